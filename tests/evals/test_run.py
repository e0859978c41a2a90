from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ctxwin.cli.main import app
from ctxwin.tiny import checkpoint_dir
from ctxwin_evals import console
from ctxwin_evals.arms import parse_arms
from ctxwin_evals.measure import BATCH, Measurer
from ctxwin_evals.run import BLOCK, Runner, Settings, batches, plan_jobs
from ctxwin_evals.tasks import open_task
from ctxwin_evals.tasks.tiny import TinyOptions
from twins import guard

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

ARMS = "blind,patched:1,patched:2,first_k:2,orbit:2,survivor,update:2"
TASKS = [
    open_task(name, TinyOptions(seed=5, frames=(2, 3)))
    for name in ("tiny/multi_hop", "tiny/order", "tiny/slide_needed", "tiny/recall@0.5")
]
WINDOW = TASKS[:2]
CELL = {"n", "accuracy", "ci95", "kl", "kl_p99", "eta", "flip_recover", "harm_rate", "bytes_share"}


def run(
    engine: HFEngine, folder: Path, arms: str = ARMS, n: int = 4, stop_after: int | None = None, tasks: Any = TASKS
) -> Runner:
    calls = 0

    def progress(done: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_after:
            raise KeyboardInterrupt

    runner = Runner(engine, Settings(), folder, tasks)
    runner.run(plan_jobs(parse_arms(arms), tasks), n, progress)
    return runner


def test_a_killed_run_ends_as_an_undisturbed_one(engine: HFEngine, tmp_path: Path) -> None:
    whole = run(engine, tmp_path / "whole", n=2).samples
    with pytest.raises(KeyboardInterrupt):
        run(engine, tmp_path / "killed", n=2, stop_after=20)
    torn = tmp_path / "killed" / "samples.jsonl"
    assert 0 < torn.read_text().count("\n") < len(whole.rows)
    torn.write_bytes(torn.read_bytes()[:-40])
    resumed = run(engine, tmp_path / "killed", n=2).samples
    assert resumed.rows == whole.rows
    lines = torn.read_text().splitlines()
    assert len(lines) == len(whole.rows) == len({(r["task"], r["arm"], r["index"]) for r in map(json.loads, lines)})


def test_what_cannot_be_measured_is_left_out(engine: HFEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of NaN are no perfect answer, and no end of the run."""
    answers = Measurer._answers

    def broken(self: Measurer, memory: Any, items: Any, begin: int, policy: Any, first: Any) -> Any:
        said = answers(self, memory, items, begin, policy, first)
        return [replace(one, logits=one.logits * float("nan")) for one in said] if first else said

    monkeypatch.setattr(Measurer, "_answers", broken)
    runner = run(engine, tmp_path, "reprefill,blind", n=1, tasks=WINDOW[:1])
    reasons = {arm: row.unscored for (_, arm, _), row in runner.samples.rows.items()}
    assert set(reasons) == {"reprefill", "blind"} and all("got NaN" in str(reason) for reason in reasons.values())


LINKS = ("mpic", "first_k", "epic", "cacheblend-oracle")
"""Arms whose tokens see each other's stored KV on an engine that is served, and what is computed for them inside the decoder."""


def same_figures(ours: Runner, theirs: Runner) -> None:
    assert ours.samples.rows.keys() == theirs.samples.rows.keys()
    for key, one in ours.samples.rows.items():
        other = theirs.samples.rows[key]
        assert (one.answer, one.reference, one.base, one.unscored) == (
            other.answer, other.reference, other.base, other.unscored
        )  # fmt: skip
        bound = 0.1 if key[1].partition(":")[0] in LINKS else 0.02
        assert other.answer_kl == pytest.approx(one.answer_kl, rel=bound, abs=2e-3), key
        assert (one.stored, one.over, one.computed) == (other.stored, other.over, other.computed)


@pytest.mark.parametrize(
    ("n", "tasks"),
    [(1, TASKS[1:]), pytest.param(2, TASKS, marks=[pytest.mark.slow, pytest.mark.guard])],
    ids=["few items", "more items"],
)
def test_requests_to_an_engine_give_the_figures_of_the_decoder(
    n: int, tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on vLLM, which is not read inside: a re-prefill is a request, and what an arm serves is loaded from spans."""
    from ctxwin.engines.hf.engine import HFEngine

    arms = (
        "reprefill,blind,patched:1,patched:2@shared,orbit:2,survivor,removal:2,stale:2,update:2,prefix:trim,lowrank-k:2,"
        "mpic:5,first_k:2,cacheblend-oracle:0.3,merged:0.5"
    )
    monkeypatch.setattr("ctxwin_evals.run.BASIS_ITEMS", 8)
    runs = {}
    with HFEngine(checkpoint_dir(), dtype="float32") as tiny:
        for name, inside in (("served", False), ("inside", None)):
            runs[name] = Runner(tiny, Settings(), tmp_path / name, tasks, inside=inside)
            runs[name].run(plan_jobs(parse_arms(arms), tasks), n)
        same_figures(runs["inside"], runs["served"])
        assert {arm for _, arm, _ in runs["served"].samples.rows} == set(arms.split(","))
        with pytest.raises(ValueError, match=r"got quest:0.5, oracle, which read inside the model; leave them out"):
            runs["served"].run(plan_jobs(parse_arms("blind,quest:0.5,oracle"), WINDOW), 1)


@pytest.mark.parametrize("command", [["run", "tiny/multi_hop", "--n", "1"], ["probe"]])
def test_a_folder_that_cannot_be_written_is_refused_before_a_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    opened: list[Any] = []
    monkeypatch.setattr(console, "open_model_on", lambda *args: opened.append(args))
    for output in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/self/run")):
        refused = invoke(*command, "--output", str(output))
        assert refused.exit_code == 2 and not opened
        assert f"{output} must be a writable folder, got: " in refused.stderr


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.vllm
def test_a_run_on_vllm_is_the_run_on_transformers(tmp_path: Path) -> None:
    args = ["run", "tiny/multi_hop,tiny/slide_needed", "--n", "4", "--frames", "3", "--layers", "deep", "--json"]
    found = {}
    for name in ("hf", "vllm"):
        made = invoke(*args, "--engine", name, "--arms", "blind,patched:11,survivor", "--output", str(tmp_path / name))
        assert made.exit_code == 0, made.output
        found[name] = json.loads(made.stdout)
    for arm, cells in found["hf"]["arms"].items():
        for kind, ours in cells.items():
            theirs = found["vllm"]["arms"][arm][kind]
            assert (ours["n"], ours["accuracy"]) == (theirs["n"], theirs["accuracy"])
            assert theirs["kl"] == pytest.approx(ours["kl"], rel=0.05, abs=5e-3), (arm, kind)
    assert found["vllm"]["arms"]["blind"]["multi_hop"]["kl"] > 1


def test_what_is_there_is_not_computed_again(engine: HFEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(engine, tmp_path, "blind,patched:1", n=2)
    before = (tmp_path / "samples.jsonl").read_bytes()
    asked: list[list[str]] = []
    samples = Measurer.samples

    def spy(self: Measurer, items: Any, arms: Any, **more: Any) -> Any:
        asked.append([a.name for a in arms])
        return samples(self, items, arms, **more)

    monkeypatch.setattr(Measurer, "samples", spy)
    run(engine, tmp_path, "blind,patched:1", n=2)
    assert not asked
    run(engine, tmp_path, "blind,patched:1,patched:3", n=2)
    assert asked and all(names == ["patched:3"] for names in asked)
    assert (tmp_path / "samples.jsonl").read_bytes().startswith(before)


def test_samples_of_another_generator_are_refused(engine: HFEngine, tmp_path: Path) -> None:
    run(engine, tmp_path, "blind", n=2)
    path = tmp_path / "samples.jsonl"
    path.write_text(path.read_text().replace('"case": "', '"case": "0'))
    for arms in ("blind", "first_k:2"):  # no other arm may join them either
        with pytest.raises(ValueError, match="today's items, got another item 0 of 'tiny/multi_hop'"):
            run(engine, tmp_path, arms, n=2)


def test_bad_settings_are_refused() -> None:
    for bad in ({"layout": "diagonal"}, {"dtype": "int8"}, {"layers": "few"}):
        with pytest.raises(ValueError, match="must be"):
            Settings(**bad)  # type: ignore[arg-type]
    for options in ({"seed": -1}, {"frames": (1,)}, {"frames": ()}):
        with pytest.raises(ValueError, match="must be"):
            TinyOptions(**options)  # type: ignore[arg-type]


def test_a_batch_depends_on_indices_alone() -> None:
    task = TASKS[0]
    long = list(batches(task, BLOCK + 7))
    assert all(len({item.shape for item in part}) == 1 and len(part) <= BATCH for part in long)
    short = list(batches(task, 5))
    assert [[item.digest for item in part] for part in short] == [
        [item.digest for item in part] for part in long if min(item.index for item in part) < 5
    ]


def test_a_task_that_leaves_items_out_has_the_same_batches() -> None:
    task = open_task("reorder:tiny/multi_hop")
    short, long = (list(batches(task, n)) for n in (BLOCK, 3 * BLOCK))
    assert len(short) < len(long)
    assert sum(map(len, short)) < BLOCK  # items without two chunks in front
    assert [[item.digest for item in part] for part in short] == [
        [item.digest for item in part] for part in long if part[0].index < BLOCK
    ]


def test_a_task_without_items_among_the_first_is_named(engine: HFEngine, tmp_path: Path) -> None:
    task = open_task("reorder:tiny/multi_hop")
    with pytest.raises(ValueError, match="none among the first 1; take a larger n"):
        run(engine, tmp_path, "blind", 1, tasks=[task])


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["eval", *args])


@guard
def test_the_command_line(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    common = ["--model", str(model_dir), "--frames", "2-3", "--n", "3", "--output", str(folder)]
    tasks = "tiny,tiny-slide,tiny/recall@0.6"
    arms = "reprefill,blind,patched:1,patched:3,patched:3@deep,first_k:1,orbit:2,survivor,removal:2,stale:2,update:2"
    made = invoke("run", tasks, *common, "--seed", "1", "--arms", arms, "--json")
    assert made.exit_code == 0, made.output
    result = json.loads(made.stdout)
    assert list(result["arms"]) == arms.split(",")
    for name, cells in result["arms"].items():
        assert cells, name
        for figures in cells.values():
            assert set(figures) >= CELL
            assert 0 <= figures["ci95"][0] <= figures["accuracy"] <= figures["ci95"][1] <= 1
    assert set(result["arms"]["patched:1"]) == {"single_hop", "multi_hop", "graded", "order"}
    assert {"slide_distractor", "slide_needed"} < set(result["arms"]["survivor"])
    assert result["arms"]["survivor"]["slide_needed"]["eta"] in (None, 0.0)
    assert result["arms"]["reprefill"]["multi_hop"]["kl"] == 0.0
    assert result["arms"]["orbit:2"]["order"]["n"] == 3
    assert result["basis_bytes"] == 0
    again = invoke("score", str(folder), "--json")
    assert json.loads(again.stdout)["arms"]["patched:3"] == result["arms"]["patched:3"]
    assert "patched:3" in invoke("score", str(folder)).stdout
    assert invoke("report", str(folder)).exit_code == 0
    assert "| patched:3 | 3 |" in (folder / "report.md").read_text()
    assert (folder / "report.html").read_text().startswith("<!")
    pictures = list((folder / "figures").glob("*.png"))
    assert pictures and all(p.read_bytes()[:4] == b"\x89PNG" for p in pictures)
    assert list((folder / "lm-eval").glob("results_*.json"))
    other = invoke("run", tasks, *common, "--seed", "2", "--arms", "blind")
    assert other.exit_code == 2
    assert "seed 1 there, 2 now" in other.stderr


def test_arms_of_slides_and_recalls_bring_their_tasks(model_dir: Path, tmp_path: Path) -> None:
    arms = "blind,patched:2,survivor,removal:2,stale:2@0.5,recall:2@0.5"
    args = ["run", "tiny", "--model", str(model_dir), "--frames", "3", "--n", "1", "--output", str(tmp_path)]
    made = invoke(*args, "--arms", arms, "--json")
    assert made.exit_code == 0, made.output
    found = {arm: set(cells) for arm, cells in json.loads(made.stdout)["arms"].items()}
    window, slides = {"single_hop", "multi_hop", "graded", "order"}, {"slide_distractor", "slide_needed"}
    assert found == {
        "blind": window | slides | {"recall@0.5"}, "patched:2": window, "survivor": slides, "removal:2": slides,
        "stale:2@0.5": {"recall"}, "recall:2@0.5": {"recall"},
    }  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text())["arms"].keys() == found.keys()


def test_a_shared_basis_is_kept_and_counted_apart(model_dir: Path, tmp_path: Path) -> None:
    args = ["run", "tiny/multi_hop", "--model", str(model_dir), "--frames", "2", "--n", "2", "--layout", "shared"]
    made = [invoke(*args, "--arms", "patched:4", "--output", str(tmp_path / "a"), "--json") for _ in range(2)]
    first, second = (json.loads(m.stdout) for m in made)
    assert first["arms"] == second["arms"]
    assert first["basis_bytes"] == (tmp_path / "a" / "basis.safetensors").stat().st_size > 0
    tokens, width = 11, 3 * 2 * 32
    share = first["arms"]["patched:4"]["multi_hop"]["bytes_share"]
    assert share == pytest.approx(tokens * 4 / (tokens * width))
    plain = invoke(*args[:-2], "--arms", "patched:4@shared", "--output", str(tmp_path / "b"), "--json")
    other = json.loads(plain.stdout)
    assert other["arms"]["patched:4@shared"]["multi_hop"]["bytes_share"] == pytest.approx(share)
    assert other["basis_bytes"] == (tmp_path / "b" / "basis-shared.safetensors").stat().st_size > 0


def test_decoded_frames_differ_and_work(model_dir: Path, tmp_path: Path) -> None:
    args = [
        "run",
        "tiny/multi_hop",
        "--model",
        str(model_dir),
        "--frames",
        "2",
        "--n",
        "1",
        "--arms",
        "blind",
        "--json",
    ]
    plain = json.loads(invoke(*args, "--output", str(tmp_path / "plain")).stdout)
    decoded = json.loads(invoke(*args, "--decoded", "--output", str(tmp_path / "decoded")).stdout)
    figures = [r["arms"]["blind"]["multi_hop"]["kl"] for r in (plain, decoded)]
    assert figures[0] != figures[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "other"], "a task must be one of"),
        (["run", "--n", "0"], "n must be >= 1 for generated tasks"),
        (["run", "video-mme", "--model", "tiny", "--arms", "blind"], "must be given its data"),
        (["run", "--video-frames", "0"], "video-frames"),
        (["run", "--arms", "patchd:8"], "an arm must be one of"),
        (["run", "tiny/none"], "must be one of"),
        (["run", "video-mme", "--arms", "stale:8", "--data", "/no/such"], "needs a task of setting recall"),
        (["run", "--frames", "2-9"], "frames must be numbers from 2 to 6"),
        (["run", "--frames", "two"], "separated by commas"),
        (["run", "video-mme", "--frames", "16"], "got video-mme; of a video take --video-frames"),
        (["run", "mm-niah,recall@0.5:milebench", "--decoded"], "--decoded must be for tiny tasks"),
        (["run", "video-mme", "--seed", "3"], "--seed must be for generated tasks or protocols, got video-mme"),
        (
            ["run", "--data", "d", "--split", "test", "--max-pixels", "3136"],
            "--data, --max-pixels, --split must be for a",
        ),
        (
            ["run", "two-page,tiny/order", "--skip-missing"],
            "--skip-missing must be for a benchmark's tasks, got two-page",
        ),
        (
            ["run", "recall@0.5:mm-niah", "--as-video", "--video-frames", "9"],
            "--as-video, --video-frames must be for tasks",
        ),
        (["run", "egoschema,mm-niah", "--times", "--subtitles"], "--subtitles must be for video-mme, got egoschema,mm"),
        (["run", "--layout", "diagonal"], "layout must be one of"),
        (["run", "--model", "/no/such/model"], "/no/such/model"),
        (["run", "--engine", "vllm", "--arms", "blind,quest:0.5"], "got quest:0.5, which read inside the model"),
        (["run", "--engine", "jax", "--n", "1"], "engine must be hf or vllm"),
        (["run", "--engine-options", "{}{", "--n", "1"], "engine options must be a JSON object"),
        (["score", "/no/such/run"], "config.json"),
        (["report", "/no/such/run"], "config.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], message: str, tmp_path: Path) -> None:
    made = invoke(*args)
    assert made.exit_code == 2
    assert message in made.stderr
    assert "Traceback" not in made.stderr


def test_debug_shows_the_whole_error() -> None:
    made = CliRunner().invoke(app, ["--debug", "eval", "score", "/no/such/run"])
    assert isinstance(made.exception, ValueError) and made.stderr == ""


@pytest.mark.parametrize("args", [["run", "tiny/order", "--n", "1"], ["probe"]])
def test_without_the_extra_a_command_says_how_to_install_it(args: list[str]) -> None:
    """In a process of its own, whose imports find nothing of the extra."""
    hide = (
        "import sys\nfrom ctxwin.extras import EXTRA_OF\n"
        "sys.modules |= dict.fromkeys(m for m, extra in EXTRA_OF.items() if extra == 'evals')\n"
        "from ctxwin.cli.main import main\nmain()"
    )
    made = subprocess.run([sys.executable, "-c", hide, "eval", *args], capture_output=True, text=True, timeout=120)
    assert made.returncode == 2
    assert made.stderr.endswith("is not installed; run pip install 'ctxwin[evals]'\n")
    assert made.stderr.count("\n") == 1


def test_ls_names_every_arm_with_its_source() -> None:
    listed = json.loads(invoke("ls", "--json").stdout)
    assert {"patched:M", "mpic:K", "cacheblend:R", "quest:R", "elastic:B", "stale:M"} <= set(listed["arms"])
    assert {"tiny/multi_hop", "mm-niah/retrieval-image", "video-mme"} <= set(listed["tasks"])
    assert all(arm["source"] and arm["about"] for arm in listed["arms"].values())
    assert invoke("ls").exit_code == 0


def test_progress_counts_each_arm_as_it_is_served(engine: HFEngine, tmp_path: Path) -> None:
    told: list[int] = []
    runner, jobs = Runner(engine, Settings(), tmp_path, WINDOW), plan_jobs(parse_arms("blind,first_k:2"), WINDOW)
    runner.run(jobs, 2, told.append)
    assert sum(told) == len(runner.samples.rows) == 2 * 2 * len(WINDOW)
    assert len([more for more in told if more]) >= 2 * len(WINDOW)
    again: list[int] = []
    runner.run(jobs, 2, again.append)
    assert sum(again) == sum(told)
