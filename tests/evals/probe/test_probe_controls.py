"""What the probe's controls are by definition, whatever the model; on random ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch

from ctxwin.chunk import Chunk
from ctxwin_evals.arms import parse_arm
from ctxwin_evals.arms.reuse import Oracle, Stepwise
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.generation import forced_logits, generate
from ctxwin_evals.measure import Measurer
from ctxwin_evals.patching import Patcher
from ctxwin_evals.probe.contexts import PLACED, Context, Question, Source, Split
from ctxwin_evals.probe.generated import World
from ctxwin_evals.probe.probe import (
    BLIND,
    ORACLE,
    OTHERS,
    SERVED,
    SURVIVOR,
    Lately,
    Probe,
    Sizes,
    Swapped,
    of_arm,
    recalled,
    spelling,
)
from ctxwin_evals.probe.reading import readings
from ctxwin_evals.probe.verdict import Setting, survival

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


def measured_by(engine: HFEngine, source: Source) -> Measurer:
    decoder = Decoder(engine)
    return Measurer(decoder, Patcher(decoder.spec, dtype=torch.float32), source.system_prompt, along=True)


@pytest.fixture(scope="module")
def world(engine: HFEngine) -> Measurer:
    return measured_by(engine, World())


class Words(Source):
    """Blocks of text, with a question about two of them and one about one."""

    kind: ClassVar[str] = "words"
    name = about = "probe/words"
    system_prompt, max_tokens, block = "You answer questions about texts.", 4, 16

    def __init__(self, engine: HFEngine) -> None:
        self._ids = engine.text_ids("what color is the shape of a frame now " * 60)

    def context(self, split: Split, index: int) -> Context:
        rng = np.random.default_rng((len(split), index))
        starts = [int(i) for i in rng.choice(len(self._ids) - self.block, 2 * PLACED, replace=False)]
        asked = Question("What differs between A and B?", "cross", (0, 1)), Question("What does C show?", "one", (2,))
        return Context(lambda: [self._chunk(at) for at in starts], ("block",) * PLACED, f"{split}-{index}", asked)

    def stream(self, index: int, slides: int) -> Context:
        raise NotImplementedError("no test slides along words")

    def _chunk(self, at: int) -> Chunk:
        return Chunk.tokens(self._ids[at : at + self.block])


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Measurer, Source]]:
    """Latent attention, reading text."""
    from ctxwin.engines.hf.engine import HFEngine
    from engines.models import write_mla_model

    engine = HFEngine(write_mla_model(tmp_path_factory.mktemp("latent") / "model"), dtype="float32")
    source = Words(engine)
    yield measured_by(engine, source), source
    engine.close()


def check_oracle(measurer: Measurer, source: Source) -> None:
    group = measurer.group(source.items(2, "reading"))
    oracle = Oracle("oracle").serve(group)
    lead = group.system_prompt_span.tokens
    for number, place in enumerate(group.places):
        tokens = group.row([[number]] * 2)
        here = tokens.moved(place.start - group.layout([number])[0].start)
        memory, _ = measurer.decoder.append(here, group.behind_system_prompt(2))
        for b in range(2):
            made = oracle[b]
            assert made is not None
            torch.testing.assert_close(
                made.spans[number].v, memory.v[:, b, :, lead:].transpose(1, 2), atol=1e-5, rtol=0
            )
            torch.testing.assert_close(
                made.spans[number].k, memory.k[:, b, :, lead:].transpose(1, 2), atol=1e-4, rtol=0
            )


def test_under_the_oracle_every_chunk_is_computed_behind_the_header_alone_at_its_own_place(world: Measurer) -> None:
    check_oracle(world, World())


def test_the_oracle_holds_for_latent_attention_and_text(latent: tuple[Measurer, Source]) -> None:
    check_oracle(*latent)


def test_the_first_chunk_loses_nothing_and_later_ones_do(world: Measurer) -> None:
    group = world.group(World().items(1, "reading"))
    oracle = Oracle("oracle").serve(group)[0]
    assert oracle is not None
    torch.testing.assert_close(oracle.spans[0].v, group.exact[0][0].v, atol=1e-5, rtol=0)
    assert (oracle.spans[2].v - group.exact[0][2].v).abs().max() > 1e-3


def test_stepwise_is_a_reprefill(latent: tuple[Measurer, Source]) -> None:
    measurer, source = latent
    group = measurer.group(source.items(2, "reading"))
    for b, made in enumerate(Stepwise("stepwise").serve(group)):
        assert made is not None
        for ours, theirs in zip(made.spans, group.exact[b], strict=True):
            torch.testing.assert_close(ours.k, theirs.k, atol=1e-4, rtol=0)
            torch.testing.assert_close(ours.v, theirs.v, atol=1e-5, rtol=0)


def test_every_way_to_compress_serves_latent_attention_and_a_full_one_is_exact(latent: tuple[Measurer, Source]) -> None:
    measurer, source = latent
    probe = Probe(measurer.decoder.engine, [source], sizes=Sizes(fitting=2))
    ways = [way for way in (*SERVED, "quantized+50-75", *OTHERS) if probe._allows(way)]
    assert "output" not in ways and "shared" in ways, "an output weight needs values by head"
    arms = [parse_arm(spelling(rank, way)) for way in ways for rank in (1, 64)]
    items = [item for item in source.items(2) if item.meta["kind"] == "cross"]
    heard = list(probe.measurer.samples(items, arms, base=BLIND))
    assert len(heard) == 2 * len(arms)
    full = [h.kl for h in heard if h.arm in ("patched:64@joint", "patched:64@per_layer", "patched:64@balanced")]
    assert max(full) < 1e-4 < max(h.kl for h in heard if h.arm == "patched:1@joint")
    assert all(0 < h.stored < h.over for h in heard if h.arm.startswith("patched:1@"))


def test_batched_answers_are_those_of_one_item_at_a_time(world: Measurer) -> None:
    decoder = world.decoder
    group = world.group(World().items(3, "reading"))
    memory = group.memory(group.exact)
    queries = [decoder.query(text) for text in ("color of 17?", "shape of 23?", "color of 05?")]
    assert len({q.tokens for q in queries}) == 1
    answers = generate(decoder, memory, queries, group.begin, max_tokens=5)
    given = [answers[0].whole, answers[1].whole[:2], answers[2].whole]
    said = forced_logits(decoder, memory, queries, group.begin, given)
    for b, query in enumerate(queries):
        alone = group.memory([group.exact[b]])
        assert answers[b].token_ids == generate(decoder, alone, [query], group.begin, max_tokens=5)[0].token_ids
        want = forced_logits(decoder, alone, [query], group.begin, [given[b]])[0]
        assert said[b].shape == want.shape
        torch.testing.assert_close(said[b], want, atol=1e-4, rtol=1e-4)


def test_a_full_patch_and_a_reprefill_say_the_same_and_blind_reuse_follows_the_oracle(world: Measurer) -> None:
    arms = [ORACLE, *(parse_arm(name) for name in ("blind", "patched:full", "reprefill"))]
    heard = list(world.samples(World().items(3), arms, control=ORACLE))
    assert len(heard) == 4 * 3 * 2
    exact = [h for h in heard if h.arm in ("patched:full", "reprefill")]
    assert max(h.answer_kl for h in exact) < 1e-6 and all(h.answer == h.reference for h in exact)
    assert max(h.answer_kl for h in of_arm(heard, "blind")) > 1e-5
    assert max(h.extra["to_control"] for h in of_arm(heard, "oracle")) == 0
    assert all("to_control" in h.extra for h in heard)


def test_what_an_arm_serves_is_served_once_a_context(world: Measurer) -> None:
    """Two questions a context share what stands in front of them, and are answered as if each were alone."""
    items = World().items(2)
    assert len(items) == 4 and len(world.group(items)) == 2
    together = {s.index: s for s in world.samples(items, [BLIND])}
    for item in items:
        (alone,) = world.samples([item], [BLIND])
        assert together[item.index].answer == alone.answer
        assert together[item.index].kl == pytest.approx(alone.kl, rel=1e-3, abs=1e-9)


def test_swapping_nothing_moves_nothing_and_swapping_something_does(world: Measurer) -> None:
    arms = [Swapped(f"swapped:{i}", i) for i in range(PLACED)]
    found = readings(list(world.samples(World().items(2, "reading", strangers=True), arms)), World())
    assert len(found) == 4
    assert all(len(r.moved) == PLACED and max(r.moved) > 0 for r in found)
    assert {r.kind for r in found} == {"one", "cross"}


def test_a_window_that_has_not_lost_anything_needed_is_exact_after_a_recall_of_the_same(world: Measurer) -> None:
    items = [item for item in World().items(2, strangers=True) if item.meta["kind"] == "cross"]
    arms = [parse_arm("stale:66"), parse_arm("update:66")]
    found = {n: list(world.samples([recalled(item, n) for item in items], arms)) for n in (0, PLACED - 1)}
    assert max(h.kl for h in found[0]) < 1e-4
    assert max(h.kl for h in of_arm(found[PLACED - 1], "update:66")) < 1e-4
    assert max(h.kl for h in of_arm(found[PLACED - 1], "stale:66")) > 1e-4


def test_the_next_way_is_tried_on_contexts_of_its_own_where_the_first_is_not_proved(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = [
        {"way": way, "rank": rank, "share": share, "eta": 0.99, "flips": 0.0}
        for way, rank, share in (("quantized+deep", 8, 0.03), ("quantized+75-100", 8, 0.04), ("quantized", 4, 0.1))
    ]

    def tried(safe: set[str], seconds: float = 3600.0) -> tuple[list[tuple[str, int, int]], Setting | None]:
        probe, calls = Probe(engine, [World()], sizes=Sizes(proving=7), seconds=seconds), []

        def attempt(evidence: str, reads: object, way: str, rank: int, first: int) -> list[Setting]:
            calls.append((way, rank, first))
            return [Setting(rank, "all", 0.1, way in safe, {})]

        monkeypatch.setattr(probe, "_try", attempt)
        settings = probe._prove("cross", ["cross"], curve)
        assert [s["rank"] for s in settings] == [rank for _, rank, _ in calls]
        return calls, probe.served

    first, second = ("quantized+deep", 8, 0), ("quantized", 4, 7)
    assert tried({"quantized"}) == ([first, second], Setting(4, "all", 0.1, True, {}))
    assert tried({"quantized+deep", "quantized"}) == ([first], Setting(8, "all", 0.1, True, {}))
    assert tried(set()) == ([first, second], None), "no third"
    assert tried({"quantized"}, 1e-9) == ([first], None), "the time is up"


def test_survivors_are_measured_against_both_references_at_every_slide(world: Measurer) -> None:
    streams = [World().stream(i, 2) for i in range(2)]
    pairs = {}
    for slides in (1, 2):
        items = World().slid(streams, slides)
        group = world.group(items)
        window = list(world.samples(items, [SURVIVOR], group=group))
        stream = list(world.samples(items, [SURVIVOR], reference=Lately("lately"), group=group))
        assert [s.cluster for s in window] == ["stream-0", "stream-1"]
        assert all(s.kl > 0 for s in window), "a random model's survivors never equal a re-prefill"
        pairs[slides] = list(zip(window, stream, strict=True))
    rows = survival(pairs)
    assert [(row["slides"], row["n"]) for row in rows] == [(1, 2), (2, 2)]
    for row in rows:
        others = {name: row[f"other_than_{name}"] for name in ("window", "stream")}
        assert others[row["stricter"]] == max(others.values())


def test_a_survivor_after_one_slide_is_the_stream_without_what_left(world: Measurer) -> None:
    """What survives was computed behind the chunk that left: so it was in the re-prefill of what was seen lately."""
    items = World().slid([World().stream(0, 1)], 1)
    group = world.group(items)
    (lately,), (kept,) = Lately("lately").serve(group), SURVIVOR.serve(group)
    assert lately is not None and kept is not None and len(lately.spans) == PLACED + 1
    torch.testing.assert_close(kept.spans[0].v, lately.spans[1].v, atol=1e-5, rtol=0)
    assert lately.begin is not None and lately.begin > group.begin
