"""The bounds hold at all times together, on simulated units, and are not much wider than the best possible."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ctxwin.audit.confidence import ALARM, ChangeDetector, is_below, ratio, units_needed, upper_bound


def test_what_it_takes_to_show_one_percent() -> None:
    """Without harm, the best bet in hindsight needs log(20) / -log(.99) = 299 units."""
    assert units_needed(0.01) == 319
    assert upper_bound({0.0: 318}) > 0.01 >= upper_bound({0.0: 319})
    assert units_needed(0.01, 0.05, {1.0: 1}) < 750
    assert units_needed(0.01, 0.05, {0.125: 1}) < 335  # one answer of eight costs little
    assert is_below({0.0: 319}, 0.01, 0.05) and not is_below({0.0: 318}, 0.01, 0.05)


def test_no_units_say_nothing_and_harm_alone_neither() -> None:
    assert upper_bound({}) == 1.0
    assert upper_bound({1.0: 5}) == 1.0


def test_a_bet_is_worth_nothing_on_average() -> None:
    """Whatever the harm of a unit looks like, as long as its mean is the one that is bet against."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        values, weights = rng.random(5), rng.dirichlet(np.ones(5))
        mean, bet = float(values @ weights), float(rng.random())
        factors = [ratio(float(value), bet, mean) for value in values]
        assert min(factors) >= 0
        assert float(np.dot(factors, weights)) == pytest.approx(1)


@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("parts", [1, 4])
def test_the_bound_is_never_under_the_mean_in_more_runs_than_it_says(share: float, parts: int) -> None:
    """Looked at after every one of 1,000 units, in 120 runs; at most 5 % may ever fail (3.3 standard errors allowed)."""
    rng = np.random.default_rng(1)
    failed = 0
    for _ in range(120):
        harms, counts, fails = rng.binomial(parts, share, 1000), np.zeros(parts + 1, int), False
        for i, harm in enumerate(harms):
            counts[harm] += 1
            # The bound falls between two harms, so it is least right in front of each.
            if i + 1 == len(harms) or harms[i + 1]:
                fails |= is_below({k / parts: int(n) for k, n in enumerate(counts) if n}, share * (1 - 1e-9), 0.05)
        failed += fails
    assert failed / 120 <= 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / 120)


def test_a_fixed_n_bound_peeked_at_would_fail() -> None:
    """The test above can fail: the exact one-sided 95 % bound for a fixed n does."""
    from scipy.stats import beta

    rng = np.random.default_rng(1)
    failed = 0
    for _ in range(40):
        harms = np.cumsum(rng.random(1000) < 0.2)
        n = np.arange(1, 1001)
        failed += bool((beta.ppf(0.95, harms + 1, np.maximum(n - harms, 1e-9)) < 0.2).any())
    assert failed > 6


def test_a_rise_is_noticed_soon_and_a_low_mean_is_not() -> None:
    rng = np.random.default_rng(2)
    false, late = 0, []
    for _ in range(100):
        quiet = ChangeDetector(0.01)
        false += any(quiet.take(float(x)) for x in rng.random(300) < 0.001)
        loud = quiet if not quiet.alarmed else ChangeDetector(0.01)
        late.append(next(i for i, x in enumerate(rng.random(2000) < 0.3, 1) if loud.take(float(x))))
    assert false <= 1
    assert np.quantile(late, 0.95) <= 25
    assert np.median(late) <= 10


def test_false_alarms_at_the_limit_are_as_rare_as_it_says() -> None:
    rng = np.random.default_rng(3)
    lengths = []
    for _ in range(40):
        change = ChangeDetector(0.01)
        lengths.append(next((i for i, x in enumerate(rng.random(10_000) < 0.01, 1) if change.take(float(x))), 10_000))
    assert np.mean(lengths) >= ALARM


def test_a_detector_goes_on_where_it_was() -> None:
    whole, first = ChangeDetector(0.01), ChangeDetector(0.01)
    harms = [0.0, 1.0, 0.0, 0.25, 1.0]
    for harm in harms[:2]:
        first.take(harm)
    second = ChangeDetector(0.01, first.wealth)
    assert [whole.take(h) for h in harms][2:] == [second.take(h) for h in harms[2:]]
    assert whole.wealth == second.wealth


def test_harm_is_suspected_until_about_25_observations_without() -> None:
    change = ChangeDetector(0.01)
    for _ in range(500):
        change.take(0.0)
    assert not change.suspicious
    assert change.mean == pytest.approx(change.resting, rel=1e-3)
    change.take(1.0)
    quiet = 0
    while change.suspicious:
        change.take(0.0)
        quiet += 1
    assert 20 <= quiet <= 30


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: upper_bound({1.5: 1}), r"harms must be in \[0, 1\]"),
        (lambda: upper_bound({0.0: -1}), "counts >= 0"),
        (lambda: upper_bound({0.0: 1}, 0.0), "error must be between 0 and 1, got 0.0"),
        (lambda: ChangeDetector(0.0), "limit must be between 0 and 1, got 0.0"),
        (lambda: units_needed(0.0), "budget must be between 0 and 1, got 0.0"),
    ],
)
def test_what_cannot_be_is_refused(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()  # type: ignore[operator]
