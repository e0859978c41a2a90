"""Video-MME's scores: the official script's, and lmms-eval's.

Sources: the official ``eval_your_results.py`` (thanku-all/parse_answer, named by the Video-MME repository at 06c2315;
arXiv 2405.21075) and lmms-eval at 75571cf (``tasks/_task_utils/mcq_extract.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

LETTERS = "ABCD"
DURATIONS = ("short", "medium", "long")
VIDEOS = 300
"""Videos of each duration in the whole data set."""

# Two commas are missing in the source, so that two prefixes are glued together and never match; "Best answer: C" is read
# as B, therefore.
_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
    "Answer:",
    "Option:",
    "The correct answer",
    "The correct option",
)


def extract_official(answer: str) -> str:
    """The first letter A-D anywhere once known prefixes are gone; "" where there is none."""
    text = answer.strip()
    for prefix in _PREFIXES:
        text = text.replace(prefix, "")
    found = re.search("[ABCD]", text)
    return found[0] if found else ""


_PHRASES = (
    *(
        f"{start} is"
        for start in (
            "the answer", "answer", "the correct answer", "correct answer", "the best answer", "best answer",
            "the correct option", "correct option", "the best option", "best option", "the choice", "choice",
            "the correct choice", "correct choice",
        )
    ),
    "i choose", "i select", "i pick", "my answer is", "my choice is",
    "옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは",
)  # fmt: skip
_FORMS = (("({})", 6), ("{}.", 5), ("{}:", 4), ("{})", 3), ("{} ", 2))


def extract_lmms_eval(answer: str) -> str:
    """The letter in the most telling form: alone at the start or end, behind a phrase, in brackets, before a mark.

    Among equals the later one wins. A phrase counts for every letter that occurs behind it.
    """
    text = answer.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    bare = text.strip()
    if not bare:
        return ""
    text, lower = f" {text} ", f" {text} ".lower()
    found: list[tuple[int, int, str]] = []
    for form, weight in _FORMS:
        found += [(weight, text.rfind(form.format(c)), c) for c in LETTERS if form.format(c) in text]
    for phrase in _PHRASES:
        at = lower.find(phrase)
        if at >= 0:
            places = ((text.find(c, at + len(phrase)), c) for c in LETTERS)
            found += [(7, place, c) for place, c in places if place >= 0]
    for c in LETTERS:
        if bare.startswith(c) and not bare[1:2].isalpha():
            found.append((10, 0, c))
        if bare.endswith(c) and not bare[-2:-1].isalpha():
            found.append((9, len(text) - 1, c))
    if not found:
        found = [(0, text.rfind(c), c) for c in LETTERS if c in text]
    return max(found, key=lambda one: one[:2])[2] if found else ""


def aggregate(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Accuracies overall and by duration, domain, sub-category and task type.

    ``accuracy...`` is the official one: answers without a letter leave the denominator, and a group of which none has a
    letter counts 0. ``accuracy_all`` keeps them as wrong. ``lmms_eval...`` is lmms-eval's, which keeps them as well and reads
    answers by another rule; it needs the rows' ``answer`` and is left out where one has none. ``unscored`` of ``n``
    answers had no letter. ``complete`` is 1 where every duration has the 300 videos that the official script insists on;
    ``videos/<duration>`` says how many there are, ``without_subtitles`` how many questions should have had some.

    Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("rows must hold at least one answer, got none")
    answered = all(isinstance(row.get("answer"), str) for row in rows)
    groups: dict[str, list[Mapping[str, Any]]] = {"": list(rows)}
    for row in rows:
        for by in ("duration", "domain", "sub_category", "task_type"):
            groups.setdefault(f"/{by}/{row['meta'][by]}", []).append(row)
    made: dict[str, float] = {}
    for name, some in groups.items():
        scores = [row["score"] for row in some if row["score"] is not None]
        made[f"accuracy{name}"] = sum(scores) / len(scores) if scores else 0.0
        if answered:
            made[f"lmms_eval{name}"] = sum(extract_lmms_eval(r["answer"]) == r["target"] for r in some) / len(some)
    videos = {d: {row["meta"]["videoID"] for row in rows if row["meta"]["duration"] == d} for d in DURATIONS}
    return {
        **made,
        "accuracy_all": sum(row["score"] or 0.0 for row in rows) / len(rows),
        "n": float(len(rows)),
        "unscored": float(sum(row["score"] is None for row in rows)),
        "complete": float(all(len(found) == VIDEOS for found in videos.values())),
        **{f"videos/{d}": float(len(found)) for d, found in videos.items()},
        "without_subtitles": float(sum(row["meta"].get("subtitles") == "missing" for row in rows)),
    }
