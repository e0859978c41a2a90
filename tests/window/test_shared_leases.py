"""Windows that were forked share leases and memos, and asks go on from earlier choices: held against windows from nothing."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.store.memory import MemoryStore
from interrupts import interrupts
from window.fake import FakeEngine, laid_out_anew, planned_anew
from window.growth import engine_for, exponent, lay_out, on, standing

PATCHED = Fidelity("patched", rank=2, survivors="removal")


def bytes_of(operation: Callable[[], object]) -> int:
    """Bytes that are allocated by a call and stay as long as its result."""
    gc.collect()
    tracemalloc.start()
    try:
        result = operation()
        return tracemalloc.get_traced_memory()[0] + 0 * id(result)
    finally:
        tracemalloc.stop()


def test_a_fork_takes_as_much_memory_and_as_many_steps_however_large_its_window_is() -> None:
    """Bytes show what is copied in C, too."""
    few, many = standing(32), standing(1024)
    for window in (few, many):
        window.fork().close()
    small, large = bytes_of(few.fork), bytes_of(many.fork)
    assert large <= 2 * small  # a copy of what is placed would take 32 times as much
    assert bytes_of(lambda: [many.fork() for _ in range(1000)]) <= 2 * 1000 * large
    assert exponent(on(standing, lambda window: [window.fork() for _ in range(1000)]), 32, 1024) <= 0.1


def leased(window: Window, windows: list[Window]) -> None:
    """The store's leases are what the open windows need, as far as it is stored, and counted so."""
    repo, keys = window.engine.repo, [w.snapshot().keys() for w in windows]
    needed = {key for some in keys for key in some if repo.contains(key)}
    assert {key for key in repo.store.list() if repo.leased(key)} == needed
    assert repo.store.stats().leased == len(needed)
    for key in needed:
        families = {id(w.core.leases): w.core.leases for w in windows}.values()
        assert sum(leases.windows(key) for leases in families) == sum(key in some for some in keys)


EDITS: dict[str, Callable[[Window, random.Random], Any]] = {
    "append": lambda w, rng: w.append(Chunk.tokens([rng.randrange(6), 7, 9])),
    "insert": lambda w, rng: w.insert(rng.randrange(len(w.ids) + 1), Chunk.tokens([rng.randrange(6), 7, 9])),
    "evict": lambda w, rng: w.ids and w.evict(rng.choice(w.ids)),
    "forget": lambda w, rng: w.ids and w.evict(rng.choice(w.ids), forget=True),
    "recall": lambda w, rng: w.evicted and w.recall(rng.choice(w.evicted), at=rng.choice([None, 0])),
    "repair": lambda w, rng: w.evicted and w.recall(rng.choice(w.evicted), repair=True),
    "reorder": lambda w, rng: w.ids and w.reorder(rng.sample(w.ids, len(w.ids))),
    "toggle": lambda w, rng: w.ids and w.toggle(rng.choice(w.ids), conditioned=rng.random() < 0.5),
    "undo": lambda w, rng: w.core._undo_version in w.core._history and w.undo(),
    "compress": lambda w, rng: w.maintenance.compress(),
    "ask": lambda w, rng: w.ask("q", 1),
    "ask again": lambda w, rng: (w.ask("q", 1), w.ask("q", 1)),
}


@pytest.mark.parametrize("seed", range(6))
def test_what_forks_lease_is_what_their_versions_need(seed: int) -> None:
    """Random edits of windows that are forked, adopted, closed and dropped."""
    rng, engine = random.Random(seed), FakeEngine(max_tokens=10**6)
    windows = [Window(engine, system_prompt, 10**6, fidelity=PATCHED) for system_prompt in ("h", "h", "g")]
    for window in windows:
        window.extend([Chunk.tokens([i % 6, 7, 9]) for i in range(rng.randrange(70))])
    for _ in range(60):
        window = rng.choice(windows)
        choice = rng.random()
        if choice < 0.2:
            windows.append(window.fork(rng.choice([None, None, None, "g"])))
        elif choice < 0.25:
            branch = window.fork()
            branch.append(Chunk.tokens([rng.randrange(6)]))
            window.adopt(branch)
            branch.close()
        elif choice < 0.35 and len(windows) > 1:
            windows.remove(window)
            if rng.random() < 0.5:
                window.close()
            del window  # its finalizer runs
            gc.collect()
        else:
            EDITS[rng.choice([*EDITS])](window, rng)
        leased(windows[0], windows)
    while windows:
        windows.pop().close()
    assert engine.store.stats().leased == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pydantic passes some interrupts over
