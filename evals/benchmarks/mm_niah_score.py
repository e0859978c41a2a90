"""MM-NIAH's scores: one answer, and the aggregate over lengths and depths.

Source: ``calculate_scores.py`` and ``eval_internvl.py`` of MM-NIAH (arXiv 2406.07230; commit 2fd03dd).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ctxwin.evals.benchmarks.vqa import holds_word, normalise
from ctxwin.evals.items import Scored

LENGTHS = (1000, 2000, 4000, 8000, 12000, 16000, 24000, 32000, 40000, 48000, 64000)
"""Lower bounds of the length bins; a context shorter than the first is in none of them."""
DEPTHS = 5
_CAMERA = {"the camera is moving left": "a", "the camera is moving right": "b"}


def score_answer(answer: str, target: Any) -> Scored:
    """One answer under the official rule; the target's type decides which one.

    int (a choice, 0-based): an answer of digits is an index. Else lower case, "the answer is" and ``*`` dropped, cut at the
    first full stop, and what is left must be one character, so that "(B)" and "B," score 0. list: JSON, fenced or not,
    compared place by place, over the length of the truth; the lists of a JSON object are put together. str: the normalised
    truth as a whole word inside the normalised answer.

    Raises ValueError for a target of another type.
    """
    response = answer.strip().strip(".")
    if isinstance(target, bool) or not isinstance(target, int | list | str) or target == []:
        raise ValueError(f"a target must be an int, a str or a list that is not empty, got {target!r}")
    if isinstance(target, int):
        return _choice(response, target)
    if isinstance(target, list):
        return _counts(response, target)
    read = normalise(response)
    return Scored(float(holds_word(read, normalise(target))), read)


def _choice(response: str, target: int) -> Scored:
    if response.isdecimal():
        return Scored(float(int(response) == target), _letter(int(response)))
    text = response.lower().replace("the answer is", "").replace("*", "")
    if "." in text:
        text = text.split(".")[0].replace(",", "")
    text = text.strip()
    text = next((letter for phrase, letter in _CAMERA.items() if phrase in text), text)
    if len(text) != 1:
        return Scored(0.0, "")
    return Scored(float(ord(text) - ord("a") == target), text.upper())


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index)


def _counts(response: str, target: Sequence[Any]) -> Scored:
    try:
        found = json.loads(response.replace("json", "").replace("```", "").strip())
    except (ValueError, RecursionError):
        return Scored(0.0, "")
    if isinstance(found, dict) and all(isinstance(v, list) for v in found.values()):
        found = [count for counts in found.values() for count in counts]
    if not isinstance(found, list):
        return Scored(0.0, "")
    matched = sum(a == b for a, b in zip(found, target, strict=False))
    return Scored(matched / len(target), json.dumps(found))


def depth_of(placed: float | Sequence[float]) -> float:
    """The mean depth of the needles, in 0..1."""
    return float(placed) if isinstance(placed, int | float) else sum(placed) / len(placed)


def cell_of(length: int, placed: float | Sequence[float]) -> tuple[int, int]:
    """(length bin, depth bin) of a context; length bin 0 is under 1,000 tokens.

    The depth bin is ``int(depth / 0.2)`` in floating point, as in the source, so that 0.6 falls into the third bin.
    """
    depth = depth_of(placed)
    return sum(length >= bound for bound in LENGTHS), int((0.99 if depth == 1.0 else depth) / 0.2)


def aggregate(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The official figures of one task, and what they leave out.

    ``binned``: mean over 11 length bins of the mean over 5 depth bins, ``binned/1k`` ...: each length's. Two traps are
    part of the rule: contexts under 1,000 tokens are thrown away (``under_1000`` says how many), and a cell without items
    counts as 0 (``empty_cells`` of 55 says how many). ``mean``: plain mean over all ``n`` answers.

    Raises ValueError where no row is scored.
    """
    totals = [[0] * DEPTHS for _ in range(len(LENGTHS) + 1)]
    sums = [[0.0] * DEPTHS for _ in range(len(LENGTHS) + 1)]
    scores = [float(row["score"]) for row in rows if row["score"] is not None]
    if not scores:
        raise ValueError("rows must hold at least one scored answer, got none")
    for row in rows:
        if row["score"] is not None:
            at, depth = cell_of(row["meta"]["context_length"], row["meta"]["placed_depth"])
            totals[at][depth] += 1
            sums[at][depth] += row["score"]
    by_length = [
        sum(s / t if t else 0.0 for s, t in zip(sums[i], totals[i], strict=True)) / DEPTHS
        for i in range(1, len(LENGTHS) + 1)
    ]
    return {
        "mean": sum(scores) / len(scores),
        "n": float(len(scores)),
        "binned": sum(by_length) / len(by_length),
        "empty_cells": float(sum(t == 0 for line in totals[1:] for t in line)),
        "under_1000": float(sum(totals[0])),
        **{f"binned/{b // 1000}k": round(v, 6) for b, v in zip(LENGTHS, by_length, strict=True)},
    }
