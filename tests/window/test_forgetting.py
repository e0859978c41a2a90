"""Forgetting follows a chunk into all KV that ever absorbed it.

The oracle runs a program twice, with two contents of equal length in the chunk that is forgotten. Afterwards the two stores
must hold the same bytes under the same keys: whatever still differs carries something of the chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.window.ask import Question
from twins import twins
from window.fake import FakeEngine

KV = ("span/", "patch/", "orbit/")


class Run:
    """A window with two chunks, the first of which will be forgotten; chunks are named by arrival."""

    def __init__(self, secret: str, fidelity: Fidelity) -> None:
        self.engine = FakeEngine()
        with Window(self.engine, "h", fidelity=fidelity) as opened:
            state = opened.snapshot().replace(window="w")
        self.window = Window.restore(self.engine, state, seed="s")
        self.append(secret)
        self.append("bb")

    def append(self, text: str) -> None:
        self.window.append(Chunk.text(text))

    def id(self, arrival: int) -> str:
        state = self.window.snapshot()
        return next(p.id for p in (*state.placed, *state.evicted) if p.arrival == arrival)

    def ask(self) -> tuple[int, ...]:
        return self.window.answer(Question.of("q", 3)).token_ids

    def do(self, op: str, which: int) -> None:
        window = self.window
        placed, evicted = window.snapshot().placed, window.snapshot().evicted
        if op == "append":
            self.append(f"n{which}" if which % 2 else "bb")
        elif op == "ask":
            self.ask()
        elif op == "evict" and len(placed) > 1:
            window.evict(placed[which % len(placed)].id)
        elif op == "recall" and evicted:
            window.recall(evicted[which % len(evicted)].id, repair=which % 3 == 0)
        elif op == "reorder" and len(placed) > 1:
            at = which % len(placed)
            window.reorder([p.id for p in (*placed[at:], *placed[:at])])
        elif op == "toggle" and placed:
            chosen = placed[which % len(placed)]
            window.toggle(chosen.id, conditioned=not chosen.conditioned)
        elif op == "refresh":
            window.maintenance.refresh(1)
        elif op == "compress":
            window.maintenance.compress()
        elif op == "orbit" and len(placed) > 1:
            window.maintenance.prepare_orbit([p.id for p in placed[:-1]][:3], orders=2)
        elif op == "fork":
            with window.fork() as branch:
                branch.evict(placed[0].id) if placed else None
                branch.append(Chunk.text("ff"))
                branch.ask("q")

    def stored(self) -> dict[str, bytes | None]:
        return {key: self.engine.store.get(key) for key in self.engine.store.list() if key.startswith(KV)}


def both(fidelity: Fidelity, program: list[tuple[str, int]]) -> tuple[Run, Run]:
    runs = Run("AAAA", fidelity), Run("ZZZZ", fidelity)
    for run in runs:
        for op, which in program:
            run.do(op, which)
        run.window.evict(run.id(0), forget=True)
        run.window.check()
    return runs


OPS = st.sampled_from(
    ["append", "ask", "ask", "evict", "recall", "reorder", "toggle", "refresh", "compress", "orbit", "fork"]
)


def check_forgotten(program: list[tuple[str, int]], survivors: Any, mode: Any) -> None:
    one, other = both(Fidelity(mode, rank=2, survivors=survivors, orbit=True), program)
    assert one.stored() == other.stored()
    assert one.ask() == other.ask()
    assert one.stored() == other.stored()


test_nothing_stored_carries_a_forgotten_chunk, test_nothing_of_many_stores_carries_a_forgotten_chunk = twins(
    check_forgotten,
    25,
    150,
    program=st.lists(st.tuples(OPS, st.integers(0, 9)), max_size=14),
    survivors=st.sampled_from(["keep", "removal", "refresh"]),
    mode=st.sampled_from(["patched", "patched", "blind", "exact"]),
)


@pytest.mark.parametrize("cleaned", [[("refresh", 0)], [("toggle", 0), ("ask", 0), ("toggle", 0), ("ask", 0)]])
def test_it_follows_through_what_was_re_formed_since(cleaned: list[tuple[str, int]]) -> None:
    """The chunk in between has let go of what it once handed on."""
    program = [("ask", 0), ("evict", 0), ("append", 1), ("ask", 0), *cleaned]
    one, other = both(Fidelity("patched", rank=2), program)
    assert one.stored() == other.stored()
    assert one.ask() == other.ask()


def test_what_was_not_near_it_keeps_its_kv() -> None:
    run = Run("AAAA", Fidelity("patched", rank=2))
    with Window(run.engine, "other", fidelity=Fidelity("exact")) as other:
        other.extend([Chunk.text("bb"), Chunk.text("cc")])
        other.ask("q")
        run.ask()
        run.window.evict(run.id(0), forget=True)
        assert other.plan().computed_tokens == 0


def test_a_window_that_still_shows_it_keeps_its_kv() -> None:
    run = Run("AAAA", Fidelity("exact"))
    run.ask()
    with run.window.fork() as branch:
        run.window.evict(run.id(0), forget=True)
        assert branch.plan().computed_tokens == 0


def kept(engine: FakeEngine) -> list[str]:
    return [*engine.store.list("source/"), *engine.store.list("embed/")]


@pytest.mark.parametrize("evicted", [False, True])
def test_another_window_keeps_its_picture(evicted: bool) -> None:
    """Whoever appended it independently did not ask to forget; there is no file to read it from again."""
    engine = FakeEngine()
    picture = Chunk.image(np.full((4, 4, 3), 9, np.uint8))
    with Window(engine, "h") as window, Window(engine, "other") as other, Window(engine, "closed") as closed:
        (mine,), (theirs,), _ = (w.extend([picture]) for w in (window, other, closed))
        closed.close()
        other.ask("q")
        if evicted:
            other.evict(theirs)
        window.evict(mine, forget=True)
        for key in engine.store.list("embed/"):
            engine.store.delete(key)  # encoded again, from its pixels
        if evicted:
            other.recall(theirs)
        assert other.ask("q").text
        other.evict(theirs, forget=True)
        assert not kept(engine)


def test_an_old_version_does_not_keep_a_picture() -> None:
    engine = FakeEngine()
    with Window(engine, "h") as window:
        picture = window.append(Chunk.image(np.full((4, 4, 3), 9, np.uint8)))
        window.evict(picture)
        old = window.at(window.version)
        window.evict(picture, forget=True)
        assert old.evicted == (picture,) and not kept(engine)


def test_an_orbit_in_use_that_is_formed_anew_with_a_later_chunk_hands_it_on() -> None:
    """The patch that serves behind a smaller set is then fitted to what was observed behind the larger one, and what is computed
    behind it carries something of that chunk, too."""
    stores = []
    for secret in ("AAAA", "ZZZZ"):
        engine = FakeEngine()
        with Window(engine, "h", fidelity=Fidelity("patched", rank=2, orbit=True)) as window:
            a, b, behind = window.extend([Chunk.text("aa"), Chunk.text("bb"), Chunk.text("cc")])
            window.evict(behind)
            window.maintenance.prepare_orbit([a, b])
            window.reorder([b, a])
            window.ask("q", 1)
            other, late = window.extend([Chunk.text("dd"), Chunk.text(secret)])
            window.reorder([b, a, late, other])
            window.maintenance.prepare_orbit([b, a, late])
            window.ask("q", 1)
            window.evict(late)
            window.recall(behind)
            window.ask("q", 1)
            window.evict(late, forget=True)
            answer = window.answer(Question.of("q", 3)).token_ids
            stores.append((answer, {k: engine.store.get(k) for k in engine.store.list() if k.startswith(KV)}))
    assert stores[0] == stores[1]
