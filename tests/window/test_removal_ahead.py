"""Removal patches of a window's next slide, formed while the engine idles (Kamera, section 5, "Sliding-window survival"; eq. 2).

The oracle is the KV of a re-prefill of what is placed: a patch of full rank gives it, but for the 16 bits of its numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.segments import Segment
from ctxwin.errors import AnswerStopped, EngineFailed
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import apply_patch, compress
from ctxwin.kv.relocate import relocate
from ctxwin.window import assembly as assembling
from ctxwin.window.idle import PrefillCounts, prefiller_of
from ctxwin.window.layout import Work
from ctxwin.window.state import Prefix, content_name, patch_key
from twins import twins
from window.fake import KV, FakeEngine
from window.slow_engine import RESERVED, SlowEngine
from window.test_idle_predictions import (
    BUDGET,
    by_budget,
    by_hand_behind,
    by_hand_first,
    chunk_of,
    second_oldest,
    with_a_lazy_eviction,
)
from window.test_idle_prefill import TURNS, edit

pytestmark = pytest.mark.usefixtures("all_of_the_time")

FULL = Fidelity("patched", rank=64, survivors="removal")
CLOSE = 0.02
"""Largest relative distance of KV that went through numbers of 16 bits a few times."""


class PatchingEngine(FakeEngine):
    """Adds patches to the KV that it is served."""

    def _run(self, segments: Sequence[Segment]) -> tuple[list[SpanKV], dict[int, SpanKV], int, int]:
        return super()._run([_patched(segment) for segment in segments])


def _patched(segment: Segment) -> Segment:
    if segment.span is None or segment.patch is None:
        return segment
    return replace(segment, span=apply_patch(segment.span, segment.patch, KV, segment.start), patch=None)


class SlowPatchingEngine(SlowEngine, PatchingEngine):
    """Both."""


@pytest.fixture
def engine() -> Iterator[PatchingEngine]:
    with PatchingEngine() as opened:
        yield opened


def spans_of(window: Window) -> list[SpanKV]:
    """KV of the placed chunks as the last answer was served it: nothing is left to compute behind it."""
    core, spans = window.core, []
    for segment in core.assembly.build_layout(core.state, window.fidelity, Work()).segments[1:]:
        assert segment.span is not None
        spans.append(relocate(_patched(segment).span, KV, segment.start))  # type: ignore[arg-type]
    return spans


def distance(window: Window) -> float:
    """Largest difference of the KV that was served from that of a re-prefill, relative to the largest number of the latter."""
    front, state, largest = (
        [Segment(window.engine.encode_system_prompt(window.system_prompt), 0)],
        window.snapshot(),
        0.0,
    )
    with FakeEngine() as other:
        for p, start, span in zip(state.placed, state.starts(), spans_of(window), strict=True):
            encoded = other.encode(p.chunk)
            exact = other.prefill(front, encoded, start)
            front.append(Segment(encoded, start))
            for have, want in ((span.k, exact.k), (span.v, exact.v)):
                largest = max(largest, float((have - want).abs().max() / want.abs().max()))
    return largest


def turn_over(window: Window, turn: Any, count: int) -> list[Any]:
    """Run turns, each with time to compute ahead; return the usages."""
    usages = []
    for i in range(count):
        turn(window, i)
        usages.append(window.ask("what?", 4).usage)
        assert prefiller_of(window.engine).drain(60)
    return usages


def counts_of(window: Window) -> PrefillCounts:
    counts = window.maintenance.prefill_counts
    assert counts is not None
    return counts


def patches(engine: FakeEngine) -> list[str]:
    return list(engine.store.list("patch/"))


@pytest.mark.parametrize("turn", [by_budget, by_hand_first, by_hand_behind, second_oldest, with_a_lazy_eviction])
@pytest.mark.parametrize("options", [{}, {"low_water": 0.7}])
def test_a_slide_takes_its_new_chunk_and_question_and_is_served_by_patches(
    engine: FakeEngine, turn: Any, options: dict[str, Any]
) -> None:
    with Window(engine, "watch", BUDGET, FULL, prefill="idle", **options) as window:
        usages = turn_over(window, turn, 14)
        query = engine.encode_query("what?").tokens
        assert max(usage.computed_tokens for usage in usages[8:]) <= 8 + query
        slid = [usage for usage in usages[8:] if usage.reused_tokens.get("patched")]
        assert any(usage.prefilled_tokens for usage in slid) and distance(window) < CLOSE
        counts = counts_of(window)
        assert counts.hits and not counts.misses and counts.used + counts.missed <= counts.tokens
    with FakeEngine() as other, Window(other, "watch", BUDGET, Fidelity("patched", rank=64)) as keeping:
        turn_over(keeping, turn, 14)
        assert distance(keeping) > 10 * CLOSE, "what survivors absorbed is seen in their KV"


def test_a_patch_formed_ahead_serves_where_asks_were_disturbed(engine: FakeEngine) -> None:
    with Window(engine, "watch", BUDGET, FULL, prefill="idle") as window:
        turn_over(window, by_budget, 8)
        engine.costs.engine.rates = (0.0, 0.05, 0.0, 0.015, 0.0, 5.0)  # all that a busy machine takes is the patches'
        usages = turn_over(window, by_budget, 4)
        assert all(usage.reused_tokens["patched"] for usage in usages)
        assert max(usage.computed_tokens for usage in usages) == 8 + engine.encode_query("what?").tokens


def test_only_patches_are_stored_of_what_will_survive(engine: FakeEngine) -> None:
    with Window(engine, "watch", BUDGET, FULL, prefill="idle") as window:
        turn_over(window, by_budget, 9)
        plan, before = window.plan(), set(engine.store.list("span/"))
        assert plan.prefilled_tokens == 8 * (len(window.ids) - 1)
        turn_over(window, by_budget, 1)
        new = set(engine.store.list("span/")) - before
        assert len(new) == 2, "the canonical of what stands first, and the chunk that arrived"
        assert window.core.idle is not None and not window.core.idle.spans


@pytest.mark.parametrize(
    "fidelity",
    [
        Fidelity("exact"),
        Fidelity("blind", survivors="removal"),
        Fidelity("exact", survivors="removal"),
        *(Fidelity("patched", rank=64, survivors=survivors) for survivors in ("keep", "slid", "refresh")),
        Fidelity("patched", rank=64, survivors="removal", advanced={"forbid": ("patched",)}),
    ],
)
def test_none_is_formed_where_none_may_serve(engine: FakeEngine, fidelity: Fidelity) -> None:
    with Window(engine, "watch", BUDGET, fidelity, prefill="idle") as window:
        turn_over(window, by_budget, 10)
        assert not patches(engine) and bool(counts_of(window).predictions) == (fidelity.mode == "exact")


def test_an_engine_that_is_never_idle_forms_none() -> None:
    class Busy(PatchingEngine):
        idle_s = 0.0

    with Busy() as engine, Window(engine, "watch", BUDGET, FULL, prefill="idle") as window:
        for i in range(9):
            by_budget(window, i)
            usage = window.ask("what?", 4).usage
        assert usage.reused_tokens["formed"] == 8 * (len(window.ids) - 1)
        assert counts_of(window) == PrefillCounts()


def test_a_request_ends_a_forward_at_once_and_no_chunk_is_computed_twice() -> None:
    class Interrupted(PatchingEngine):
        interrupt, starts = 0, list[int]()

        def prefill(self, context: Any, target: Any, start: int, **options: Any) -> Any:
            if options.get("background"):
                self.interrupt -= 1
                if not self.interrupt:
                    raise AnswerStopped("a request waits")
                self.starts.append(start)
            return super().prefill(context, target, start, **options)

    with Interrupted() as engine, Window(engine, "watch", BUDGET, FULL, prefill="idle") as window:
        turn_over(window, by_budget, 8)
        with prefiller_of(engine).hold():  # only what is computed behind the answer is to be interrupted
            by_budget(window, 8)
            window.ask("what?", 4)
            engine.interrupt, engine.starts, before = 4, [], counts_of(window).interrupted
        assert prefiller_of(engine).drain(60)
        assert counts_of(window).interrupted == before + 1
        assert len(engine.starts) == len(set(engine.starts)) == len(window.ids) - 1
    with SlowPatchingEngine() as slow, Window(slow, "watch", BUDGET, FULL, prefill="idle") as window:
        slow.go_on.set()
        turn_over(window, by_budget, 8)
        with prefiller_of(slow).hold():
            by_budget(window, 8)
            window.ask("what?", 4)
            slow.go_on.clear()
            slow.begun.clear()
            before = counts_of(window).interrupted
        assert slow.begun.wait(60)  # of the next slide
        slow.waiting = True
        while counts_of(window).interrupted == before:
            threading.Event().wait(0.001)
        slow.waiting = False
        slow.go_on.set()
        assert prefiller_of(slow).drain(60) and distance(window) < CLOSE


def test_an_error_costs_what_a_slide_without_patches_costs(engine: FakeEngine) -> None:
    with Window(engine, "watch", BUDGET, FULL, prefill="idle") as window:
        turn_over(window, by_budget, 8)
        with prefiller_of(engine).hold():
            by_budget(window, 8)
            window.ask("what?", 4)
            engine.fail = EngineFailed("out of memory")
        assert prefiller_of(engine).drain(60)
        failed, engine.fail = counts_of(window).failed, None
        with prefiller_of(engine).hold():  # or the next slide's patches are formed as soon as it is there
            by_budget(window, 9)
            usage = window.ask("what?", 4).usage
        assert failed == 1 and usage.reused_tokens["formed"] == 8 * 5
        assert prefiller_of(engine).drain(60) and distance(window) < CLOSE


def test_a_store_that_refuses_patches_is_given_exact_kv(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.repo, "put_patch", lambda *_: False)
    with Window(engine, "watch", BUDGET, FULL, prefill="idle") as window:
        turn_over(window, by_budget, 9)
        with prefiller_of(engine).hold():  # or the new chunk is computed before it is asked about
            by_budget(window, 9)
            usage = window.ask("what?", 4).usage
        assert usage.exact and usage.computed_tokens == 8 + engine.encode_query("what?").tokens


def test_nothing_of_a_forgotten_chunk_is_left(engine: FakeEngine) -> None:
    with Window(engine, "watch", BUDGET, FULL, prefill="idle") as window:
        turn_over(window, by_budget, 9)
        forgotten = window.ids[2]
        name = content_name(window.chunk(forgotten).id)
        assert any(name in engine.repo.get_patch(key).meta["absorbed"] for key in patches(engine))
        window.evict(forgotten, forget=True)
        assert prefiller_of(engine).drain(60)
        assert not any(name in engine.repo.get_patch(key).meta["absorbed"] for key in patches(engine))
        window.ask("what?", 4)
        assert distance(window) < CLOSE


def swap(window: Window) -> None:
    ids = list(window.ids)
    window.reorder([ids[0], ids[2], ids[1], *ids[3:]])


def put_between(window: Window) -> None:
    window.insert(2, Chunk.text("y" * 4))


def put_instead(window: Window) -> None:
    window.evict(window.ids[1])
    window.insert(1, Chunk.text("z" * 8))


def bring_back(window: Window) -> None:
    window.recall(window.evicted[0], 1)


@pytest.fixture
def slid(engine: FakeEngine) -> Iterator[Window]:
    """A window with room, from which a chunk has left that nothing predicted; four of the others are patched."""
    with Window(engine, "watch", 400, FULL, prefill="idle") as window:
        window.extend([chunk_of(i) for i in range(6)])
        window.ask("what?", 4)
        window.slide(1)
        assert prefiller_of(engine).drain(60)
        usage = window.ask("what?", 4).usage
        assert usage.computed_tokens == engine.encode_query("what?").tokens and usage.reused_tokens["patched"] == 32
        yield window


@pytest.mark.parametrize("change", [swap, put_between, put_instead, bring_back])
def test_patches_are_updated_where_antecedents_changed_little(slid: Window, change: Any) -> None:
    stale = {p.id: p.kv.patch for p in slid.snapshot().placed if p.kv}
    spans = {p.id: p.kv.span for p in slid.snapshot().placed if p.kv}
    change(slid)
    assert prefiller_of(slid.engine).drain(60)
    usage = slid.ask("what?", 4).usage
    assert usage.computed_tokens == slid.engine.encode_query("what?").tokens and usage.prefilled_tokens
    assert usage.reused_tokens["patched"] >= 16 and distance(slid) < CLOSE
    last = slid.snapshot().placed[-1]
    assert last.kv is not None and last.kv.patch is not None and last.kv.patch != stale[last.id]
    assert last.kv.span == spans[last.id], "the patch is another one, the KV under it is not"


def test_nothing_is_patched_where_most_antecedents_are_others(slid: Window) -> None:
    ids = list(slid.ids)
    slid.reorder([ids[0], *ids[2:], ids[1]])
    assert prefiller_of(slid.engine).drain(60)
    usage = slid.ask("what?", 4).usage
    *others, moved = slid.snapshot().placed[1:]
    assert moved.kv is not None and moved.kv.exact and moved.kv.patch is None
    assert all(p.kv is not None and p.kv.patch for p in others) and distance(slid) < CLOSE
    assert usage.computed_tokens == slid.engine.encode_query("what?").tokens


def check_patches(window: Window) -> None:
    """Assert that each patch was formed for what stands in front of its chunk now, and for the KV it is added to."""
    core, front = window.core, Prefix.of(window.snapshot())
    for choice in core.assembly.build_layout(core.state, window.fidelity, Work()).choices:
        here, p = choice.conditioning, choice.entry
        if here.patch:
            provenance = front.computed(p.chunk_id, "patched").provenance
            assert here.patch == patch_key(provenance, here.span, window.fidelity.patch_name)
        front = front.extended_by(p, here)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "insert", "evict", "forget", "slide", "recall", "look_back", "reorder", "undo", "ask", "ask"]
        ),
        st.integers(0, 99),
        st.booleans(),
    ),
    max_size=10,
)


def check_trace(turn: str, size: int, waits: bool, between: list[tuple[str, int, bool]]) -> None:
    """Regular turns with random edits in between: whatever is served is what a re-prefill gives, and all work is counted."""
    regular = [(op, size, waits or op == "ask") for op in turn.split()]
    with PatchingEngine() as engine, pytest.MonkeyPatch.context() as patched:
        # Errors of 16 bits would grow from chunk to chunk: this engine is very sensitive.
        patched.setattr(
            assembling, "compress_deficit", lambda lost, _, spec, __: compress(lost, spec, dtype=torch.float32)
        )
        system, chunk = engine.encode_system_prompt("watch").tokens, engine.encode(Chunk.text(f"10 {'ab' * 4}")).tokens
        with Window(engine, "watch", system + 6 * chunk + RESERVED, FULL, prefill="idle") as window:
            steps = [*[("append", size, False)] * 5, *regular * 4, *between, *regular * 3]
            for i, (op, at, drains) in enumerate((*steps, ("ask", 0, True))):
                if op == "ask":
                    edit(window, "room", 0, Chunk.text("-"))
                    window.ask(f"what of {at % 3}?", 2)
                    assert distance(window) < 1e-4
                    check_patches(window)
                else:
                    edit(window, op, at, Chunk.text(f"{i} {'ab' * (at % 5)}"))
                if drains:
                    assert prefiller_of(engine).drain(60)
                window.maintenance.check()
            core = window.core
        assert core.idle is not None and not core.idle.spans
        counts = core.idle.counts
        assert counts.failed == 0 and counts.used + counts.missed == counts.tokens
        assert engine.store.stats().leased == 0


test_whatever_is_served_is_what_a_re_prefill_gives, test_whatever_is_served_in_many_traces = twins(
    check_trace, 4, 20, st.sampled_from(TURNS), st.integers(0, 4), st.booleans(), STEPS
)


def test_the_oracle_sees_a_patch_of_another_slide(engine: FakeEngine) -> None:
    with Window(engine, "watch", BUDGET, FULL, prefill="idle") as window:
        turn_over(window, by_budget, 9)
        state = window.snapshot()
        entry = state.placed[3]
        assert entry.kv is not None and entry.kv.patch is not None
        patch = engine.repo.get_patch(entry.kv.patch)
        assert patch is not None and patch.right is None
        torch.nn.init.zeros_(patch.left)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine.repo, "get_patch", lambda _, **options: patch)
            assert distance(window) > CLOSE
