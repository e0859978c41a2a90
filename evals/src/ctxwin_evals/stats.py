"""Intervals and tests for figures over items that come in clusters (questions on one video, one document).

Items of a cluster are not independent, so standard errors sum within clusters first (Miller, "Adding Error Bars to Evals",
arXiv 2411.00640, section 2.2), and bootstraps draw whole clusters. Where every item is a cluster of its own, each
figure equals its plain counterpart. Intervals are of 95 %, and None where one cluster leaves nothing to estimate from.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Interval = tuple[float, float]
Floats = NDArray[np.float64]

RESAMPLES = 2000
SEED = 0x63747877
"""Of every bootstrap: the same samples give the same interval. Figures of the same items share their draws."""
_LEVEL = 0.95
_Z = float(stats.norm.ppf(0.5 + _LEVEL / 2))
_DIGITS = 12
"""Decimals of scores that count: what sums and means round off makes no difference."""
_COUNTS_AT_ONCE = 4_000_000
"""Counts that are multiplied at once, 32 MB."""


def wilson(right: float, n: float) -> Interval:
    """Wilson score interval of a proportion of independent items, or of as many as clustered ones are worth.

    Raises ValueError where n <= 0 or ``right`` is not within 0..n.
    """
    if n <= 0 or not 0 <= right <= n:  # items of few clusters may be worth less than one
        raise ValueError(f"n must be > 0 and right in 0..n, got right={right}, n={n}")
    share = right / n
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n * n)) / (1 + _Z**2 / n)
    # At 0 and n the bounds are exactly 0 and 1, which rounding would miss.
    return (middle - half if share > 0 else 0.0), (middle + half if share < 1 else 1.0)


def standard_error(values: ArrayLike, clusters: Sequence[str]) -> float | None:
    """Cluster-robust standard error of a mean; None where there is only one cluster.

    ``sqrt(G / (G - 1) * sum_g (sum_i in g (x_i - mean))^2) / n`` over G clusters; with one item a cluster this is
    ``std(ddof=1) / sqrt(n)``. Raises ValueError for empty input or an item without a cluster.
    """
    x, codes = _with_cluster_numbers(values, clusters)
    count = int(codes.max()) + 1
    if count < 2:
        return None
    sums = np.bincount(codes, weights=x - x.mean())
    return math.sqrt(float(sums @ sums) * count / (count - 1)) / len(x)


def mean_interval(values: ArrayLike, clusters: Sequence[str]) -> Interval | None:
    """Interval of a mean: Student's t on the cluster-robust standard error, one degree less than clusters."""
    error = standard_error(values, clusters)
    if error is None:
        return None
    middle = float(np.mean(np.asarray(values, dtype=np.float64)))
    half = float(stats.t.ppf(0.5 + _LEVEL / 2, len(set(clusters)) - 1)) * error
    return middle - half, middle + half


def difference_interval(differences: ArrayLike, clusters: Sequence[str], *, drawn: bool = False) -> Interval | None:
    """Interval of the mean difference of two scores of the same items, each within 0..1.

    `mean_interval`, or `bootstrap_mean` where ``drawn``, cut to -1..1. Where all differences are equal, both would have no
    width however few the items; Wilson's bound on an unseen different value is then put on either side.
    """
    x = _with_cluster_numbers(differences, clusters)[0].round(_DIGITS)
    interval = bootstrap_mean(x, clusters) if drawn else mean_interval(x, clusters)
    if interval is None:
        return None
    if (x == x[0]).all():
        unseen = share_interval(np.zeros(len(x)), clusters)[1]
        interval = x[0] - unseen, x[0] + unseen
    return max(-1.0, float(interval[0])), min(1.0, float(interval[1]))


def share_interval(scores: ArrayLike, clusters: Sequence[str], effective: float | None = None) -> Interval:
    """Interval of a mean of scores within 0..1.

    Scores that are all 0 or 1 get Wilson's interval on the effective number of items: n over the design effect with the
    correction for few clusters (Korn and Graubard 1998), at most n. Where all scores are equal it is ``effective``, if known from
    other scores of the same items (`effective_count`), else the number of clusters. Other scores get `mean_interval`, cut to
    0..1; where they are all equal, which would leave no width, it allows for unseen 0s or 1s up to Wilson's bound.

    Raises ValueError for empty input, an item without a cluster or a score outside 0..1.
    """
    x, codes = _with_cluster_numbers(scores, clusters)
    x = x.round(_DIGITS)
    if x.min() < 0 or x.max() > 1:
        raise ValueError(f"scores must be within 0..1, got {x.min()} to {x.max()}")
    count, share = int(codes.max()) + 1, float(x.mean())
    if not np.isin(x, (0.0, 1.0)).all():
        interval = mean_interval(x, clusters)
        if interval is None:
            return 0.0, 1.0
        if (x == x[0]).all():
            unseen = wilson(0, count)[1]
            return share * (1 - unseen), share + (1 - share) * unseen
        return max(0.0, interval[0]), min(1.0, interval[1])
    worth = effective_count(x, clusters) or effective or count
    return wilson(share * worth, worth)


