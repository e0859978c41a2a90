"""What may be said of a share of harmed answers at any time, however often one looks.

An interval of a fixed n, looked at after every audit, is wrong far more often than it says. Here evidence is the wealth of
bets against "the share is at least p", which is a supermartingale where that is true, so that by Ville's inequality it ever
reaches 1/alpha with a chance of at most alpha (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
betting", JRSS B 2024, section 4; for Bernoulli shares and mixtures of bets Robbins, "Statistical methods related to the law of
the iterated logarithm", 1970). A bet here is the likelihood ratio of a smaller share to p; a mixture of bets is one.

All functions take counts only. They hold for trials whose chance of harm, given those before, is the same; where it drifts, what
is bounded is a share that the trials do not fall below, and `Change` watches for one that rises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BETS: tuple[tuple[float, float], ...] = ((0.5, 0.0), (0.125, 1 / 16), (0.125, 1 / 8), (0.125, 1 / 4), (0.125, 1 / 2))
"""Weight of each bet, and the share that it bets on, as a part of the one it bets against. Half goes on no harm at all: without
harm 95 % are reached after 325 trials for a share of 1 %, where the best bet in hindsight takes 299."""
HIGHER: tuple[float, ...] = (0.05, 0.2, 0.5)
"""Shares that `Change` bets on."""
ALARM = 1000.0
"""Wealth at which a share counts as risen; at the limit itself that takes this many trials on average, or more."""


def upper_bound(harms: int, trials: int, level: float = 0.95) -> float:
    """Largest share of harm that the trials so far do not refute, at any time (a one-sided confidence sequence).

    Args:
        harms: of ``trials``; 0 trials say nothing, and the bound is 1.
        level: chance, over all times together, that the bound is never under the true share.

    Raises ValueError for counts that cannot be, or a level outside (0, 1).
    """
    _check(harms, trials, level)
    goal = -math.log(1 - level)
    low, high = 0.0, 1.0
    if _wealth(harms, trials, 1 - 1e-12) < goal:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _wealth(harms, trials, middle) >= goal else (middle, high)
    return high


def trials_needed(harms: int, budget: float, level: float = 0.95) -> int:
    """How many trials with so many harms put `upper_bound` at or under ``budget``. Raises ValueError as it does."""
    if not 0 < budget < 1:
        raise ValueError(f"budget must be between 0 and 1, got {budget}")
    low, high = harms, harms + 1
    while upper_bound(harms, high, level) > budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if upper_bound(harms, middle, level) <= budget else (middle, high)
    return high


class Change:
    """Notices a share of harm that has risen above a limit, whenever that happened.

    A CUSUM of likelihood ratios, one for each of `HIGHER`; their mean is an e-detector, so while the share is at most ``limit``
    the mean number of trials to a false alarm is at least `ALARM` (Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric
    framework for sequential change detection", 2022, definition 2.2 and proposition 2.3).

    Args:
        limit: the share up to which all is well.
        wealth: as `wealth` gave it, to go on.
    """

    def __init__(self, limit: float, wealth: Sequence[float] = ()) -> None:
        if not 0 < limit < 1:
            raise ValueError(f"limit must be between 0 and 1, got {limit}")
        self._limit = limit
        self._higher = [q for q in HIGHER if q > limit] or [(1 + limit) / 2]
        fits = len(wealth) == len(self._higher)
        self.wealth = tuple(wealth) if fits else (0.0,) * len(self._higher)

    def take(self, harmed: bool) -> bool:
        """Counts one more trial; whether the alarm is raised."""
        p = self._limit
        ratios = [q / p if harmed else (1 - q) / (1 - p) for q in self._higher]
        self.wealth = tuple(min(max(w, 1.0) * ratio, 1e300) for w, ratio in zip(self.wealth, ratios, strict=True))
        return self.alarmed

    @property
    def alarmed(self) -> bool:
        """Whether the share counts as risen."""
        return self.mean >= ALARM

    @property
    def mean(self) -> float:
        """Of the wealth of its bets: how much speaks for a rise."""
        return math.fsum(self.wealth) / len(self.wealth)


def _wealth(harms: int, trials: int, p: float) -> float:
    """Logarithm of the wealth of bets against a share of at least ``p``; rises with p."""
    logs = []
    for weight, part in BETS:
        if harms and not part:
            continue  # lost with the first harm
        won = harms * math.log(part) if harms else 0.0
        logs.append(math.log(weight) + won + (trials - harms) * (math.log1p(-part * p) - math.log1p(-p)))
    top = max(logs)
    return top + math.log(math.fsum(math.exp(value - top) for value in logs))


def _check(harms: int, trials: int, level: float) -> None:
    if not 0 <= harms <= trials:
        raise ValueError(f"harms must be in 0..trials, got {harms} of {trials}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
