"""Anytime-valid statements on a mean harm: an upper bound that holds at all times together, and an alarm for a rise.

Observations are harms of independent units (windows), numbers in [0, 1]. The evidence against "the mean harm is at least p" is
the wealth of bets that pay when harm is rarer: a bet multiplies by ``1 + b (p - harm)``, never below 0, so that on average it
cannot grow while the mean is p or more. By Ville's inequality it then reaches 1/error with a chance of at most ``error``, at any
time (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024, sections 4 and 5). A fixed
mixture of bets is such a bet, too; its stakes do not follow the data, so the order of the units does not matter and a table of
how often each harm occurred suffices.

Nothing is assumed of the shape of a unit's harm, and units need not be alike. Let m(i) be the expected harm of unit i given
the units before it. Dividing each bet by its mean, ``1 + b (p - m(i))``, makes it a martingale, and where the average of
m(1..n) is p or more the product of these means is at most 1 (it is at most the exponential of b times the sum of p - m(i)). So
the bounded quantity, with the stated error and at all n together, is the average of m(1..n): the expected harm of the observed
units. Nothing follows for future units unless they are like those; `ChangeDetector` watches for that.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Harm = TypeVar("Harm", float, "NDArray[np.float64]")

BETS: tuple[tuple[float, float], ...] = ((0.6, 0.0), (0.1, 1 / 16), (0.1, 1 / 8), (0.1, 1 / 4), (0.1, 1 / 2))
"""Weight of each bet, and the mean that it bets on as a fraction of the one it bets against. Most weight is on no harm at all:
if there is none, 319 units show at most 1 % at 95 %; the best bet in hindsight takes 299."""
HIGHER: tuple[float, ...] = (0.03, 0.1, 0.3, 0.9)
"""Means that `ChangeDetector` bets on."""
ALARM = 1000.0
"""Wealth at which a mean counts as risen; with a mean at the limit that takes at least this many observations on average."""
SUSPICION = 2.0
"""Multiple of the wealth at rest from which on a rise is suspected."""


def ratio(harm: Harm, bet: float, against: float) -> Harm:
    """Return the factor by which a bet on the mean ``bet`` grows with one observation; of mean 1 if the mean is ``against``.

    For a harm of 0 or 1 it is the likelihood ratio; between them it is linear.
    """
    return harm * (bet / against) + (1 - harm) * ((1 - bet) / (1 - against))


def log_wealth(harms: Mapping[float, float], p: float) -> float:
    """Return the logarithm of the wealth of `BETS` against a mean of at least ``p``; rises with p.

    Args:
        harms: number of units by harm.
    """
    logs = []
    for weight, part in BETS:
        factors = [(count, ratio(harm, part * p, p)) for harm, count in harms.items()]
        # A bet on no harm at all is lost with the first entirely harmed unit.
        if all(factor > 0 for _, factor in factors):
            logs.append(math.log(weight) + math.fsum(count * math.log(factor) for count, factor in factors))
    top = max(logs)
    return top + math.log(math.fsum(math.exp(value - top) for value in logs))


def upper_bound(harms: Mapping[float, int], error: float = 0.05) -> float:
    """Return the largest mean harm that the units so far do not refute, at any time (a one-sided confidence sequence).

    Args:
        harms: number of units by harm; without any the bound is 1.
        error: probability, over all times together, that the bound is ever below the mean.

    Raises ValueError for negative counts, harms outside [0, 1] or an error outside (0, 1).
    """
    _check(harms, error)
    goal = -math.log(error)
    low, high = 0.0, 1.0
    if log_wealth(harms, 1 - 1e-12) < goal:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if log_wealth(harms, middle) >= goal else (middle, high)
    return high


def is_below(harms: Mapping[float, int], budget: float, error: float) -> bool:
    """Return True if `upper_bound` is at most ``budget``; one evaluation."""
    _check(harms, error)
    return log_wealth(harms, budget) >= -math.log(error)


def units_needed(budget: float, error: float = 0.05, harms: Mapping[float, int] | None = None) -> int:
    """Return the number of further units without harm that show a mean of at most ``budget``. Raises as `upper_bound`."""
    if not 0 < budget < 1:
        raise ValueError(f"budget must be between 0 and 1, got {budget}")
    observed = dict(harms or {})

    def suffices(count: int) -> bool:
        return is_below({**observed, 0.0: observed.get(0.0, 0) + count}, budget, error)

    low, high = -1, 1
    while not suffices(high):
        low, high = high, 2 * high
    return bisect_left(range(high), True, low + 1, key=suffices)


def units_like(harms: Mapping[float, int], budget: float, error: float = 0.05) -> int | None:
    """Return the number of units that show a mean of at most ``budget`` if all are like ``harms``; None for over a million."""
    _check(harms, error)
    count = sum(harms.values())

    def suffices(units: int) -> bool:
        return log_wealth({harm: n * units / count for harm, n in harms.items()}, budget) >= -math.log(error)

    most = 1_000_000
    return bisect_left(range(most), True, 1, key=suffices) if count and suffices(most) else None


class ChangeDetector:
    """Detects that a mean harm has risen above a limit at any time.

    A Shiryaev-Roberts sum of bets, one for each of `HIGHER`: each is multiplied by the next `ratio` after 1 was added, for the
    change that may begin there. Their mean is an e-detector, so while the expected harm of each observation, given those before,
    is at most ``limit``, the mean number of observations to a false alarm is at least `ALARM` (Shin, Ramdas and Rinaldo,
    "E-detectors: a nonparametric framework for sequential change detection", 2022, definition 2.2 and proposition 2.3). A sum
    alarms never later than the CUSUM of the same bets, under the same guarantee.

    Args:
        limit: largest acceptable mean.
        wealth: value of `wealth` to continue from.
    """

    def __init__(self, limit: float, wealth: Sequence[float] = ()) -> None:
        if not 0 < limit < 1:
            raise ValueError(f"limit must be between 0 and 1, got {limit}")
        self._limit = limit
        self._higher = [q for q in HIGHER if q > limit] or [(1 + limit) / 2]
        fits = len(wealth) == len(self._higher)
        self.wealth = tuple(wealth) if fits else (0.0,) * len(self._higher)

    def take(self, harm: float) -> bool:
        """Add one observation, a number in [0, 1]; return True if the alarm is raised."""
        pairs = zip(self.wealth, self._higher, strict=True)
        self.wealth = tuple(min((w + 1) * ratio(harm, q, self._limit), 1e300) for w, q in pairs)
        return self.alarmed

    @property
    def alarmed(self) -> bool:
        """True if the mean counts as risen."""
        return self.mean >= ALARM

    @property
    def suspicious(self) -> bool:
        """True if the evidence for a rise is twice that at rest; after one harm, until about 25 observations without any."""
        return self.mean >= SUSPICION * self.resting

    @property
    def mean(self) -> float:
        """Mean wealth of its bets: the evidence for a rise."""
        return math.fsum(self.wealth) / len(self.wealth)

    @property
    def resting(self) -> float:
        """`mean` after many observations without harm."""
        losses = [(1 - q) / (1 - self._limit) for q in self._higher]
        return math.fsum(loss / (1 - loss) for loss in losses) / len(losses)


def _check(harms: Mapping[float, int], error: float) -> None:
    if any(not 0 <= harm <= 1 or count < 0 for harm, count in harms.items()):
        raise ValueError(f"harms must be in [0, 1] and their counts >= 0, got {dict(harms)}")
    if not 0 < error < 1:
        raise ValueError(f"error must be between 0 and 1, got {error}")
