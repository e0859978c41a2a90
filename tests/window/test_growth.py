"""How work grows with a window, with forks of it, with windows of a server and with a store's entries: in counted lines of
Python, so that a busy machine changes nothing. A step in C (a copied tuple, a sum) counts as the line that asks for it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.layout import SpanKV
from ctxwin.store.disk import DiskStore
from ctxwin.store.memory import MemoryStore
from ctxwin.window.antecedents import Antecedents
from ctxwin.window.continuation import Continuation
from ctxwin.window.core import demand_of
from ctxwin.window.layout import Work
from ctxwin.window.survival import Evicted
from store.wrappers import WrapperStore
from window.fake import DIM, LAYERS, FakeEngine, planned_anew

SMALL, LARGE = 32, 128
Setup = Callable[[int], Callable[[], object]]


def lines(operation: Callable[[], object]) -> int:
    """Lines of Python that a call runs in this thread."""
    count, tracer = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(tracer)
    return count


def exponent(setup: Setup, small: int = SMALL, large: int = LARGE) -> float:
    """Power of the size with which the work grows; the first call only fills caches."""
    setup(4)()
    few, many = lines(setup(small)), lines(setup(large))
    return math.log(many / few) / math.log(large / small)


def on(prepare: Callable[[int], Any], operation: Callable[[Any], object]) -> Setup:
    """``operation`` on what ``prepare`` gives for a size."""
    return lambda n: partial(operation, prepare(n))


class NullEngine(FakeEngine):
    """KV of zeros in linear time, where no answer is looked at."""

    def _forward(self, front: list[SpanKV], encoded: Encoded, start: int) -> SpanKV:
        zeros = torch.zeros(LAYERS, encoded.tokens, 1, DIM, dtype=torch.float64)
        return SpanKV(zeros, zeros, torch.from_numpy(encoded.positions.copy()), start)

    def _run(self, segments: Sequence[Segment]) -> tuple[list[SpanKV], dict[int, SpanKV], int, int]:
        spans = [s.span if s.span is not None else self._forward([], s.encoded, s.start) for s in segments]
        computed = {i: span for i, span in enumerate(spans) if segments[i].span is None}
        captured = {i: span for i, span in computed.items() if segments[i].capture}
        return spans, captured, sum(segments[i].tokens for i in computed), 0


def engine_for(n: int) -> FakeEngine:
    """An engine for windows of so many chunks."""
    return (FakeEngine if n <= LARGE else NullEngine)(max_tokens=10**6)


def opened(n: int, mode: Any = "patched", engine: FakeEngine | None = None) -> Window:
    """A window of ``n`` chunks whose KV is held."""
    window = Window(engine or engine_for(n), "h", 10**6, fidelity=Fidelity(mode))
    window.extend([Chunk.tokens([i % 40]) for i in range(n)])
    window.ask("q", 1)
    return window


def lay_out(window: Window) -> None:
    """All of an ask but the engine's call, and what it writes back."""
    assembly, state = window.core.assembly, window.snapshot()
    assembly.write_back(state, assembly.build_layout(state, window.fidelity, Work()), {}, window.fidelity)


