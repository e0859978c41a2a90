"""`examples/web_session.py`: long sessions through LangGraph and SQLite, flat in cost and bounded in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("langgraph.checkpoint.sqlite")

SCRIPT = Path(__file__).parents[2] / "examples" / "web_session.py"


def run(*arguments):
    command = [sys.executable, str(SCRIPT), "--engine", "hf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("steps", [pytest.param(80, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)])
def test_many_steps_cost_the_same_and_stay_bounded(steps):
    done = run("--json", *(["--steps", str(steps)] if steps != 200 else []))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] == steps
    # Every page is prefilled once, and a question is not free: what is counted is really all of it.
    assert figures["tokens_second_quarter"] > steps / 4 * (66 + 2 * 9)
    assert figures["tokens_last_quarter"] <= 1.3 * figures["tokens_second_quarter"]
    assert figures["checkpoints"] > 2 * steps
    assert figures["checkpoint_bytes_mean"] <= figures["checkpoint_bytes_max"] < 20_000
    assert figures["store_bytes"] <= figures["store_max_bytes"] == 8_000_000
    assert figures["vision_encodes"] == steps
    assert figures["right"] >= 0.94 * figures["asks"] >= 1.74 * steps


def test_a_short_session_encodes_each_page_once():
    done = run("--json", "--steps", "8")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] == figures["vision_encodes"] == 8
    assert 0 < figures["right"] <= figures["asks"]


def test_a_session_too_short_is_refused():
    done = run("--steps", "3")
    assert done.returncode == 2
    assert "at least 8" in done.stderr
