"""The table over all examples, from stand-ins that end well, badly or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.agent_runs import EXAMPLES

FIGURES = """
import json, sys
seed = int(sys.argv[sys.argv.index("--seed") + 1])
engine = sys.argv[sys.argv.index("--engine") + 1] if "--engine" in sys.argv else "tiny"
names = ["computed_tokens", "vision_encodes"]
figures = {f"{n}_{p}": 100 * (seed + 1) for n in names for p in ("naive", "trim", "append")}
figures |= {"asks": 10, "known": 8, "right": 7 + seed, "right_reprefill": 8, "compared": 10, "agree": 9}
print("starting", file=sys.stderr)
print(json.dumps({"seed": seed, "engine": engine, "computed_tokens": 25, "vision_encodes": 9, **figures}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The program among stand-ins: two that report, one that fails, one that reports something else."""
    shutil.copy(EXAMPLES / "run_all.py", tmp_path)
    shutil.copytree(EXAMPLES / "web", tmp_path / "web")
    for name in ("video_agent", "custom_loop", "web_agent"):
        (tmp_path / f"{name}.py").write_text(FIGURES)
    (tmp_path / "two_agents.py").write_text("print('on the way')\nraise SystemExit('the planner left')")
    (tmp_path / "visual_search.py").write_text("print('not figures')")
    return tmp_path


def run_all(folder: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PATH": path} if path is not None else {})
    command = [sys.executable, str(folder / "run_all.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_seeds_are_pooled(folder: Path) -> None:
    done = run_all(folder, "--json", "--only", "video_agent", "custom_loop", "--seeds", "2", "--engine", "hf")
    assert done.returncode == 0, done.stderr
    assert "custom_loop, seed 1: " in done.stderr
    found = json.loads(done.stdout)
    assert [row["example"] for row in found["examples"]] == ["video_agent", "custom_loop"]
    row = found["examples"][0]
    assert (row["asks"], row["known"], row["right"], row["right_reprefill"]) == (20, 16, 15, 16)
    assert (row["computed_tokens"], row["computed_tokens_naive"]) == (50, 300)
    assert row["share_of_naive"] == pytest.approx(1 / 6)  # of the sums, not the mean of shares
    assert (row["seeds"], row["engine"]) == ([0, 1], "hf")
    assert found["failed"] == found["skipped"] == {}


@pytest.mark.parametrize("name, said", [("two_agents", "the planner left"), ("visual_search", "not figures")])
def test_a_failure_is_named_and_the_others_still_run(folder: Path, name: str, said: str) -> None:
    done = run_all(folder, "--json", "--only", name, "custom_loop")
    assert done.returncode == 1
    assert f"{name} failed with seed 0" in done.stderr
    assert said in done.stderr
    found = json.loads(done.stdout)
    assert [row["example"] for row in found["examples"]] == ["custom_loop"]
    assert list(found["failed"]) == [name]


def test_without_chromium_the_web_example_is_skipped_by_name(folder: Path, tmp_path: Path) -> None:
    done = run_all(folder, "--json", "--only", "web_agent", "custom_loop", path=str(tmp_path / "nothing"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["skipped"]) == ["web_agent"]
    assert "make system-deps" in found["skipped"]["web_agent"]
    assert [row["example"] for row in found["examples"]] == ["custom_loop"]


def test_tables_for_people_and_for_the_readme(folder: Path) -> None:
    text = run_all(folder, "--only", "video_agent").stdout
    assert "video_agent" in text
    assert "25.0 %" in text
    system_prompt, rule, row = run_all(folder, "--only", "video_agent", "--markdown").stdout.splitlines()
    assert system_prompt.count("|") == rule.count("|") == row.count("|")
    assert row.startswith("| video_agent | 10 | 7/8 | 8/8 | 25 | 25.0 % |")


def test_what_it_cannot_run_is_refused(folder: Path) -> None:
    for wrong in (["--only", "nothing"], ["--seeds", "0"], ["--json", "--markdown"]):
        assert run_all(folder, *wrong).returncode == 2


def test_every_agent_among_the_examples_is_run() -> None:
    agents = {path.stem for path in EXAMPLES.glob("*.py") if "agent_options.running(" in path.read_text()}
    listed = run_all(EXAMPLES, "--help").stdout
    assert [name for name in sorted(agents - {"agent_options"}) if name not in listed] == []