def effective_count(scores: ArrayLike, clusters: Sequence[str]) -> float | None:
    """How many independent items scores of 0 and 1 are worth, see `share_interval`; None where their clusters do not tell."""
    x, codes = _with_cluster_numbers(scores, clusters)
    n, count, share = len(x), int(codes.max()) + 1, float(x.mean())
    if count == n:
        return float(n)
    error = standard_error(x, clusters)
    if not error:
        return None
    design = error**2 / (share * (1 - share) / (n - 1))
    few = float(stats.t.ppf(0.5 + _LEVEL / 2, n - 1) / stats.t.ppf(0.5 + _LEVEL / 2, count - 1)) ** 2
    return min(float(n), n / design * few)


def bootstrap_ratio(numerator: ArrayLike, denominator: ArrayLike, clusters: Sequence[str]) -> Interval | None:
    """Percentile interval of ``sum(numerator) / sum(denominator)`` over draws of whole clusters.

    A mean is the ratio to ones, eta one minus a ratio of KLs. None where there is only one cluster, or where some draw leaves
    a denominator of 0. Raises ValueError for empty input, unequal lengths or an item without a cluster.
    """
    over, codes = _with_cluster_numbers(numerator, clusters)
    under, _ = _with_cluster_numbers(denominator, clusters)
    count = int(codes.max()) + 1
    if count < 2:
        return None
    sums = np.stack([np.bincount(codes, weights=w) for w in (over, under)], axis=1)
    drawn = np.concatenate([part.astype(np.float64) @ sums for part in _draws(count)])
    if (drawn[:, 1] == 0).any():
        return None
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.5 - _LEVEL / 2, 0.5 + _LEVEL / 2])
    return float(low), float(high)


def bootstrap_mean(values: ArrayLike, clusters: Sequence[str]) -> Interval | None:
    """Percentile interval of a mean over draws of whole clusters; for skewed values such as KLs."""
    return bootstrap_ratio(values, np.ones(len(np.atleast_1d(np.asarray(values)))), clusters)


def bootstrap_median(values: Sequence[float]) -> Interval | None:
    """Percentile interval of the median of independent values; None for one."""
    x, count = np.sort(np.asarray(values, dtype=np.float64)), len(values)
    if count < 2:
        return None
    # How many of the drawn values are at most the first, the second, ... of them: the one in the middle follows.
    drawn = np.concatenate(_draws(count)).cumsum(axis=1, dtype=np.int64)
    lower, upper = ((drawn <= at).sum(axis=1) for at in ((count - 1) // 2, count // 2))
    low, high = np.quantile((x[lower] + x[upper]) / 2, [0.5 - _LEVEL / 2, 0.5 + _LEVEL / 2])
    return float(low), float(high)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Two-sided p-value of McNemar's exact test: do two arms get equally many of the same independent items right?

    Only items that one of them gets right and the other wrong count; 1.0 where there are none. Raises ValueError for
    empty or unequal input.
    """
    if not len(first) or len(first) != len(second):
        raise ValueError(f"both arms must have the same items, at least one, got {len(first)} and {len(second)}")
    gained = sum(a and not b for a, b in zip(first, second, strict=True))
    lost = sum(b and not a for a, b in zip(first, second, strict=True))
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0


def _with_cluster_numbers(values: ArrayLike, clusters: Sequence[str]) -> tuple[Floats, NDArray[np.intp]]:
    """Values, and the number of each one's cluster in order of appearance."""
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not x.size:
        raise ValueError(f"values must be a non-empty vector, got shape {x.shape}")
    if len(clusters) != x.size:
        raise ValueError(f"every item must name its cluster, got {len(clusters)} clusters of {x.size} items")
    if not all(clusters):
        raise ValueError(f"every item must name its cluster (independent items their own), got {list(clusters)}")
    numbers = {cluster: i for i, cluster in enumerate(dict.fromkeys(clusters))}
    return x, np.array([numbers[c] for c in clusters], dtype=np.intp)


@lru_cache(maxsize=3)
def _draws(count: int) -> list[NDArray[np.uint8]]:
    """How often each of ``count`` clusters is drawn, ``[draws, count]`` at a time, `RESAMPLES` draws in all.

    Kept for the next figure, a byte each: no cluster is drawn 255 times where all are equally likely and the draws as many as
    the clusters.
    """
    rng, at_once = np.random.default_rng(SEED), max(1, _COUNTS_AT_ONCE // count)
    sizes = (min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once))
    return [rng.multinomial(count, np.full(count, 1 / count), size=size).astype(np.uint8) for size in sizes]
