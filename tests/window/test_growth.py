"""How work grows with a window, with forks of it, with windows of a server and with a store's entries: in counted lines of
Python, so that a busy machine changes nothing. A step in C (a copied tuple, a sum) counts as the line that asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.store.disk import DiskStore
from ctxwin.store.memory import MemoryStore
from ctxwin.window.antecedents import Antecedents
from ctxwin.window.core import demand_of
from ctxwin.window.survival import Evicted
from window.fake import FakeEngine
from window.growth import LARGE, SMALL, NullEngine, Setup, engine_for, exponent, lay_out, lines, on, opened, standing


def without_middle(n: int) -> Window:
    window = opened(n)
    window.evict(window.ids[n // 2])
    return window


def with_unasked(n: int) -> Window:
    """A window that shows a chunk at its front that no answer has seen, and was planned with it."""
    window = opened(n)
    window.insert(0, Chunk.tokens([7]))
    window.plan()
    return window


def rotated(n: int) -> Window:
    window = opened(n)
    window.reorder([window.ids[-1], *window.ids[:-1]])
    return window


def backwards(n: int) -> Window:
    window = opened(n)
    window.reorder(window.ids[::-1])
    return window


def unasked(n: int) -> Window:
    """A window of ``n`` chunks whose KV is computed nowhere, on an engine that takes as long for each."""
    window = Window(NullEngine(max_tokens=10**6), "h", fidelity=Fidelity("patched"))
    window.extend([Chunk.tokens([i % 40]) for i in range(n)])
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


def streamed_on(n: int) -> Window:
    """A stream that lost the chunk in its middle, and has a chunk that was computed without it."""
    window = streamed(n)
    window.evict(window.ids[n // 2])
    window.append(Chunk.tokens([7]))
    window.ask("q", 1)
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


def full(n: int) -> Window:
    """A window that is over its budget by a token."""
    window = Window(engine_for(n), "h", n, fidelity=Fidelity("patched"))
    window.extend([Chunk.tokens([i % 40]) for i in range(n)])
    return window


EDITS: dict[str, Setup] = {
    "append": on(opened, lambda window: window.append(Chunk.tokens([7]))),
    "insert at the front": on(opened, lambda window: window.insert(0, Chunk.tokens([7]))),
    "slide": on(opened, lambda window: window.slide(1)),
    "slide of an exact window": on(partial(opened, mode="exact"), lambda window: window.slide(1)),
    "slide into the budget": on(full, lambda window: window.slide()),
    "evict": on(opened, lambda window: window.evict(window.ids[len(window.ids) // 2])),
    "evict lazily": on(opened, lambda window: window.evict(window.ids[len(window.ids) // 2], lazy=True)),
    "evict what was never asked about": on(with_unasked, lambda window: window.evict(window.ids[0])),
    "slide past what was never asked about": on(with_unasked, lambda window: window.slide(1)),
    "append behind what was never asked about": on(with_unasked, lambda window: window.append(Chunk.tokens([8]))),
    "recall": on(without_middle, lambda window: window.recall(window.evicted[0])),
    "recall and repair": on(without_middle, lambda window: window.recall(window.evicted[0], repair=True)),
    "recall and repair a stream": on(streamed_on, lambda window: window.recall(window.evicted[-1], repair=True)),
    "look back": on(without_middle, lambda window: window.look_back(window.evicted[0])),
    "toggle": on(opened, lambda window: window.toggle(window.ids[-1], conditioned=False)),
    "touch": on(opened, lambda window: window.maintenance.touch(window.ids[0])),
    "fork": on(opened, lambda window: window.fork()),
    "undo": on(slid, lambda window: window.undo()),
}
WALKS: dict[str, Setup] = {
    "extend": lambda n: partial(opened(1).extend, [Chunk.tokens([i % 40]) for i in range(n)]),
    "reorder": on(opened, lambda window: window.reorder(window.ids[::-1])),
    "plan": on(opened, lambda window: window.plan()),
    "plan behind a slide": on(slid, lambda window: window.plan()),
    "plan behind an exact slide": on(partial(slid, mode="exact"), lambda window: window.plan()),
    "plan of the oldest at the end": on(rotated, lambda window: window.plan()),
    "plan of all backwards": on(backwards, lambda window: window.plan()),
    "plan of a stream": on(streamed, lambda window: window.plan()),
    "prepare an ask": on(opened, lay_out),
    "prepare an ask behind a slide": on(slid, lay_out),
    "prefill": on(unasked, lambda window: window.maintenance.prefill()),
    "snapshot": on(opened, lambda window: window.snapshot().model_dump_json()),
    "restore": on(saved(opened), lambda saved: Window.restore(*saved)),
    "restore a stream": on(saved(streamed), lambda saved: Window.restore(*saved)),
    "plan without middles": on(without_its_middles, lambda window: window.plan()),
    "snapshot without middles": on(without_its_middles, lambda window: window.snapshot().model_dump_json()),
    "restore without middles": on(saved(without_its_middles), lambda saved: Window.restore(*saved)),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_takes_as_many_steps_in_a_larger_window(name: str) -> None:
    assert exponent(EDITS[name]) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_takes_as_many_steps_in_a_window_of_five_thousand_chunks(name: str) -> None:
    assert exponent(EDITS[name], 500, 5000) <= 0.1


@pytest.mark.parametrize("name", WALKS)
def test_work_grows_at_most_in_proportion_to_a_window(name: str) -> None:
    assert exponent(WALKS[name]) <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_work_grows_so_up_to_five_thousand_chunks(name: str) -> None:
    assert exponent(WALKS[name], 500, 5000) <= 1.1


def grown(n: int) -> Window:
    """A window of ``n`` chunks that stand, and a new one."""
    window = standing(n)
    window.append(Chunk.tokens([7]))
    return window


def forked_on(n: int) -> Window:
    fork = forks(n).fork()
    fork.append(Chunk.tokens([7]))
    return fork


@pytest.mark.parametrize("prepare", [grown, forked_on])
def test_a_plan_and_an_ask_take_few_steps_for_a_chunk_that_did_not_move(prepare: Callable[[int], Window]) -> None:
    """One is the copy of a pointer, a look into a memory, or a comparison of identities."""
    small, large = prepare(LARGE), prepare(2 * LARGE)
    assert (lines(large.plan) - lines(small.plan)) / LARGE <= 12
    assert (lines(large.plan) - lines(small.plan)) / LARGE <= 5, "behind a plan"
    layouts = [lines(partial(lay_out, window)) for window in (small, large)]
    assert (layouts[1] - layouts[0]) / LARGE <= 24


def ids_held(window: Window) -> int:
    """Placement ids that the antecedents of a window's chunks hold, and what its plan says of them."""
    state, plan = window.snapshot(), window.plan()
    orders = {id(p.kv.antecedents.order): p.kv.antecedents.order for p in (*state.placed, *state.evicted) if p.kv}
    missing = [runs for e in plan.entries for runs in (_runs_of(e.evicted_antecedents) or [e.evicted_antecedents])]
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
    missing = [(i, len(e.evicted_antecedents)) for i, e in enumerate(window.plan().entries) if e.lane == "survivor"]
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
        assert [tuple(e.evicted_antecedents) for e in again.plan().entries] == [
            tuple(e.evicted_antecedents) for e in window.plan().entries
        ]
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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_kv_is_leased_until_the_last_of_a_windows_forks_releases_it(order: tuple[int, ...]) -> None:
    window = standing(4)
    repo, store, keys = window.engine.repo, window.engine.store, sorted(window.snapshot().keys())
    windows, leases = [window, fork := window.fork(), fork.fork()], window.core.leases
    assert [leases.windows(key) for key in keys] == [3] * 4 and store.stats().leased == 4
    windows[order[0]].evict(windows[order[0]].ids[0])
    assert sorted(map(leases.windows, keys)) == [2, 3, 3, 3]
    for i, at in enumerate(order, start=1):
        windows[at].close()
        assert sorted(map(leases.windows, keys)) == [3 - i] * 4
        assert store.stats().leased == (4 if i < 3 else 0) and all(repo.leases(key) == (i < 3) for key in keys)


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
        return lambda: (served.sweep(), served.compress_idle())

    assert abs(exponent(append, 125, 500)) <= 0.1
    assert exponent(upkeep, 125, 500) <= 1.1
