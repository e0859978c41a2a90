"""Patches are formed where they serve: removal patches, KV kept as patches while bytes are short, means over orders met."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.store.memory import MemoryStore
from ctxwin.store.spans import SpanRepository
from ctxwin.window import orbits
from ctxwin.window.core import demand_of
from ctxwin.window.lanes import canonical_key
from ctxwin.window.maintenance import Maintenance
from ctxwin.window.state import Conditioning
from ctxwin.window.storage_policy import Demand, context_of, likely_form
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.registry.windows import OpenWindows, WindowRegistry
from window.fake import KV, FakeEngine

TEXTS = ("a" * 30, "b" * 30, "c" * 30)


def lanes(window: Window) -> list[str]:
    return [e.lane for e in window.chunks]


def opened(engine: FakeEngine, order: Sequence[int] = (0, 1, 2), **fidelity: object) -> Window:
    window = Window(engine, "hd", fidelity=Fidelity("patched", **{"rank": 2, **fidelity}))
    window.extend([Chunk.text(TEXTS[i]) for i in order])
    window.ask("q")
    return window


def conditioning(window: Window, index: int) -> Conditioning:
    kv = window.snapshot().placed[index].kv
    assert kv is not None
    return kv


def patches(engine: FakeEngine) -> list[str]:
    return list(engine.store.list("patch/"))


def test_a_removal_patch_serves_from_the_ask_after_the_one_that_formed_it(engine: FakeEngine) -> None:
    window = opened(engine, survivors="removal")
    survived = conditioning(window, 2).span
    (a,) = window.slide(1)
    formed = window.ask("q")
    assert formed.usage.reused_tokens["formed"] == 60 and formed.usage.exact
    assert lanes(window) == ["resident", "patched"]
    assert conditioning(window, 1).span == survived, "the patch lies over the KV it survived with"
    assert not window.chunks[1].exact and window.chunks[1].depth == 1
    served = window.ask("q").usage
    assert served.computed_tokens == 3 and served.reused_tokens["patched"] == 30 and not served.exact
    assert lanes(window) == ["resident", "patched"], "asking does not change the lane"
    assert engine.repo.counters.patches_served == engine.repo.counters.patches == 1
    window.recall(a)
    assert lanes(window)[2] == "resident" and window.chunks[2].exact, "what it survived with is still there"


def test_slide_after_slide_patches_the_same_kv(engine: FakeEngine) -> None:
    window = opened(engine, survivors="removal")
    window.append(Chunk.text("d" * 30))
    window.ask("q")
    survived = conditioning(window, 3).span
    for left in (2, 1):
        window.slide(1)
        window.ask("q")
        assert (conditioning(window, left).span, lanes(window)[left]) == (survived, "patched")
    window.slide(1)
    window.ask("q")
    assert window.chunks[0].exact, "alone behind the system prompt it is computed: that is its canonical"


def test_forgetting_takes_what_a_removal_patch_left_behind(engine: FakeEngine) -> None:
    window = opened(engine, survivors="removal")
    (a,) = window.slide(1)
    window.ask("q")
    survived = conditioning(window, 1).span
    window.append(Chunk.text("d" * 30))
    window.ask("q")  # behind the patched chunk, so it carries what the patch left
    window.evict(a, forget=True)
    assert lanes(window) == ["resident", "formed", "formed"]
    assert not engine.repo.contains(survived) and not patches(engine)
    window.ask("q")
    assert window.plan().exact


def test_with_bytes_enough_nothing_is_compressed(engine: FakeEngine) -> None:
    with opened(engine) as window, opened(engine, (1, 0, 2)) as other:
        before = engine.counters.prefill_tokens
        assert window.maintenance.compress(if_short=True) == other.maintenance.compress(if_short=True) == 0
        assert engine.counters.prefill_tokens == before and window.plan().exact and not patches(engine)


def test_one_context_of_a_chunk_is_not_worth_a_canonical() -> None:
    """Canonical and patch together take more than the conditioned KV."""
    engine = FakeEngine(MemoryStore(30_000))
    window = opened(engine)
    assert window.core.assembly.demand().short is False
    small = FakeEngine(MemoryStore(20_000))
    with opened(small) as alone:
        demand = Demand(10, 10, alone.core.assembly.demand().contexts)
        assert demand.short and not any(demand.pays(alone.snapshot(), p, False) for p in alone.snapshot().placed)
        assert all(demand.pays(alone.snapshot(), p, True) for p in alone.snapshot().placed)


ORDERS = ((0, 1, 2), (1, 2, 0), (2, 1, 0), (0, 2, 1), (1, 0, 2))


def short_engine(chunks: int) -> FakeEngine:
    """Its store holds so many chunks' KV, records' headers included."""
    engine = FakeEngine()
    engine.spec = replace(engine.spec, kv=replace(KV, dtype="float64"))
    engine.store = MemoryStore(chunks * (30 * engine.spec.kv.token_bytes + 1700))
    engine.repo = SpanRepository(engine.store, engine.spec.identity, max_live_bytes=0)
    return engine


@pytest.mark.parametrize("idle", ["between", "at the end"])
def test_while_bytes_are_short_shared_chunks_become_canonical_and_patch(idle: str) -> None:
    engine = short_engine(8)
    windows: list[Window] = []
    for order in ORDERS:
        windows.append(opened(engine, order))
        for window in windows if idle == "between" else ():
            window.maintenance.compress(if_short=True)
    for _ in range(3):
        for window in windows:
            window.ask("q")  # what the store had refused is computed once more
            window.maintenance.compress(if_short=True)
    for window in windows:
        assert set(lanes(window)[1:]) == {"patched"} and window.chunks[0].exact
        assert window.ask("q").usage.computed_tokens == 3
        window.check()
    assert engine.store.stats().bytes <= engine.store.limit()
    assert engine.repo.counters.patches_served == 10
    for window in windows:
        window.close()


def test_a_server_compresses_what_nobody_uses_and_whoever_comes_meanwhile_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = short_engine(8)
    registry = WindowRegistry(engine, 9, Limits(), OpenWindows(9))
    ids = [registry.add(opened(engine, order)).id for order in ORDERS]
    for _ in range(3):
        for window_id in ids:
            with registry.using(window_id) as window:
                window.ask("q")
        with registry.using(ids[0]) as window:
            before = window.snapshot()
            registry.compress_idle()
            assert window.snapshot() is before, "in use: left alone"
        registry.compress_idle()
    assert engine.repo.counters.patches and engine.repo.counters.patches_served
    looked = Mock(side_effect=Maintenance.compress)
    monkeypatch.setattr(Maintenance, "compress", looked)
    assert registry.compress_idle() == 0 and not looked.called, "a version is looked at once"
    begun, go_on = threading.Event(), threading.Event()

    def slow(maintenance: Maintenance, *, if_short: bool) -> int:
        begun.set()
        assert go_on.wait(20)
        with maintenance.core.writing():
            return 7

    monkeypatch.setattr(Maintenance, "compress", slow)
    with registry.using(ids[1]) as window:
        window.evict(window.ids[-1])
    with ThreadPoolExecutor(2) as pool:
        freed = pool.submit(registry.compress_idle)
        assert begun.wait(20)

        def ask() -> str:
            with registry.using(ids[1]) as window:
                return window.ask("q").text

        answer = pool.submit(ask)
        time.sleep(0.05)
        assert not answer.done()
        go_on.set()
        assert freed.result(20) == 7 and answer.result(20)
    monkeypatch.setattr(FakeEngine, "busy", True)
    with registry.using(ids[1]) as window:
        window.evict(window.ids[-1])
    begun.clear()
    assert registry.compress_idle() == 0 and not begun.is_set(), "somebody waits"
    registry.close()
    assert engine.store.stats().leased == 0


def test_while_bytes_are_short_what_is_computed_is_stored_as_a_patch_where_the_canonical_is_held() -> None:
    engine = short_engine(10)
    windows = [opened(engine, order) for order in ORDERS[:3]]  # each chunk's canonical is at the front of one
    spans = set(engine.store.list("span/"))
    late = opened(engine, ORDERS[4])
    assert late.core.assembly.demand().short
    assert lanes(late) == ["resident", "patched", "patched"]
    assert set(engine.store.list("span/")) == spans, "no conditioned KV was stored for it"
    assert all(window.plan().exact for window in windows)
    for window in windows:
        window.close()
    assert late.maintenance.refresh() and late.plan().exact, "re-forming keeps exact KV, whatever bytes are short"


def test_patches_that_never_served_are_dropped_only_when_bytes_are_short(engine: FakeEngine) -> None:
    def superseded(engine: FakeEngine) -> Window:
        window = opened(engine, survivors="removal")
        window.append(Chunk.text("d" * 30))
        window.ask("q")
        for _ in range(2):  # the patches of the first slide are left by the second before anything is asked
            window.slide(1)
            window.ask("q")
        return window

    with superseded(engine) as window:
        assert window.maintenance.compress(if_short=True) == 0
        assert engine.repo.counters.patches_dropped == 0
        stale = set(patches(engine)) - window.snapshot().keys()
        assert stale and engine.repo.drop_unserved() > 0
        assert set(patches(engine)) == window.snapshot().keys() & set(patches(engine))
        assert engine.repo.counters.patches_dropped == len(stale)


def test_the_form_of_what_was_evicted_follows_its_return(engine: FakeEngine) -> None:
    window = opened(engine)
    a = window.ids[0]
    window.slide(2)
    state = window.snapshot()
    first, second = state.evicted
    assert likely_form(state, first, True, True) == "canonical"
    assert likely_form(state, second, True, True) == "canonical", "it returns to the front, too"
    assert likely_form(state, second, False, True) == "conditioned", "as a survivor"
    assert likely_form(state, second, False, False) == "source"
    window.recall(a)
    assert likely_form(window.snapshot(), second, True, False) == "conditioned", "its antecedents are back"
    window.insert(0, Chunk.text("e"))
    assert likely_form(window.snapshot(), second, True, False) == "canonical", "that came later and goes behind it"


def test_an_orbit_patch_is_the_mean_over_the_orders_met() -> None:
    """At full rank the same as one prepared from these orders."""
    engine = FakeEngine()
    window = opened(engine, rank=64, orbit=True, survivors="refresh")
    ids = window.ids
    assert not list(engine.store.list("orbit/")), "without its canonical a chunk has no patch"
    window.maintenance.compress(if_short=True)
    window.maintenance.compress(if_short=True)
    assert engine.repo.counters.patches == 0, "one order is no orbit, however often it is met"
    (only,) = engine.store.list("orbit/")
    alone = engine.repo.get_patch(only)
    window.reorder([ids[i] for i in (1, 0, 2)])
    window.ask("q")
    assert engine.repo.counters.patches == 1
    (key,) = (
        k for k in engine.store.list("orbit/") if engine.repo.record_of(k).get("orders") == 2 and k in served(window)
    )
    mean = engine.repo.get_patch(key)
    window.maintenance.prepare_orbit(ids[:2], orders=2)
    prepared = engine.repo.get_patch(served(window)[0])
    assert alone is not None and mean is not None and prepared is not None
    for layer in range(KV.layers):
        for have, want in zip(mean.delta(layer) or (), prepared.delta(layer) or (), strict=True):
            assert torch.allclose(have, want, atol=0.01), "patches are stored in bf16"
    assert any(
        not torch.allclose(a, b, atol=0.05) for a, b in zip(alone.delta(1) or (), mean.delta(1) or (), strict=True)
    )


def test_behind_an_answer_a_first_order_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most sets are met in one order, whose mean would never serve. The second one makes the mean of both."""
    formed, compress = list[int](), orbits.compress_deficit

    def counted(*arguments: Any) -> Any:
        formed.append(1)
        return compress(*arguments)

    monkeypatch.setattr(orbits, "compress_deficit", counted)
    engine = FakeEngine()
    with opened(engine, rank=64, orbit=True, survivors="refresh") as window:
        for placement in window.ids:  # their canonicals
            with window.fork() as branch:
                branch.toggle(placement, conditioned=False)
                branch.ask("q")
        ids, front = window.ids, Chunk.text("d" * 20)
        window.insert(0, front)
        for _ in range(2):
            window.ask("q")
        assert not formed and not list(engine.store.list("orbit/"))
        window.reorder([window.ids[0], ids[1], ids[0], ids[2]])
        window.ask("q")
        assert len(formed) == 1 and engine.repo.counters.patches == 1
        assert [engine.repo.record_of(k)["orders"] for k in engine.store.list("orbit/")] == [2, 2]


