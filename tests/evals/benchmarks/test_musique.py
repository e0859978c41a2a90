"""MuSiQue: paragraphs as chunks, answers and paragraphs scored as the official script does, predictions in its form."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_data import write_musique
from benchmark_data.reading import as_text
from ctxwin_evals.benchmarks import DataOptions, benchmark
from ctxwin_evals.benchmarks.musique import normalise, read_answer, support_f1, word_f1


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    return tmp_path, write_musique(tmp_path, 4, seed=1)["dev"]


def test_every_paragraph_is_a_chunk(data: tuple[Path, list[dict[str, Any]]]) -> None:
    root, rows = data
    (root / "data").mkdir()
    for path in root.glob("*.jsonl"):
        path.rename(root / "data" / path.name)  # as the official archive unpacks
    for name in ("musique", "musique/supporting"):
        for item, row in zip(benchmark(name, DataOptions(data=str(root))).items(), rows, strict=True):
            shown = [p for p in row["paragraphs"] if p["is_supporting"] or name == "musique"]
            text = "".join(f"[{p['idx']}] {p['title']}\n{p['paragraph_text']}\n\n" for p in shown)
            said = as_text(item.load(), item.query)
            assert said.startswith(f"{text}Answer the question") and said.endswith(
                f"Question: {row['question']}\nAnswer:"
            )
            assert item.count == len(shown) == len(item.load())
            support = {p["idx"] for p in row["paragraphs"] if p["is_supporting"]}
            assert {shown[i]["idx"] for i in item.meta["support_chunks"]} == support == set(item.target["support"])
            assert item.asked is not None and row["answer"] in shown[item.asked]["paragraph_text"]
            assert item.meta["hops"] == len(support)
    assert len(benchmark("musique", DataOptions(data=str(root), split="train")).items()) == 4


@pytest.mark.parametrize(
    ("text", "answer", "named"),
    [
        ("Altmar\nParagraphs: 3, 8", "Altmar", [3, 8]),
        ("Answer: Altmar.\n\nparagraph: 3 and 3", "Altmar.", [3, 3]),
        ("Altmar: a town", "Altmar: a town", []),
        ("\n Altmar \nbecause", "Altmar", []),
        ("Paragraphs: 1", "", [1]),
        ("", "", []),
    ],
)
def test_an_answer_is_its_first_line_and_the_paragraphs_named(text: str, answer: str, named: list[int]) -> None:
    assert read_answer(text) == (answer, named)


WORDS = st.lists(st.sampled_from(["the", "An", "Bay", "bay,", "of", "Falun", "a.", "!"]), max_size=5).map(" ".join)


@given(WORDS, WORDS, st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_scores_are_the_official_ones(truth: str, text: str, named: set[int], support: set[int]) -> None:
    """Precision and recall, as ``metrics/answer.py`` and ``metrics/support.py`` count them."""

    def f1(same: int, ours: int, theirs: int) -> float:
        precision, recall = (same / n if n else 0.0 for n in (ours, theirs))
        return 2 * precision * recall / (precision + recall) if precision + recall else 0.0

    a, b = ([w for w in re.sub(r"[,.!]", "", t.lower()).split() if w not in ("a", "an", "the")] for t in (truth, text))
    assert normalise(text).split() == b
    expected = f1((Counter(a) & Counter(b)).total(), len(b), len(a)) if a and b else float(a == b)
    assert word_f1(truth, text) == pytest.approx(expected)
    both = f1(len(named & support), len(named), len(support)) if named or support else 1.0
    assert support_f1([*named, *named], [*support]) == pytest.approx(both)


def test_scores_figures_and_predictions(data: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    root, rows = data
    task = benchmark("musique", DataOptions(data=str(root)))
    items = task.items()
    alias = items[1].target["answers"][1]
    support = ", ".join(map(str, items[1].target["support"]))
    answers = ["no idea", f"{alias.upper()}!\nParagraphs: {support}", "", rows[3]["answer"]]
    scored = [task.score(a, i.target, i.meta) for a, i in zip(answers, items, strict=True)]
    assert [s.score for s in scored] == [0.0, 1.0, 0.0, 1.0]
    assert scored[1].metrics == {"exact_match": 1.0, "support_f1": 1.0} and scored[3].metrics["support_f1"] == 0.0
    figures = task.official([{"score": s.score, **s.metrics} for s in scored])
    assert figures == {"answer_f1": 0.5, "answer_em": 0.5, "support_f1": 0.25, "n": 4.0}
    lines = [{"doc_id": i.doc_id, "answer": a} for i, a in zip(items, answers, strict=True)]
    made = [json.loads(line) for line in task.export(lines).splitlines()]
    assert [m["id"] for m in made] == [r["id"] for r in rows], "the official script goes by the order of the lines"
    assert made[1] == {
        "id": rows[1]["id"], "predicted_answer": f"{alias.upper()}!", "predicted_support_idxs": items[1].target["support"],
        "predicted_answerable": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda row: row.pop("answer_aliases"), "answer_aliases must be given"),
        (lambda row: row.update(paragraphs=[]), "paragraphs must have at least 1 item"),
        (lambda row: row["paragraphs"][0].pop("title"), "title must be given"),
        (lambda row: [p.update(is_supporting=False) for p in row["paragraphs"]], "some must be supporting, got []"),
        (lambda row: row["paragraphs"][0].update(idx=1), "paragraphs must have an idx each"),
        (lambda row: row.update(answer=None), "answer must be a valid string, got None"),
    ],
)
def test_an_odd_row_is_counted_and_named(
    data: tuple[Path, list[dict[str, Any]]], how: Callable[[dict[str, Any]], Any], message: str
) -> None:
    root, rows = data
    how(rows[1])
    path = root / "musique_ans_v1.0_dev.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = benchmark("musique", DataOptions(data=str(root)))
    assert [item.index for item in task.items()] == [0, 2, 3]
    assert message in task.odd[0] and f"{path}:2" in task.odd[0]
