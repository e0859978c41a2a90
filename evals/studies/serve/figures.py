"""From runs at several rates to one comparison, and from slices of plain traffic to ratios: pure functions of the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NotRequired, TypedDict

OURS = "ctxwin"
WANTED = 1.5
"""The ratio that the study is to show, at least."""
BOUNDS = (1.25, 1.5, 2.0, 3.0, 4.0)
"""Bounds to compare at, in p95 of the best prefix-cache policy at the lowest rate."""
SLO = 2.0
"""The one among `BOUNDS` that counts unless a bound is given."""
SIDES = ("without", "with")
BESIDE = "windows"
LEVEL = 0.95
"""Of `median_interval`."""
_NEVER = 1e6  # seconds; stands for a first token that did not come


class Quantiles(TypedDict):
    """None where there are no values, or the quantile is infinite."""

    p50: float | None
    p95: float | None
    p99: float | None


class Cell(TypedDict):
    """One policy at one rate. ``errors`` holds up to three; times count from when a request was due.

    ``ttfts_s`` has one time a request, None where no first token came; ``index`` is that of the rate.
    """

    policy: str
    index: int
    rate: float
    requests: int
    completed: int
    dropped: int
    failed: int
    errors: list[str]
    seconds: float
    requests_per_s: float
    ttft_s: Quantiles
    ttft_by_turn_s: dict[str, Quantiles]
    inter_token_s: Quantiles
    wait_s: Quantiles
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    answer_tokens: int
    loads: int
    bytes_loaded: int
    misses: int
    fallbacks: int
    tokens_by_lane: dict[str, int]
    cpu_s_per_request: float | None
    load: list[float]
    ttfts_s: list[float | None]


class Slice(TypedDict):
    """Plain traffic on one side of one pair: gaps between tokens and times to the first one, in seconds."""

    pair: int
    side: str
    rate: float
    gaps: list[float]
    ttfts: list[float]
    tokens: int
    seconds: float
    burst_tokens_per_s: float
    cpu_s_per_token: float
    window_asks: int
    load: float


class Compared(TypedDict):
    """Every policy's highest rate within a bound, and ours over the best of the others.

    ``ratio`` is None where no other policy keeps the bound at any rate measured, or ours was not measured. ``ratio_is`` says
    whether it is exact, ``at least`` (ours was not driven to the bound) or ``at most``. ``factor``: of `BOUNDS`.
    """

    bound_s: float
    rates: dict[str, float | None]
    at_least: list[str]
    best_prefix_cache: str | None
    ratio: float | None
    ratio_is: str | None
    factor: NotRequired[float]


class Comparison(TypedDict):
    """The comparison at the bound that counts, and those around it."""

    slo_s: float | None
    slo_is: str | None
    at_slo: Compared | None
    around: list[Compared]


class Ratio(TypedDict):
    """With the connector over without it: the median of the pairs' own ratios, and the ratio over all slices (``pooled``)."""

    median: float | None
    interval: list[float] | None
    quartiles: list[float] | None
    pairs: int
    pooled: float | None


class Check(TypedDict):
    """Something that must hold; ``verdict`` is "holds", "fails", or "not shown" where the interval reaches beyond the bound."""

    check: str
    value: float
    interval: list[float] | None
    bound: float
    verdict: str
    holds: bool


@dataclass(frozen=True)
class Highest:
    """The highest rate at which p95 stays within a bound.

    Attributes:
        rate: requests a second; None where the lowest rate measured already exceeds the bound.
        at_least: the highest rate measured is still within it.
    """

    rate: float | None
    at_least: bool = False


