"""MileBench's multiple-choice rule, oddity by oddity."""

from __future__ import annotations

import json

import pytest

from ctxwin_evals.benchmarks import benchmark
from ctxwin_evals.benchmarks.milebench import extract, letter_of, process, quantity

ACTIONS = ("Opened the door.", "Put down the cup/glass.", "Took the bag.", "Sat at 1.5 m")

TASK = benchmark("milebench/StateChange")


@pytest.mark.parametrize(
    ("answer", "letters"),
    [
        ("B. Put down the cup/glass.", "B"),
        ("Put down the cup/glass.", "B"),
        ("They took the bag.", "C"),
        ("tookthebag", "C"),  # spaces are ignored
        ("C", "C"),
        ("c.", "C"),
        ("(A)", "A"),
        ("", "C"),  # an empty answer is read as C
        ("?!", "C"),
        ("the answer is b", "AB"),  # every letter that names a choice
        ("D. Sat at 1.5 m", "D"),
        ("Sat at 1.5 m", "AA"),  # a full stop inside: found, but taken for none of them
        ("AB", "AB"),
        ("xyz", ""),
    ],
)
def test_extract(answer: str, letters: str) -> None:
    assert extract(answer, ACTIONS) == letters


def test_letter_with_choice_is_looked_for_inside_words() -> None:
    assert extract("banana pear", ["pear", "fig"]) == "A"


def test_process_keeps_articles_and_numbers() -> None:
    assert process(' "The two cups."\n') == "the two cups"
    assert [letter_of(i) for i in (0, 25, 26, 52)] == ["A", "Z", "AA", "BA"]


def test_score_takes_the_first_of_equal_choices() -> None:
    task = benchmark("milebench/StateChange")
    target = {"response": "a cat!", "choice_list": ["A cat.", "a cat", "A dog."]}
    assert task.score("A", target, {}).score == 1
    assert task.score("B", target, {}).score == 0
    with pytest.raises(ValueError, match="one of the choices"):
        task.score("A", {"response": "a bird", "choice_list": ["A cat."]}, {})


def test_aggregate_by_number_of_pictures() -> None:
    assert [quantity(n) for n in (5, 6, 31, 32)] == ["few", "medium", "medium", "many"]
    rows = [{"score": s, "meta": {"num_images": n}} for s, n in ((1.0, 2), (0.0, 5), (1.0, 6))]
    figures = TASK.official(rows)
    assert figures["accuracy"] == pytest.approx(2 / 3)
    assert (figures["accuracy/few"], figures["accuracy/medium"], figures["accuracy/many"]) == (0.5, 1.0, 0.0)
    assert (figures["n/few"], figures["n/many"]) == (2, 0)


def test_export() -> None:
    row = {
        "doc_id": "3",
        "answer": "A",
        "target": {"response": "a cat", "choice_list": ["a cat", "a dog"]},
        "meta": {"sample_id": 3, "images": ["x.png"]},
    }
    assert json.loads(TASK.export([row])) == [
        {"sample_id": 3, "image": ["x.png"], "gt_response": "a cat", "pred_response": "A"}
    ]
