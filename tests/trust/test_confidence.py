"""The bounds hold at all times together, on simulated trials, and are not much wider than the best possible."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ctxwin.trust.confidence import ALARM, Change, trials_needed, upper_bound


def test_what_it_takes_to_show_one_percent() -> None:
    """Without harm, the best bet in hindsight needs log(20) / -log(.99) = 299 trials."""
    assert trials_needed(0, 0.01) == 325
    assert upper_bound(0, 324) > 0.01 >= upper_bound(0, 325)
    assert trials_needed(1, 0.01) < 1000
    assert trials_needed(0, 0.01, level=0.5) < 140


def test_no_trials_say_nothing_and_harm_alone_neither() -> None:
    assert upper_bound(0, 0) == 1.0
    assert upper_bound(5, 5) == 1.0


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_the_bound_is_never_under_the_share_in_more_runs_than_it_says(share: float) -> None:
    """Looked at after every one of 1,000 trials, in 400 runs; at most 5 % may ever fail (3.3 standard errors allowed)."""
    rng = np.random.default_rng(1)
    bounds: dict[tuple[int, int], bool] = {}
    failed = 0
    for _ in range(400):
        harms = np.cumsum(rng.random(1000) < share)
        # The bound falls between two harms, so it is least right in front of each.
        last = np.flatnonzero(np.diff(harms, append=harms[-1] + 1))
        counts = [(int(harms[i]), int(i) + 1) for i in last]
        for count in counts:
            if count not in bounds:
                bounds[count] = upper_bound(*count) < share
        failed += any(bounds[count] for count in counts)
    assert failed / 400 <= 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / 400)


def test_a_fixed_n_bound_peeked_at_would_fail() -> None:
    """The test above can fail: the exact one-sided 95 % bound for a fixed n does."""
    from scipy.stats import beta

    rng = np.random.default_rng(1)
    failed = 0
    for _ in range(100):
        harms = np.cumsum(rng.random(1000) < 0.2)
        n = np.arange(1, 1001)
        failed += bool((beta.ppf(0.95, harms + 1, np.maximum(n - harms, 1e-9)) < 0.2).any())
    assert failed / 100 > 0.15


def test_the_bound_comes_near_the_share() -> None:
    assert upper_bound(2000, 10_000) < 0.3  # it bets on shares well below the one it tests
    assert upper_bound(10, 10_000) < 0.005


def test_a_rise_is_noticed_soon_and_peace_is_left_alone() -> None:
    rng = np.random.default_rng(2)
    late, false = [], 0
    for _ in range(200):
        quiet = Change(0.01)
        false += any(quiet.take(bool(x)) for x in rng.random(300) < 0.001)
        loud = quiet if not quiet.alarmed else Change(0.01)
        late.append(next(i for i, x in enumerate(rng.random(2000) < 0.3, 1) if loud.take(bool(x))))
    assert false == 0
    assert np.quantile(late, 0.95) <= 50
    assert np.median(late) <= 15


def test_false_alarms_at_the_limit_are_as_rare_as_it_says() -> None:
    rng = np.random.default_rng(3)
    lengths = []
    for _ in range(60):
        change = Change(0.01)
        lengths.append(next((i for i, x in enumerate(rng.random(20_000) < 0.01, 1) if change.take(bool(x))), 20_000))
    assert np.mean(lengths) >= ALARM


def test_a_detector_goes_on_where_it_was() -> None:
    whole, first = Change(0.01), Change(0.01)
    harms = [False, True, False, True, True]
    for harmed in harms[:2]:
        first.take(harmed)
    second = Change(0.01, first.wealth)
    assert [whole.take(h) for h in harms][2:] == [second.take(h) for h in harms[2:]]
    assert whole.wealth == second.wealth


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: upper_bound(2, 1), r"harms must be in 0\.\.trials, got 2 of 1"),
        (lambda: upper_bound(0, 1, 1.0), "level must be between 0 and 1, got 1.0"),
        (lambda: Change(0.0), "limit must be between 0 and 1, got 0.0"),
        (lambda: trials_needed(0, 0.0), "budget must be between 0 and 1, got 0.0"),
    ],
)
def test_what_cannot_be_is_refused(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()  # type: ignore[operator]
