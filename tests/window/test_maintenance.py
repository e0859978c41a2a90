"""Work on a window besides its edits and questions: compression, orbit patches, re-forming and computing ahead."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.segments import Segment
from ctxwin.errors import BudgetExceeded, EngineFailed
from ctxwin.kv.patch import apply_patch
from ctxwin.kv.relocate import relocate
from ctxwin.window.lanes import canonical_key
from ctxwin.window.layout import Work
from ctxwin.window.orbits import balanced_orders
from ctxwin.window.state import orbit_key
from window.fake import KV, FakeEngine
from window.test_window import fresh, lanes


def test_compress_serves_patches_and_gives_bytes_back(engine: FakeEngine, window: Window) -> None:
    long = window.append(Chunk.text("l" * 30))
    window.ask("q")
    span = window.snapshot().placed[-1].kv.span  # type: ignore[union-attr]
    assert window.maintenance.compress() > 0
    assert lanes(window)[-1] == "patched"
    assert not window.chunks[-1].exact
    assert not engine.repo.contains(span)
    usage = window.ask("q").usage
    assert usage.computed_tokens == 3
    assert usage.reused_tokens["patched"] >= 30
    assert window.maintenance.refresh() and window.plan().exact
    assert window.ids[-1] == long
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)


ORBIT_ONLY = Fidelity("patched", rank=64, orbit=True, advanced={"forbid": ("survivor", "patched")})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=2, max_size=7), st.data())
def test_every_order_of_a_prepared_set_is_served_without_a_forward(texts: list[str], data: st.DataObject) -> None:
    """Chunks may have the same contents. Preparing costs what its plan says."""
    engine = FakeEngine()
    with Window(engine, "hd", fidelity=ORBIT_ONLY) as window:
        ids = window.extend([Chunk.text(text) for text in texts])
        k = data.draw(st.integers(2, min(4, len(ids))))
        if data.draw(st.booleans()):
            window.ask("q")
        plan, before = window.maintenance.plan_orbit(ids[:k]), replace(engine.counters)
        with pytest.raises(BudgetExceeded, match="token_limit"):
            window.maintenance.prepare_orbit(ids[:k], token_limit=plan["tokens"] - 1)
        assert engine.counters == before
        covered = window.maintenance.prepare_orbit(
            ids[:k], seed=data.draw(st.integers(0, 3)), token_limit=plan["tokens"]
        )
        assert covered == ids
        assert engine.counters.prefill_forwards - before.prefill_forwards == plan["forwards"] <= k + 1 + len(ids) - k
        assert engine.counters.prefill_tokens - before.prefill_tokens == plan["tokens"]
        assert window.maintenance.plan_orbit(ids[:k])["forwards"] == k
        query = engine.encode_query("q").tokens
        for order in permutations(ids[:k]):
            with window.fork() as branch:
                branch.reorder([*order, *ids[k:]])
                assert set(lanes(branch)) <= {"resident", "orbit"} and branch.plan().computed_tokens == 0
                usage = branch.ask("q").usage
                assert (usage.computed_tokens, usage.forwards, usage.misses) == (query, 1, 0)
                branch.check()


def test_a_prepared_set_serves_the_orders_that_were_computed_as_a_forward_does() -> None:
    """At full rank; chunks are then nearer to a forward in the other orders, too, than their canonicals are."""
    engine, computed = FakeEngine(), balanced_orders(4, 4, 0)
    errors: dict[str, list[float]] = {"orbit": [], "blind": []}
    with Window(engine, "hd", fidelity=ORBIT_ONLY) as window:
        ids = window.extend([Chunk.text(text * 5) for text in "abcd"])
        window.maintenance.prepare_orbit(ids)
        for order in permutations(range(4)):
            with window.fork() as branch:
                branch.reorder([ids[i] for i in order])
                layout = branch.core.assembly.build_layout(branch.snapshot(), branch.fidelity, Work())
            front = [replace(layout.segments[0], span=None)]
            for segment in layout.segments[1:]:
                assert segment.span is not None
                exact = engine.prefill(front, segment.encoded, segment.start)
                front.append(Segment(segment.encoded, segment.start, span=exact))
                moved = relocate(segment.span, KV, segment.start)
                served = moved if segment.patch is None else apply_patch(moved, segment.patch, KV, segment.start)
                if order in computed:
                    torch.testing.assert_close(served.v, exact.v, atol=0.02, rtol=0.02)
                    torch.testing.assert_close(served.k, exact.k, atol=0.02, rtol=0.02)
                for kind, span in (("orbit", served), ("blind", moved)):
                    errors[kind].append(float((span.v - exact.v).norm()))
    assert sum(errors["orbit"]) < sum(errors["blind"]) / 2


def test_which_chunks_an_orbit_covers(engine: FakeEngine) -> None:
    window = Window(engine, "hd", fidelity=ORBIT_ONLY)
    ids = window.extend([Chunk.text(f"c{i}") for i in range(8)])
    assert window.maintenance.prepare_orbit(ids[:1]) == ids[1:]
    assert window.maintenance.prepare_orbit(ids[:7]) == ids[7:], "of seven chunks the orders would take 441 patches"
    with pytest.raises(ValueError, match="first placed chunks"):
        window.maintenance.prepare_orbit([ids[2]])
    with pytest.raises(ValueError, match="leave a chunk behind"):
        window.maintenance.plan_orbit(ids)


def test_an_orbit_patch_holds_what_its_chunk_absorbed(engine: FakeEngine) -> None:
    """At full rank the canonical with the patch is the mean of what forwards behind the others in either order give."""
    window = Window(engine, "hd", fidelity=Fidelity("patched", rank=64, orbit=True))
    a, b, c = window.extend([Chunk.text("aa"), Chunk.text("bb"), Chunk.text("cccccccccccc")])
    window.maintenance.prepare_orbit([a, b], orders=2)
    state = window.snapshot()
    front = [p.chunk_id for p in state.placed[:2]]
    key = orbit_key(state.system_prompt_key, state.placed[2].chunk_id, front, window.fidelity.patch_name)
    patch = engine.repo.get_patch(key)
    canonical, _ = engine.repo.get_span(canonical_key(window.snapshot(), window.chunk(c).id)[1])
    whole = []
    for order in ((a, b), (b, a)):
        front, at = [Segment(engine.encode_system_prompt("hd"), 0)], engine.encode_system_prompt("hd").advance
        for placement in order:
            encoded = engine.encode(window.chunk(placement))
            front.append(Segment(encoded, at, span=engine.prefill(front, encoded, at)))
            at += encoded.advance
        whole.append(engine.prefill(front, engine.encode(window.chunk(c)), at))
    served = apply_patch(canonical, patch, KV, at)
    assert (whole[0].v - canonical.v).abs().max() > 0.01
    torch.testing.assert_close(served.v, (whole[0].v + whole[1].v) / 2, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(served.k, (whole[0].k + whole[1].k) / 2, atol=1e-3, rtol=1e-3)


def test_refresh_bounds_the_drift(engine: FakeEngine, window: Window) -> None:
    for i in range(6):
        window.append(Chunk.text(f"n{i}"))
        window.slide(1)
        window.ask("q")
    depths = [e.depth for e in window.chunks]
    assert max(depths) > 2
    approximate = [e.id for e in window.chunks if not e.exact]
    for left in range(len(approximate), 0, -1):
        # One a time, front to back: each becomes exact, because everything in front of it is.
        assert window.maintenance.refresh(1) == [approximate[-left]]
        assert sum(not e.exact for e in window.chunks) == left - 1
    window.maintenance.refresh()
    assert window.plan().exact
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)


@pytest.mark.parametrize("mode", ["exact", "patched"])
def test_what_was_prefilled_is_not_computed_by_the_answer(mode: Any) -> None:
    asked, ahead = (Window(FakeEngine(), "hd", fidelity=Fidelity(mode)) for _ in range(2))
    for i in range(6):
        for window in (asked, ahead):
            placed = window.append(Chunk.text(f"n{i}"))
            if i > 2:
                window.slide(1)
        version, due = ahead.version, [e.id for e in ahead.chunks if e.compute]
        assert ahead.maintenance.prefill() == due and due[-1] == placed
        assert ahead.version == version and ahead.maintenance.prefill() == []
        answers = [window.ask("q", max_tokens=3) for window in (asked, ahead)]
        assert answers[0].token_ids == answers[1].token_ids
        query = answers[1].usage.prompt_tokens - ahead.tokens
        assert answers[1].usage.computed_tokens == query < answers[0].usage.computed_tokens
        assert [e.lane for e in ahead.chunks] == [e.lane for e in asked.chunks]
        ahead.check()


def test_a_prefill_that_fails_keeps_what_it_has_computed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    window, prefill = Window(engine, "hd", fidelity=Fidelity("patched")), engine.prefill
    ids = window.extend([Chunk.text(text) for text in "abcd"])

    def fails_at_c(front: Any, encoded: Any, start: int, **options: Any) -> Any:
        if len(front) == 3:
            raise EngineFailed("no")
        return prefill(front, encoded, start, **options)

    monkeypatch.setattr(engine, "prefill", fails_at_c)
    with pytest.raises(EngineFailed):
        window.maintenance.prefill()
    assert [e.id for e in window.chunks if e.compute] == ids[2:]
    monkeypatch.undo()
    assert window.maintenance.prefill() == ids[2:]
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)


def test_a_prefill_that_can_load_nothing_computes_exact_kv(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    window, prefill = Window(engine, "hd", fidelity=Fidelity("patched")), engine.prefill
    window.extend([Chunk.text(text) for text in "abcd"])
    window.ask("q", max_tokens=1)
    window.slide(1)
    ids = window.extend([Chunk.text(text) for text in "ef"])

    def loads_nothing(front: Any, encoded: Any, start: int, **options: Any) -> Any:
        options["tally"].fallbacks += 1
        return prefill([replace(s, span=None, approximate=False) for s in front], encoded, start, **options)

    monkeypatch.setattr(engine, "prefill", loads_nothing)
    assert window.maintenance.prefill()[-2:] == ids
    assert all(e.exact for e in window.chunks)
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)


def test_a_prefill_beyond_the_engine_says_what_to_do() -> None:
    with Window(FakeEngine(max_tokens=20), "h", fidelity=Fidelity("exact")) as window:
        window.extend([Chunk.text(text * 9) for text in "ab"])
        with pytest.raises(BudgetExceeded, match=r"engine's 20 tokens, got 20; slide\(\)"):
            window.maintenance.prefill()
        window.slide(1)
        assert window.maintenance.prefill() == [*window.ids]


def test_prefill_ends_where_the_store_takes_nothing(engine: FakeEngine) -> None:
    engine.repo.put_span = lambda *_: False  # type: ignore[assignment,method-assign]
    window = Window(engine, "hd", fidelity=Fidelity("patched"))
    window.extend([Chunk.text(text) for text in "abc"])
    assert window.maintenance.prefill() == list(window.ids)
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)
