"""The store in memory against a naive list, and what a call costs however much it holds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ctxwin.store.memory import MemoryStore

KEYS = st.sampled_from([f"span/{name}" for name in "abcdef"])
LIMIT = 10


class Machine(RuleBasedStateMachine):
    """Values by the order of their last use; what is leased stays."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(LIMIT)
        self.values: list[tuple[str, int]] = []
        self.leases: Counter[str] = Counter()
        self.dropped: list[str] = []
        self.store.listen(self.drop)

    def drop(self, key: str) -> None:
        self.dropped.append(key)

    def size(self, key: str) -> int | None:
        return dict(self.values).get(key)

    def use(self, key: str) -> bool:
        size = self.size(key)
        if size is not None:
            self.values.remove((key, size))
            self.values.append((key, size))
        return size is not None

    @rule(key=KEYS, size=st.integers(1, 11))
    def put(self, key: str, size: int) -> None:
        self.use(key)
        others = [(k, n) for k, n in self.values if k != key]
        fits = size + sum(n for k, n in others if self.leases[k]) <= LIMIT
        assert self.store.put(key, bytes(size)) == fits
        if fits:
            while size + sum(n for _, n in others) > LIMIT:
                others.remove(next((k, n) for k, n in others if not self.leases[k]))
            self.values = [*others, (key, size)]

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        size = self.size(key)
        assert self.store.get(key) == (None if size is None else bytes(size))
        self.use(key)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.store.delete(key) == (self.size(key) is not None)
        self.values = [(k, n) for k, n in self.values if k != key]
        self.leases.pop(key, None)

    @rule(key=KEYS)
    def lease(self, key: str) -> None:
        held = self.use(key)
        assert self.store.lease(key) == held
        self.leases[key] += held

    @rule(key=KEYS)
    def release(self, key: str) -> None:
        self.store.release(key)
        if self.leases[key]:
            self.leases[key] -= 1
            if not self.leases[key]:
                self.use(key)

    @invariant()
    def it_holds_the_same(self) -> None:
        stats = self.store.stats()
        assert list(self.store.list()) == sorted(key for key, _ in self.values)
        assert (stats.items, stats.bytes) == (len(self.values), sum(n for _, n in self.values))
        assert stats.bytes <= LIMIT and stats.leased == sum(1 for count in self.leases.values() if count)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def steps(call: Callable[[], object]) -> int:
    """How many instructions of the interpreter a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("leased", [False, True], ids=["full", "full of leases"])
def test_a_call_takes_as_long_however_much_is_held(leased: bool) -> None:
    def taken(items: int) -> list[int]:
        store = MemoryStore(10 * items)
        for number in range(items):
            assert store.put(f"span/{number}", bytes(10))
            if leased and number < items - 5:
                store.lease(f"span/{number}")
        calls = (
            lambda: store.put("span/new", bytes(10)),
            lambda: store.put("span/new", bytes(8)),
            lambda: store.lease("span/new"),
            lambda: store.release("span/new"),
            lambda: store.get("span/0"),
            lambda: store.delete("span/new"),
        )
        return [steps(call) for call in calls]

    assert taken(50) == taken(5000)
