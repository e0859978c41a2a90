"""No ask computes more whole chunks than a user of a prefix cache who asks the same.

The user of `ctxwin.baselines` sends what the window places, in its order, at every ask, and has a cache that forgets nothing.
Its hits end inside a chunk where two begin with the same tokens; a window counts in whole chunks, so that one is forgiven.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.baselines import PrefixCache, Prompt
from ctxwin.engines.base import Engine
from ctxwin.window import lanes
from twins import twins
from window.fake import FIDELITIES, FakeEngine

OPS = (
    "append",
    "insert",
    "evict",
    "slide",
    "recall",
    "recall",
    "reorder",
    "flip",
    "ask",
    "ask",
    "ask",
    "fork",
    "remember",
)
PROGRAMS = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 10**6)), min_size=6, max_size=25)
TEXTS = ["aa", "ab", "b", "c", "dd"]


class Account:
    """A window beside the user of a prefix cache who asks the same."""

    def __init__(self, engine: Engine, fidelity: Fidelity) -> None:
        self.engine, self.cache, self.asks = engine, PrefixCache(block=1), 0
        self.window = Window(engine, "h", fidelity=fidelity)
        self.system_prompt = engine.encode_system_prompt("h")

    def ask(self, query: str = "q", *, remember: bool = False) -> None:
        window = self.window
        parts = [self.system_prompt, *(self.engine.encode(window.chunk(i)) for i in window.ids)]
        prompt = Prompt.of([*parts, self.engine.encode_query(query)])
        theirs, _ = self.cache.serve(prompt)
        found = len(prompt.tokens) - theirs
        ends = list(accumulate(part.tokens for part in parts))
        whole = max((end for end in ends if end <= found), default=0)
        plan = window.plan()
        assert plan.computed_tokens <= ends[-1] - whole, f"a prefix cache finds {whole} of {ends[-1]}:\n{plan}"
        answer = window.ask(query, max_tokens=2, remember=remember)
        exchange = self.engine.encode_exchange(query, answer.token_ids)
        rest = exchange.tokens - len(answer.token_ids) if remember else self.engine.encode_query(query).tokens
        # The last token of an answer is sampled and not computed.
        assert answer.usage.computed_tokens <= plan.computed_tokens + rest + remember
        self.cache.hold(Prompt.of([*parts, exchange]))
        self.asks += 1

    def run(self, op: str, number: int) -> None:
        window, ids = self.window, self.window.ids
        chunk = Chunk.text(TEXTS[number % len(TEXTS)])
        if op == "append":
            window.append(chunk)
        elif op == "insert":
            window.insert(number % (len(ids) + 1), chunk)
        elif op == "evict" and ids:
            window.evict(ids[number % len(ids)])
        elif op == "slide" and ids:
            window.slide(1)
        elif op == "recall" and window.evicted:
            window.recall(window.evicted[number % len(window.evicted)], [None, 0, len(ids)][number % 3])
        elif op == "reorder" and ids:
            moved = ids[number % len(ids)]
            rest = [i for i in ids if i != moved]
            rest.insert(number % len(ids), moved)
            window.reorder(rest)
        elif op == "flip":
            window.reorder(ids[::-1])
        elif op == "fork":
            branch = window.fork()
            window.close()
            self.window = branch
        elif op in ("ask", "remember"):
            # A blind window serves canonicals, also of an exchange whose KV behind everything is at hand.
            self.ask(remember=op == "remember" and window.fidelity.mode != "blind")


@contextmanager
def account(engine: Engine, fidelity: Fidelity) -> Iterator[Account]:
    made = Account(engine, fidelity)
    try:
        yield made
    finally:
        made.window.close()


@pytest.mark.parametrize("fidelity", FIDELITIES, ids=lambda f: f"{f.mode}-{f.survivors}-{f.orbit}")
def check_bound(fidelity: Fidelity, program: list[tuple[str, int]]) -> None:
    with account(FakeEngine(), fidelity) as made:
        for op, number in [("append", 0), ("append", 1), ("append", 2), ("ask", 0), *program, ("ask", 0)]:
            made.run(op, number)
            made.window.check()


test_no_ask_computes_more_than_a_prefix_cache, test_no_ask_of_many_computes_more = twins(
    check_bound, 5, 20, program=PROGRAMS
)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    with open_engine("tiny:hf") as engine:
        yield engine


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=PROGRAMS)
def test_on_the_bundled_model(tiny: Any, program: list[tuple[str, int]]) -> None:
    with account(tiny, Fidelity("auto")) as made:
        assert made.window.fidelity.mode == "patched", "the bundled model has a profile"
        for op, number in [("append", 0), ("append", 1), ("append", 2), ("ask", 0), *program, ("ask", 0)]:
            made.run(op, number)


def test_it_is_what_was_served_before_that_keeps_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound breaks without it: behind [b, a] c is formed anew, and back behind [a, b] nothing else fits any more."""

    def program(made: Account) -> None:
        window = made.window
        z, a, b, c = window.extend([Chunk.text(t) for t in "zabc"])
        made.ask()
        window.evict(z)
        made.ask()
        window.reorder([b, a, c])
        made.ask()
        window.reorder([a, b, c])
        made.ask()

    with account(FakeEngine(), Fidelity("patched", rank=2)) as made:
        program(made)
        assert any(entry.reused for entry in made.window.plan().entries)
    monkeypatch.setattr(lanes.ServedMemo, "of", lambda choice: None)
    with (
        account(FakeEngine(), Fidelity("patched", rank=2)) as made,
        pytest.raises(AssertionError, match="prefix cache finds"),
    ):
        program(made)
