"""From runs at several rates to one comparison: the highest rate at equal p95 of the time to the first token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Row = dict[str, Any]
OURS = "ctxwin"
WANTED = 1.5
"""Least ratio that `bench serve` is to show."""
BOUNDS = (1.25, 1.5, 2.0, 3.0, 4.0)
"""Bounds to compare at, in p95 of the best prefix-cache policy at the lowest rate."""
SLO = 2.0
"""The one among `BOUNDS` that counts unless a bound is given."""
_NEVER = 1e6  # seconds; stands for a first token that did not come


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

    Args:
        points: (rate, p95 in seconds; None where a first token never came), rates ascending.
        bound: seconds.

    p95 can only grow with the rate, so what noise makes of it is first evened out (isotonic regression of its logarithm);
    between two rates the logarithm is taken as linear. Raises ValueError for rates that do not ascend.
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


def curves(cells: Sequence[Row]) -> dict[str, list[tuple[float, float | None]]]:
    """(rate, p95) by policy, rates ascending."""
    found: dict[str, list[tuple[float, float | None]]] = {}
    for cell in sorted(cells, key=lambda c: float(c["rate"])):
        found.setdefault(cell["policy"], []).append((cell["rate"], cell["ttft_s"]["p95"]))
    return found


def base_p95(cells: Sequence[Row]) -> float | None:
    """The lowest p95 of any prefix-cache policy at the lowest rate; None where there is none yet."""
    firsts = [points[0][1] for policy, points in curves(cells).items() if policy != OURS]
    known = [p95 for p95 in firsts if p95 is not None]
    return min(known) if known else None


def compare(cells: Sequence[Row], bound: float) -> Row:
    """Every policy's highest rate within ``bound`` seconds, and ours over the best of the others.

    ``ratio`` is None where no other policy keeps the bound at any rate measured, or ours is not among the cells;
    ``ratio_is`` says whether it is exact, ``at least`` (ours was not driven to the bound) or ``at most``.
    """
    rates = {policy: highest_rate(points, bound) for policy, points in curves(cells).items()}
    others = {p: h for p, h in rates.items() if p != OURS and h.rate is not None}
    best = max(others, key=lambda p: others[p].rate or 0.0, default=None)
    ours = rates.get(OURS)
    ratio, kind = None, None
    if best is not None and ours is not None:
        theirs = others[best]
        assert theirs.rate is not None
        ratio = (ours.rate or 0.0) / theirs.rate
        kind = "at least" if ours.at_least and not theirs.at_least else "at most" if theirs.at_least else "exact"
    return {
        "bound_s": bound,
        "rates": {p: h.rate for p, h in rates.items()},
        "at_least": sorted(p for p, h in rates.items() if h.at_least),
        "best_prefix_cache": best,
        "ratio": ratio,
        "ratio_is": kind,
    }


def comparisons(cells: Sequence[Row], slo_s: float | None) -> Row:
    """The comparison at the bound that counts, and those around it."""
    base = base_p95(cells)
    if base is None and slo_s is None:
        return {"slo_s": None, "slo_is": None, "at_slo": None, "around": []}
    bound = slo_s if slo_s is not None else SLO * (base or 0.0)
    around = [] if base is None else [compare(cells, factor * base) | {"factor": factor} for factor in BOUNDS]
    return {
        "slo_s": bound,
        "slo_is": "given" if slo_s is not None else f"{SLO:g} x the best prefix-cache policy's p95 at the lowest rate",
        "at_slo": compare(cells, bound),
        "around": around,
    }


def checks(at_slo: Row | None, plain: Mapping[str, Any] | None) -> list[Row]:
    """What must hold: the ratio, and plain traffic within 5 % of an engine without the connector.

    ``verdict``: "holds", "fails" or, of plain traffic, "not shown", where the interval of the median reaches beyond the bound.
    """
    found: list[Row] = []
    if at_slo is not None and at_slo["ratio"] is not None:
        # A ratio that is too high by an unknown amount shows nothing.
        holds = at_slo["ratio"] >= WANTED and at_slo["ratio_is"] != "at most"
        found.append(_check("ratio", at_slo["ratio"], None, WANTED, "holds" if holds else "fails"))
    if plain is not None:
        for name, least, most in (("inter_token_p99", 0.0, 1.05), ("throughput", 0.95, math.inf)):
            ratio = plain["ratios"][name]
            if ratio["median"] is None:  # no pair is whole yet
                continue
            bound = most if math.isfinite(most) else least
            verdict = _verdict(ratio["interval"], least, most)
            found.append(_check(name, ratio["median"], ratio["interval"], bound, verdict))
    return found


def _verdict(interval: Sequence[float] | None, least: float, most: float) -> str:
    if interval is None:
        return "not shown"
    low, high = interval
    return "holds" if least <= low and high <= most else "fails" if high < least or low > most else "not shown"


def _check(name: str, value: float, interval: Sequence[float] | None, bound: float, verdict: str) -> Row:
    return {
        "check": name, "value": value, "interval": interval, "bound": bound, "verdict": verdict,
        "holds": verdict == "holds",
    }  # fmt: skip
