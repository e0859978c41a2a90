"""Generated data sets in the official layouts, through the command line, on models of two attention families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctxwin.evals.benchmarks.generate import write_mm_niah, write_video_mme
from ctxwin.evals.cli import app
from ctxwin.evals.samples import read_samples
from engines.models import edit_config, write_kimi, write_vision_model

ARMS = "reprefill,blind,patched:8,patched:full,mpic:4,cacheblend:0.15,elastic:0.5"
WRITERS: dict[str, Callable[[Path], Path]] = {"qwen2_5_vl": write_vision_model, "kimi": write_kimi}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_mm_niah(folder / "mm-niah", n=1, seed=3, lengths=(300,), image_size=84)
    write_video_mme(folder / "video-mme", n=1, seed=3)
    return folder


@pytest.mark.parametrize("family", list(WRITERS))
def test_benchmarks_run_from_files_to_a_report(family: str, data: Path, tmp_path: Path) -> None:
    model = WRITERS[family](tmp_path / "model")
    edit_config(model, max_position_embeddings=16384)
    folders = []
    for name, tasks, options in (
        ("mm-niah", "mm-niah/retrieval-image,mm-niah/reasoning-text", ()),
        ("video-mme", "video-mme", ("--video-frames", "2", "--subtitles", "--max-pixels", "7056")),
    ):
        out = tmp_path / name
        args = ["run", tasks, "--data", str(data / name), "--model", str(model), "--arms", ARMS, "--n", "1", *options]
        made = CliRunner().invoke(app, [*args, "--output", str(out), "--json"])
        assert made.exit_code == 0, made.output
        for task in tasks.split(","):
            cells = {arm: found[task] for arm, found in json.loads(made.stdout)["arms"].items()}
            assert cells["reprefill"]["kl"] == 0.0
            assert cells["patched:full"]["kl"] < 1e-6
            assert cells["blind"]["kl"] > cells["patched:8"]["kl"]
            assert all(cell["kl"] >= 0 for cell in cells.values())
        rows = read_samples(out).rows.values()
        assert len(rows) == len(tasks.split(",")) * len(ARMS.split(","))
        assert all("unscored" not in row and row["answer"] is not None for row in rows)
        folders.append(str(out))
    frames = next(row["meta"]["frame_indices"] for row in rows)
    assert len(frames) == 2
    made = CliRunner().invoke(app, ["report", *folders, "--output", str(tmp_path / "report")])
    assert made.exit_code == 0, made.output
    page = (tmp_path / "report" / "report.html").read_text()
    assert "mm-niah/retrieval-image" in page and "video-mme" in page
