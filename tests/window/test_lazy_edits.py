"""Edits that wait for a break of the prefix (``lazy=True``), against a list that is edited by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.window.events import Event
from window.fake import FakeEngine


@dataclass
class Shown:
    """A placed chunk, and the edits of it that wait."""

    id: str
    clean: bool = False
    leaves: bool = False
    flips: bool = False
    before: str = ""


class Model:
    """A window as a list."""

    def __init__(self) -> None:
        self.shown: list[Shown] = []

    def at(self, placement: str) -> int:
        return next(i for i, s in enumerate(self.shown) if s.id == placement)

    def settle(self, start: int = 0) -> None:
        """Apply what waits from a place on: who leaves, where the inserted go, who is switched."""
        self.shown = [s for i, s in enumerate(self.shown) if i < start or not s.leaves]
        preceding = [s.id for s in self.shown[:start]]
        for one in [s for s in self.shown if s.before and s.before not in preceding]:
            if any(s.id == one.before for s in self.shown):
                self.shown.remove(one)
                self.shown.insert(self.at(one.before), one)
            one.before = ""
        for one in self.shown[start:]:
            one.clean, one.flips = one.clean != one.flips, False

    def changed(self, old: list[str]) -> None:
        """Settle from where another chunk stands; a switch, which may be taken back, settles nothing."""
        pairs = enumerate(zip(old, (s.id for s in self.shown), strict=False))
        start = next((i for i, (a, b) in pairs if a != b), None)
        if start is not None:
            self.settle(start)


OPS = (
    "append",
    "append",
    "evict",
    "lazy evict",
    "insert",
    "lazy insert",
    "toggle",
    "lazy toggle",
    "slide",
    "reorder",
    "stay",
)
STEPS = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 99), st.integers(0, 99)), min_size=4, max_size=30)


@settings(max_examples=60)
@given(STEPS)
def test_lazy_edits_happen_together_where_the_prefix_breaks(steps: list[tuple[str, int, int]]) -> None:
    model, told = Model(), list[Event]()
    with FakeEngine() as engine, Window(engine, "sys", fidelity=Fidelity("exact")) as window:
        window.observe(told.append)
        for number, (op, first, second) in enumerate(steps):
            ids, old = window.ids, [s.id for s in model.shown]
            chunk = Chunk.text(f"chunk {number}")
            if op == "append" or not ids:
                model.shown.append(Shown(window.append(chunk)))
                old.append(model.shown[-1].id)
            elif op.endswith("evict"):
                lazy, placement = op != "evict", ids[first % len(ids)]
                window.evict(placement, lazy=lazy)
                if lazy:
                    model.shown[model.at(placement)].leaves = True
                else:
                    del model.shown[model.at(placement)]
            elif op.endswith("insert"):
                lazy, index = op != "insert", first % (len(ids) + 1)
                placement = window.insert(index, chunk, lazy=lazy)
                before = ids[index] if lazy and index < len(ids) else ""
                model.shown.insert(len(ids) if before else index, Shown(placement, before=before))
            elif op.endswith("toggle"):
                lazy, one = op != "toggle", model.shown[first % len(ids)]
                clean = bool(second % 2)
                window.toggle(one.id, conditioned=not clean, lazy=lazy)
                one.flips = lazy and one.clean != clean
                one.clean = one.clean if lazy else clean
            elif op == "slide":
                if any(not s.leaves for s in model.shown):
                    (left,) = window.slide(1)
                    assert not model.shown[model.at(left)].leaves
                    del model.shown[model.at(left)]
            elif op == "reorder":
                order = [*ids[first % len(ids) :], *ids[: first % len(ids)]]
                window.reorder(order)
                if order != list(ids):
                    model.shown = [model.shown[model.at(i)] for i in order]
                    for one in model.shown:
                        one.before = ""
            elif op == "stay" and any(s.leaves for s in model.shown):
                one = next(s for s in model.shown if s.leaves)
                assert window.recall(one.id) == model.at(one.id)
                one.leaves = False
            model.changed(old)
            assert window.ids == tuple(s.id for s in model.shown)
            assert window.pending == tuple(s.id for s in model.shown if s.leaves or s.flips or s.before)
            assert [not p.conditioned for p in window.snapshot().placed] == [s.clean for s in model.shown]
            window.check()
        restored = Window.restore(engine, window.snapshot().model_dump_json())
        assert (restored.ids, restored.pending) == (window.ids, window.pending)
        pending = window.pending
        assert window.maintenance.apply_pending() == pending and not window.pending
        model.settle()
        assert window.ids == tuple(s.id for s in model.shown)
        gone = {i for event in told if event.op in ("evict", "slide") for i in event.ids}
        assert set(window.evicted) == gone


def test_lazy_evictions_cost_one_break() -> None:
    """Of ten chunks three leave from the midst, one after another: each ask computes only the question until one slides."""
    sizes: dict[bool, list[int]] = {}
    for lazy in (False, True):
        with FakeEngine() as engine, Window(engine, "sys", fidelity=Fidelity("exact")) as window:
            ids = window.extend([Chunk.text(f"chunk number {i} ") for i in range(10)])
            query = window.ask("q?", 1).usage.computed_tokens - window.tokens
            sizes[lazy] = []
            for placement in (ids[1], ids[4], ids[7]):
                window.evict(placement, lazy=lazy)
                sizes[lazy].append(window.ask("q?", 1).usage.computed_tokens - query)
            window.slide(1)
            sizes[lazy].append(window.ask("q?", 1).usage.computed_tokens - query)
            assert window.ids == tuple(i for i in ids if i not in (ids[0], ids[1], ids[4], ids[7]))
    assert sizes[True][:3] == [0, 0, 0] and min(sizes[False][:3]) > 0
    assert sizes[True][3] == sizes[False][3] and sum(sizes[True]) < sum(sizes[False]) / 2


def test_what_waits_in_front_of_a_break_goes_on_waiting() -> None:
    """An eviction near the end leaves the prefix alone, and computes what stands behind it."""
    with FakeEngine() as engine, Window(engine, "sys", fidelity=Fidelity("exact")) as window:
        a, b, c, d, e = window.extend([Chunk.text(f"chunk number {i} ") for i in range(5)])
        query = window.ask("q?", 1).usage.computed_tokens - window.tokens
        window.evict(b, lazy=True)
        late = window.insert(1, Chunk.text("late"), lazy=True)
        window.evict(d)
        assert window.ids == (a, b, c, e, late) and window.pending == (b, late)
        behind = sum(entry.tokens for entry in window.chunks[3:])
        assert window.ask("q?", 1).usage.computed_tokens == behind + query
        window.evict(a)
        assert window.ids == (c, e, late) and not window.pending, "where it was to stand has left"


def test_what_is_about_to_leave_makes_room_first() -> None:
    with FakeEngine() as engine, Window(engine, "sys", 100, Fidelity("exact")) as window:
        ids = window.extend([Chunk.text("0123456789" * 2) for _ in range(5)])
        window.evict(ids[2], lazy=True)
        assert window.slide() == [ids[2]] and window.ids == (*ids[:2], *ids[3:])
        window.evict(ids[3], lazy=True)
        window.undo()
        assert not window.pending
        with pytest.raises(ValueError, match="forget must be False"):
            window.evict(ids[3], lazy=True, forget=True)
