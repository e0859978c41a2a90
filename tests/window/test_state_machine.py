"""Random programs of edits against a naive list.

The oracle holds the prompt as a plain list of texts and recomputes everything from scratch; it shares no code with the
window. Two windows run the same program: one exact, whose every answer must equal the oracle's, and one patched, which
must place the same chunks, never call an approximation exact, and answer like the oracle whenever it says it is exact.
"""

from __future__ import annotations

import math
import operator
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ctxwin import Chunk, Fidelity, Window, open_store
from ctxwin.errors import BudgetExceeded
from ctxwin.policies import ByPriority, Eviction, LeastRecentlyRead, OldestFirst
from twins import machines
from window.fake import DIM, LAYERS, FakeEngine, laid_out_anew, own_rows, planned_anew

HEADER = "h"
BUDGET = 48
POLICIES: dict[str, tuple[Eviction, Callable[[Any, int], Any]]] = {
    "oldest": (OldestFirst(), lambda machine, arrival: arrival),
    "read": (LeastRecentlyRead(), lambda machine, arrival: machine.read[arrival]),
    "priority": (ByPriority(), lambda machine, arrival: (machine.priority(arrival), arrival)),
}
"""Each with what a naive model sorts the arrivals of `Programs` by."""
_POLICY = st.sampled_from(sorted(POLICIES))


def oracle_answer(texts: list[str], query: str) -> list[int]:
    """What a forward over the whole prompt answers: one loop over tokens, no spans, no positions."""
    prompt = [1, *(100 + b for b in HEADER.encode())]
    for text in texts:
        prompt += [100 + b for b in text.encode()]
    prompt += [*(100 + b for b in query.encode()), 2, 3]
    rows = 0
    row = total = np.zeros((2, LAYERS, DIM))
    out: list[int] = []
    for _ in range(3):
        for token in prompt[rows:]:
            row = np.tanh(own_rows(token) + 3 * total / max(rows, 1))
            total, rows = total + row, rows + 1
        state = float(sum((i + 1) * x for i, x in enumerate(row[1, -1].tolist())))
        scores = [math.cos(1e4 * state * (j + 1.3)) for j in range(50)]
        out.append(max(range(50), key=scores.__getitem__))
        prompt.append(out[-1])
    return out


