"""`examples/web_session.py`: 200 steps through LangGraph and SQLite, flat in cost and bounded in memory."""

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


def test_two_hundred_steps_cost_the_same_and_stay_bounded():
    done = run("--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] == 200
    # Every page is prefilled once, and a question is not free: what is counted is really all of it.
    assert figures["tokens_second_quarter"] > 50 * (66 + 2 * 9)
    assert figures["tokens_last_quarter"] <= 1.3 * figures["tokens_second_quarter"]
    assert figures["checkpoints"] > 2 * 200
    assert figures["checkpoint_bytes_mean"] <= figures["checkpoint_bytes_max"] < 20_000
    assert figures["store_bytes"] <= figures["store_max_bytes"] == 8_000_000
    assert figures["vision_encodes"] == 200
    assert figures["right"] >= 0.94 * figures["asks"] >= 370


def test_a_session_too_short_is_refused():
    done = run("--steps", "3")
    assert done.returncode == 2
    assert "at least 8" in done.stderr
