"""`ctxwin eval export`: a run's answers in the files that MM-NIAH's and Video-MME's own scripts read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ctxwin_evals.cli import app
from ctxwin_evals.samples import Sample, open_samples

NIAH = {"question": "How many?", "context_length": 1200, "placed_depth": [0.2, 0.5], "split": "val"}
MME = {
    "video_id": "001", "videoID": "abc", "duration": "short", "domain": "Film", "sub_category": "Drama",
    "question_id": "001-1", "task_type": "Counting", "question": "Who?", "options": ["A. x", "B. y", "C. z", "D. w"],
}  # fmt: skip


def sample(task: str, arm: str, index: int, answer: str, target: Any, meta: dict[str, Any], **more: Any) -> Sample:
    doc = meta.get("question_id") or str(index)
    return Sample(
        task=task, arm=arm, index=index, doc_id=doc, cluster="c", case="d", frames=1, tokens=9, placed=1, question="?",
        target=target, meta=meta, answer=answer, reference=f" {target}", **more,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with open_samples(tmp_path / "run", {"format": 3, "model": "models/Qwen VL", "tasks": {}}) as samples:
        samples.add(
            [
                sample("mm-niah/counting-text", "blind", 0, " [1, 2] ", [1, 2], NIAH),
                sample("mm-niah/counting-text", "blind", 1, "?", [3], NIAH, unscored="too long"),
                sample("mm-niah/counting-text", "patched:8", 0, "[9]", [1, 2], NIAH),
                sample("video-mme", "blind", 0, "B.", "B", MME),
                sample("tiny/multi_hop", "blind", 0, "red", "red", {}),
            ]
        )
    return tmp_path / "run"


def test_official_files(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--arm", "blind", "--output", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    files = json.loads(result.stdout)["files"]
    assert {Path(path).name for path in files.values()} == {
        "Qwen_VL_blind_counting-text-val.jsonl",
        "Qwen_VL_blind_video-mme.json",
    }
    lines = [json.loads(line) for line in Path(files["mm-niah/counting-text"]).read_text().splitlines()]
    assert lines == [
        {
            "question_id": 0, "question": "How many?", "answer": [1, 2], "response": "[1, 2]", "context_length": 1200,
            "placed_depth": [0.2, 0.5],
        }
    ]  # fmt: skip
    (video,) = json.loads(Path(files["video-mme"]).read_text())
    assert (video["video_id"], video["missing"], video["duration"]) == ("001", False, "short")
    (question,) = video["questions"]
    assert (question["answer"], question["response"], question["question_id"]) == ("B", "B.", "001-1")


def test_the_models_own_answers_are_exported_by_default(run: Path) -> None:
    assert CliRunner().invoke(app, ["export", str(run)]).exit_code == 0
    lines = (run / "Qwen_VL_reprefill_counting-text-val.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"] for line in lines] == ["[1, 2]"]


def test_what_cannot_be_exported_says_so(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--arm", "nobody"])
    assert result.exit_code == 2
    assert "arm must be one of reprefill, blind, patched:8; got 'nobody'" in result.output
    with open_samples(tmp_path / "other", {"format": 3, "model": "m"}) as samples:
        samples.add([sample("tiny/multi_hop", "blind", 0, "red", "red", {})])
    assert (
        "must hold answers to a benchmark's data" in CliRunner().invoke(app, ["export", str(tmp_path / "other")]).output
    )
