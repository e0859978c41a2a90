"""Budgets in tokens and in bytes: the smaller one counts, for asking, sliding and looking back."""

from __future__ import annotations

from typing import Any

import pytest

from ctxwin import Chunk, Window
from ctxwin.errors import BudgetExceeded
from window.fake import DIM, LAYERS, FakeEngine

TOKEN_BYTES = LAYERS * 1 * (DIM + DIM) * 4  # layers, heads, k and v, float32
EACH = 3


def filled(engine: FakeEngine, **options: Any) -> Window:
    window = Window(engine, "h", **options)
    window.extend([Chunk.text(t * EACH) for t in "abcd"])
    return window


def test_bytes_of_a_window_are_its_kv(engine: FakeEngine) -> None:
    window = filled(engine)
    assert window.bytes == (2 + 4 * EACH) * TOKEN_BYTES
    window.ask("q")
    spans = [engine.repo.get_span(p.kv.span) for p in window.snapshot().placed if p.kv]
    # The fake computes in float64 what its layout declares as float32.
    assert sum(found[0].nbytes for found in spans if found) // 2 + 2 * TOKEN_BYTES == window.bytes
    window.slide(1)
    assert window.bytes == (2 + 3 * EACH) * TOKEN_BYTES


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 4096),
        ({"budget_bytes": 20 * TOKEN_BYTES}, 20),
        ({"budget_bytes": 20 * TOKEN_BYTES + TOKEN_BYTES - 1}, 20),  # a part of a token is none
        ({"budget_bytes": "1KB"}, 1000 // TOKEN_BYTES),
        ({"budget_bytes": "1KiB"}, 1024 // TOKEN_BYTES),
        ({"budget": 10, "budget_bytes": 20 * TOKEN_BYTES}, 10),
        ({"budget": 30, "budget_bytes": 20 * TOKEN_BYTES}, 20),
        ({"budget_bytes": "50GB"}, 4096),  # the engine takes no more
    ],
)
def test_the_smaller_budget_counts(engine: FakeEngine, options: dict[str, Any], tokens: int) -> None:
    assert Window(engine, "h", **options).budget == tokens


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        ("much", ValueError, "size must be a number with a unit of B, KB, MB, GB, TB, KiB ... TiB, got 'much'"),
        ("1PB", ValueError, "size must be"),
        (0, ValueError, "size must be positive, got 0"),
        (-5, ValueError, "size must be positive, got -5"),
        (1.5, ValueError, "size must be an int or a str like '50GB', got 1.5"),
        (True, ValueError, "size must be"),
        (2 * TOKEN_BYTES, BudgetExceeded, "budget must exceed the system prompt's 2 tokens, got 2"),
        (1, BudgetExceeded, "budget must exceed the system prompt's 2 tokens, got 0"),
    ],
)
def test_bad_sizes_are_refused(engine: FakeEngine, size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Window(engine, "h", budget_bytes=size)


def test_a_byte_budget_holds_for_every_operation(engine: FakeEngine) -> None:
    window = filled(engine, budget_bytes=12 * TOKEN_BYTES)
    a, b, c, d = window.ids
    with pytest.raises(BudgetExceeded, match="must fit the budget of 12, got"):
        window.ask("q", max_tokens=1)
    assert window.slide(reserve_tokens=4) == [a, b]
    assert window.bytes == 8 * TOKEN_BYTES
    assert window.ask("q", max_tokens=1).text  # its query takes 3 tokens
    assert window.bytes <= 12 * TOKEN_BYTES
    assert window.look_back(a) == [a]
    assert window.ids == (c, d, a)
    assert window.look_back(b) == [b]
    assert window.ids == (c, d, b), "what was looked back at makes room before the others"
    with pytest.raises(BudgetExceeded, match="a chunk must fit the budget of 12"):
        window.append(Chunk.text("x" * 11))
    window.check()


def test_a_look_back_that_recalls_nothing_makes_room(engine: FakeEngine) -> None:
    window = filled(engine, budget=14)
    a, b, c, d = window.ids
    assert window.look_back("") == [] and window.ids == (a, b, c, d)
    assert window.look_back(f"what was in {a}?", reserve_tokens=6) == []
    assert window.ids == (a, d), "what it names in view leaves last"
    with pytest.raises(BudgetExceeded, match="reserve less"):
        window.look_back("", reserve_tokens=13)
    assert window.look_back(a, reserve_tokens=12) == [] and window.ids == ()


def test_forks_and_restarts_keep_the_budget(engine: FakeEngine) -> None:
    window = filled(engine, budget_bytes=12 * TOKEN_BYTES)
    assert window.fork().budget == window.fork("other").budget == window.at(0).budget == 12
    assert Window.restore(engine, window.snapshot().model_dump_json()).budget == 12
