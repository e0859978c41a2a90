"""MM-NIAH's rule, oddity by oddity. Expected values follow the official script's text; none is computed by our code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxwin_evals.benchmarks import benchmark
from ctxwin_evals.benchmarks.mm_niah import cell_of, score_answer
from ctxwin_evals.benchmarks.vqa import normalise, strip_punctuation

TASK = benchmark("mm-niah/retrieval-text")


@pytest.mark.parametrize(
    ("answer", "target", "score"),
    [
        ("B", 1, 1),
        ("b", 1, 1),
        (" B.\n", 1, 1),
        ("**B**", 1, 1),
        ("The answer is B.", 1, 1),
        ("B. A red star", 1, 1),  # cut at the first full stop
        ("1", 1, 1),  # digits are an index
        ("01.", 1, 1),
        ("2", 1, 0),
        ("A", 1, 0),
        ("(B)", 1, 0),  # three characters
        ("B,", 1, 0),  # the comma only goes where a full stop is
        ("B,.x", 1, 1),
        ("B) red", 1, 0),
        ("none", 1, 0),
        ("", 0, 0),
        ("²", 1, 0),
        ("The camera is moving left", 0, 1),
        ("I think the camera is moving right", 1, 1),
        ("The camera is moving left", 1, 0),
    ],
)
def test_choice(answer: str, target: int, score: float) -> None:
    assert score_answer(answer, target).score == score


def test_choice_predictions_agree_by_meaning() -> None:
    assert {score_answer(a, 0).prediction for a in ("B", "b.", "1", "**b**", "The answer is B")} == {"B"}
    assert score_answer("no idea", 0).prediction == ""


@pytest.mark.parametrize(
    ("answer", "target", "score"),
    [
        ("[1, 2, 3]", [1, 2, 3], 1),
        ("```json\n[1, 2, 3]\n```", [1, 2, 3], 1),
        ("json [1, 2, 9]", [1, 2, 3], 2 / 3),
        ("[1]", [1, 2, 3], 1 / 3),
        ("[2, 1]", [1, 2], 0),  # place by place
        ("[1, 2, 3, 4, 5]", [1, 2], 1),  # what is too much costs nothing
        ("[1.0, 2]", [1, 2], 1),
        ('["1", 2]', [1, 2], 0.5),
        ('{"a": [1], "b": [2]}', [1, 2], 1),
        ('{"a": 1, "b": 2}', [1, 2], 0),
        ("{}", [1], 0),
        ("`[1]`", [1], 0),  # single backticks stay
        ("1", [1], 0),
        ("1, 2", [1, 2], 0),
        ("[1, 2].", [1, 2], 1),
        ("[" * 3000, [1], 0),
        ("", [1], 0),
    ],
)
def test_counting(answer: str, target: list[int], score: float) -> None:
    assert score_answer(answer, target).score == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "target", "score"),
    [
        ("oak", "oak", 1),
        ("It is Oak.", "the oak", 1),
        ("oaks", "oak", 0),  # whole words only
        ("oak-tree", "oak", 1),  # the hyphen becomes a space
        ("two", "2", 1),
        ("2", "two", 1),
        ("dont know", "don't know", 1),
        ("1,000 apples", "1000", 1),
        ("3.5", "3.5", 1),
        ("pine", "oak", 0),
        ("", "oak", 0),
    ],
)
def test_text(answer: str, target: str, score: float) -> None:
    assert score_answer(answer, target).score == score


def test_punctuation_rule() -> None:
    assert strip_punctuation("a-b") == "a b"
    assert strip_punctuation("a- b-c") == "a bc"  # it touches a space once: gone everywhere
    assert strip_punctuation("1,5 a-b") == "15 ab"  # a comma between digits: every mark goes
    assert strip_punctuation("." * 40) == "." * 8  # the first 32 full stops only
    assert strip_punctuation("3.5") == "3.5"
    assert normalise("An  apple\tor the PEAR") == "apple or pear"


def test_counting_targets_may_be_text() -> None:
    task = benchmark("mm-niah/counting-text")
    assert task.score("[4, 2]", "[4, 2]", {}).score == 1


@pytest.mark.parametrize("target", [None, [], True, 1.5])
def test_unknown_targets_are_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="a target must be"):
        score_answer("A", target)


def row(score: float | None, length: int, depth: float | list[float], name: str = "0") -> dict[str, Any]:
    return {"doc_id": name, "score": score, "meta": {"context_length": length, "placed_depth": depth}}


def test_cells() -> None:
    assert cell_of(999, 0.0) == (0, 0)
    assert cell_of(1000, 0.2) == (1, 1)
    assert cell_of(64000, 1.0) == (11, 4)
    assert cell_of(2000, [0.0, 0.5]) == (2, 1)
    assert cell_of(2000, 0.6) == (2, 2)  # 0.6 / 0.2 is a little under 3 in floating point


def test_aggregate_throws_short_contexts_away_and_counts_empty_cells_as_zero() -> None:
    figures = TASK.official([row(1, 500, 0.1), row(1, 1500, 0.1), row(0, 1500, 0.1), row(1, 1500, 0.9)])
    assert figures["mean"] == pytest.approx(3 / 4)
    assert figures["n"] == 4
    assert figures["under_1000"] == 1
    assert figures["empty_cells"] == 53
    assert figures["binned/1k"] == pytest.approx((0.5 + 0 + 0 + 0 + 1) / 5)
    assert figures["binned/64k"] == 0
    assert figures["binned"] == pytest.approx(0.3 / 11)


def test_aggregate_of_a_full_grid_is_the_mean() -> None:
    rows = [
        row(i % 2, length, (d + 0.5) / 5)
        for length in (1000, 2000, 4000, 8000, 12000, 16000, 24000, 32000, 40000, 48000, 70000)
        for d in range(5)
        for i in range(4)
    ]
    figures = TASK.official(rows)
    assert figures["binned"] == figures["mean"] == 0.5
    assert figures["empty_cells"] == figures["under_1000"] == 0


def test_unscored_rows_leave_and_nothing_raises() -> None:
    assert TASK.official([row(None, 1500, 0.1), row(1, 1500, 0.1)])["mean"] == 1


def test_export_writes_official_lines() -> None:
    meta = {
        "context_length": 1500,
        "placed_depth": [0.5],
        "question": "What?\nAnswer the question using a single word or phrase.",
    }
    rows = [{"doc_id": str(i), "answer": " öak \n", "target": "oak", "meta": meta, "score": 1.0} for i in (7, 3)]
    first, second = (json.loads(line) for line in TASK.export(rows).splitlines())
    assert list(first) == ["question_id", "question", "answer", "response", "context_length", "placed_depth"]
    assert first["question_id"] == 7 and second["question_id"] == 3
    assert first["response"] == "öak" and first["placed_depth"] == [0.5]