@pytest.mark.parametrize("name", ["append", "evict"])
def test_an_interrupted_edit_leaves_no_window_busy_and_loses_no_lease(name: str) -> None:
    """At worst one lease too many is left, where the store was taking or giving it back."""
    rng, engine = random.Random(1), FakeEngine(max_tokens=10**6)
    window = Window(engine, "h", 10**6, fidelity=PATCHED)
    window.extend([Chunk.tokens([i, 7, 9]) for i in range(3)])
    window.ask("q", 1)
    gc.disable()  # a finalizer would take the interrupt
    try:
        for _ in interrupts(partial(EDITS[name], window, rng)):
            window.append(Chunk.tokens([1, 7, 9]))
            window.ask("q", 1)
            window.check()
            while len(window.ids) > 3:
                window.evict(window.ids[0], forget=True)
    finally:
        gc.enable()
    window.close()
    assert not window.core.leases.keys


@pytest.mark.parametrize("seed", range(6))
def test_plans_and_layouts_that_go_on_are_as_if_made_anew(seed: int) -> None:
    """While chunks are edited, records leave the store, others come, and other windows load the same KV."""
    rng, engine = random.Random(seed), FakeEngine(MemoryStore(1 << 30), max_tokens=10**6)
    windows = [Window(engine, "h", 10**6, fidelity=PATCHED) for _ in range(2)]
    for window in windows:
        window.extend([Chunk.tokens([i % 6, 7, 9]) for i in range(8)])
    windows.append(windows[0].fork())
    for step in range(40):
        window = rng.choice(windows)
        EDITS[rng.choice([*EDITS])](window, rng)
        if rng.random() < 0.3 and (keys := [*engine.store.list("span/"), *engine.store.list("patch/")]):
            engine.repo.delete(rng.choice(keys))
        if rng.random() < 0.2:
            with Window(engine, "h", 10**6, fidelity=Fidelity("exact")) as other:
                other.extend([window.chunk(placement) for placement in window.ids])
                other.ask("q", 1)
        goes_on, anew = planned_anew(window)
        assert goes_on == anew, step
        if not any(entry.compute for entry in goes_on):  # what one of both computes the other finds
            first, second = laid_out_anew(window)
            assert first == second, step


def test_a_chunk_that_stands_twice_is_loaded_at_both_places() -> None:
    """Both are served from one record."""
    window = Window(engine_for(8), "h", 10**6, fidelity=PATCHED)
    window.extend([Chunk.tokens([i % 3, 7, 9]) for i in range(9)])
    for placement in window.ids:
        window.toggle(placement, conditioned=False)
    for _ in range(3):
        window.ask("q", 1)
        goes_on, anew = laid_out_anew(window)
        assert goes_on == anew


def holding_twice(n: int) -> Window:
    """A window of ``n`` chunks behind one that stands at two of its places."""
    window = Window(engine_for(n + 2), "h", 10**6, fidelity=PATCHED)
    window.extend([Chunk.tokens([77]), Chunk.tokens([78]), Chunk.tokens([77])])
    window.extend([Chunk.tokens([i % 40, i // 40]) for i in range(n)])
    window.ask("q", 1)
    for placement in (window.ids[0], window.ids[2]):
        window.toggle(placement, conditioned=False)
    for _ in range(3):
        window.ask("q", 1)
    assert [window.plan().entries[place].lane for place in (0, 2)] == ["canonical"] * 2  # served from one record
    return window


def test_a_chunk_that_stands_twice_costs_the_chunks_behind_it_nothing() -> None:
    assert exponent(on(holding_twice, lay_out), 100, 1000) <= 0.1


def test_a_forks_memory_of_what_was_served_is_its_own() -> None:
    window = Window(FakeEngine(max_tokens=10**6), "h", 10**6, fidelity=PATCHED)
    window.extend([Chunk.text(text) for text in "abcd"])
    window.ask("q", 1)
    served = dict(window.core.assembly.memo.memos)
    fork = window.fork()
    fork.append(Chunk.text("e"))
    fork.ask("q", 1)
    assert served and dict(window.core.assembly.memo.memos) == served and len(fork.core.assembly.memo.memos) == 5
    window.core.assembly.memo.clear()
    assert len(fork.core.assembly.memo.memos) == 5
    second = fork.fork()
    fork.append(Chunk.text("f"))
    fork.ask("q", 1)
    assert len(second.core.assembly.memo.memos) == 5 and len(fork.core.assembly.memo.memos) == 6
