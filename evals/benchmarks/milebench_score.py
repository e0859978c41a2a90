"""MileBench's score of multiple-choice answers.

Source: ``evaluate.py`` of MileBench (arXiv 2404.18532; commit 9583e1f), whose oddities are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ctxwin.evals.benchmarks.vqa import strip_punctuation
from ctxwin.evals.items import Scored

_SPECIAL = "\\.^$*+?{}[]|()"


def process(text: str) -> str:
    """Lower case, without punctuation and surrounding quotes; articles and numbers stay."""
    text = strip_punctuation(text.replace("\n", " ").replace("\t", " ").strip())
    return text.strip("'").strip('"').strip().lower()


def letter_of(index: int) -> str:
    """A..Z, AA..AZ, BA..; what a choice is called."""
    return chr(ord("A") + index) if index < 26 else ("A" if index < 52 else "B") + chr(ord("A") + index % 26)


def _escape(text: str) -> str:
    return "".join("\\" + c if c in _SPECIAL else c for c in process(text))


def extract(answer: str, choices: Sequence[str]) -> str:
    """The letters an answer is read as.

    Both are processed first (see `process`). An empty answer is read as C. Then, in this order: a letter with its choice
    ("a apples"), anywhere; a choice, spaces ignored (one with a full stop or another sign of regular expressions inside
    is not found this way); an answer of one or two characters that names a choice. Else every letter of the answer that
    names a choice, so that "the answer is b" is read as "AEAEB" among five choices and counts as wrong.
    """
    text = process(answer)
    named = {letter_of(i): process(choice) for i, choice in enumerate(choices)}
    if not text:
        return "C"
    found = re.search("|".join(_escape(f"{letter} {choice}") for letter, choice in named.items()), text, re.S)
    if found:
        return found[0][:1].upper()
    bare = {letter: _escape(choice).replace(" ", "") for letter, choice in named.items()}
    found = re.search("|".join(bare.values()), text.replace(" ", ""), re.S)
    if found:
        for letter, choice in bare.items():
            if found[0].strip() == choice:
                return letter
    if text.upper() in named and len(text) <= 2:
        return text.upper()
    return "".join(c.upper() for c in text if c.upper() in named)


def score_answer(answer: str, response: str, choices: Sequence[str]) -> Scored:
    """Right where the answer is read as the first choice that equals ``response``; ValueError where none does."""
    processed, truth = [process(c) for c in choices], process(response)
    if truth not in processed:
        raise ValueError(f"the response must be one of the choices, got {response!r} and {list(choices)!r}")
    read = extract(answer, choices)
    return Scored(float(read == letter_of(processed.index(truth))), read)


def quantity(pictures: int) -> str:
    """MileBench's level of the number of pictures."""
    return "few" if pictures < 6 else "many" if pictures > 31 else "medium"


def aggregate(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Accuracy, and by the number of pictures: few (under 6), medium, many (over 31); a level without items counts 0.

    Raises ValueError for no rows.
    """
    scores = [(row["score"], quantity(row["meta"]["num_images"])) for row in rows if row["score"] is not None]
    if not scores:
        raise ValueError("rows must hold at least one scored answer, got none")
    made = {"accuracy": sum(s for s, _ in scores) / len(scores), "n": float(len(scores))}
    for level in ("few", "medium", "many"):
        some = [s for s, at in scores if at == level]
        made |= {f"accuracy/{level}": sum(some) / len(some) if some else 0.0, f"n/{level}": float(len(some))}
    return made
