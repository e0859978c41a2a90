"""Parallel runs in which a test ends its process: the others are run, and once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CONFTEST = """
from schedulers import make_scheduler

def pytest_xdist_make_scheduler(config, log):
    return make_scheduler(config, log)
"""
FILE = """
import os, pathlib
import pytest

@pytest.mark.parametrize("i", range({count}))
def test_it(i):
    with (pathlib.Path(__file__).parent / "ran.txt").open("a") as file:
        file.write(f"{name} {{i}}\\n")
    if i == {ends_at}:
        os._exit(3)
"""


@pytest.mark.parametrize(
    ("dist", "files"),
    [
        ("loadfile", [(3, None)] * 6 + [(3, 1)]),
        ("loadfile", [(2, 1), (1, None), (4, 0), (2, None)]),
        ("loadscope", [(1, 0)] + [(1, None)] * 5),
    ],
    ids=str,
)
def test_a_run_goes_on_behind_a_test_that_ends_its_process(
    tmp_path: Path, dist: str, files: list[tuple[int, int | None]]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for number, (count, ends_at) in enumerate(files):
        name = f"test_{number}"
        (tmp_path / f"{name}.py").write_text(FILE.format(name=name, count=count, ends_at=ends_at))
    command = ["-m", "pytest", "-q", "-n", "2", "-p", "xdist", "--dist", dist, "--max-worker-restart", "2", "."]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""}
    run = subprocess.run(  # a run that stands still is killed
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    ended = sum(ends_at is not None for _, ends_at in files)
    passed = sum(count for count, _ in files) - ended
    assert re.search(rf"\b{ended} failed, {passed} passed\b", run.stdout), run.stdout + run.stderr
    ran = (tmp_path / "ran.txt").read_text().splitlines()
    assert len(ran) == len(set(ran)) == passed + ended
