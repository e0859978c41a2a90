"""Arms held against each other on the same items: paired differences, and token arms at a patch's number of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxwin.evals.metrics import ETA_FLOOR, Outcome
from ctxwin.evals.stats import bootstrap_mean, bootstrap_ratio, difference_interval, mcnemar

Outcomes = Mapping[int, Outcome]
"""Scored samples of one arm on one task, by the index of their item."""


def best_patched(cells: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The ``patched:M`` arm of the highest accuracy, at equal accuracy of the fewest bytes; None without one.

    Args:
        cells: figures by arm, as `ctxwin.evals.metrics.cell` makes them.
    """
    patched = [
        (-f["accuracy"], f["bytes_share"] or 0.0, name)
        for name, f in cells.items()
        if name.startswith("patched:") and f["accuracy"] is not None
    ]
    return min(patched)[2] if patched else None


def paired(first: Outcomes, second: Outcomes) -> dict[str, Any] | None:
    """``first`` minus ``second`` on the items that both have; None where they share none.

    Returns:
        ``n`` and ``clusters`` of the shared items; differences of ``accuracy`` (items scored both ways), ``kl`` in nats
        and ``eta``, each with a bootstrap interval over clusters; ``gained`` and ``lost``, the items that only the first
        or only the second gets right, and ``mcnemar_p``. The last three are None where scores are not all 0 or 1;
        McNemar's test takes items as independent, so its p is None, too, where clusters hold several.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    pairs = [(first[i], second[i]) for i in shared]
    clusters = [a.cluster for a, _ in pairs]
    kls = [a.kl - b.kl for a, b in pairs]
    return {
        "n": len(pairs),
        "clusters": len(set(clusters)),
        **_accuracy(pairs),
        "kl": math.fsum(kls) / len(kls),
        "kl_ci95": _listed(bootstrap_mean(kls, clusters)),
        **_eta([a.kl for a, _ in pairs], [b.kl for _, b in pairs], [a.base_kl for a, _ in pairs], clusters),
    }


def _accuracy(pairs: Sequence[tuple[Outcome, Outcome]]) -> dict[str, Any]:
    known = [
        (a.answer.score, b.answer.score, a.cluster)
        for a, b in pairs
        if a.answer.score is not None and b.answer.score is not None
    ]
    none = dict.fromkeys(("gained", "lost", "mcnemar_p"))
    if not known:
        return {"accuracy": None, "accuracy_ci95": None, **none}
    differences, clusters = [a - b for a, b, _ in known], [c for _, _, c in known]
    made = {
        "accuracy": math.fsum(differences) / len(differences),
        "accuracy_ci95": _listed(difference_interval(differences, clusters, drawn=True)),
    }
    if any(score not in (0, 1) for a, b, _ in known for score in (a, b)):
        return {**made, **none}
    right = [bool(a) for a, _, _ in known], [bool(b) for _, b, _ in known]
    return {
        **made,
        "gained": differences.count(1),
        "lost": differences.count(-1),
        "mcnemar_p": mcnemar(*right) if len(set(clusters)) == len(clusters) else None,
    }


def _eta(
    kls: Sequence[float], others: Sequence[float], base_kls: Sequence[float], clusters: Sequence[str]
) -> dict[str, Any]:
    total = math.fsum(base_kls)
    if total / len(base_kls) < ETA_FLOOR:
        return {"eta": None, "eta_ci95": None}
    removed = [b - a for a, b in zip(kls, others, strict=True)]
    return {
        "eta": math.fsum(removed) / total,
        "eta_ci95": _listed(bootstrap_ratio(removed, base_kls, clusters)),
    }


@dataclass(frozen=True)
class Setting:
    """One setting of a token arm.

    Attributes:
        name: of the arm.
        share: of the chunks' tokens it computes anew. A computed token costs its KV's bytes, so this is its share of
            their bytes, too (Kamera, Table 6, sets a rank-16 patch beside 31 tokens that way).
        outcomes: its samples.
    """

    name: str
    share: float
    outcomes: Outcomes


def matched(patch: Outcomes, share: float, settings: Sequence[Setting]) -> dict[str, Any] | None:
    """A patch minus a token arm at the patch's bytes (Kamera, section 6 and Table 6), paired by item.

    Between the two settings on either side of ``share`` (the lower one may be the base, which computes nothing) each
    item's score and KL are interpolated linearly. A curve that bends towards the upper setting is better than its
    chord, which would flatter the patch; ``above`` is therefore the difference to the upper setting as it is, which
    has at least the patch's bytes. Where no setting has that many, the largest one is taken as it is.

    Args:
        patch: samples of the patch.
        share: its bytes over the KV's.
        settings: of one token arm, any order.

    Returns:
        ``n``, ``clusters``, ``shares`` and ``settings`` compared with (lower, upper), ``interpolated``, differences of
        ``accuracy`` and ``eta`` with bootstrap intervals, and ``above`` (None where no setting has the bytes). None
        where no item is shared.

    Raises ValueError without a setting.
    """
    if not settings:
        raise ValueError("a token arm must have at least one setting, got none")
    ranked = sorted(settings, key=lambda s: s.share)
    upper = next((s for s in ranked if s.share >= share), None)
    lower = next((s for s in reversed(ranked) if s.share <= share), None) if upper else ranked[-1]
    ends = [lower, upper] if upper else [ranked[-1]]
    shared = sorted(set(patch).intersection(*(s.outcomes for s in ends if s)))
    if not shared:
        return None
    low_share = lower.share if lower else 0.0
    weight = (share - low_share) / (upper.share - low_share) if upper and upper.share > low_share else 0.0
    kls, scores = [], []
    for i in shared:
        mine = patch[i]
        low = (lower.outcomes[i].kl, lower.outcomes[i].answer.score) if lower else (mine.base_kl, mine.base.score)
        high = (upper.outcomes[i].kl, upper.outcomes[i].answer.score) if upper else low
        kls.append((1 - weight) * low[0] + weight * high[0])
        scores.append(None if low[1] is None or high[1] is None else (1 - weight) * low[1] + weight * high[1])
    clusters = [patch[i].cluster for i in shared]
    gaps = [
        (patch[i].answer.score - other, patch[i].cluster)  # type: ignore[operator]
        for i, other in zip(shared, scores, strict=True)
        if other is not None and patch[i].answer.score is not None
    ]
    return {
        "n": len(shared),
        "clusters": len(set(clusters)),
        "settings": [lower.name if lower else "base", upper.name if upper else None],
        "shares": [low_share, upper.share if upper else None],
        "interpolated": 0.0 < weight < 1.0,
        "accuracy": math.fsum(g for g, _ in gaps) / len(gaps) if gaps else None,
        "accuracy_ci95": _listed(difference_interval([g for g, _ in gaps], [c for _, c in gaps], drawn=True))
        if gaps
        else None,
        **_eta([patch[i].kl for i in shared], kls, [patch[i].base_kl for i in shared], clusters),
        "above": _above(patch, upper),
    }


def _above(patch: Outcomes, upper: Setting | None) -> dict[str, Any] | None:
    if upper is None:
        return None
    found = paired(patch, upper.outcomes)
    return found and {k: found[k] for k in ("accuracy", "accuracy_ci95", "eta", "eta_ci95")}


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)
