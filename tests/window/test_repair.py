"""What a repairing recall re-forms: those that lack what came back, transitively, and nobody else."""

from __future__ import annotations

import random

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import UnknownChunk
from ctxwin.window.edits import stale_dependents
from window.fake import FakeEngine
from window.growth import NullEngine

PATCHED = Fidelity("patched", rank=2)


def formed(window: Window) -> list[str]:
    window.check()
    return [e.id for e in window.chunks if e.compute]


def test_what_absorbed_it_before_it_left_keeps_its_kv(engine: FakeEngine) -> None:
    """b and c saw a; d came when a was out, and e stands on d. Their antecedent z is gone, so all of it is approximate."""
    with Window(engine, "h", fidelity=PATCHED) as window:
        z, a, b, c = window.extend([Chunk.text(t) for t in "zabc"])
        window.ask("q")
        window.evict(z)
        window.evict(a)
        d = window.append(Chunk.text("d"))
        window.ask("q")
        e = window.append(Chunk.text("e"))
        window.ask("q")
        window.recall(a, repair=True)
        assert window.ids == (a, b, c, d, e)
        assert formed(window) == [d, e]
        assert {x.id: x.lane for x in window.chunks}[b] == "survivor"


def test_it_is_transitive(engine: FakeEngine) -> None:
    """c absorbed a once, but also b, which was re-formed without a meanwhile."""
    with Window(engine, "h", fidelity=PATCHED) as window:
        a, b, c = window.extend([Chunk.text(t) for t in "abc"])
        window.ask("q")
        window.evict(a)
        window.ask("q")
        assert window.maintenance.refresh(ids=[b]) == [b]
        assert formed(window) == [], "c survives as it was"
        window.recall(a, repair=True)
        assert not set(formed(window)) - {b, c}
        kept = {p.id: p.kv for p in window.snapshot().placed}
        assert kept[b] is None and kept[c] is None


@pytest.mark.parametrize("seed", range(10))
def test_against_a_naive_walk_of_the_cascade_graph(engine: FakeEngine, seed: int) -> None:
    """Reachability by repeated sweeps, until nothing is added."""
    rng = random.Random(seed)
    with Window(engine, "h", fidelity=PATCHED) as window:
        for _ in range(14):
            window.append(Chunk.text(rng.choice("abcdefgh")))
            if rng.random() < 0.6:
                window.ask("q", 1)
            if rng.random() < 0.5 and len(window.ids) > 2:
                window.evict(rng.choice(window.ids))
            if rng.random() < 0.2 and window.evicted:
                window.recall(rng.choice(window.evicted))
        if not window.evicted:
            window.evict(window.ids[0])
        back = rng.choice(window.evicted)
        placed = window.snapshot().placed
        edges = {p.id: set(p.kv.antecedents) if p.kv else None for p in placed}
        naive = {i for i, seen in edges.items() if seen is None or back not in seen}
        while more := {i for i, seen in edges.items() if i not in naive and seen and seen & naive}:
            naive |= more
        assert stale_dependents(back, placed) == naive


@pytest.mark.parametrize("seed", range(4))
def test_the_stale_behind_any_place_of_a_long_window(seed: int) -> None:
    """Of chunks that left, were inserted, came back and changed places, with and without an ask between them."""
    rng = random.Random(seed)
    with Window(NullEngine(max_tokens=10**6), "h", fidelity=PATCHED) as window:
        window.extend([Chunk.tokens([i % 40, i // 40]) for i in range(100)])
        found = 0
        for step in range(20):
            if rng.random() < 0.7:
                window.ask("q", 1)
            window.evict(rng.choice(window.ids))
            window.insert(rng.choice([0, 50, len(window.ids)]), Chunk.tokens([step, 7, 7]))
            if step % 4 == 3:
                window.recall(rng.choice(window.evicted), repair=step % 8 == 3)
                window.reorder([*window.ids[5:], *window.ids[:5]] if step % 8 == 7 else window.ids)
            placed, back = window.snapshot().placed, rng.choice(window.evicted)
            for begin in (0, rng.randrange(len(placed)), len(placed)):
                naive: set[str] = set()
                for p in placed[begin:]:
                    if p.kv is None or not {back}.issubset(p.kv.antecedents) or naive & {*p.kv.antecedents}:
                        naive.add(p.id)
                assert stale_dependents(back, placed, begin) == naive
                found += 0 < len(naive) < len(placed) - begin
        assert found, "some of them are stale, and others are not"


def test_many_that_came_when_it_was_out() -> None:
    """What they were conditioned on lies around its place."""
    with Window(NullEngine(max_tokens=10**6), "h", fidelity=PATCHED) as window:
        ids = window.extend([Chunk.tokens([i % 40]) for i in range(64)])
        window.ask("q", 1)
        window.evict(ids[20])
        new = window.extend([Chunk.tokens([i, 7]) for i in range(100)])
        window.ask("q", 1)
        assert stale_dependents(ids[20], window.snapshot().placed, 20) == {*new}


def test_refresh_of_some(engine: FakeEngine) -> None:
    with Window(engine, "h", fidelity=PATCHED) as window:
        a, b, c = window.extend([Chunk.text(t) for t in "abc"])
        window.ask("q")
        window.evict(a)
        assert window.maintenance.refresh(ids=[]) == []
        with pytest.raises(UnknownChunk):
            window.maintenance.refresh(ids=[a])
        assert window.maintenance.refresh(ids=[c]) == [c]
        assert [e.lane for e in window.chunks] == ["survivor", "resident"]
        assert window.maintenance.refresh(1, ids=[b, c]) == [b]
