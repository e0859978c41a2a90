"""Figures of one arm on one task; no model.

The reference of a sample is the exact re-prefill of what is placed; its base is what doing nothing would serve: the
relocated canonical, or for a survivor its KV as it is. Empty input raises instead of giving a figure. Answers are
compared as the task's rule reads them (`ctxwin.evals.items.Scored`), and as they are where it reads nothing in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctxwin.evals.items import Scored
from ctxwin.evals.samples import Sample
from ctxwin.evals.stats import Interval, bootstrap_mean, bootstrap_ratio, difference_interval, mean, share_interval

ETA_FLOOR = 0.01
"""Mean KL of the base in nats below which eta would divide noise by noise, and is None."""


class Figures(TypedDict):
    """Figures of one arm on one task, as JSON holds them. Intervals are of 95 %; a figure that no item has is None.

    Attributes:
        n, clusters, unparsed: items, groups of items that depend on each other, and answers that the rule could not score.
        accuracy, ci95: mean score over the answers that could be scored.
        delta, delta_ci95: accuracy minus re-prefill's on the same items.
        kl, kl_ci95, kl_p99, base_kl: KL(re-prefill || arm) of the next token in nats; ``base_kl`` under the base.
        forced_kl, forced_eta: the same along re-prefill's answer, where any answer has more than one token.
        eta, eta_ci95: share of the base's KL that the arm removes.
        agreement, agreement_ci95: share of items with re-prefill's prediction.
        flips, flip_recover, flip_ci95: items whose prediction the base changes, and the share of them that the arm restores.
        harm_rate, harm_ci95: share of items in which the arm scores lower than re-prefill.
        bytes_share: bytes stored for patched chunks over their KV; None where nothing was patched.
        recomputed_share: share of the chunks' tokens that were computed when asked.
        spent_share: bytes stored or replaced when asked, over the KV that patches of this task are applied to.
        unscored, unscored_why: items that the arm could not serve, and how many for which reason.
        by_frames, by_layer, grid: accuracy by number of chunks; relative error of the KV by layer; accuracy by length and depth.
        tokens, computed, forwards, encodes: means.
        ttft_s: median seconds to the first token, and of how many items.
        own: the arm's own figures, means.
        official: the data set's own aggregates.
    """

    n: int
    clusters: int
    unparsed: int
    accuracy: float | None
    ci95: Interval | None
    delta: float | None
    delta_ci95: Interval | None
    kl: float
    kl_ci95: Interval | None
    kl_p99: float
    base_kl: float
    eta: float | None
    eta_ci95: Interval | None
    agreement: float | None
    agreement_ci95: Interval | None
    flips: int
    flip_recover: float | None
    flip_ci95: Interval | None
    harm_rate: float | None
    harm_ci95: Interval | None
    reference_accuracy: float | None
    base_accuracy: float | None
    bytes_share: float | None
    recomputed_share: float
    forced_kl: NotRequired[float]
    forced_kl_ci95: NotRequired[Interval | None]
    forced_eta: NotRequired[float | None]
    forced_eta_ci95: NotRequired[Interval | None]
    spent_share: NotRequired[float | None]
    unscored: NotRequired[int]
    unscored_why: NotRequired[dict[str, int]]
    by_frames: NotRequired[dict[str, dict[str, Any]]]
    by_layer: NotRequired[list[float]]
    grid: NotRequired[list[dict[str, Any]]]
    tokens: NotRequired[float]
    computed: NotRequired[float]
    forwards: NotRequired[float]
    encodes: NotRequired[float]
    ttft_s: NotRequired[dict[str, float]]
    own: NotRequired[dict[str, float]]
    official: NotRequired[dict[str, float]]


@dataclass(frozen=True)
class Outcome:
    """One scored sample: the answers under its arm, under re-prefill and under the base, as the task's rule reads them."""

    row: Sample
    answer: Scored
    reference: Scored
    base: Scored

    @property
    def recomputed(self) -> float:
        """Share of the placed tokens that were computed when it was asked."""
        if self.row.arm == "reprefill":
            return 1.0  # by definition; the prompt's other tokens are system prompt and question
        return self.row.extra.get("recomputed", min(1.0, self.row.computed / self.row.placed))

    @property
    def spent(self) -> float:
        """Bytes stored, or replaced when it was asked."""
        return self.row.stored + self.row.extra.get("renewed", self.recomputed) * self.row.over


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
    return np.asarray(x - np.log(np.exp(x).sum()))


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


