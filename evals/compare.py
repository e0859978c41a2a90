"""Arms held against each other on the same items: paired differences, and token arms at a patch's number of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from ctxwin.evals.metrics import ETA_FLOOR, Figures, Outcome
from ctxwin.evals.stats import Interval, bootstrap_mean, bootstrap_ratio, difference_interval, mcnemar, mean

Outcomes = Mapping[int, Outcome]
"""Scored samples of one arm on one task, by the index of their item."""


class Difference(TypedDict):
    """One arm minus another on shared items, with bootstrap intervals over clusters; None where no item has the figure."""

    accuracy: float | None
    accuracy_ci95: Interval | None
    eta: float | None
    eta_ci95: Interval | None


class Pair(Difference):
    """`paired`: also ``gained`` and ``lost``, the items that only the first or only the second gets right.

    These and ``mcnemar_p`` are None where scores are not all 0 or 1; the latter also where clusters hold several items, since
    McNemar's test takes items as independent.
    """

    n: int
    clusters: int
    gained: int | None
    lost: int | None
    mcnemar_p: float | None
    kl: float
    kl_ci95: Interval | None


class Match(Difference):
    """`matched`: the settings and shares compared with (lower, upper), and the difference to the upper one as it is."""

    n: int
    clusters: int
    settings: list[str | None]
    shares: list[float | None]
    interpolated: bool
    above: Difference | None


def best_patched(cells: Mapping[str, Figures]) -> str | None:
    """The ``patched:M`` arm of the highest accuracy, at equal accuracy of the fewest bytes; None without one."""
    patched = [
        (-accuracy, f["bytes_share"] or 0.0, name)
        for name, f in cells.items()
        if name.startswith("patched:") and (accuracy := f["accuracy"]) is not None
    ]
    return min(patched)[2] if patched else None


def paired(first: Outcomes, second: Outcomes) -> Pair | None:
    """``first`` minus ``second`` on the items that both have; None where they share none."""
    pairs = [(first[i], second[i]) for i in sorted(first.keys() & second.keys())]
    if not pairs:
        return None
    clusters = [a.row.cluster for a, _ in pairs]
    kls = [a.row.kl - b.row.kl for a, b in pairs]
    known = [
        (mine, theirs, a.row.cluster)
        for a, b in pairs
        if (mine := a.answer.score) is not None and (theirs := b.answer.score) is not None
    ]
    graded = not known or any(score not in (0, 1) for a, b, _ in known for score in (a, b))
    exact = not graded and len({c for _, _, c in known}) == len(known)
    base_kls = [a.row.base_kl for a, _ in pairs]
    return {
        "n": len(pairs),
        "clusters": len(set(clusters)),
        **_difference([(a - b, c) for a, b, c in known], [-kl for kl in kls], base_kls, clusters),
        "gained": None if graded else sum(a > b for a, b, _ in known),
        "lost": None if graded else sum(b > a for a, b, _ in known),
        "mcnemar_p": mcnemar([a > 0 for a, _, _ in known], [b > 0 for _, b, _ in known]) if exact else None,
        "kl": mean(kls),
        "kl_ci95": bootstrap_mean(kls, clusters),
    }


def _difference(
    scores: Sequence[tuple[float, str]], removed: Sequence[float], base_kls: Sequence[float], clusters: Sequence[str]
) -> Difference:
    """From scores (with their clusters) and the share of the base's KL that is removed."""
    made: Difference = {"accuracy": None, "accuracy_ci95": None, "eta": None, "eta_ci95": None}
    if scores:
        values, of = zip(*scores, strict=True)
        made["accuracy"], made["accuracy_ci95"] = mean(values), difference_interval(values, of, drawn=True)
    if mean(base_kls) >= ETA_FLOOR:
        made["eta"] = math.fsum(removed) / math.fsum(base_kls)
        made["eta_ci95"] = bootstrap_ratio(removed, base_kls, clusters)
    return made


@dataclass(frozen=True)
class Setting:
    """One setting of a token arm: its name, the share of the chunks' tokens that it computes anew, and its samples.

    A computed token costs its KV's bytes, so the share is of their bytes, too (Kamera, Table 6, sets a rank-16 patch beside
    31 tokens that way).
    """

    name: str
    share: float
    outcomes: Outcomes


def matched(patch: Outcomes, share: float, settings: Sequence[Setting]) -> Match | None:
    """A patch minus a token arm at the patch's bytes (Kamera, section 6 and Table 6), paired by item.

    Between the two settings on either side of ``share`` (the lower one may be the base, which computes nothing) each
    item's score and KL are interpolated linearly. A curve that bends towards the upper setting is better than its
    chord, which would flatter the patch; ``above`` is therefore the difference to the upper setting as it is, which
    has at least the patch's bytes. Where no setting has that many, the largest one is taken as it is.

    Args:
        patch: samples of the patch.
        share: its bytes over the KV's.
        settings: of one token arm, any order.

    Returns None where no item is shared; raises ValueError for no setting.
    """
    if not settings:
        raise ValueError("a token arm must have at least one setting, got none")
    ranked = sorted(settings, key=lambda s: s.share)
    upper = next((s for s in ranked if s.share >= share), None)
    lower = next((s for s in reversed(ranked) if s.share <= share), None) if upper else ranked[-1]
    shared = sorted(set(patch).intersection(*(s.outcomes for s in (lower, upper) if s)))
    if not shared:
        return None
    low_share = lower.share if lower else 0.0
    weight = (share - low_share) / (upper.share - low_share) if upper and upper.share > low_share else 0.0
    removed, gaps = [], []
    for i in shared:
        mine, row = patch[i], patch[i].row
        low = (lower.outcomes[i].row.kl, lower.outcomes[i].answer.score) if lower else (row.base_kl, mine.base.score)
        high = (upper.outcomes[i].row.kl, upper.outcomes[i].answer.score) if upper else low
        removed.append((1 - weight) * low[0] + weight * high[0] - row.kl)
        if mine.answer.score is not None and low[1] is not None and high[1] is not None:
            gaps.append((mine.answer.score - ((1 - weight) * low[1] + weight * high[1]), row.cluster))
    clusters = [patch[i].row.cluster for i in shared]
    above = paired(patch, upper.outcomes) if upper else None
    return {
        "n": len(shared),
        "clusters": len(set(clusters)),
        "settings": [lower.name if lower else "base", upper.name if upper else None],
        "shares": [low_share, upper.share if upper else None],
        "interpolated": 0.0 < weight < 1.0,
        **_difference(gaps, removed, [patch[i].row.base_kl for i in shared], clusters),
        "above": above and _only(above),
    }


def _only(pair: Pair) -> Difference:
    return {k: pair[k] for k in Difference.__annotations__}  # type: ignore[literal-required,return-value]