def highest_rate(points: Sequence[tuple[float, float | None]], bound: float) -> Highest:
    """Where the curve of p95 over rate crosses ``bound``.

    p95 can only grow with the rate, so what noise makes of it is first evened out (isotonic regression of its logarithm);
    between two rates the logarithm is taken as linear.

    Args:
        points: (rate, p95 in seconds; None where a first token never came), rates ascending.
        bound: seconds.

    Raises:
        ValueError: rates that do not ascend, or a bound that is not positive.
    """
    rates = [rate for rate, _ in points]
    if not points or rates != sorted(set(rates)):
        raise ValueError(f"rates must ascend, got {rates}")
    if bound <= 0:
        raise ValueError(f"bound must be positive, got {bound}")
    from scipy.optimize import isotonic_regression

    logs = isotonic_regression([math.log(_NEVER if p is None else p) for _, p in points]).x
    wanted = math.log(bound)
    if logs[0] > wanted:
        return Highest(None)
    for (low, high), (a, b) in zip(pairwise(rates), pairwise(logs), strict=True):
        if b > wanted:
            return Highest(low + (high - low) * float((wanted - a) / (b - a)))
    return Highest(rates[-1], at_least=True)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed, between neighbours; infinite where one of those is."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    if math.isinf(low) or math.isinf(high):
        return high if at > math.floor(at) else low
    return low + (high - low) * (at - math.floor(at))


def quantiles(values: Sequence[float]) -> Quantiles:
    """p50, p95 and p99."""
    found = [quantile(values, share) for share in (0.5, 0.95, 0.99)]
    p50, p95, p99 = (value if math.isfinite(value) else None for value in found)
    return {"p50": p50, "p95": p95, "p99": p99}


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Interval that covers the median of the values' distribution with a probability of at least `LEVEL`.

    The k-th lowest and k-th highest value, exact whatever the distribution: the median lies beyond one of them as rarely as a
    fair coin falls fewer than k times on one of its sides (the sign test). None for fewer than six values, of which not even
    the lowest and the highest are far enough apart; a bootstrap of so few would give an interval that is too narrow.
    """
    n = len(values)
    k, beyond = 0, 2 * 0.5**n  # chance that the median is beyond the (k + 1)-th lowest or highest
    while beyond <= 1 - LEVEL:
        k += 1
        beyond += 2 * math.comb(n, k) * 0.5**n
    ordered = sorted(values)
    return [ordered[k - 1], ordered[n - k]] if k else None


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper quartile; of a single value, that value twice."""
    return [quantile(values, 0.25), quantile(values, 0.75)]


def goodput(cell: Cell, slo_s: float) -> float:
    """Requests a second whose first token came within ``slo_s`` of when they were due."""
    return sum(t is not None and t <= slo_s for t in cell["ttfts_s"]) / cell["seconds"]


def curves(cells: Sequence[Cell]) -> dict[str, list[tuple[float, float | None]]]:
    """(rate, p95) by policy, rates ascending."""
    found: dict[str, list[tuple[float, float | None]]] = {}
    for cell in sorted(cells, key=lambda c: c["rate"]):
        found.setdefault(cell["policy"], []).append((cell["rate"], cell["ttft_s"]["p95"]))
    return found


def base_p95(cells: Sequence[Cell]) -> float | None:
    """The lowest p95 of any prefix-cache policy at the lowest rate; None where there is none yet."""
    firsts = [points[0][1] for policy, points in curves(cells).items() if policy != OURS]
    return min((p95 for p95 in firsts if p95 is not None), default=None)


def compare(cells: Sequence[Cell], bound: float) -> Compared:
    """The policies at one bound, in seconds."""
    rates = {policy: highest_rate(points, bound) for policy, points in curves(cells).items()}
    others = {policy: found.rate for policy, found in rates.items() if policy != OURS and found.rate is not None}
    best = max(others, key=lambda policy: others[policy], default=None)
    ours = rates.get(OURS)
    ratio, kind = None, None
    if best is not None and ours is not None:
        ratio = (ours.rate or 0.0) / others[best]
        kind = "at most" if rates[best].at_least else "at least" if ours.at_least else "exact"
    return {
        "bound_s": bound,
        "rates": {policy: found.rate for policy, found in rates.items()},
        "at_least": sorted(policy for policy, found in rates.items() if found.at_least),
        "best_prefix_cache": best,
        "ratio": ratio,
        "ratio_is": kind,
    }


def comparisons(cells: Sequence[Cell], slo_s: float | None) -> Comparison:
    """The comparison at ``slo_s``, or at `SLO` times the prefix cache's own p95, and those around it."""
    base = base_p95(cells)
    bound = slo_s if slo_s is not None else None if base is None else SLO * base
    if bound is None:
        return {"slo_s": None, "slo_is": None, "at_slo": None, "around": []}
    return {
        "slo_s": bound,
        "slo_is": "given" if slo_s is not None else f"{SLO:g} x the best prefix-cache policy's p95 at the lowest rate",
        "at_slo": compare(cells, bound),
        "around": [] if base is None else [{**compare(cells, f * base), "factor": f} for f in BOUNDS],
    }