def without_middle(n: int) -> Window:
    window = opened(n)
    window.evict(window.ids[n // 2])
    return window


def rotated(n: int) -> Window:
    window = opened(n)
    window.reorder([window.ids[-1], *window.ids[:-1]])
    return window


def backwards(n: int) -> Window:
    window = opened(n)
    window.reorder(window.ids[::-1])
    return window


def slid(n: int, mode: Any = "patched") -> Window:
    window = opened(n, mode)
    window.slide(1)
    return window


def streamed(n: int) -> Window:
    """As many orders as slides: what stays keeps the one it was conditioned in."""
    window = opened(n)
    for i in range(min(n // 8, 16)):
        window.slide(1)
        window.append(Chunk.tokens([i % 40]))
        window.maintenance.prefill()
    window.plan()
    return window


def without_its_middles(n: int) -> Window:
    """A window that lost the chunk in its middle and got a new one, as many times as chunks stand behind that (64 at most)."""
    window = opened(n)
    for i in range(min(n // 2, LARGE // 2)):
        window.evict(window.ids[n // 2])
        window.append(Chunk.tokens([i % 40, i // 40]))
        window.maintenance.prefill()
    window.plan()
    return window


def saved(prepare: Callable[[int], Window]) -> Callable[[int], tuple[Any, str]]:
    def save(n: int) -> tuple[Any, str]:
        window = prepare(n)
        return window.engine, window.snapshot().model_dump_json()

    return save


EDITS: dict[str, Setup] = {
    "append": on(opened, lambda window: window.append(Chunk.tokens([7]))),
    "extend": lambda n: partial(opened(1).extend, [Chunk.tokens([i % 40]) for i in range(n)]),
    "slide": on(opened, lambda window: window.slide(1)),
    "evict": on(opened, lambda window: window.evict(window.ids[len(window.ids) // 2])),
    "recall": on(without_middle, lambda window: window.recall(window.evicted[0])),
    "fork": on(opened, lambda window: window.fork()),
    "undo": on(slid, lambda window: window.undo()),
    "plan": on(opened, lambda window: window.plan()),
    "plan behind a slide": on(slid, lambda window: window.plan()),
    "plan behind an exact slide": on(partial(slid, mode="exact"), lambda window: window.plan()),
    "plan of the oldest at the end": on(rotated, lambda window: window.plan()),
    "plan of all backwards": on(backwards, lambda window: window.plan()),
    "plan of a stream": on(streamed, lambda window: window.plan()),
    "prepare an ask": on(opened, lay_out),
    "prepare an ask behind a slide": on(slid, lay_out),
    "snapshot": on(opened, lambda window: window.snapshot().model_dump_json()),
    "restore": on(saved(opened), lambda saved: Window.restore(*saved)),
    "restore a stream": on(saved(streamed), lambda saved: Window.restore(*saved)),
    "plan without middles": on(without_its_middles, lambda window: window.plan()),
    "snapshot without middles": on(without_its_middles, lambda window: window.snapshot().model_dump_json()),
    "restore without middles": on(saved(without_its_middles), lambda saved: Window.restore(*saved)),
}


@pytest.mark.parametrize("name", EDITS)
def test_work_grows_at_most_in_proportion_to_a_window(name: str) -> None:
    assert exponent(EDITS[name]) <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_work_grows_so_up_to_five_thousand_chunks(name: str) -> None:
    assert exponent(EDITS[name], 500, 5000) <= 1.1


def standing(n: int) -> Window:
    """A window of ``n`` chunks that did not move since they were planned and asked."""
    window = opened(n)
    window.ask("q", 1)
    window.plan()
    return window


def test_a_plan_and_an_ask_take_few_steps_for_a_chunk_that_did_not_move() -> None:
    window = standing(LARGE)
    window.append(Chunk.tokens([7]))
    assert lines(window.plan) / LARGE <= 60
    assert lines(partial(lay_out, window)) / LARGE <= 100


PATCHED = Fidelity("patched", rank=2, survivors="removal")
ORBITS = Fidelity("patched", rank=2, orbit=True, advanced={"forbid": ("survivor", "patched")})


def survivors(n: int = SMALL, fidelity: Fidelity | None = None) -> Window:
    window = opened(n + 1) if fidelity is None else Window(engine_for(n), "h", 10**6, fidelity=fidelity)
    if fidelity is not None:
        window.extend([Chunk.tokens([i % 40, 7, 9, i // 40]) for i in range(n + 1)])
        window.ask("q", 1)
        window.maintenance.compress()
    window.slide(1)
    window.ask("q", 1)
    return window


def orbits(n: int = SMALL) -> Window:
    window = Window(engine_for(n), "h", 10**6, fidelity=ORBITS)
    window.extend([Chunk.tokens([i % 40, 7, 9, i // 40]) for i in range(n)])
    window.maintenance.prepare_orbit(window.ids[:2])
    window.reorder([window.ids[1], window.ids[0], *window.ids[2:]])
    window.ask("q", 1)
    return window


def clean(n: int = SMALL) -> Window:
    window = opened(n)
    for placement in window.ids:
        window.toggle(placement, conditioned=False)
    window.ask("q", 1)
    return window


def merged(n: int = SMALL) -> Window:
    window = Window(engine_for(n), "h", 10**6, fidelity=Fidelity("patched", merge=0.5))
    window.extend([Chunk.tokens([i % 40, 7, 9, i // 40]) for i in range(n)])
    window.ask("q", 1)
    for placement in window.ids:
        window.maintenance.merge(placement)
    window.ask("q", 1)
    return window


INEXACT: dict[str, Callable[..., Window]] = {
    "survivor": survivors,
    "patched": partial(survivors, fidelity=PATCHED),
    "orbit": orbits,
    "canonical": clean,
    "merged": merged,
}
"""Windows whose chunks are served in a lane, mostly."""


def again(window: Window) -> Window:
    """The window, planned and asked once more: the first time a placement's own KV becomes what served it."""
    window.ask("q", 1)
    window.plan()
    return window


@pytest.mark.parametrize("lane", INEXACT)
def test_what_is_no_exact_kv_goes_on_in_few_steps_as_well(lane: str) -> None:
    window = again(INEXACT[lane](min(LARGE, 60)))
    n, assembly, fidelity = len(window.ids), window.core.assembly, window.core.fidelity
    assert [e.lane for e in window.plan().entries].count(lane) > n / 2
    window.append(Chunk.tokens([7]))
    window.plan()
    assert lines(lambda: assembly.plan(window.snapshot(), fidelity)) / n <= 60
    assert lines(partial(lay_out, window)) / n <= 120
    assert len(assembly.newest.loaded.chunks) == n
    goes_on, anew = planned_anew(window)
    assert goes_on == anew


def withdraw_trust(window: Window) -> None:
    window.core.audits._fixed = window.fidelity.with_advanced(forbid=("survivor", "patched", "orbit", "merged"))


def demote(window: Window) -> None:
    window.core.audits._exact |= {window.ids[3]}


def discard(window: Window) -> None:
    kv = window.snapshot().placed[3].kv
    assert kv is not None and window.engine.repo.delete(kv.patch or kv.span)


def lose_the_lease(window: Window) -> None:
    """What nobody leases leaves a store that needs room."""
    store = window.engine.store
    window.core._leases.follow(())
    assert store.put("span/large", bytes(store.limit() - 1)) and not list(store.list("patch/"))
    store.delete("span/large")


def store_exact_kv(window: Window) -> None:
    """Another window computes what this one has an approximation of."""
    with Window(window.engine, "h", 10**6, fidelity=Fidelity("exact")) as other:
        other.extend([window.chunk(placement) for placement in window.ids])
        other.ask("q", 1)


CHANGES: list[Callable[[Window], None]] = [withdraw_trust, demote, discard, lose_the_lease, store_exact_kv]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lane", [lane for lane in INEXACT if lane != "canonical"])
def test_a_choice_falls_with_what_it_was_made_on(lane: str, change: Callable[[Window], None]) -> None:
    """Trust withdrawn, an audit's finding, a patch discarded, a lease lost, exact KV found: the plan is as if made anew, and
    the answer as that of a window that remembers nothing."""
    windows = [again(INEXACT[lane](12)) for _ in range(2)]
    before = windows[0].plan()
    for window in windows:
        change(window)
    goes_on, anew = planned_anew(windows[0])
    assert goes_on == anew and goes_on[3].lane != before.entries[3].lane
    windows[1].core.assembly.newest = Continuation()
    first, second = (window.ask("q", 3, logprobs=-1) for window in windows)
    assert first.first_token_logprobs == second.first_token_logprobs


@pytest.mark.parametrize("lane", INEXACT)
def test_kv_that_left_the_store_behind_a_plan_is_not_served(lane: str) -> None:
    """It is gone, or another record stands under its key, between two asks: neither is taken from what was loaded."""
    window = again(INEXACT[lane](12))
    choice, repo = window.core.assembly.newest.choices[3], window.engine.repo
    kv = choice.conditioning
    stored = repo.get_span(kv.span)
    assert stored is not None and repo.put_span(kv.span, stored[0], {**stored[1], "token_ids": [39] * stored[0].tokens})
    assert repo.get_span(kv.span), "another chunk's, in memory"
    answer = window.ask("q", 1)
    assert answer.usage.misses + answer.usage.computed_tokens > window.ask("q", 1).usage.computed_tokens
    assert planned_anew(window)[0] == planned_anew(window)[1]


def test_what_was_served_before_is_so_only_as_long_as_it_is_remembered() -> None:
    window = Window(FakeEngine(), "h", fidelity=Fidelity("patched", rank=2))
    z, a, b, c = window.extend([Chunk.text(text) for text in "zabc"])
    window.ask("q", 1)
    window.evict(z)
    window.ask("q", 1)
    for order in ([b, a, c], [a, b, c]):
        window.reorder(order)
        window.ask("q", 1)
    assert any(entry.repeated for entry in window.plan().entries)
    window.core.assembly.memo.clear()
    goes_on, anew = planned_anew(window)
    assert goes_on == anew and not any(entry.repeated for entry in goes_on)


def test_a_dear_choice_goes_on_at_the_same_prices_and_falls_with_them() -> None:
    """Where loading takes milliseconds another lane may be cheaper at other prices."""
    window = again(survivors(SMALL))
    rates = window.engine.costs.engine.rates
    window.engine.costs.engine.rates = (*rates[:1], 9.0, rates[2], 6.0, *rates[4:])
    window.plan()
    assert lines(window.plan) / SMALL <= 80, "as it was chosen"
    assert all(entry.lane == "survivor" and entry.ms > 5 for entry in window.plan().entries)
    window.engine.costs.engine.rates = (*rates[:1], 0.5, rates[2], 70.0, *rates[4:])
    goes_on, anew = planned_anew(window)
    assert goes_on == anew and [entry.lane for entry in goes_on].count("formed") > SMALL / 2


def test_a_chunk_that_did_not_move_is_planned_at_its_price_now() -> None:
    window = standing(SMALL)
    before, costs = window.plan(), window.engine.costs
    costs.engine.rates = tuple(2 * rate for rate in costs.engine.rates)
    assert lines(window.plan) / SMALL <= 240, "no entry is made anew"
    after = window.plan()
    assert all(new.ms > old.ms for new, old in zip(after.entries, before.entries, strict=True))
    window.core.assembly.forget()
    assert window.plan() == after


def test_a_layout_goes_on_with_what_the_one_before_loaded() -> None:
    window, work = standing(SMALL), Work()
    window.append(Chunk.tokens([7, 8]))
    assembly, state = window.core.assembly, window.snapshot()
    layout = assembly.build_layout(state, window.fidelity, work)
    chunks = assembly.newest.loaded.chunks
    assert len(chunks) == SMALL and all(c.segment.span is None for c in chunks)
    assembly.forget()
    whole = assembly.build_layout(state, window.fidelity, work)
    for new, old in zip(layout.segments, whole.segments, strict=True):
        assert new.span is old.span and all(
            getattr(new, f.name) == getattr(old, f.name) for f in fields(new) if f.name != "span"
        )
    assert (layout.contents, layout.counts, layout.salt) == (whole.contents, whole.counts, whole.salt)


def test_kv_that_is_not_what_was_checked_is_checked_before_it_serves_again() -> None:
    window = standing(8)
    key, repo = window.core.assembly.newest.loaded.chunks[3].conditioning.span, window.engine.repo
    span, record = repo.get_span(key)
    assert repo.put_span(key, span, {**record, "token_ids": [39]}) and repo.get_span(key), "another chunk's, in memory"
    assert window.ask("q", 1).usage.misses == 1
    assert window.ask("q", 1).usage.misses == 0
    window.engine.store.delete(key)
    assert window.ask("q", 1).usage.computed_tokens > window.ask("q", 1).usage.computed_tokens


class AskedStore(WrapperStore):
    """Counts the times it is asked for one key, or for several at once."""

    asked = 0

    def get(self, key: str) -> bytes | None:
        self.asked += 1
        return super().get(key)

    def contains(self, key: str) -> bool:
        self.asked += 1
        return super().contains(key)

    def look_up(self, keys: Collection[str]) -> set[str]:
        self.asked += 1
        return self.inner.look_up(keys)


def test_kv_that_stays_is_looked_up_at_once_behind_a_slide() -> None:
    """A store elsewhere takes a round trip each time: two for each survivor remain, for exact KV of its new place."""
    asked = {}
    for n in (8, 32):
        store = AskedStore(MemoryStore(1 << 30))
        window = Window(FakeEngine(store, max_tokens=10**6), "s", 10**6, fidelity=Fidelity("patched"))
        window.extend([Chunk.tokens([i, 1]) for i in range(n + 1)])
        window.ask("q", 1)
        window.ask("q", 1)
        window.slide(1)
        store.asked = 0
        assert window.ask("q", 1).usage.reused_tokens["survivor"] == 2 * n
        asked[n] = store.asked
    assert asked[32] - asked[8] == 2 * (32 - 8) and asked[8] <= 2 * 8 + 6


def ids_held(window: Window) -> int:
    """Placement ids that the antecedents of a window's chunks hold, and what its plan says of them."""
    state, plan = window.snapshot(), window.plan()
    orders = {id(p.kv.antecedents.order): p.kv.antecedents.order for p in (*state.placed, *state.evicted) if p.kv}
    missing = [runs for e in plan.entries for runs in (_runs_of(e.missing) or [e.missing])]
    views = {id(ids.order): ids.order for ids in missing if isinstance(ids, Antecedents)}
    lists = [ids for ids in missing if not isinstance(ids, Antecedents)]
    return sum(map(len, lists)) + sum(len(o.ids) + len(o.versions) for o in (orders | views).values())


def _runs_of(ids: Sequence[str]) -> list[Antecedents]:
    return [ids.was, ids.now] if isinstance(ids, Evicted) else []


@pytest.mark.parametrize("restored", [False, True])
def test_a_streams_chunks_share_the_ids_of_what_preceded_them(restored: bool) -> None:
    """Every chunk was computed behind other ones than the chunk before it, and holds no list of its own."""
    window = opened(SMALL)
    for i in range(2 * SMALL):
        window.slide(1)
        window.append(Chunk.tokens([i % 40, i // 40]))
        window.maintenance.prefill()
    if restored:
        window = Window.restore(window.engine, window.snapshot().model_dump_json())
    missing = [(i, len(e.missing)) for i, e in enumerate(window.plan().entries) if e.lane == "survivor"]
    assert len(missing) > SMALL // 2 and all(count == SMALL - 1 - i for i, count in missing)
    assert ids_held(window) <= 12 * SMALL


def one_from_the_middle(window: Window, step: int) -> None:
    window.evict(window.ids[len(window.ids) // 2])


def any_one(window: Window, step: int) -> None:
    window.evict(window.ids[step * 7919 % len(window.ids)])


def one_behind_a_fork(window: Window, step: int) -> None:
    """A fork of each step loses and gets others."""
    one_from_the_middle(window, step)
    fork = window.fork()
    fork.evict(fork.ids[1])
    fork.append(Chunk.tokens([3, step % 40]))
    fork.maintenance.prefill()
    fork.close()


@pytest.mark.parametrize("leave", [one_from_the_middle, any_one, one_behind_a_fork])
def test_chunks_whose_middles_left_share_the_ids_of_what_preceded_them(leave: Callable[[Window, int], None]) -> None:
    """In memory, in the plan and as JSON, those that were evicted since as well; and again once restored."""
    sizes = []
    for n in (SMALL, 2 * SMALL):
        window = opened(n, engine=NullEngine(max_tokens=10**6))
        for step in range(n):
            leave(window, step)
            window.append(Chunk.tokens([step % 40, step // 40]))
            window.maintenance.prefill()
        state, text = window.snapshot(), window.snapshot().model_dump_json()
        again = Window.restore(window.engine, text)
        assert again.snapshot() == state
        assert [tuple(e.missing) for e in again.plan().entries] == [tuple(e.missing) for e in window.plan().entries]
        assert max(ids_held(window), ids_held(again)) <= 16 * n
        assert sum(len(p.kv.antecedents) for p in (*state.placed, *state.evicted) if p.kv) > n * n
        sizes.append(len(text))
    assert math.log2(sizes[1] / sizes[0]) <= 1.1


def forks(n: int) -> Window:
    """A window that was forked before, so that nothing is left to be cached."""
    window = standing(n)
    window.fork()
    return window


def test_a_fork_costs_what_has_changed() -> None:
    """Its leases, its choices and its memory of what was served are the window's so far, copied in C."""
    assert abs(exponent(on(forks, lambda window: window.fork()))) <= 0.1
    fork = forks(LARGE).fork()
    fork.append(Chunk.tokens([7]))
    assert lines(fork.plan) / LARGE <= 60
    assert lines(partial(lay_out, fork)) / LARGE <= 100


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_kv_is_leased_until_the_last_of_a_windows_forks_releases_it(order: tuple[int, ...]) -> None:
    window = standing(4)
    repo, store, keys = window.engine.repo, window.engine.store, sorted(window.snapshot().keys())
    windows = [window, fork := window.fork(), fork.fork()]
    assert [repo.leases(key) for key in keys] == [3] * 4 and store.stats().leased == 4
    windows[order[0]].evict(windows[order[0]].ids[0])
    assert sorted(map(repo.leases, keys)) == [2, 3, 3, 3]
    for i, at in enumerate(order, start=1):
        windows[at].close()
        assert sorted(map(repo.leases, keys)) == [3 - i] * 4
        assert store.stats().leased == (4 if i < 3 else 0)


def forked(n: int) -> list[Window]:
    window = opened(8)
    return [window, *(window.fork() for _ in range(n))]


def filled(store: Any, n: int) -> Any:
    """A store of room for ``n`` entries that holds as many."""
    for i in range(n):
        store.put(f"span/{i:064d}", b"x" * 100)
    return store


def counted(n: int) -> Window:
    """A window of a chunk that was edited since the bytes of a large one beside it were counted."""
    engine = engine_for(n)
    large, small = opened(n, engine=engine), opened(1, engine=engine)
    assert demand_of(engine).bytes and large.ids
    small.observe(lambda event, large=large: None)  # keeps it open
    small.append(Chunk.tokens([7]))
    return small


BESIDE: dict[str, Setup] = {
    "a fork's append": on(forked, lambda forks: forks[1].append(Chunk.tokens([7]))),
    "a fork's ask": on(forked, lambda forks: forks[1].ask("q", 1)),
    "another fork": on(forked, lambda forks: forks[0].fork()),
    "the bytes that open windows need": on(counted, lambda window: demand_of(window.engine)),
    "a put": on(lambda n: filled(MemoryStore(10**9), n), lambda store: store.put("span/new", b"y")),
    "a put that drops": on(lambda n: filled(MemoryStore(100 * n), n), lambda store: store.put("span/new", b"y" * 100)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_costs_nothing(name: str) -> None:
    assert abs(exponent(BESIDE[name])) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"), [(n, 100_000 if "put" in n else 5000 if "bytes" in n else 1000) for n in BESIDE]
)
def test_many_more_beside_cost_nothing(name: str, most: int) -> None:
    assert abs(exponent(BESIDE[name], most // 10, most)) <= 0.1


def full_on_disk(folder: Path, n: int, leased: int) -> DiskStore:
    """A full store of ``n`` records, the first of which are leased."""
    store = filled(DiskStore(folder, 10**9), n)
    store.max_bytes = store.stats().bytes
    assert all([store.lease(f"span/{i:064d}") for i in range(leased)])
    return store


def put_into_full(store: DiskStore, n: int) -> None:
    """Puts that evict, or are refused where all is leased."""
    accepted = [store.put(f"span/new{i}", b"y" * 100) for i in range(n // 4)]
    assert accepted == [store.stats().leased < n] * (n // 4)


def slide_in_full(store: DiskStore, n: int) -> None:
    """Each record takes the place of one that was leased before."""
    for i in range(n // 4):
        store.release(f"span/{i:064d}")
        assert store.put(f"span/new{i}", b"y" * 100) and store.lease(f"span/new{i}")


ON_DISK: dict[str, tuple[Callable[[DiskStore, int], None], float]] = {
    "full": (put_into_full, 0),
    "half of it leased": (put_into_full, 0.5),
    "all of it leased": (put_into_full, 1),
    "all of it leased and released one by one": (slide_in_full, 1),
}


def put_exponent(folder: Path, name: str, small: int, large: int) -> float:
    """Power of the size with which the lines of a put grow, walks over the folder included."""
    operation, leased = ON_DISK[name]
    put = on(lambda n: (full_on_disk(folder / f"{n}", n, int(leased * n)), n), lambda full: operation(*full))
    return exponent(put, small, large) - 1  # as many puts as records


@pytest.mark.parametrize("name", ON_DISK)
def test_a_put_into_a_full_store_on_disk_costs_the_same_however_much_it_holds(tmp_path: Path, name: str) -> None:
    assert abs(put_exponent(tmp_path, name, 100, 400)) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_DISK)
def test_so_does_a_put_beside_ten_thousand_records_on_disk(tmp_path: Path, name: str) -> None:
    assert abs(put_exponent(tmp_path, name, 100, 10_000)) <= 0.1


def test_a_store_on_disk_with_room_costs_the_same_and_opens_in_proportion(tmp_path: Path) -> None:
    folders = iter(range(99))

    def put(n: int) -> Callable[[], object]:
        store = filled(DiskStore(tmp_path / f"{next(folders)}"), n)
        return lambda: [store.put(f"span/new{i}", b"y" * 100) for i in range(8)]

    def reopen(n: int) -> Callable[[], object]:
        folder = tmp_path / f"{next(folders)}"
        filled(DiskStore(folder), n).close()
        return lambda: DiskStore(folder).close()

    assert exponent(put) <= 0.1
    assert exponent(reopen) <= 1.1


def test_five_hundred_windows_of_a_server_stand_beside_each_other() -> None:
    from ctxwin_server.protocol.limits import Limits
    from ctxwin_server.registry.windows import OpenWindows, WindowRegistry

    def registry(n: int) -> tuple[WindowRegistry, list[str]]:
        engine = FakeEngine(max_tokens=10**6)
        served = WindowRegistry(engine, 999, Limits(), OpenWindows(999))
        return served, [served.add(opened(3, engine=engine)).id for _ in range(n)]

    def append(n: int) -> Callable[[], object]:
        served, ids = registry(n)

        def run() -> None:
            with served.using(ids[0]) as window:
                window.append(Chunk.tokens([7]))

        return run

    def upkeep(n: int) -> Callable[[], object]:
        served, _ = registry(n)
        return lambda: (served.sweep(), served.economise())

    assert abs(exponent(append, 125, 500)) <= 0.1
    assert exponent(upkeep, 125, 500) <= 1.1