def cell(outcomes: Sequence[Outcome]) -> Figures:
    """All figures of one arm on one task that follow from its outcomes; raises ValueError where there are none.

    Intervals of shares are as in `ctxwin.evals.stats.share_interval`, of KL and eta by the cluster bootstrap, of ``delta``
    by Student's t.
    """
    if not outcomes:
        raise ValueError("outcomes must hold at least one sample, got none")
    rows = [o.row for o in outcomes]
    clusters = [row.cluster for row in rows]
    over = sum(row.over for row in rows)
    shares = {
        ("accuracy", "ci95"): _share(outcomes, lambda o: o.answer.score),
        ("agreement", "agreement_ci95"): _share(outcomes, agreed),
        ("flip_recover", "flip_ci95"): _share([o for o in outcomes if flipped(o)], agreed),
        ("harm_rate", "harm_ci95"): _share(outcomes, harmed),
    }
    gains = [
        (o.answer.score - o.reference.score, o.row.cluster)
        for o in outcomes
        if o.answer.score is not None and o.reference.score is not None
    ]
    figures: dict[str, Any] = {
        "n": len(outcomes),
        "clusters": len(set(clusters)),
        "unparsed": sum(o.answer.score is None for o in outcomes),
        **{name: value for names, pair in shares.items() for name, value in zip(names, pair, strict=True)},
        **_divergence("", [row.kl for row in rows], [row.base_kl for row in rows], clusters),
        "kl_p99": float(np.quantile([row.kl for row in rows], 0.99)),
        "base_kl": mean([row.base_kl for row in rows]),
        "bytes_share": sum(row.stored for row in rows) / over if over else None,
        "recomputed_share": mean([o.recomputed for o in outcomes]),
        "flips": sum(map(flipped, outcomes)),
        "reference_accuracy": _share(outcomes, lambda o: o.reference.score)[0],
        "base_accuracy": _share(outcomes, lambda o: o.base.score)[0],
        "delta": mean([gain for gain, _ in gains]) if gains else None,
        "delta_ci95": difference_interval(*zip(*gains, strict=True)) if gains else None,
    }
    if any(row.forced_kl is not None for row in rows):
        kls, base_kls = [row.answer_kl for row in rows], [row.base_answer_kl for row in rows]
        figures |= _divergence("forced_", kls, base_kls, clusters)
    return cast(Figures, figures)


def _divergence(prefix: str, kls: list[float], base_kls: list[float], clusters: list[str]) -> dict[str, Any]:
    """KL and eta with their intervals."""
    made = mean(kls), bootstrap_mean(kls, clusters), eta(kls, base_kls), eta_interval(kls, base_kls, clusters)
    return {prefix + name: value for name, value in zip(("kl", "kl_ci95", "eta", "eta_ci95"), made, strict=True)}


def eta_interval(kls: Sequence[float], base_kls: Sequence[float], clusters: Sequence[str]) -> Interval | None:
    """Bootstrap interval of `eta`; None where eta is."""
    found = None if eta(kls, base_kls) is None else bootstrap_ratio(kls, base_kls, clusters)
    return None if found is None else (1 - found[1], 1 - found[0])


def _share(
    outcomes: Sequence[Outcome], read: Callable[[Outcome], float | bool | None]
) -> tuple[float | None, Interval | None]:
    """Mean and interval of a figure over the outcomes that have it."""
    known = [(float(value), o.row.cluster) for o in outcomes if (value := read(o)) is not None]
    if not known:
        return None, None
    values, clusters = zip(*known, strict=True)
    return mean(values), share_interval(values, clusters)