def plain_figures(slices: Sequence[Slice]) -> dict[str, Any]:
    """Figures of plain traffic by side over all slices, and the ratios of the pairs (`Ratio`).

    p50 and p99 between tokens in the open loop, throughput when a burst is asked at once, and processor time a token of those,
    which changes least with what else the machine does.
    """
    sides: dict[str, Any] = {}
    for side in (*SIDES, BESIDE):
        own = [s for s in slices if s["side"] == side]
        if own:
            sides[side] = {
                "slices": len(own),
                "inter_token_s": quantiles([gap for s in own for gap in s["gaps"]]),
                "ttft_s": quantiles([t for s in own for t in s["ttfts"]]),
                "tokens_per_s": sum(s["tokens"] for s in own) / sum(s["seconds"] for s in own),
                "burst_tokens_per_s": median(s["burst_tokens_per_s"] for s in own),
                "cpu_s_per_token": median(s["cpu_s_per_token"] for s in own),
                "window_asks": sum(s["window_asks"] for s in own),
            }
    p50, p99 = (_gap_quantile(name) for name in ("p50", "p99"))
    ratios = {
        "inter_token_p50": _ratio(slices, sides, p50, lambda side: side["inter_token_s"]["p50"]),
        "inter_token_p99": _ratio(slices, sides, p99, lambda side: side["inter_token_s"]["p99"]),
        "throughput": _ratio(slices, sides, lambda s: s["burst_tokens_per_s"], lambda side: side["burst_tokens_per_s"]),
        "cpu_per_token": _ratio(slices, sides, lambda s: s["cpu_s_per_token"], lambda side: side["cpu_s_per_token"]),
    }
    return {"rate": slices[0]["rate"], "sides": sides, "ratios": ratios}


def _gap_quantile(name: str) -> Callable[[Slice], float]:
    return lambda one: quantiles(one["gaps"])[name]  # type: ignore[literal-required]


def _ratio(
    slices: Sequence[Slice],
    sides: Mapping[str, Any],
    of_slice: Callable[[Slice], float],
    of_side: Callable[[Mapping[str, Any]], float],
) -> Ratio:
    by = {(s["pair"], s["side"]): of_slice(s) for s in slices}
    ratios = [by[p, "with"] / by[p, "without"] for p, side in by if side == "with" and (p, "without") in by]
    return {
        "median": median(ratios) if ratios else None,
        "interval": median_interval(ratios),
        "quartiles": quartiles(ratios) if ratios else None,
        "pairs": len(ratios),
        "pooled": of_side(sides["with"]) / of_side(sides["without"]) if all(s in sides for s in SIDES) else None,
    }


def checks(at_slo: Compared | None, plain: Mapping[str, Any] | None) -> list[Check]:
    """What must hold: the ratio, and plain traffic within 5 % of an engine without the connector."""
    found: list[Check] = []
    if at_slo is not None and at_slo["ratio"] is not None:
        # A ratio that is too high by an unknown amount shows nothing.
        holds = at_slo["ratio"] >= WANTED and at_slo["ratio_is"] != "at most"
        found.append(_check("ratio", at_slo["ratio"], None, WANTED, "holds" if holds else "fails"))
    if plain is not None:
        for name, least, most in (("inter_token_p99", 0.0, 1.05), ("throughput", 0.95, math.inf)):
            ratio: Ratio = plain["ratios"][name]
            if ratio["median"] is not None:
                bound = most if math.isfinite(most) else least
                verdict = _verdict(ratio["interval"], least, most)
                found.append(_check(name, ratio["median"], ratio["interval"], bound, verdict))
    return found


def _verdict(interval: Sequence[float] | None, least: float, most: float) -> str:
    if interval is None:
        return "not shown"
    low, high = interval
    return "holds" if least <= low and high <= most else "fails" if high < least or low > most else "not shown"


def _check(name: str, value: float, interval: list[float] | None, bound: float, verdict: str) -> Check:
    return {
        "check": name,
        "value": value,
        "interval": interval,
        "bound": bound,
        "verdict": verdict,
        "holds": verdict == "holds",
    }
