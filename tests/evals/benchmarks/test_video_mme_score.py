"""Video-MME's official rule and lmms-eval's, oddity by oddity."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxwin_evals.benchmarks import benchmark
from ctxwin_evals.benchmarks.video_mme import extract_lmms_eval, extract_official

TASK = benchmark("video-mme")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("C", "C"),
        ("C. Berries.", "C"),
        ("The best answer is: D", "D"),
        ("Answer: B", "B"),
        ("The correct option is A.", "A"),
        ("(B)", "B"),
        ("Both are wrong, so C", "B"),  # the first capital anywhere
        ("Best answer: C", "B"),  # a comma is missing in the source: this prefix is never stripped
        ("The best option is C", "C"),
        ("a", ""),
        ("", ""),
        ("none of these options fits what is shown in the video at all", ""),
        ("I do not know which of these options is right here, maybe D", "D"),
    ],
)
def test_official_letter(answer: str, letter: str) -> None:
    assert extract_official(answer) == letter


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("C", "C"),
        ("C.", "C"),
        ("Best answer: C", "C"),
        ("The answer is (B).", "B"),
        ("it is not (A): I choose B then", "B"),  # a phrase weighs more than brackets
        ("A is wrong, B is right", "A"),  # a letter alone at the start weighs most
        ("maybe (A), or (D)", "D"),  # of equals the later one
        ("The answer is B. Because of Apples", "A"),  # a phrase counts for every letter behind it, the later wins
        ("Definitely", "D"),  # any letter at all, where nothing else is found
        ("nothing", ""),
        ("...", ""),
    ],
)
def test_lmms_eval_letter(answer: str, letter: str) -> None:
    assert extract_lmms_eval(answer) == letter


def test_an_answer_without_a_letter_is_unscored_not_wrong() -> None:
    task = benchmark("video-mme")
    said = task.score("no idea", "B", {})
    assert said.score is None and said.prediction == ""
    assert said.metrics == {"lmms_eval": 0.0}
    assert task.score("Best answer: C", "C", {}).score == 0.0
    assert task.score("Best answer: C", "C", {}).metrics == {"lmms_eval": 1.0}


def made(
    name: str, answer: str, target: str, video: str = "v0", duration: str = "short", kind: str = "OCR Problems"
) -> dict[str, Any]:
    scored = benchmark("video-mme").score(answer, target, {})
    meta = {
        "video_id": video, "videoID": video, "duration": duration, "domain": "Knowledge", "sub_category": "Law",
        "task_type": kind, "question_id": name, "question": "Q?", "options": ["A. a", "B. b", "C. c", "D. d"],
    }  # fmt: skip
    return {"doc_id": name, "answer": answer, "target": target, "score": scored.score, "meta": meta}


def test_unscored_answers_leave_the_official_denominator_only() -> None:
    rows = [made("1", "A", "A"), made("2", "who knows", "A"), made("3", "B", "A", "v1", "long", "Counting Problem")]
    figures = TASK.official(rows)
    assert figures["accuracy"] == 1 / 2
    assert figures["accuracy_all"] == figures["lmms_eval"] == pytest.approx(1 / 3)
    assert figures["unscored"] == 1 and figures["n"] == 3
    assert figures["accuracy/duration/short"] == 1 and figures["lmms_eval/duration/short"] == 1 / 2
    assert figures["accuracy/duration/long"] == 0
    assert "accuracy/duration/medium" not in figures
    assert figures["accuracy/domain/Knowledge"] == figures["accuracy/sub_category/Law"] == 1 / 2
    assert figures["accuracy/task_type/Counting Problem"] == 0
    assert figures["videos/short"] == figures["videos/long"] == 1 and figures["videos/medium"] == 0
    assert figures["complete"] == 0


def test_complete_needs_300_videos_of_each_duration() -> None:
    rows = [made(f"{d}{i}", "A", "A", f"{d}{i}", d) for d in ("short", "medium", "long") for i in range(300)]
    assert TASK.official(rows)["complete"] == 1
    assert TASK.official(rows[1:])["complete"] == 0


def test_rows_without_answers_have_no_lmms_eval_figure() -> None:
    row = made("1", "A", "A")
    del row["answer"]
    assert "lmms_eval" not in TASK.official([row])


def test_export_groups_questions_by_video() -> None:
    rows = [made("001-1", "A.", "A", "001"), made("002-1", "B", "A", "002", "long"), made("001-2", "x", "C", "001")]
    first, second = json.loads(TASK.export(rows))
    assert list(first) == ["video_id", "duration", "domain", "sub_category", "missing", "questions"]
    assert [q["question_id"] for q in first["questions"]] == ["001-1", "001-2"]
    assert list(first["questions"][0]) == ["question_id", "task_type", "question", "options", "answer", "response"]
    assert first["questions"][0]["response"] == "A." and second["duration"] == "long"
