"""Figures of one arm on one task; no model.

The reference of a sample is the exact re-prefill of what is placed; its base is what doing nothing would serve: the
relocated canonical, or for a survivor its KV as it is. Empty input raises instead of giving a figure. Answers are
compared as the task's rule reads them (`ctxwin.evals.items.Scored`), and as they are where it reads nothing in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxwin.evals.items import Scored
from ctxwin.evals.stats import bootstrap_mean, bootstrap_ratio, difference_interval, share_interval

ETA_FLOOR = 0.01
"""Mean KL of the base in nats below which eta would divide noise by noise, and is None."""


@dataclass(frozen=True)
class Outcome:
    """One scored sample of one arm.

    Attributes:
        answer, reference, base: answers under the arm, under re-prefill and under the base.
        cluster: items of one cluster are not independent; never empty.
        kl, base_kl: KL(re-prefill || arm) and KL(re-prefill || base) of the next token, nats, whole vocabulary.
        forced_kl, base_forced_kl: the same, averaged over the tokens of re-prefill's answer, which is forced; None for
            answers of one token, where it would be ``kl``.
        stored: bytes kept for the patched chunks beyond their canonicals.
        over: bytes of those chunks' KV in bf16.
        recomputed: share of the chunks' tokens that were computed when it was asked, 0..1.
        renewed: share of the chunks' KV that was replaced then; None where that is ``recomputed``.
    """

    answer: Scored
    reference: Scored
    base: Scored
    cluster: str
    kl: float
    base_kl: float
    forced_kl: float | None = None
    base_forced_kl: float | None = None
    stored: int = 0
    over: int = 0
    recomputed: float = 0.0
    renewed: float | None = None

    @property
    def spent(self) -> float:
        """Bytes stored, or replaced when it was asked."""
        return self.stored + (self.recomputed if self.renewed is None else self.renewed) * self.over


def kl_divergence(reference: ArrayLike, other: ArrayLike) -> float:
    """KL(reference || other) in nats of two next-token distributions given as logits over the same vocabulary.

    Computed in float64. Raises ValueError for different shapes or an empty vocabulary.
    """
    p, q = _log_softmax(reference), _log_softmax(other)
    if p.shape != q.shape:
        raise ValueError(f"both distributions must cover the same vocabulary, got {p.shape} and {q.shape}")
    return max(0.0, float(np.sum(np.exp(p) * (p - q))))


def _log_softmax(logits: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(logits, dtype=np.float64)
    if x.ndim != 1 or not x.size:
        raise ValueError(f"logits must be a non-empty vector, got shape {x.shape}")
    x = x - x.max()
    shifted: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return shifted


def eta(kls: Sequence[float], base_kls: Sequence[float]) -> float | None:
    """Share of the base's KL that an arm removes: ``1 - sum(kl) / sum(base_kl)``; None under `ETA_FLOOR`.

    Negative where the arm is worse than doing nothing (Kamera, section 5).
    """
    if not kls or len(kls) != len(base_kls):
        raise ValueError(f"kl and base kl must be as many and at least one, got {len(kls)} and {len(base_kls)}")
    total = math.fsum(base_kls)
    return None if total / len(base_kls) < ETA_FLOOR else 1.0 - math.fsum(kls) / total


def agreed(outcome: Outcome) -> bool:
    """Whether the arm answers as re-prefill does, right or wrong."""
    return outcome.answer.prediction == outcome.reference.prediction


def flipped(outcome: Outcome) -> bool:
    """Whether the base answers otherwise than re-prefill."""
    return outcome.base.prediction != outcome.reference.prediction


def harmed(outcome: Outcome) -> bool | None:
    """Whether the arm scores lower than re-prefill; for scores of 0 and 1: re-prefill right, arm wrong.

    None where either answer is unscored.
    """
    ours, theirs = outcome.answer.score, outcome.reference.score
    return None if ours is None or theirs is None else ours < theirs


def agreement(outcomes: Sequence[Outcome]) -> float:
    """Share of items with the same prediction as re-prefill."""
    return sum(map(agreed, outcomes)) / _count(outcomes)


def flip_recover(outcomes: Sequence[Outcome]) -> tuple[float | None, int]:
    """(share of the base's flips that the arm restores, number of flips); None where the base flips nothing."""
    flips = [o for o in outcomes if flipped(o)]
    return (sum(map(agreed, flips)) / len(flips) if flips else None), len(flips)


def harm_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Share of the items, scored both ways, in which the arm scores lower than re-prefill; None without any."""
    _count(outcomes)
    known = [h for h in map(harmed, outcomes) if h is not None]
    return sum(known) / len(known) if known else None


def cell(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All figures of one arm on one task; raises ValueError where there are no outcomes.

    Accuracy is over the answers that the rule could score, ``unparsed`` counts the others; a figure that no item has
    is None. ``bytes_share`` is None where the arm patched nothing (there was no chunk to patch). Intervals are of 95 %:
    of shares as in `ctxwin.evals.stats.share_interval`, of KL and eta by the cluster bootstrap, of ``delta`` (accuracy
    minus re-prefill's on the same items) by Student's t.
    """
    n = _count(outcomes)
    clusters = [o.cluster for o in outcomes]
    kls, base_kls = [o.kl for o in outcomes], [o.base_kl for o in outcomes]
    recovered, flips = flip_recover(outcomes)
    over = sum(o.over for o in outcomes)
    accuracy, accuracy_ci = _share([(o.answer.score, o.cluster) for o in outcomes])
    harm, harm_ci = _share([(harmed(o), o.cluster) for o in outcomes])
    agree, agree_ci = _share([(agreed(o), o.cluster) for o in outcomes])
    _, flip_ci = _share([(agreed(o) if flipped(o) else None, o.cluster) for o in outcomes])
    figures = {
        "n": n,
        "clusters": len(set(clusters)),
        "unparsed": sum(o.answer.score is None for o in outcomes),
        "accuracy": accuracy,
        "ci95": accuracy_ci,
        "kl": math.fsum(kls) / n,
        "kl_ci95": _listed(bootstrap_mean(kls, clusters)),
        "kl_p99": float(np.quantile(kls, 0.99)),
        "eta": eta(kls, base_kls),
        "eta_ci95": eta_interval(kls, base_kls, clusters),
        "agreement": agree,
        "agreement_ci95": agree_ci,
        "flip_recover": recovered,
        "flip_ci95": flip_ci,
        "harm_rate": harm,
        "harm_ci95": harm_ci,
        "bytes_share": sum(o.stored for o in outcomes) / over if over else None,
        "recomputed_share": math.fsum(o.recomputed for o in outcomes) / n,
        "flips": flips,
        "reference_accuracy": _share([(o.reference.score, o.cluster) for o in outcomes])[0],
        "base_accuracy": _share([(o.base.score, o.cluster) for o in outcomes])[0],
        "base_kl": math.fsum(base_kls) / n,
    }
    return figures | _delta(outcomes) | _forced(outcomes)


def eta_interval(kls: Sequence[float], base_kls: Sequence[float], clusters: Sequence[str]) -> list[float] | None:
    """Bootstrap interval of `eta`; None where eta is."""
    if eta(kls, base_kls) is None:
        return None
    found = bootstrap_ratio(kls, base_kls, clusters)
    return None if found is None else [1 - found[1], 1 - found[0]]


def _delta(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Accuracy minus re-prefill's on the items that are scored both ways, with its interval."""
    both = [
        (o.answer.score - o.reference.score, o.cluster)
        for o in outcomes
        if o.answer.score is not None and o.reference.score is not None
    ]
    if not both:
        return {"delta": None, "delta_ci95": None}
    differences, clusters = [d for d, _ in both], [c for _, c in both]
    return {
        "delta": math.fsum(differences) / len(differences),
        "delta_ci95": _listed(difference_interval(differences, clusters)),
    }


def _forced(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """KL over whole answers, where any answer has more than one token; a one-token answer counts its ``kl``."""
    if all(o.forced_kl is None for o in outcomes):
        return {}
    kls = [o.kl if o.forced_kl is None else o.forced_kl for o in outcomes]
    base_kls = [o.base_kl if o.base_forced_kl is None else o.base_forced_kl for o in outcomes]
    clusters = [o.cluster for o in outcomes]
    return {
        "forced_kl": math.fsum(kls) / len(kls),
        "forced_kl_ci95": _listed(bootstrap_mean(kls, clusters)),
        "forced_eta": eta(kls, base_kls),
        "forced_eta_ci95": eta_interval(kls, base_kls, clusters),
    }


def _share(pairs: Sequence[tuple[float | bool | None, str]]) -> tuple[float | None, list[float] | None]:
    """Mean and interval of the values that are not None."""
    known = [(float(value), cluster) for value, cluster in pairs if value is not None]
    if not known:
        return None, None
    values, clusters = [v for v, _ in known], [c for _, c in known]
    return math.fsum(values) / len(values), list(share_interval(values, clusters))


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _count(outcomes: Sequence[Outcome]) -> int:
    if not outcomes:
        raise ValueError("outcomes must hold at least one sample, got none")
    return len(outcomes)