class Programs(RuleBasedStateMachine):
    """One program; see the module."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where there is such a folder: the store syncs every blob, and durability is tested elsewhere.
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.engine = self._engine()

    def _engine(self) -> FakeEngine:
        return FakeEngine(open_store(f"disk:{self.folder.name}"))

    @initialize(survivors=st.sampled_from(["keep", "removal", "refresh"]), orbit=st.booleans())
    def open(self, survivors: Any, orbit: bool) -> None:
        fidelities = (Fidelity("exact"), Fidelity("patched", rank=2, survivors=survivors, orbit=orbit))
        self.windows = [Window(self.engine, HEADER, budget=BUDGET, fidelity=f) for f in fidelities]
        self.names: dict[str, int] = {}  # placement id (of either window) -> arrival
        self.texts: list[str] = []  # by arrival
        self.placed: list[int] = []
        self.evicted: list[int] = []
        self.read: list[int] = []  # by arrival: when it was last read
        self.clock = 0
        self.branches: list[Window] = []

    def id(self, window: Window, arrival: int) -> str:
        return next(i for i in (*window.ids, *window.evicted) if self.names[i] == arrival)

    def _arrive(self, text: str, index: int | None) -> None:
        chunk = Chunk.text(text, priority=self.priority(len(self.texts)))
        for window in self.windows:
            new = window.append(chunk) if index is None else window.insert(index, chunk)
            self.names[new] = len(self.texts)
        self.placed.insert(len(self.placed) if index is None else index, len(self.texts))
        self.texts.append(text)
        self.read.append(0)
        self._read(len(self.texts) - 1)

    @staticmethod
    def priority(arrival: int) -> int:
        return 5 * arrival % 3

    def _read(self, arrival: int) -> None:
        self.clock += 1
        self.read[arrival] = self.clock

    def _leaving(self, policy: str) -> list[int]:
        """The placed chunks, the one to leave first first; the windows are told to use ``policy`` from now on."""
        for window in self.windows:
            window.eviction = POLICIES[policy][0]
        return sorted(self.placed, key=lambda arrival: POLICIES[policy][1](self, arrival))

    def _chronological(self, placed: list[int], arrival: int) -> int:
        return next((i for i, a in enumerate(placed) if a > arrival), len(placed))

    @rule(text=st.text("abc", min_size=1, max_size=3))
    def append(self, text: str) -> None:
        self._arrive(text, None)

    @rule(text=st.text("abc", min_size=1, max_size=3), at=st.integers(0, 9))
    def insert(self, text: str, at: int) -> None:
        self._arrive(text, at % (len(self.placed) + 1))

    @rule(text=st.text("abc", min_size=1, max_size=3), query=st.sampled_from("xy"), patched_first=st.booleans())
    def append_and_ask(self, text: str, query: str, patched_first: bool) -> None:
        """What an agent does most of the time, so it is drawn more often than by chance."""
        self._arrive(text, None)
        self.ask_both(query, patched_first)

    @precondition(lambda self: self.placed)
    @rule(at=st.integers(0, 9), forget=st.booleans())
    def evict(self, at: int, forget: bool) -> None:
        arrival = self.placed.pop(at % len(self.placed))
        for window in self.windows:
            window.evict(self.id(window, arrival), forget=forget)
        if not forget:
            self.evicted.append(arrival)

    @precondition(lambda self: len(self.placed) > 1)
    @rule(policy=_POLICY)
    def slide(self, policy: str) -> None:
        first = self._leaving(policy)[0]
        for window in self.windows:
            assert window.slide(1) == [self.id(window, first)]
        self.placed.remove(first)
        self.evicted.append(first)

    @precondition(lambda self: self.placed)
    @rule(at=st.integers(0, 9))
    def touch(self, at: int) -> None:
        arrival = self.placed[at % len(self.placed)]
        for window in self.windows:
            window.maintenance.touch(self.id(window, arrival))
        self._read(arrival)

    @precondition(lambda self: self.evicted)
    @rule(which=st.integers(0, 9), at=st.none() | st.integers(0, 9), repair=st.booleans())
    def recall(self, which: int, at: int | None, repair: bool) -> None:
        arrival = self.evicted.pop(which % len(self.evicted))
        index = None if at is None else at % (len(self.placed) + 1)
        for window in self.windows:
            window.recall(self.id(window, arrival), index, repair=repair)
        self.placed.insert(self._chronological(self.placed, arrival) if index is None else index, arrival)
        self._read(arrival)

    @precondition(lambda self: self.evicted)
    @rule(which=st.lists(st.integers(0, 9), min_size=1, max_size=2), spare=st.integers(0, 4), policy=_POLICY)
    def look_back(self, which: list[int], spare: int, policy: str) -> None:
        """With room for ``spare`` tokens only, so that others must leave, or not enough can."""
        reserve_tokens = BUDGET - self.windows[0].tokens - spare
        back = list(dict.fromkeys(self.evicted[i % len(self.evicted)] for i in which))
        placed = list(self.placed)
        for arrival in back:
            placed.insert(self._chronological(placed, arrival), arrival)
        excess = sum(len(self.texts[a]) for a in back) - spare
        leaving = []
        for arrival in self._leaving(policy):  # what comes back does not leave
            if excess > 0:
                leaving.append(arrival)
                excess -= len(self.texts[arrival])
        for window in self.windows:
            ids = [self.id(window, a) for a in back]
            query = f"what was in {' and '.join(ids)}?"
            if excess > 0:
                before = window.snapshot()
                with pytest.raises(BudgetExceeded):
                    window.look_back(query, reserve_tokens=reserve_tokens)
                assert window.snapshot() == before
            elif (
                window.fidelity.mode == "exact"
            ):  # it would place them at the end (`test_exact_cost`); here, step by step
                for arrival in sorted(back):
                    window.recall(self.id(window, arrival))
                for arrival in leaving:
                    window.evict(self.id(window, arrival))
            else:
                assert window.look_back(query, reserve_tokens=reserve_tokens) == ids
        if excess <= 0:
            self.placed = [a for a in placed if a not in leaving]
            self.evicted = [a for a in self.evicted if a not in back] + leaving
            for arrival in sorted(back):  # the oldest comes back first, whichever the query names first
                self._read(arrival)

    @precondition(lambda self: len(self.placed) > 1)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        self.placed = list(data.draw(st.permutations(self.placed)))
        for window in self.windows:
            window.reorder([self.id(window, a) for a in self.placed])

    @precondition(lambda self: self.placed)
    @rule(at=st.integers(0, 9))
    def toggle_off_and_on(self, at: int) -> None:
        # Lanes, keys and bytes must come back; the exact window's answers are checked by `ask`.
        arrival = self.placed[at % len(self.placed)]
        for window in self.windows:
            placement = self.id(window, arrival)
            before = [(e.id, e.lane, e.exact, e.depth) for e in window.chunks]
            window.toggle(placement, conditioned=False)
            window.check()
            assert next(e for e in window.chunks if e.id == placement).lane == "canonical"
            window.toggle(placement, conditioned=True)
            assert [(e.id, e.lane, e.exact, e.depth) for e in window.chunks] == before

    @rule()
    def fork_edit_adopt(self) -> None:
        for i, window in enumerate(self.windows):
            branch = window.fork()
            before = window.snapshot()
            if branch.ids:
                branch.evict(branch.ids[-1])
            branch.append(Chunk.text("fork"))
            branch.check()
            assert window.snapshot() == before
            if i == 0:
                continue
            other = window.fork()
            window.adopt(other)
            window.check()
            assert window.ids == other.ids

    @rule()
    def restart(self) -> None:
        """Another process: a new engine and store on the same folder, the windows from their JSON."""
        states = [w.snapshot().model_dump_json() for w in self.windows]
        for window in self.windows:
            window.close()
        self.engine.close()
        self.engine = self._engine()
        self.windows = [Window.restore(self.engine, s) for s in states]

    @rule()
    def lose_the_store(self) -> None:
        for key in list(self.engine.store.list()):
            if key.startswith(("span/", "patch/", "orbit/")):
                self.engine.repo.delete(key)

    @precondition(lambda self: len(self.placed) > 2)
    @rule()
    def idle(self) -> None:
        patched = self.windows[1]
        patched.maintenance.prepare_orbit(patched.ids[:2], orders=2)
        patched.maintenance.refresh(1)
        patched.maintenance.compress()

    @rule(query=st.sampled_from("xy"), patched_first=st.booleans())
    def ask(self, query: str, patched_first: bool) -> None:
        self.ask_both(query, patched_first)

    def ask_both(self, query: str, patched_first: bool) -> None:
        """Both windows share a store, so whatever the patched one leaves there must not reach the exact one."""
        texts = [self.texts[a] for a in self.placed]
        if sum(map(len, texts)) + 8 > BUDGET:
            return
        expected = oracle_answer(texts, query)
        for window in self.windows[:: -1 if patched_first else 1]:
            claims = window.plan()
            answer = window.ask(query, max_tokens=3)
            assert sum(answer.usage.reused_tokens.values()) == window.tokens
            assert answer.usage.exact == claims.exact
            if claims.exact:
                assert list(answer.token_ids) == expected
            assert window.plan().computed_tokens == 0, "asking again must cost the query alone"
        assert self.windows[0].plan().exact

    @invariant()
    def same_as_the_list(self) -> None:
        for window in getattr(self, "windows", []):
            window.check()
            goes_on, anew = planned_anew(window)
            assert goes_on == anew, "what stands from the plan before"
            if not any(e.lane == "canonical" and e.compute for e in goes_on):  # it would be formed
                assert operator.eq(*laid_out_anew(window)), "what stands from the ask before"
            assert [self.names[i] for i in window.ids] == self.placed
            assert [self.names[i] for i in window.evicted] == self.evicted
            assert window.tokens == 2 + sum(len(self.texts[a]) for a in self.placed)

    def teardown(self) -> None:
        for window in getattr(self, "windows", []):
            window.close()
        assert self.engine.store.stats().leased == 0
        self.engine.close()
        self.folder.cleanup()


TestPrograms, TestManyPrograms = machines(Programs, 25, 300, stateful_step_count=20)