def test_a_first_order_whose_kv_has_left_is_met_anew() -> None:
    engine = FakeEngine()
    with opened(engine, rank=64, orbit=True, survivors="refresh") as window:
        with window.fork() as branch:
            branch.toggle(window.ids[2], conditioned=False)
            branch.ask("q")
        ids = window.ids
        for order in ((1, 0, 2), (0, 1, 2), (1, 0, 2)):
            for key in set(engine.store.list("span/")) - canonicals(window):
                engine.store.delete(key)
            window.reorder([ids[i] for i in order])
            window.ask("q")
            assert not list(engine.store.list("orbit/"))


def canonicals(window: Window) -> set[str]:
    state = window.snapshot()
    return {canonical_key(state, p.chunk_id)[1] for p in state.placed}


def served(window: Window) -> list[str]:
    """The keys under which the lane looks for orbit patches of the last chunk."""
    from ctxwin.window.state import orbit_keys

    state = window.snapshot()
    contents = [p.chunk_id for p in state.placed[:-1]]
    return list(orbit_keys(state.system_prompt_key, state.placed[-1].chunk_id, contents, window.fidelity.patch_name))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=30))
def test_the_demand_kept_up_to_date_is_that_of_all_windows(program: list[tuple[int, int]]) -> None:
    engine = FakeEngine()
    windows = [Window(engine, "h", fidelity=Fidelity("patched"))]
    for where, what in program:
        window = windows[where % len(windows)]
        if what < 3:
            window.append(Chunk.text("abc"[what]))
        elif what == 3:
            window.ask("q", 1)
        elif what == 4:
            window.slide(min(1, len(window.ids)))
        elif what == 5:
            windows.append(window.fork("another" if where % 2 else None))
        elif len(windows) > 1:
            windows.remove(window)
            window.close()
        contexts: dict[tuple[str, str], dict[str, int]] = {}
        for state in (w.snapshot() for w in windows):
            for p in state.placed:
                contexts.setdefault((state.system_prompt_key, p.chunk_id), {})[context_of(state, p)] = p.tokens
        tokens = [count for each in contexts.values() for count in each.values()]
        have = demand_of(engine)
        assert have.limit == engine.store.limit()
        assert have.bytes == sum(tokens) * KV.token_bytes + len(tokens) * KV.state_bytes
        assert {chunk: set(found) for chunk, found in have.contexts.items()} == {c: set(e) for c, e in contexts.items()}
