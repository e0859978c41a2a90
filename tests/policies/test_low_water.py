"""A mark that full windows fall to: against a naive list, and by tokens against who trims a prompt by hand."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import BudgetExceeded
from ctxwin.policies import Batching, ByPriority, LowWater, Placement, best_low_water, sliding_cost
from ctxwin.window.serialization import plan_from, plan_to
from twins import twins
from window.fake import FakeEngine

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30)
MARKS = st.one_of(st.floats(0.05, 0.95), st.integers(5, 120))


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    mark=MARKS,
    reserve=st.integers(0, 20),
    pinned=st.sets(st.integers(0, 5), max_size=1),
    policy=st.booleans(),
)
def test_a_window_slides_as_a_list_that_is_cut_to_the_mark(
    sizes: list[int], mark: float, reserve: int, pinned: set[int], policy: bool
) -> None:
    with FakeEngine() as engine:
        budget = 120
        window = (
            Window(engine, "h", budget, eviction=LowWater(mark))
            if policy
            else Window(engine, "h", budget, low_water=mark)
        )
        head = window.tokens
        tokens = mark if isinstance(mark, int) else int(mark * budget)
        assert window.low_water == tokens
        placed: list[tuple[str, int]] = []
        held: set[str] = set()
        for i, size in enumerate(sizes):
            placement = window.append(Chunk.text("x" * size))
            if i in pinned:
                window.pin(placement)
                held.add(placement)
            placed.append((placement, window.snapshot().placed[-1].tokens))

            def total() -> int:
                return head + sum(n for _, n in placed) + reserve

            before = list(placed)
            if total() > budget:
                for one in before:
                    if total() <= min(tokens, budget) or (total() <= budget and len(placed) == 1):
                        break
                    if one[0] not in held:
                        placed.remove(one)
            if total() > budget:
                with pytest.raises(BudgetExceeded):
                    window.slide(reserve_tokens=reserve)
                assert window.ids == tuple(p for p, _ in before)
                return
            window.slide(reserve_tokens=reserve)
            assert window.ids == tuple(p for p, _ in placed)
            assert window.slide(reserve_tokens=reserve) == []


def trimmed(lengths: Sequence[int], system: int, budget: int, query: int, mark: int) -> list[int]:
    """Tokens that a prefix cache computes for a user who drops the oldest down to ``mark`` when the prompt is too long."""
    cached: list[tuple[int, int]] = []
    shown: list[tuple[int, int]] = []
    costs, first = [], system
    for item in enumerate(lengths):
        shown.append(item)
        if system + sum(n for _, n in shown) + query > budget:
            while len(shown) > 1 and system + sum(n for _, n in shown) + query > mark:
                shown.pop(0)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(shown, cached, strict=False)))
        costs.append(first + query + sum(n for _, n in shown[same:]))
        cached, first = list(shown), 0
    return costs


def check_trimming(lengths: list[int], mark: float) -> None:
    budget, answer = 160, 1
    with FakeEngine() as engine, Window(engine, "watch", budget, Fidelity("exact"), low_water=mark) as window:
        query = engine.encode_query("what?").tokens
        sizes, costs = [], []
        for i, length in enumerate(lengths):
            window.append(Chunk.text(chr(200 + i) * length))  # none comes twice
            sizes.append(window.snapshot().placed[-1].tokens)
            window.slide(reserve_tokens=query + answer)
            costs.append(window.ask("what?", answer).usage.computed_tokens)
        system = window.snapshot().system_prompt_tokens
        assert costs == trimmed(sizes, system, budget - answer, query, int(mark * budget) - answer)


STREAMS = st.lists(st.integers(6, 30), min_size=12, max_size=40), st.sampled_from([0.25, 0.5, 0.75])
test_an_exact_window_with_a_mark_computes_what_trimming_by_hand_does, test_many_streams_are_trimmed_as_by_hand = twins(
    check_trimming, 5, 25, *STREAMS
)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 60), st.integers(0, 30), st.integers(1, 60), st.floats(0.01, 0.99))
def test_the_cost_of_a_mark_is_what_a_stream_costs(chunk: int, system: int, query: int, fit: int, mark: float) -> None:
    budget = system + query + fit * chunk
    cost = sliding_cost(budget, mark, chunk, system_prompt=system, query=query)
    lengths = [chunk] * (cost.most + 4 * cost.cycle)
    by_hand = trimmed(lengths, system, budget, query, max(system + query + chunk, int(mark * budget)))
    assert cost.most == fit
    assert sum(by_hand[-2 * cost.cycle :]) / (2 * cost.cycle) == pytest.approx(cost.tokens)


@given(st.integers(2, 100), st.floats(0.51, 1))
def test_the_best_mark_is_the_cheapest_that_shows_enough(fit: int, share: float) -> None:
    best = best_low_water(10 + fit * 8, 8, system_prompt=10, occupancy=share)
    every = [sliding_cost(10 + fit * 8, 10 + kept * 8, 8, system_prompt=10) for kept in range(1, fit + 1)]
    enough = [cost for cost in every if cost.occupancy >= share]
    assert best.occupancy >= share and best.tokens == min(cost.tokens for cost in enough)


def test_slide_to_falls_at_once_and_within_the_budget_too(engine: FakeEngine) -> None:
    with Window(engine, "h", budget=100) as window:
        ids = window.extend([Chunk.text("x" * 9) for _ in range(6)])
        assert window.slide() == [] and window.low_water is None
        gone = window.slide(to=0.3)
        assert gone == ids[: len(gone)] and window.tokens <= 30 < window.tokens + 10
        window.pin(window.ids[0])
        with pytest.raises(BudgetExceeded):
            window.slide(to=5)
        with pytest.raises(ValueError, match="leave one out"):
            window.slide(1, to=0.5)
        with pytest.raises(ValueError, match=r"to must be a share in \(0, 1\) or tokens in 1..100, got 1.5"):
            window.slide(to=1.5)


@pytest.mark.parametrize("mark", [0, 1.0, 1.5, -0.2, 101, True, "half", float("nan")])
def test_a_mark_out_of_range_is_refused(engine: FakeEngine, mark: float) -> None:
    with pytest.raises(ValueError, match="low_water must be"):
        Window(engine, "h", budget=100, low_water=mark)


def test_a_mark_goes_along_with_forks_and_snapshots(engine: FakeEngine) -> None:
    with Window(engine, "h", budget=100, low_water=0.5) as window:
        window.append(Chunk.text("x" * 9))
        with window.fork() as branch, window.fork("another") as other:
            assert branch.low_water == other.low_water == 50
        with Window.restore(engine, window.snapshot().model_dump_json()) as again:
            assert again.low_water == 50


def test_a_policy_with_a_mark_keeps_its_order_and_its_place() -> None:
    wrapped = LowWater(0.5, ByPriority())
    assert isinstance(wrapped, Batching) and isinstance(wrapped, Placement)
    assert not isinstance(ByPriority(), Batching)
    with pytest.raises(ValueError, match="low_water must be"):
        LowWater(0.0)


def test_who_slides_one_by_one_is_told_once_what_a_mark_saves(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script that configures no logging
    with Window(engine, "h", budget=100, fidelity=Fidelity("exact")) as window:
        for i in range(16):
            window.append(Chunk.text(chr(97 + i) * 9))
            window.slide(reserve_tokens=10)
            usage = window.ask("q", 1).usage
        advice = window.plan().sliding
        assert advice is not None and advice.saved == usage.low_water_saves > 0
        assert "low-water mark" in str(window.plan())
        assert plan_from(json.loads(json.dumps(plan_to(window.plan())))) == window.plan()
    [hint] = [line for line in capsys.readouterr().err.splitlines() if "low_water" in line]
    assert 'Window(low_water="auto")' in hint and f"about {advice.one_by_one:.0f} tokens" in hint
    with Window(engine, "h", 100, Fidelity("exact"), low_water=0.5) as window:
        for i in range(16):
            window.append(Chunk.text(chr(97 + i) * 9))
            window.slide(reserve_tokens=10)
        assert window.plan().sliding is None


def test_an_exact_window_takes_its_mark_from_its_sizes(engine: FakeEngine) -> None:
    with Window(engine, "h", 100, Fidelity("exact"), low_water="auto") as window:
        shown = []
        for i in range(40):
            window.append(Chunk.text(chr(65 + i) * (6 if i < 20 else 12)))
            gone = window.slide(reserve_tokens=2)
            shown.append(len(window.ids))
            size, fits = window.snapshot().placed[-1].tokens, 96 // (6 if i < 20 else 12)
            if gone and (i < 20 or i > 30):
                assert len(window.ids) == -(-fits // 2)
                assert window.low_water == best_low_water(100, size, system_prompt=2).low_water
        assert max(shown[10:20]) == 16 and max(shown[30:]) == 8
        again = Window.restore(engine, window.snapshot().model_dump_json())
        assert again.low_water == window.low_water
        again.close()
    with Window(engine, "h", 100, Fidelity("patched", rank=2), low_water="auto") as window:
        window.extend([Chunk.text(chr(97 + i) * 12) for i in range(9)])
        assert window.low_water is None and len(window.slide()) == 1
    with pytest.raises(ValueError, match="low_water"):
        Window(engine, "h", 100, low_water="half")  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), exact=st.booleans())
def test_what_returns_where_it_is_cheapest_costs_least(data: st.DataObject, exact: bool) -> None:
    """Against each place tried, and taken back."""
    fidelity = Fidelity("exact") if exact else Fidelity("patched", rank=2)
    mark = data.draw(st.sampled_from([None, 0.5]))
    with FakeEngine() as engine, Window(engine, "h", 200, fidelity, low_water=mark) as window:
        ids = window.extend(
            [
                Chunk.text(chr(97 + i) * n)
                for i, n in enumerate(data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=7)))
            ]
        )
        window.ask("q", 1)
        gone = data.draw(st.sampled_from(ids))
        window.evict(gone)
        if data.draw(st.booleans()):
            window.append(Chunk.text("new"))
        if data.draw(st.booleans()):
            window.ask("q", 1)
        costs = {}
        places: tuple[Literal["chronological"] | int, ...] = ("chronological", 0, len(window.ids))
        chronological = sum(ids.index(p) < ids.index(gone) for p in window.ids if p in ids)
        for at in places:
            place = window.recall(gone, at)
            assert at != "chronological" or place == chronological
            costs[place] = window.plan().computed_tokens
            window.undo()
        end = len(window.ids)
        place = window.recall(gone)
        assert place == chronological or (exact and mark and place == end)
        assert not (exact and mark) or costs[place] <= costs[end]
        window.undo()
        index = window.recall(gone, "cheapest")
        assert window.ids[index] == gone
        assert window.plan().computed_tokens == costs[index] == min(costs.values())
        with pytest.raises(ValueError, match="cheapest"):
            window.evict(gone) or window.recall(gone, "dearest")  # type: ignore[arg-type]
