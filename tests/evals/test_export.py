"""`ctxwin eval export`: a run's answers in the files that the data sets' own scripts read, by what these scripts ask of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ctxwin.cli.main import app
from ctxwin_evals.benchmarks.milebench import process
from ctxwin_evals.report.tables import official_table, read_runs
from ctxwin_evals.samples import Sample, open_samples, read_samples
from ctxwin_evals.score import scores

NIAH = {"question": "How many?", "context_length": 1200, "placed_depth": [0.2, 0.5], "split": "val"}
MILE = {"sample_id": 0, "num_images": 1, "images": ["a.png"], "split": "test"}
CHOICES = {"response": "Red.", "choice_list": ["red", "blue"]}
HOPS = {"answers": ["red"], "support": [0]}
MME = {
    "video_id": "001", "videoID": "abc", "duration": "short", "domain": "Film", "sub_category": "Drama",
    "question_id": "001-1", "task_type": "Counting", "question": "Who?", "options": ["A. x", "B. y", "C. z", "D. w"],
}  # fmt: skip


def sample(task: str, arm: str, index: int, answer: str, target: Any, meta: dict[str, Any], **more: Any) -> Sample:
    doc = meta.get("question_id") or str(index)
    return Sample(
        task=task, arm=arm, index=index, doc_id=doc, cluster="c", case="d", frames=1, tokens=9, placed=1, question="?",
        target=target, meta=meta, answer=answer, reference="" if more else f" {target}", **more,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with open_samples(tmp_path / "run", {"format": 3, "name": "Qwen VL", "model": "0" * 64, "tasks": {}}) as samples:
        samples.add(
            [
                sample("mm-niah/counting-text", "blind", 0, " [1, 2] ", [1, 2], NIAH),
                sample("mm-niah/counting-text", "blind", 1, "", [3], NIAH, unscored="too long"),
                sample("mm-niah/counting-text", "patched:8", 0, "[9]", [1, 2], NIAH),
                sample("video-mme", "blind", 0, "B.", "B", MME),
                sample(
                    "video-mme", "blind", 1, "", "A", {**MME, "video_id": "002", "question_id": "002-1"}, unscored="-"
                ),
                sample("milebench/StateChange", "blind", 0, "A", CHOICES, MILE),
                sample("milebench/StateChange", "blind", 1, "", CHOICES, {**MILE, "sample_id": 1}, unscored="too long"),
                sample(
                    "musique", "blind", 1, "red\nParagraphs: 0, 7", HOPS, {}
                ),  # a run continued may add them in any order
                sample("musique", "blind", 0, "", HOPS, {}, unscored="too long"),
                sample("musique", "patched:8", 0, "blue", HOPS, {}),
                sample("egoschema", "blind", 0, "(B)", 1, {"options": ["a", "b", "c", "d", "e"]}),
                sample("mmdu", "blind", 0, "red", "red", {"turn": 1, "images": []}),
                sample("tiny/multi_hop", "blind", 0, "red", "red", {}),
            ]
        )
    return tmp_path / "run"


def exported(run: Path, output: Path, arm: str = "blind") -> dict[str, Path]:
    result = CliRunner().invoke(app, ["eval", "export", str(run), "--arm", arm, "--output", str(output), "--json"])
    assert result.exit_code == 0, result.output
    return {task: Path(path) for task, path in json.loads(result.stdout)["files"].items()}


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_mm_niah_reads_every_file_of_a_folder(run: Path) -> None:
    """Of a name, what follows the last underscore is the task with its split; lines have a length, a depth and two answers."""
    file = exported(run, run)["mm-niah/counting-text"]
    assert list(file.parent.iterdir()) == [file]
    model, _, task = file.name.removesuffix(".jsonl").rpartition("_")
    assert (model, task) == ("Qwen_VL_blind", "counting-text-val")
    for line, counts in zip(json_lines(file), ([1, 2], [3]), strict=True):
        assert line["answer"] == counts and isinstance(line["response"], str)
        assert (
            isinstance(line["context_length"], int) and 0 <= sum(line["placed_depth"]) / len(line["placed_depth"]) <= 1
        )
    assert [line["response"] for line in json_lines(file)] == ["[1, 2]", ""]


def test_video_mme_counts_the_videos(run: Path, tmp_path: Path) -> None:
    """300 of each duration: one whose question could not be served is among them, and an answer without a letter is left out."""
    videos = json.loads(exported(run, tmp_path)["video-mme"].read_text())
    assert [(video["video_id"], video["missing"], video["duration"]) for video in videos] == [
        ("001", False, "short"), ("002", False, "short"),
    ]  # fmt: skip
    assert all(video.keys() >= {"domain", "sub_category", "questions"} for video in videos)
    ((first,), (second,)) = [video["questions"] for video in videos]
    assert (first["answer"], first["response"], first["question_id"]) == ("B", "B.", "001-1")
    assert (second["answer"], second["response"], second["task_type"]) == ("A", "", "Counting")


def test_milebench_looks_into_a_folder_of_the_model_and_the_set(run: Path, tmp_path: Path) -> None:
    """It wants as many predictions as samples, by whole numbers, and the truth among the choices once both are read."""
    file = exported(run, tmp_path)["milebench/StateChange"]
    assert file == tmp_path / "Qwen_VL_blind" / "StateChange" / "pred.json"
    rows = json.loads(file.read_text())
    assert [(row["sample_id"], row["pred_response"]) for row in rows] == [(0, "A"), (1, "")]
    assert all(process(row["gt_response"]) in CHOICES["choice_list"] and row["image"] for row in rows)


def test_musique_reads_its_data_and_the_predictions_line_by_line(run: Path, tmp_path: Path) -> None:
    lines = json_lines(exported(run, tmp_path)["musique"])
    assert lines == [
        {"id": "0", "predicted_answer": "", "predicted_support_idxs": [], "predicted_answerable": True},
        {"id": "1", "predicted_answer": "red", "predicted_support_idxs": [0, 7], "predicted_answerable": True},
    ]


def test_official_figures_are_those_of_the_exports(run: Path) -> None:
    """What could not be served has an empty answer in both, which the scripts count."""
    blind = scores(read_samples(run))["arms"]["blind"]
    assert {name: blind[name]["n"] for name in blind if "/" in name or name == "musique"} == {
        "mm-niah/counting-text": 1, "milebench/StateChange": 1, "musique": 1, "tiny/multi_hop": 1,
    }  # fmt: skip
    official = {name: figures.get("official", {}) for name, figures in blind.items()}
    assert (official["mm-niah/counting-text"]["n"], official["mm-niah/counting-text"]["mean"]) == (2, 0.5)
    assert (official["milebench/StateChange"]["n"], official["milebench/StateChange"]["accuracy"]) == (2, 0.5)
    assert (official["musique"]["n"], official["musique"]["answer_em"]) == (2, 0.5)
    mme = official["video-mme"]
    assert (mme["n"], mme["unscored"], mme["accuracy"], mme["accuracy_all"]) == (2, 1, 1, 0.5)
    table = official_table(read_runs([run]), "musique")
    assert table is not None and "empty answers" in table.note


def test_others_files(run: Path, tmp_path: Path) -> None:
    files = exported(run, tmp_path)
    assert json.loads(files["egoschema"].read_text()) == {"0": 1}
    assert files["egoschema"].name == "Qwen_VL_blind_egoschema.json"
    assert [line["rouge_l"] for line in json_lines(files["mmdu"])] == [1]


def test_the_models_own_answers_are_exported_by_default(run: Path) -> None:
    assert CliRunner().invoke(app, ["eval", "export", str(run)]).exit_code == 0
    lines = json_lines(run / "mm-niah" / "Qwen_VL_reprefill_counting-text-val.jsonl")
    assert [line["response"] for line in lines] == ["[1, 2]"], "of the second item nobody asked the model"


def test_what_cannot_be_exported_says_so(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["eval", "export", str(run), "--arm", "nobody"])
    assert result.exit_code == 2
    assert "arm must be one of reprefill, blind, patched:8; got 'nobody'" in result.output
    with open_samples(tmp_path / "other", {"format": 3, "model": "m"}) as samples:
        samples.add([sample("tiny/multi_hop", "blind", 0, "red", "red", {})])
    assert (
        "must hold answers to a benchmark's data"
        in CliRunner().invoke(app, ["eval", "export", str(tmp_path / "other")]).output
    )
