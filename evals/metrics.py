"""Figures from samples; numpy only, no model.

The reference of a sample is the exact re-prefill of what is placed; its base is what doing nothing would serve: the
relocated canonical, or for a survivor its KV as it is. Empty input raises instead of giving a figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

ETA_FLOOR = 0.01
"""Mean KL of the base in nats below which eta would divide noise by noise, and is None."""
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Outcome:
    """One scored sample of one arm.

    Attributes:
        answer, reference, base: next word under the arm, under re-prefill and under the base.
        truth: the generator's answer.
        kl, base_kl: KL(re-prefill || arm) and KL(re-prefill || base) of the next token, nats, whole vocabulary.
        stored: bytes kept for the patched chunks beyond their canonicals.
        over: bytes of those chunks' KV in bf16.
    """

    answer: str
    reference: str
    base: str
    truth: str
    kl: float
    base_kl: float
    stored: int = 0
    over: int = 0


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


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion. One question per item, so items are independent.

    Raises ValueError where n < 1 or ``right`` is not within 0..n.
    """
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"n must be >= 1 and right in 0..n, got right={right}, n={n}")
    share, z2 = right / n, _Z95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At 0 and n the bounds are exactly 0 and 1, which rounding would miss.
    return (middle - half if right else 0.0), (middle + half if right < n else 1.0)


def eta(kls: Sequence[float], base_kls: Sequence[float]) -> float | None:
    """Share of the base's KL that an arm removes: ``1 - sum(kl) / sum(base_kl)``; None under `ETA_FLOOR`.

    Negative where the arm is worse than doing nothing (Kamera, section 5).
    """
    if not kls or len(kls) != len(base_kls):
        raise ValueError(f"kl and base kl must be as many and at least one, got {len(kls)} and {len(base_kls)}")
    total = math.fsum(base_kls)
    return None if total / len(base_kls) < ETA_FLOOR else 1.0 - math.fsum(kls) / total


def flip_recover(outcomes: Sequence[Outcome]) -> tuple[float | None, int]:
    """(share of the base's flips that the arm restores, number of flips); None where the base flips nothing."""
    flips = [o for o in outcomes if o.base != o.reference]
    return (sum(o.answer == o.reference for o in flips) / len(flips) if flips else None), len(flips)


def harm_rate(outcomes: Sequence[Outcome]) -> float:
    """Share of all items that re-prefill gets right and the arm gets wrong."""
    return sum(o.reference == o.truth != o.answer for o in outcomes) / _count(outcomes)


def paired_difference(outcomes: Sequence[Outcome]) -> tuple[float, float, float]:
    """Accuracy minus re-prefill's on the same items, with its 95 % interval (normal, of the paired differences)."""
    n = _count(outcomes)
    differences = np.array([float(o.answer == o.truth) - float(o.reference == o.truth) for o in outcomes])
    mean = float(differences.mean())
    half = _Z95 * float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else 1.0
    return mean, mean - half, mean + half


def cell(outcomes: Sequence[Outcome]) -> dict[str, float | int | list[float] | None]:
    """All figures of one arm on one task; raises ValueError where there are no outcomes.

    ``bytes_share`` is None where the arm patched nothing (there was no chunk to patch).
    """
    n = _count(outcomes)
    right = sum(o.answer == o.truth for o in outcomes)
    kls, base_kls = [o.kl for o in outcomes], [o.base_kl for o in outcomes]
    recovered, flips = flip_recover(outcomes)
    delta, low, high = paired_difference(outcomes)
    over = sum(o.over for o in outcomes)
    return {
        "n": n,
        "accuracy": right / n,
        "ci95": list(wilson(right, n)),
        "kl": math.fsum(kls) / n,
        "kl_p99": float(np.quantile(kls, 0.99)),
        "eta": eta(kls, base_kls),
        "flip_recover": recovered,
        "harm_rate": harm_rate(outcomes),
        "bytes_share": sum(o.stored for o in outcomes) / over if over else None,
        "flips": flips,
        "delta": delta,
        "delta_ci95": [low, high],
        "reference_accuracy": sum(o.reference == o.truth for o in outcomes) / n,
        "base_accuracy": sum(o.base == o.truth for o in outcomes) / n,
        "base_kl": math.fsum(base_kls) / n,
    }


def _count(outcomes: Sequence[Outcome]) -> int:
    if not outcomes:
        raise ValueError("outcomes must hold at least one sample, got none")
    return len(outcomes)
