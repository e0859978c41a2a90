"""The layer axis: what arms must be by definition, on random models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ctxwin.kv.merge import most_important
from ctxwin.kv.rope import angles, turn
from ctxwin_evals.arms import parse_arm
from ctxwin_evals.arms.layers import low_rank_keys
from ctxwin_evals.items import Item
from ctxwin_evals.tasks import open_task

if TYPE_CHECKING:
    from .conftest import Bench


def test_limits_on_every_family(family: Bench) -> None:
    for group in family.any():
        family.same(group, "layers:0", "reprefill")
        family.same(group, "layers:1", "blind", atol=0.0)
        assert family.serve(group, "layers:1")[0].computed == 0
        assert family.serve(group, "layers:0")[0].computed == group.context_tokens - group.places[0].tokens


def test_shallow_layers_are_blind_and_deep_ones_see_exact_layers_only_behind_them(family: Bench) -> None:
    """Reused layers hold the canonical; the first computed one differs from exact, as what enters it saw no context."""
    for group in family.any():
        one = family.serve(group, "layers:0.67")[0]  # two of three
        for x, blind, exact in zip(one.spans[1:], group.blind[0][1:], group.exact[0][1:], strict=True):
            assert torch.equal(x.k[:2], blind.k[:2])
            assert torch.equal(x.v[:2], blind.v[:2])
            # KV of the third layer follow from what enters it, which is the canonical's.
            torch.testing.assert_close(x.k[2], blind.k[2], atol=1e-4, rtol=0)
            torch.testing.assert_close(x.v[2], blind.v[2], atol=1e-4, rtol=0)
            assert float((x.v[2] - exact.v[2]).abs().max()) > 1e-5
        one = family.serve(group, "layers:0.34")[0]
        assert torch.equal(one.spans[1].v[:1], group.blind[0][1].v[:1])
        assert float((one.spans[1].v[2] - group.blind[0][1].v[2]).abs().max()) > 1e-5
        assert one.computed == -(-2 * (group.context_tokens - group.places[0].tokens) // 3)
        hidden = group.context.embeds.shape[-1]
        assert one.stored == (group.context_tokens - group.places[0].tokens) * hidden * 2


def test_in_a_recall_only_what_came_back_is_reused(bench: Bench) -> None:
    group = bench.tiny("recall", frames=3, turnover=0.5)
    arm = parse_arm("layers:0").on("recall")
    for b, one in enumerate(arm.serve(group)):
        assert one is not None
        assert one.computed == group.places[-1].tokens
        assert one.over == group.kv_bytes([len(group.places) - 1])
        for x, y in zip(one.spans, group.exact[b], strict=True):
            torch.testing.assert_close(x.v, y.v, atol=1e-4, rtol=0)
    blind = parse_arm("layers:1").on("recall").serve(group)[0]
    assert blind is not None
    assert torch.equal(blind.spans[-1].v, group.blind[0][-1].v)
    assert all(torch.equal(x.v, y.v) for x, y in zip(blind.spans[:-1], group.exact[0][:-1], strict=True))
    assert parse_arm("mpic:2").on("recall") == parse_arm("mpic:2")


def test_a_recalled_item_must_say_what_came_back(bench: Bench) -> None:
    item = bench.mixed().items[0]
    assert isinstance(item, Item) and item.asked is None
    with pytest.raises(ValueError, match="what came back"):
        parse_arm("layers:0.5").on("recall").serve(bench.mixed())


def test_jobs_tell_arms_their_setting() -> None:
    from ctxwin_evals.arms import parse_arms
    from ctxwin_evals.run import plan_jobs

    jobs = plan_jobs(parse_arms("layers:0.5"), [open_task("tiny/recall@0.5"), open_task("tiny/order")])
    assert [job.arms[0].setting for job in jobs] == ["recall", "window"]  # type: ignore[attr-defined]
    assert [job.arms[0].name for job in jobs] == ["layers:0.5"] * 2


def test_cacheblend_chooses_at_layer_one(bench: Bench) -> None:
    """Layer 0 as it is stored; at layer 1 the tokens whose fresh KV differ most are fresh, the others stored."""
    group, share = bench.tiny(frames=3), 0.4
    spans = bench.serve(group, f"cacheblend:{share}")[0].spans
    have, blind, exact = (
        [torch.cat([getattr(s, name) for s in row], 1) for name in ("k", "v")]
        for row in (spans, group.blind[0], group.exact[0])
    )
    for x, y in zip(have, blind, strict=True):
        torch.testing.assert_close(x[0], y[0], atol=1e-5, rtol=0)
    # Layer 0 ran in full, so fresh KV at layer 1 are the exact ones.
    lost = sum((x[1] - y[1]).double().pow(2).sum(dim=(1, 2)) for x, y in zip(exact, blind, strict=True))
    count = int(share * 1.25 * group.context_tokens + 0.5)
    first = most_important(torch.as_tensor(lost)[None], count)[0]
    fresh = torch.zeros(group.context_tokens, dtype=torch.bool)
    fresh[first] = True
    torch.testing.assert_close(have[1][1][fresh], exact[1][1][fresh], atol=1e-5, rtol=0)
    assert torch.equal(have[1][1][~fresh], blind[1][1][~fresh])
    changed = (have[1][2] != blind[1][2]).flatten(1).any(dim=1)
    assert int(changed.sum()) == int(share * 0.75 * group.context_tokens + 0.5)
    assert not (changed & ~fresh).any()  # who left does not come back
    one = bench.serve(group, f"cacheblend:{share}")[0]
    replaced = int(fresh.sum()) + int(changed.sum())
    assert one.extra["renewed"] == pytest.approx(replaced / 3 / group.context_tokens)
    assert one.extra["recomputed"] == pytest.approx((replaced + group.context_tokens) / 3 / group.context_tokens)


def test_low_rank_keys_are_the_best_of_their_rank(family: Bench) -> None:
    group = family.any()[0]
    spec = group.spec
    exact, blind = group.exact[0][1], group.blind[0][1]
    one = family.serve(group, "lowrank-k:full")[0]
    torch.testing.assert_close(one.spans[1].k, exact.k, atol=1e-5, rtol=0)
    assert torch.equal(one.spans[1].v, blind.v)
    width = spec.heads * spec.k_dim
    tokens = sum(p.tokens for p in group.places[1:])
    assert one.stored == tokens * spec.layers * width * 4  # float32
    errors = []
    for rank in (1, 2, 3):
        k, size = low_rank_keys(exact, spec, rank, torch.float32)
        assert size == rank * spec.layers * (exact.tokens + width) * 4
        away = angles(spec.rope, exact.positions + exact.start)
        made, want = (turn(spec.rope, x.double(), -away).flatten(2) for x in (k, exact.k))
        assert int(torch.linalg.matrix_rank(made[1], rtol=1e-5)) == rank
        tail = torch.linalg.svdvals(want[1])[rank:].pow(2).sum()
        assert float((made[1] - want[1]).pow(2).sum()) == pytest.approx(float(tail), rel=1e-3)
        errors.append(float(tail))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("text", ["layers", "layers:2", "layers:all", "cacheblend:1.1", "lowrank-k:0.5"])
def test_bad_spellings_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="an arm must be one of"):
        parse_arm(text)
