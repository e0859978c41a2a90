"""EgoSchema: the repository's JSON and the hub's parquet are one data set; answers go out as the official server takes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from benchmark_data import write_egoschema
from benchmark_data.reading import as_text
from ctxwin_evals.benchmarks import DataOptions, Missing, benchmark
from ctxwin_evals.benchmarks.egoschema import read_answer

OPTIONS = ["C reads", "C cooks.", "C reads and cooks", "C. A. sleeps", "C walks"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Generated once; each test damages a copy."""
    root = tmp_path_factory.mktemp("ego")
    return root, write_egoschema(root, 4, seed=2, image_size=56)


@pytest.fixture
def ego(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "ego"))


def test_both_layouts_are_one_data_set(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    root, rows = whole
    hub = tmp_path / "hub"
    assert write_egoschema(hub, 4, seed=2, hub=True, image_size=56) == rows
    for split, wanted in (("subset", rows[::2]), ("full", rows)):
        ours, theirs = (
            benchmark("egoschema", DataOptions(data=str(data), split=split, frames=2)).items() for data in (root, hub)
        )
        assert [i.doc_id for i in ours] == [i.doc_id for i in theirs] == [r["q_uid"] for r in wanted]
        targets = [r["answer"] if r in rows[::2] else None for r in wanted]
        assert [i.target for i in ours] == [i.target for i in theirs] == targets
        assert [(i.query, i.digest) for i in ours] == [(i.query, i.digest) for i in theirs]


def test_the_prompt_is_that_of_lmms_eval(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    root, rows = whole
    item = benchmark("egoschema", DataOptions(data=str(root), frames=2, frame_rule="lmms-eval")).items(1)[0]
    choices = "\n".join(f"{letter}. {rows[0][f'option {i}']}" for i, letter in enumerate("ABCDE"))
    said = f"<image><image>{rows[0]['question']}\n{choices}\nAnswer with the option's letter from the given choices directly."
    assert as_text(item.load(), item.query) == said
    assert item.meta["frame_indices"] == [0, 15] and item.max_tokens == 16


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        ("B", 1), ("B.", 1), (" b ", 1), ("(B)", 1), ("C cooks", 1), ("B. C cooks.", 1), ("C reads and cooks.", 2),
        ("d. C. A. sleeps", 3), ("C", 2), ("", -1), ("B and C", -1), ("F", -1), ("C reads or walks", -1),
        ("B)", 1), ("[B]", 1), ("\uff08B\uff09", 1), ("(B).", 1), ("(B) C cooks", 1), ("B) C cooks.", 1), ("B. C walks", -1),
        ("The answer is B.", -1), ("(B", 1), ("E. C walks.", 4),
    ],
)  # fmt: skip
def test_answers_are_letters_or_choices(answer: str, index: int) -> None:
    assert read_answer(answer, OPTIONS) == index


def test_answers_that_are_not_public_are_unscored_and_go_to_the_server(
    whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    root, rows = whole
    task = benchmark("egoschema", DataOptions(data=str(root), split="full"))
    scored = []
    for item, row in zip(task.items(), rows, strict=True):
        right = task.score("ABCDE"[row["answer"]], item.target, item.meta)
        assert right.score == (None if item.target is None else 1.0) and right.prediction == "ABCDE"[row["answer"]]
        scored.append({"score": right.score, "prediction": right.prediction})
    assert task.official([*scored, {"score": 0.0, "prediction": ""}]) == {"accuracy": 2 / 3, "n": 3.0, "unread": 1.0}
    assert task.official(scored[1::2]) == {}
    answers = ("A", "D.", "none", "e")
    lines = [{"doc_id": i.doc_id, "meta": i.meta, "answer": a} for i, a in zip(task.items(), answers, strict=True)]
    found = json.loads(task.export(lines))
    assert found == dict(zip([r["q_uid"] for r in rows], (0, 3, -1, 4), strict=True))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda row: row.pop("q_uid"), "question 0: q_uid must be given"),
        (lambda row: row.update(q_uid="../x"), "q_uid must be a plain name, got '../x'"),
        (lambda row: row.pop("question"), "question 0: question must be given"),
        (lambda row: row.pop("option 3"), "options must have at least 5 items"),
        (lambda row: row.update({"option 1": 7}), "options.1 must be a valid string, got 7"),
    ],
)
def test_an_odd_question_is_counted_and_named(ego: Path, how: Callable[[dict[str, Any]], Any], message: str) -> None:
    path = ego / "questions.json"
    rows = json.loads(path.read_text())
    how(rows[0])
    path.write_text(json.dumps(rows))
    public = json.loads((ego / "subset_answers.json").read_text())
    (ego / "subset_answers.json").write_text(json.dumps({**public, "../x": 1}))
    task = benchmark("egoschema", DataOptions(data=str(ego)))
    assert [item.index for item in task.items()] == [1]
    (odd,) = task.odd
    assert message in odd and str(path) in odd


def test_an_odd_row_of_the_hub_and_answers_out_of_range(ego: Path, tmp_path: Path) -> None:
    answers = json.loads((ego / "subset_answers.json").read_text())
    (ego / "subset_answers.json").write_text(json.dumps({uid: 5 - 3 * i for i, uid in enumerate(answers)}))
    task = benchmark("egoschema", DataOptions(data=str(ego)))
    assert [item.target for item in task.items()] == [2] and "answer must be" in task.odd[0]
    hub = tmp_path / "hub"
    write_egoschema(hub, 3, hub=True, image_size=56)
    path = hub / "Subset" / "test-00000-of-00001.parquet"
    table = pq.read_table(path).to_pylist()
    changes: list[dict[str, Any]] = [{"answer": None}, {"option": None}, {"video_idx": None}]
    for change, said in zip(changes, ("must have its answer", "options", "q_uid"), strict=True):
        pq.write_table(pa.Table.from_pylist([{**table[0], **change}, table[1]], pq.read_schema(path)), path)
        task = benchmark("egoschema", DataOptions(data=str(hub)))
        assert [item.index for item in task.items()] == [1] and said in task.odd[0] and "row 0" in task.odd[0]


def test_missing_files_are_named(ego: Path) -> None:
    first = json.loads((ego / "questions.json").read_text())[0]["q_uid"]
    (ego / "videos" / f"{first}.mp4").rename(ego / "videos" / f"{first}.MP4")
    assert len(benchmark("egoschema", DataOptions(data=str(ego))).items()) == 2
    (ego / "videos" / f"{first}.MP4").unlink()
    with pytest.raises(Missing, match=rf"question 0 must find its video, got none of videos/{first}\.mp4"):
        benchmark("egoschema", DataOptions(data=str(ego))).items()
    task = benchmark("egoschema", DataOptions(data=str(ego), skip_missing=True))
    assert len(task.items()) == 1 and task.skipped == (first,)
    (ego / "subset_answers.json").unlink()
    with pytest.raises(ValueError, match=r"got no file .*subset_answers\.json"):
        benchmark("egoschema", DataOptions(data=str(ego))).items()
