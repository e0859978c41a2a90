"""Generated data sets in the official layouts, through the command line, on models of two attention families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmark_data import write_mm_niah, write_video_mme
from ctxwin.cli.main import app
from ctxwin.errors import BadMedia
from ctxwin_evals.benchmarks import DataOptions, benchmark
from ctxwin_evals.samples import read_samples
from ctxwin_evals.tasks import open_task
from ctxwin_evals.tasks.protocols import ProtocolTask
from engines.models import edit_config, wide, write_kimi, write_vision_model

ARMS = "reprefill,blind,patched:8,patched:full,mpic:4,cacheblend:0.15,elastic:0.5"
WRITERS: dict[str, Callable[[Path], Path]] = {"qwen2_5_vl": write_vision_model, "kimi": write_kimi}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_mm_niah(folder / "mm-niah", n=3, seed=3, lengths=(300,), image_size=84)
    write_video_mme(folder / "video-mme", n=4, seed=3)  # two videos: a slide needs a chunk of another item
    return folder


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("kimi", marks=[pytest.mark.slow, pytest.mark.guard])])
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
        made = CliRunner().invoke(app, ["eval", *args, "--output", str(out), "--json"])
        assert made.exit_code == 0, made.output
        for task in tasks.split(","):
            cells = {arm: found[task] for arm, found in json.loads(made.stdout)["arms"].items()}
            assert cells["reprefill"]["kl"] == 0.0
            assert cells["patched:full"]["kl"] < 1e-6
            assert cells["blind"]["kl"] > cells["patched:8"]["kl"]
            assert all(cell["kl"] >= 0 for cell in cells.values())
        rows = read_samples(out).rows.values()
        assert len(rows) == len(tasks.split(",")) * len(ARMS.split(","))
        assert all(row.unscored is None for row in rows)
        folders.append(str(out))
    frames = next(row.meta["frame_indices"] for row in rows)
    assert len(frames) == 2
    made = CliRunner().invoke(app, ["eval", "report", *folders, "--output", str(tmp_path / "report")])
    assert made.exit_code == 0, made.output
    page = (tmp_path / "report" / "report.html").read_text()
    assert "mm-niah/retrieval-image" in page and "video-mme" in page


def test_the_first_items_are_those_whose_media_are_there(model_dir: Path, tmp_path: Path) -> None:
    write_video_mme(tmp_path / "data", n=8, seed=3, seconds=(2, 2, 2), image_size=56)
    gone = benchmark("video-mme", DataOptions(data=str(tmp_path / "data"))).items(1)[0].cluster
    (tmp_path / "data" / "video" / f"{gone}.mp4").unlink()
    tasks = "video-mme,divergent-replace-one:video-mme"
    args = ["run", tasks, "--data", str(tmp_path / "data"), "--model", str(model_dir), "--skip-missing", "--json"]
    args += ["--arms", "reprefill,blind", "--output", str(tmp_path / "run"), "--video-frames", "2"]
    for n in (2, 3):  # the longer run finds the items of the shorter one as they were
        made = CliRunner().invoke(app, ["eval", *args, "--n", str(n)])
        assert made.exit_code == 0, made.output
        result = json.loads(made.stdout)
        arms = result["arms"]
        assert result["left_out"]["video-mme"] == {"unreadable": 0, "missing": 3}  # the questions on that video
        assert all(cell["n"] + cell["unscored"] == n for arm in arms.values() for cell in arm.values())
    found = read_samples(tmp_path / "run")
    assert {index for _, _, index in found.rows} == {3, 4, 5}
    assert {row.index for row in found.first(2)} == {3, 4}


def test_a_run_scores_the_items_that_it_was_asked_for(model_dir: Path, tmp_path: Path) -> None:
    """Not the first that its folder holds, whose media have left since; nor are those needed of a further arm."""
    write_video_mme(tmp_path / "data", n=8, seed=3, seconds=(2, 2, 2), image_size=56)
    first = benchmark("video-mme", DataOptions(data=str(tmp_path / "data"))).items(1)[0].cluster
    args = ["run", "video-mme", "--data", str(tmp_path / "data"), "--model", str(model_dir), "--skip-missing", "--json"]
    args += ["--output", str(tmp_path / "run"), "--video-frames", "2", "--n", "3", "--arms"]
    for arms in ("reprefill,blind", "reprefill,blind", "first_k:1"):
        made = CliRunner().invoke(app, ["eval", *args, arms])
        assert made.exit_code == 0, made.output
        cells = json.loads(made.stdout)["arms"]
        assert list(cells) == arms.split(",") and all(cell["video-mme"]["n"] == 3 for cell in cells.values())
        (tmp_path / "data" / "video" / f"{first}.mp4").unlink(missing_ok=True)
    videos = cells["first_k:1"]["video-mme"]["official"]
    assert videos["videos/short"] + videos["videos/medium"] == 1
    assert sorted(read_samples(tmp_path / "run").rows) == sorted(
        [("video-mme", arm, i) for arm in ("reprefill", "blind") for i in range(6)]
        + [("video-mme", "first_k:1", i) for i in (3, 4, 5)]
    )


def test_a_picture_that_cannot_be_read_is_named_with_its_item(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(shutil.copytree(data / "mm-niah", tmp_path / "data"))
    first, *_ = sorted((root / "mm_niah_val" / "images" / "retrieval-image").glob("0001-*.png"))
    first.write_bytes(b"")
    model = write_vision_model(tmp_path / "model")
    edit_config(model, max_position_embeddings=16384)
    args = ["run", "mm-niah/retrieval-image", "--data", str(root), "--model", str(model), "--arms", "blind", "--n", "2"]
    made = CliRunner().invoke(app, ["eval", *args, "--output", str(tmp_path / "run"), "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["left_out"] == {"mm-niah/retrieval-image": {"unreadable": 1, "missing": 0}}
    assert "mm-niah/retrieval-image: an item is left out: 1: " in caplog.text


def test_items_whose_media_cannot_be_read_are_left_out(model_dir: Path, tmp_path: Path) -> None:
    """A run goes on behind them, and finds them once they are whole."""
    write_video_mme(tmp_path / "data", n=8, seed=3, seconds=(2, 2, 2), image_size=56)
    items = benchmark("video-mme", DataOptions(data=str(tmp_path / "data"))).items()
    broken = tmp_path / "data" / "video" / f"{items[0].cluster}.mp4"
    content, out = broken.read_bytes(), str(tmp_path / "run")
    broken.write_bytes(bytes(len(content)))
    subtitles = tmp_path / "data" / "subtitle" / f"{items[-1].cluster}.srt"
    subtitles.write_bytes(subtitles.read_bytes() + b"\xe9")
    args = ["run", "video-mme", "--data", str(tmp_path / "data"), "--model", str(model_dir), "--n", "0"]
    args += ["--arms", "reprefill,blind", "--video-frames", "2", "--subtitles", "--output", out, "--json"]
    for unreadable in (sum(item.cluster in (items[0].cluster, items[-1].cluster) for item in items), 0):
        made = CliRunner().invoke(app, ["eval", *args])
        assert made.exit_code == 0, made.output
        result = json.loads(made.stdout)
        assert result["left_out"]["video-mme"] == {"unreadable": unreadable, "missing": 0}
        assert result["arms"]["blind"]["video-mme"]["n"] == len(items) - unreadable
        broken.write_bytes(content)
        subtitles.write_bytes(subtitles.read_bytes().rstrip(b"\xe9"))
    for video in broken.parent.iterdir():
        video.write_bytes(b"no video")
    made = CliRunner().invoke(app, ["eval", *args[:-2], str(tmp_path / "none"), "--json"])
    assert made.exit_code == 2 and "must be decodable by OpenCV" in made.output
    recalled = open_task("recall@0.5:video-mme", data=DataOptions(data=str(tmp_path / "data")))
    assert isinstance(recalled, ProtocolTask)
    recalled.leave_out(BadMedia("broken"))
    assert recalled.base.odd == ("broken",)  # type: ignore[attr-defined]
    with pytest.raises(BadMedia, match="broken"):
        open_task("tiny/order").leave_out(BadMedia("broken"))


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("task", "options"),
    [("mm-niah/counting-image", ()), ("video-mme", ("--video-frames", "3", "--max-pixels", "7056"))],
)
def test_both_engines_give_one_table(task: str, options: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    """Every arm that is served, in each setting; vLLM's KL is over the likeliest tokens, and so no more."""
    model = wide(
        lambda f: write_vision_model(f, "qwen3_vl"), tmp_path / "model"
    )  # heads of a size that vLLM serves on a CPU
    edit_config(model, max_position_embeddings=16384)
    arms = {
        task: "reprefill,blind,patched:8,orbit:8,merged:0.5,mpic:4",
        f"slide:{task}": "reprefill,blind,survivor,removal:8,prefix:trim,mpic:4",
        f"recall@0.5:{task}": "reprefill,blind,update:8,stale:8",
    }
    names = ",".join(dict.fromkeys(",".join(arms.values()).split(",")))
    found, answers = {}, {}
    args = ["run", ",".join(arms), "--data", str(data / task.partition("/")[0]), "--model", str(model), "--n", "2"]
    for engine in ("hf", "vllm"):
        out = ["--engine", engine, "--arms", names, "--output", str(tmp_path / engine), "--json"]
        made = CliRunner().invoke(app, ["eval", *args, *options, *out])
        assert made.exit_code == 0, made.output
        found[engine] = json.loads(made.stdout)["arms"]
        rows = read_samples(tmp_path / engine).rows
        # MPIC's tokens see each other's stored KV in windows, and what the step computes on transformers.
        answers[engine] = {key: (key[1] == "mpic:4" or row.answer, row.reference) for key, row in rows.items()}
    assert answers["hf"] == answers["vllm"]
    for setting, served in arms.items():
        assert {arm for arm, cells in found["vllm"].items() if setting in cells} >= set(served.split(","))
        for arm in served.split(","):
            ours, theirs = (found[engine][arm][setting] for engine in ("hf", "vllm"))
            assert (ours["n"], ours["unscored"], ours["accuracy"]) == (
                theirs["n"], theirs["unscored"], theirs["accuracy"]
            )  # fmt: skip
            assert -1e-3 <= theirs["kl"] <= 1.05 * ours["kl"] + 2e-3, f"{arm}: over the likeliest tokens it is no more"
        blind, exact = (found["vllm"][arm][setting]["kl"] for arm in ("blind", "reprefill"))
        assert "recall" in setting or blind > 4 * max(1e-4, exact)
