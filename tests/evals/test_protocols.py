"""Windowed protocols and their arms: what must hold by definition, whatever the model; on a random one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ctxwin.chunk import Chunk
from ctxwin_evals.arms import Served, parse_arm
from ctxwin_evals.arms.recall import divergence
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item, Scored, Task
from ctxwin_evals.metrics import kl_divergence
from ctxwin_evals.patching import Patcher
from ctxwin_evals.tasks import open_task
from ctxwin_evals.tasks.protocols import PROTOCOLS, ProtocolTask
from ctxwin_evals.tasks.tiny import TASKS, TinyOptions, TinyTask

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

HEADER = "You watch a camera."


@pytest.fixture(scope="module")
def decoder(engine: HFEngine) -> Decoder:
    return Decoder(engine)


def grouped(decoder: Decoder, items: Sequence[Item]) -> Group:
    return Group(decoder, items, Patcher(decoder.spec, dtype=torch.float32), HEADER)


def group_of(decoder: Decoder, name: str, frames: int = 4, count: int = 2, amount: float = 0.0) -> Group:
    return grouped(decoder, [TASKS[name].case(0, i, (frames,), amount) for i in range(count)])


def worst_kl(group: Group, arm: str, reference: str = "reprefill") -> float:
    def read(served: Sequence[Served | None]) -> torch.Tensor:
        memory = group.memory([s.spans for s in served if s])
        return group.decoder.read(memory, [item.query for item in group.items], group.begin)

    pairs = zip(read(parse_arm(reference).serve(group)), read(parse_arm(arm).serve(group)), strict=True)
    return max(kl_divergence(p.numpy(), q.numpy()) for p, q in pairs)


def test_without_a_change_stale_equals_update_and_both_are_exact_at_full_rank(decoder: Decoder) -> None:
    for name in ("changed", "excess", "superset"):
        group = group_of(decoder, name)
        assert worst_kl(group, "stale:full") < 1e-6 and worst_kl(group, "update:full") < 1e-6
        assert worst_kl(group, "stale:3", "update:3") < 1e-6
        assert [divergence(group, b, group.items[b].asked or 0) for b in range(2)] == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "amount"),
    [("divergent-reorder", 0), ("divergent-duplicate", 0), ("divergent-replace-all", 0), ("changed", 2),
     ("excess", 2), ("superset", 2)],
)  # fmt: skip
def test_a_fresh_patch_follows_a_change_and_a_stale_one_does_not(decoder: Decoder, name: str, amount: float) -> None:
    group = group_of(decoder, name, amount=amount)
    assert worst_kl(group, "update:full") < 1e-6 and worst_kl(group, "refresh:full") < 1e-6
    assert worst_kl(group, "stale:full") > 1e-6
    assert worst_kl(group, "refresh:0", "stale:0") < 1e-12  # nothing stale, nothing new
    assert worst_kl(group, "refresh:0@full", "stale:full") < 1e-12
    assert worst_kl(group, "refresh:4@0", "update:4") < 1e-5
    assert worst_kl(group, "refresh:full@2") < 1e-6
    assert all(divergence(group, b, item.asked or 0) > 1e-3 for b, item in enumerate(group.items))


def test_a_refresh_costs_the_bytes_of_both_patches(decoder: Decoder) -> None:
    group = group_of(decoder, "changed", amount=2)
    stale, update, both = (parse_arm(arm).serve(group)[0] for arm in ("stale:3", "update:2", "refresh:2@3"))
    assert stale and update and both
    assert both.stored == stale.stored + update.stored and both.over == stale.over
    assert both.extra["divergence"] == stale.extra["divergence"] == update.extra["divergence"]


def test_divergence_is_of_matched_positions(decoder: Decoder) -> None:
    group = group_of(decoder, "excess", count=1, amount=2)
    assert divergence(group, 0, 4) == pytest.approx(0.5, abs=1e-6)  # two frames stay where they were, two are new
    item = group.items[0]
    moved = grouped(decoder, [replace(item, placed=(0, 1, 3, 4, 2))])
    assert 0.5 < divergence(moved, 0, 4) < 2


def test_the_stored_order_is_the_item_s_and_its_own_order_is_exact(decoder: Decoder) -> None:
    group = group_of(decoder, "reorder", count=3, amount=3)
    assert worst_kl(group, "patched:full") < 1e-6
    assert worst_kl(group, "transfer:full") > 1e-7
    same = grouped(decoder, [replace(item, placed=item.before) for item in group.items])
    assert worst_kl(same, "transfer:full") < 1e-6
    assert all(s and s.extra["moved"] < 1e-6 for s in parse_arm("transfer:full").serve(same))


def test_an_orbit_of_one_order_is_its_transfer_and_all_orders_leave_the_served_one_out(decoder: Decoder) -> None:
    items = [TASKS["reorder"].case(0, i, (4,), 3, task="tiny/reorder@3") for i in range(2)]
    # Without a stored order a transfer takes the first of an orbit's.
    group = grouped(decoder, [replace(item, before=()) for item in items])
    assert worst_kl(group, "orbit:4@1", "transfer:4") < 1e-12
    for served in parse_arm("orbit:4@24").serve(group):
        assert served and served.extra["orders"] == 5
    for served in parse_arm("orbit:4").serve(group):
        assert served and served.extra["orders"] == 5
    assert worst_kl(group, "orbit:4@24") != worst_kl(group, "orbit:4@2")


def test_a_stream_no_longer_than_its_window_is_the_prefill_of_it(decoder: Decoder) -> None:
    items = [TASKS["history"].case(0, i, (4,), 1, task="tiny/history@1") for i in range(2)]
    short = [replace(item, before=item.placed) for item in items]
    group = grouped(decoder, short)
    assert worst_kl(group, "survivor") < 1e-6


def test_a_slide_by_one_differs_from_what_saw_everything_only_by_the_newest(decoder: Decoder) -> None:
    """Survivors of the first slide saw what left; the newest chunk is computed behind them and did not see it."""
    item = TASKS["history"].case(0, 0, (4,), 1, task="tiny/history@1")
    streamed, whole = grouped(decoder, [item]), grouped(decoder, [replace(item, meta={})])
    for i in range(3):
        torch.testing.assert_close(streamed.survivors[0][i].v, whole.survivors[0][i].v, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(streamed.survivors[0][i].k, whole.survivors[0][i].k, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(streamed.survivors[0][3].v, whole.survivors[0][3].v, atol=1e-4)
    assert worst_kl(streamed, "removal:full") < 1e-6 < worst_kl(streamed, "survivor")


def test_a_toggled_chunk_is_its_canonical_behind_exact_ones(decoder: Decoder) -> None:
    group = group_of(decoder, "multi_hop")
    for b, served in enumerate(parse_arm("toggled").serve(group)):
        assert served
        place = group.items[b].asked or 0
        for i, span in enumerate(served.spans):
            want = group.blind[b][i] if i == place else group.exact[b][i]
            assert torch.equal(span.k, want.k) and torch.equal(span.v, want.v)


SPELLED = [f"{name}@{0.5 if name == 'recall' else 2}" if p.amount else name for name, p in PROTOCOLS.items()]


@pytest.mark.parametrize("spelling", SPELLED)
def test_a_protocol_gives_any_item_a_history(decoder: Decoder, spelling: str) -> None:
    base = TinyTask("tiny/multi_hop", TinyOptions(frames=(4,)))
    task = ProtocolTask(spelling, base)
    items = task.items(6)
    assert (
        [i.digest for i in items]
        == [i.digest for i in task.items(11) if i.index < 6]
        == [i.digest for i in task.items(6)]
    )
    own = {item.index: item for item in base.items(6)}
    for item in items:
        chunks, mine = item.load(), own[item.index].load()
        assert len(chunks) == item.count == len({*item.before, *item.placed})
        assert item.asked is not None and item.query == own[item.index].query and item.target == own[item.index].target
        assert chunks[item.placed[item.asked]] == mine[own[item.index].asked or 0]
        assert item.placed[item.asked] in item.before or task.setting == "window"
        exact = [chunks[f] for f in item.placed] == list(mine)
        assert item.meta["own_context"] == exact
        scored = task.score(item.target, item.target, item.meta)
        assert scored.score == (1.0 if exact else None)
    arm = {"slide": "removal", "recall": "update", "window": "patched"}[task.setting]
    alone = grouped(decoder, items[:1])
    assert worst_kl(alone, f"{arm}:full") < 1e-6
    if arm == "update" and not spelling.startswith("divergent-reorder"):
        assert worst_kl(alone, "stale:full") > 1e-7


def test_a_recall_without_turnover_is_a_control() -> None:
    items = open_task("recall@0:tiny/multi_hop").items(3)
    assert all(item.meta["control"] and item.meta["own_context"] for item in items)
    assert not any(item.meta["control"] for item in open_task("slide:tiny/multi_hop").items(3))


def test_items_with_too_little_in_front_are_left_out() -> None:
    names = [item.index for item in open_task("reorder:tiny/multi_hop").items(40)]
    base = {item.index: item for item in open_task("tiny/multi_hop").items(40)}
    assert names == [i for i, item in base.items() if (item.asked or 0) >= 2] != list(base)


def test_distractors_come_from_other_clusters_of_near_items() -> None:
    class Clips(TinyTask):
        """Pairs of items share a clip."""

        endless = False

        def items(self, n: int | None = None) -> list[Item]:
            made = [replace(self.item(i), cluster=str(i // 2)) for i in range(17)]
            return made[:n]

    base = Clips("tiny/multi_hop", TinyOptions(frames=(3,)))
    task = ProtocolTask("divergent-replace-all", base)
    items = task.items()
    assert [i.digest for i in items[:3]] == [i.digest for i in task.items(3)]
    frames = {chunk.id: item.cluster for item in base.items() for chunk in item.load()}
    for item in items:  # the last block holds one item: it borrows from the block in front
        lent = item.load()[len(item.placed) :]
        assert lent and all(frames[chunk.id] != item.cluster for chunk in lent)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("other:tiny/multi_hop", "a protocol must be one of"),
        ("recall:tiny/multi_hop", "a share .* must be 0..1, got 'recall"),
        ("recall@2:tiny/multi_hop", "a share .* must be 0..1, got 'recall"),
        ("slide@1:tiny/multi_hop", "slide must be named without an amount"),
        ("excess@x:tiny/multi_hop", "a number of chunks .* must be 0, 1, 2.*, got 'excess@x'"),
        ("slide:tiny/recall@1", "a protocol needs a task without its own history"),
        ("slide:tiny/none", "a generated task must be one of"),
    ],
)
def test_other_protocols_are_refused(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        open_task(name)


def test_a_block_that_lends_too_little_is_an_error() -> None:
    class Alone(TinyTask):
        """One clip."""

        endless = False

        def items(self, n: int | None = None) -> list[Item]:
            return [replace(self.item(i), cluster="one") for i in range(3)]

    with pytest.raises(ValueError, match="must lend 1 chunks of other clusters, got 0"):
        ProtocolTask("slide", Alone("tiny/multi_hop")).items()


class Mixed(Task):
    """Texts and pictures of different sizes, different in every item."""

    name, about, setting = "mixed", "texts and pictures", "window"

    def items(self, n: int | None = None) -> list[Item]:
        return [self.item(i) for i in range(6)][:n]

    def item(self, index: int) -> Item:
        return Item(
            task="mixed", index=index, load=lambda: self.chunks(index), count=4, placed=(0, 1, 2, 3), query="what color?",
            target="red", doc_id=f"d{index}", cluster=f"d{index}", digest=f"mixed-{index}", asked=2,
        )  # fmt: skip

    def chunks(self, index: int) -> list[Chunk]:
        rng = np.random.default_rng(index)
        small, wide = (rng.integers(0, 255, (28 * h, 28 * w, 3), dtype=np.uint8) for h, w in ((2, 2), (1, 3)))
        return [
            Chunk.text("a red circle " * (1 + index % 3)), Chunk.image(small, text=f"frame {index}"),
            Chunk.image(wide), Chunk.text("the number is now blue"),
        ]  # fmt: skip

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        return Scored(float(answer == target), answer)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "kimi"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """Grouped queries, deepstack, latent attention."""
    from ctxwin.engines.hf.engine import HFEngine
    from engines.models import write_kimi, write_vision_model

    folder = tmp_path_factory.mktemp("family") / request.param
    path = write_kimi(folder) if request.param == "kimi" else write_vision_model(folder, request.param)
    opened = HFEngine(path, dtype="float32")
    yield Decoder(opened)
    opened.close()


def test_protocols_and_arms_hold_on_every_family_and_chunks_of_different_sizes(family: Decoder) -> None:
    for spelling, arms in {
        "recall@0.5": ("update:full", "refresh:full", "refresh:full@2"),
        "divergent-duplicate": ("update:full", "refresh:full"),
        "superset@2": ("update:full", "refresh:full"),
        "slide": ("removal:full",),
        "reorder": ("patched:full",),
    }.items():
        item = ProtocolTask(spelling, Mixed()).items()[1]
        group = grouped(family, [item])
        for arm in arms:
            assert worst_kl(group, arm) < 1e-5, (spelling, arm)
    group = grouped(family, [ProtocolTask("reorder", Mixed()).items()[1]])
    assert all(s and s.extra["moved"] > 0 for arm in ("transfer:2", "orbit:2") for s in parse_arm(arm).serve(group))
    item = Mixed().item(0)
    stream = replace(item, before=(0, 1, 2, 3), placed=(0, 1, 2, 3), meta={"stream_window": 4})
    assert worst_kl(grouped(family, [stream]), "survivor") < 1e-5
    slid = replace(item, before=(0, 1, 2, 3), placed=(1, 2, 3), asked=1, meta={"stream_window": 3})
    assert worst_kl(grouped(family, [slid]), "removal:full") < 1e-5 < worst_kl(grouped(family, [slid]), "survivor")
