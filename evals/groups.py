"""Figures by groups of items: number of chunks, length and depth of the needle, layer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxwin.evals.benchmarks import mm_niah
from ctxwin.evals.samples import Sample

LENGTHS = (0, *mm_niah.LENGTHS)
"""Lower edges in tokens of MM-NIAH's bins of context length, and the bin under 1,000 that its own figure leaves out."""
DEPTH = 1 / mm_niah.DEPTHS
"""Width of a bin of the needle's depth, 0 (front) to 1 (end)."""


def by_frames(rows: Sequence[Sample], scores: Sequence[float | None]) -> dict[str, dict[str, Any]]:
    """Accuracy by number of placed chunks; None where no answer could be scored."""
    found: dict[int, list[float | None]] = defaultdict(list)
    for row, score in zip(rows, scores, strict=True):
        found[row.frames].append(score)
    return {str(frames): {"n": len(some), "accuracy": _mean(some)} for frames, some in sorted(found.items())}


def by_layer(rows: Sequence[Sample]) -> list[float] | None:
    """Mean of what an arm left for each layer of the model, first to last; None where it left nothing.

    Raises ValueError where samples disagree about the number of layers.
    """
    held = [row.by_layer for row in rows if row.by_layer]
    if not held:
        return None
    if len({len(x) for x in held}) != 1:
        raise ValueError(f"samples of a run must be of one model's layers, got {sorted({len(x) for x in held})}")
    return [float(x) for x in np.mean(np.asarray(held, dtype=np.float64), axis=0)]


def grid(rows: Sequence[Sample], scores: Sequence[float | None]) -> list[dict[str, Any]] | None:
    """Accuracy by context length and depth of the needle (MM-NIAH's grid); None where items have neither.

    Each cell says its ``length`` (lower edge), ``depth`` (number of the bin) and ``n``; cells without items are left out.
    Needles in several places count at their mean depth, as in the official figure.
    """
    found: dict[tuple[int, int], list[float | None]] = defaultdict(list)
    for row, score in zip(rows, scores, strict=True):
        length, depth = row.meta.get("context_length"), row.meta.get("placed_depth")
        if length is None or depth is None or depth == []:
            continue
        # Divided, not multiplied, so that edges fall as they do in the official figure.
        at = int(min(float(np.mean(depth)), 0.99) / DEPTH)
        found[LENGTHS[bisect_right(LENGTHS, length) - 1], at].append(score)
    return [
        {"length": length, "depth": depth, "n": len(some), "accuracy": _mean(some)}
        for (length, depth), some in sorted(found.items())
    ] or None


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [s for s in scores if s is not None]
    return math.fsum(known) / len(known) if known else None
