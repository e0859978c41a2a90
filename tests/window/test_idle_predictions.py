"""`Window(prefill="idle")` on windows that are edited in a regular way: the next edit is foreseen, and computed ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.policies import LowWater, OldestFirst
from ctxwin.window import idle as idling
from ctxwin.window.idle import prefiller_of
from twins import seeds
from window.fake import FakeEngine
from window.growth import NullEngine, exponent, on
from window.slow_engine import RESERVED, SlowEngine

pytestmark = pytest.mark.usefixtures("all_of_the_time")


def chunk_of(i: int, size: int = 8) -> Chunk:
    return Chunk.text(f"{i:03d}".ljust(size, "x"))


BUDGET = 80
"""Room for six such chunks, a question and its answer."""


def by_budget(window: Window, i: int) -> None:
    window.append(chunk_of(i))
    window.slide(reserve_tokens=RESERVED)


def by_hand_first(window: Window, i: int) -> None:
    if len(window.ids) == 6:
        window.slide(1)
    window.append(chunk_of(i))


def by_hand_behind(window: Window, i: int) -> None:
    window.append(chunk_of(i))
    if len(window.ids) > 6:
        window.slide(1)


def second_oldest(window: Window, i: int) -> None:
    window.append(chunk_of(i))
    if len(window.ids) > 6:
        window.evict(window.ids[1])


def in_pairs(window: Window, i: int) -> None:
    for k in range(2):
        window.append(chunk_of(2 * i + k, 4))
    window.slide(reserve_tokens=RESERVED)


def with_a_lazy_eviction(window: Window, i: int) -> None:
    for k in range(2):
        if len(window.ids) == 6:
            window.slide(1)
        window.append(chunk_of(2 * i + k, 4))
    if len(window.ids) == 6:
        window.evict(window.ids[2], lazy=True)


@pytest.mark.parametrize(
    "turn", [by_budget, by_hand_first, by_hand_behind, second_oldest, in_pairs, with_a_lazy_eviction]
)
@pytest.mark.parametrize("options", [{}, {"low_water": 0.7}, {"eviction": LowWater(0.6, OldestFirst())}])
def test_a_window_that_slides_computes_its_new_chunk_and_question_alone(
    engine: FakeEngine, turn: Any, options: dict[str, Any]
) -> None:
    with Window(engine, "watch", BUDGET, Fidelity("exact"), prefill="idle", **options) as window:
        computed, slides = [], 0
        for i in range(18):
            before = set(window.ids)
            turn(window, i)
            slides += bool(before - set(window.ids))
            computed.append(window.ask("what?", 4).usage.computed_tokens)
            assert prefiller_of(engine).drain(60)
        assert slides > 1
        assert max(computed[8:]) <= 8 + engine.encode_query("what?").tokens
        counts = window.maintenance.prefill_counts
        assert counts is not None and counts.hits and not counts.misses


def random_turns(window: Window, rng: Random, count: int) -> None:
    for i in range(count):
        window.append(chunk_of(rng.randrange(1000)))
        while len(window.ids) > 6:
            window.evict(rng.choice(window.ids))
        window.ask(f"what of {i}?", 4)
        assert prefiller_of(window.engine).drain(60)


@pytest.mark.parametrize("seed", seeds(1, 4))
def test_random_edits_end_predictions_within_their_share_and_regular_ones_bring_them_back(
    engine: FakeEngine, seed: int
) -> None:
    with Window(engine, "watch", BUDGET, Fidelity("exact"), prefill="idle") as window:
        idle, rng = window.core.idle, Random(seed)
        assert idle is not None
        random_turns(window, rng, 20)
        predicted = idle.counts.predictions
        random_turns(window, rng, 40)
        assert idle.counts.predictions - predicted <= 8
        assert idle.counts.missed <= 2 * window.budget + idling.IDLE_SHARE * idle.answered
        hits = idle.counts.hits
        for i in range(20):
            by_hand_first(window, i)
            window.ask("what?", 4)
            assert prefiller_of(engine).drain(60)
        assert idle.counts.hits - hits > 12


def test_a_prediction_stands_until_the_window_is_edited(engine: FakeEngine, idle: Window) -> None:
    for i in range(24):
        by_budget(idle, i)
        assert prefiller_of(engine).drain(60)  # what an ask interrupts may be counted behind it
        idle.ask("what?", 4)
    assert prefiller_of(engine).drain(60)
    ahead = idle.plan().prefilled_tokens
    assert ahead == 8 * (len(idle.ids) - 1)
    usage = idle.ask("and now?", 4).usage
    assert (usage.prefilled_tokens, usage.missed_tokens, idle.plan().prefilled_tokens) == (0, 0, ahead)
    with prefiller_of(engine).hold():  # which computes ahead of the reversed window else
        idle.reorder(idle.ids[::-1])
        usage = idle.ask("and now?", 4).usage
    assert usage.missed_tokens >= ahead
    counts = idle.maintenance.prefill_counts
    assert counts is not None and counts.misses == 1
    with Window(engine) as plain:
        assert plain.maintenance.prefill_counts is None


def test_an_ask_does_not_wait_for_a_forward_of_what_it_does_not_ask() -> None:
    with SlowEngine() as engine, Window(engine, "watch", BUDGET, Fidelity("exact"), prefill="idle") as window:
        engine.go_on.set()
        for i in range(7):
            by_budget(window, i)
            window.ask("what?", 4)
        with prefiller_of(engine).hold():  # an ask must not join a forward that is never let go on
            by_budget(window, 7)
            window.ask("what?", 4)
            engine.go_on.clear()
            engine.begun.clear()
        assert engine.begun.wait(60)  # it computes the next version
        current = prefiller_of(engine)._current
        while current is not None and not current.worth_joining():
            threading.Event().wait(0.001)
        assert window.ask("what?", 4).usage.missed_tokens == 0


def test_what_is_forgotten_is_not_kept_for_predictions(engine: FakeEngine, idle: Window) -> None:
    for i in range(24):
        by_budget(idle, i)
        idle.ask("what?", 4)
    assert prefiller_of(engine).drain(60)
    gone = idle.ids[0]
    idle.evict(gone, forget=True)
    predictor = idle.core.idle.predictor  # type: ignore[union-attr]
    assert predictor.base is None and gone not in repr(predictor)
    assert idle.ask("what?", 4).text


def evict_in_the_middle(window: Window) -> None:
    window.evict(window.ids[len(window.ids) // 2])


TURNS: list[Callable[[Window], object]] = [lambda window: None, lambda window: window.slide(1), evict_in_the_middle]
SIZES = [(32, 128), pytest.param(500, 5000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("turn", TURNS, ids=["grows", "slides", "loses its middle"])
@pytest.mark.parametrize(("few", "many"), SIZES)
def test_an_edit_looks_at_what_has_changed_alone(
    turn: Callable[[Window], object], few: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind turns that are foreseen, in lines of Python; what is computed ahead is left out."""
    monkeypatch.setattr(idling.Prefiller, "submit", lambda prefiller, job: None)

    def edited(n: int) -> Window:
        window = Window(NullEngine(max_tokens=10**6), "h", 10**6, Fidelity("exact"), prefill="idle")
        window.extend([Chunk.tokens([i % 40, i // 40]) for i in range(n)])
        for i in range(4):
            window.ask("q", 1)
            window.append(Chunk.tokens([i, 7, 7]))
            turn(window)
        window.ask("q", 1)
        return window

    assert exponent(on(edited, lambda window: window.append(Chunk.tokens([9]))), few, many) <= 0.1
    assert exponent(on(edited, evict_in_the_middle), few, many) <= 0.1
