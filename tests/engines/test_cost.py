"""The cost model: what it learns of known costs, through noise and outliers, and what it never learns from."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ctxwin import Chunk, Window
from ctxwin.engines import cost as cost_module
from ctxwin.engines.cost import CostModel, Fit, Workload, _thread, attended
from window.fake import FakeEngine

pytestmark = pytest.mark.learns_prices

RATES = (7.0, 0.4, 3e-5, 0.01, 0.6, 0.02)


def load(rng: random.Random) -> Workload:
    asked, offset = Workload(requests=rng.randint(1, 3)), 0
    for _ in range(rng.randint(1, 8)):
        tokens = rng.randint(4, 400)
        if rng.random() < 0.4:
            asked.compute(tokens, offset)
        else:
            asked.load(tokens, rng.random() < 0.3)
        offset += tokens
    asked.compute(12, offset)
    return asked


def cost(amounts: tuple[float, ...]) -> float:
    return sum(a * r for a, r in zip(amounts, RATES, strict=True))


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
def test_it_finds_what_things_cost_through_noise_and_outliers(scale: float) -> None:
    rng, model = random.Random(1), CostModel()
    for _ in range(200):
        amounts = load(rng).amounts
        waited = 8.0 if rng.random() < 0.2 else 1.0  # one call in five met a busy machine
        model.learn(model.engine, amounts, scale * cost(amounts) * waited * rng.uniform(0.95, 1.05))
    model.settle()
    errors = []
    for _ in range(100):
        amounts = load(rng).amounts
        errors.append(abs(model.engine(*amounts) / (scale * cost(amounts)) - 1))
    assert sorted(errors)[90] < 0.15
    assert all(rate >= 0 for rate in model.engine.rates)


def test_the_first_call_sets_the_scale_and_the_prior_the_rest() -> None:
    fit = Fit((4.0, 0.1))
    assert fit.observe((1, 100), 140.0)
    fit.refit()
    assert fit(1, 100) == pytest.approx(140.0, rel=0.05)
    assert fit(1, 200) == pytest.approx(240.0, rel=0.2), "ten times the prior's 24"


def test_many_equal_calls_do_not_drive_out_the_others() -> None:
    fit = Fit((1.0, 1.0))
    for tokens in (10, 100, 1000, 4000):
        fit.observe((1, tokens), 5 + 0.2 * tokens)
    for _ in range(5000):
        fit.observe((1, 100), 25.0)
    fit.refit()
    assert fit(1, 4000) == pytest.approx(805, rel=0.05)
    assert sum(len(calls) for calls in fit._sizes.values()) <= 6 * 40


def test_it_follows_a_machine_that_changes() -> None:
    fit = Fit((1.0, 1.0))
    rng = random.Random(3)
    for speed in (1.0, 3.0):
        for _ in range(300):
            tokens = rng.choice((10, 100, 1000))
            fit.observe((1, tokens), speed * (5 + 0.2 * tokens))
    fit.refit()
    assert fit(1, 500) == pytest.approx(3 * 105, rel=0.05)


def test_rates_stay_as_long_as_they_price_each_call_alike() -> None:
    fit = Fit((1.0, 1.0))
    fit.observe((1, 100), 50.0)
    fit.refit()
    rates = fit.rates
    fit.observe((1, 100), 51.0)
    fit.refit()
    assert fit.rates is rates
    for _ in range(6):
        fit.observe((1, 100), 54.0)
    fit.refit()
    assert fit(1, 100) == pytest.approx(54.0, rel=0.01)


def test_what_took_no_time_teaches_nothing() -> None:
    fit = Fit((1.0, 1.0))
    assert not fit.observe((1, 5), 0.0)
    assert fit.calls == 0 and fit(1, 5) == 6.0


def test_calls_that_ran_beside_each_other_are_not_alone() -> None:
    model, inside, leave = CostModel(), threading.Event(), threading.Event()
    alone: list[bool] = []

    def call(then: Callable[[], object]) -> None:
        with model.timed() as watch:
            then()
        alone.append(watch.alone)

    def wait() -> None:
        inside.set()
        leave.wait(10)

    thread = threading.Thread(target=call, args=(wait,))
    thread.start()
    inside.wait(10)
    call(lambda: None)
    leave.set()
    thread.join()
    call(lambda: None)
    assert alone == [False, False, True]


def test_pairs_of_a_causal_forward() -> None:
    assert attended(4, 10) == sum(10 + i for i in range(1, 5))


def test_stores_of_many_kinds_stay_few() -> None:
    model = CostModel()
    for i in range(1000):
        model.fetched(f"kind {i}", 10, 1.0)
    assert len(model.tiers) <= 8


def test_what_a_busy_moment_made_dear_is_tried_again() -> None:
    """Loads dearer than a forward are not made, so that no later call would correct their price."""
    model, rng, loads = CostModel(), random.Random(5), []
    for ask in range(2000):
        is_load = ask >= 10 and model.load_ms(300, False) + model.fetch_ms("disk", 300) < model.forward_ms(300, 50)
        work = Workload(1)
        busy = 400 <= ask < 420
        if is_load:
            loads.append(ask)
            work.load(300, False)
            model.fetched("disk", 300, 900.0 if busy else rng.uniform(1, 3))
        work.compute(12 if is_load else 312, 50)
        model.learn(
            model.engine, work.amounts, cost(work.amounts) * (100.0 if busy and is_load else rng.uniform(0.9, 1.1))
        )
        model.settle()
    assert 390 in loads and 419 not in loads
    resumed = next(ask for ask in loads if ask >= 420)
    assert resumed <= 420 + 256 + 16, "the time is over, and a fit is due at every eighth call"
    assert len(loads) > 0.98 * (2000 - resumed + 390)


def test_loads_that_stay_dear_are_tried_seldom() -> None:
    model, loads = CostModel(), 0
    for ask in range(4000):
        is_load, work = ask >= 10 and model.load_ms(300, False) < model.forward_ms(300, 50), Workload(1)
        loads += is_load
        if is_load:
            work.load(300, False)
        work.compute(12 if is_load else 312, 50)
        model.learn(model.engine, work.amounts, cost(work.amounts) + 300 * work.spans)
        model.settle()
    assert 0 < loads <= 4 * 4000 / 256


def test_what_is_noted_changes_prices_once_it_is_settled() -> None:
    model, reference = CostModel(), CostModel()
    before = model.fetch_ms("MemoryStore", 100)
    for tokens in (10, 100, 1000):
        model.fetched("MemoryStore", tokens, 0.02 * tokens)
        assert model.fetch_ms("MemoryStore", 100) == before
        reference._tier("MemoryStore").observe((1, tokens), 0.02 * tokens)
    reference._tier("MemoryStore").refit()
    model.settle()
    assert model.fetch_ms("MemoryStore", 100) == reference.fetch_ms("MemoryStore", 100) != before


def test_asks_that_follow_at_once_share_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take turns with each of them at the interpreter."""
    model, submitted = CostModel(), list[Callable[[], None]]()
    monkeypatch.setattr(cost_module, "_thread", lambda _: SimpleNamespace(submit=submitted.append))
    for asks in range(1, 4):
        for tokens in (10, 100):
            model.fetched("MemoryStore", tokens, 0.02 * tokens)
            model.settle_later()
        assert len(submitted) == asks and model.noted
        submitted[-1]()
        assert not model.noted and model.tiers["MemoryStore"].calls == 2 * asks


def test_no_answer_waits_for_a_fit_and_a_plan_goes_by_what_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, refit = list[str](), Fit.refit

    def counted(self: Fit) -> None:
        threads.append(threading.current_thread().name)
        refit(self)

    monkeypatch.setattr(Fit, "refit", counted)
    with FakeEngine() as engine, Window(engine, "h") as window:
        window.extend([Chunk.text(text * 9) for text in "abc"])
        for calls in range(1, 4):
            window.ask("q")
            window.plan()
            assert not engine.costs.noted and engine.costs.engine.calls >= calls
        window.ask("q")
        _thread(os.getpid()).submit(int).result()  # behind what the ask has submitted
        assert not engine.costs.noted and any(name.startswith("ctxwin-prices") for name in threads)
        threads.clear()
        monkeypatch.setattr(engine.costs, "settle_later", lambda: None)
        window.ask("q")
        assert engine.costs.noted and not threads
