"""Runs an example as a user would, and checks what every example must show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """What ``examples/<name>.py`` prints on the bundled model, on transformers."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--model", "tiny:hf", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures_of(name: str, *arguments: str) -> dict[str, Any]:
    """Its figures; nothing else may stand on standard output."""
    figures: dict[str, Any] = json.loads(run_example(name, "--json", *arguments))
    return figures


def check_figures(figures: dict[str, Any]) -> None:
    """As right as a re-prefill, a quarter of naive prefix caching's tokens, no more than clever use; no more encodes."""
    assert figures["policy"] == "scripted"
    known = figures["known"]
    assert known == figures["compared"] > 0
    assert figures["right_reprefill"] >= 0.9 * known, "the questions must be such that the model can answer them"
    assert figures["right"] >= figures["right_reprefill"] - 0.05 * known
    ours = figures["computed_tokens"]
    assert 0 < ours <= 0.25 * figures["computed_tokens_naive"]
    assert ours <= figures["computed_tokens_trim"]
    assert ours <= figures["computed_tokens_append"]
    for policy in ("naive", "trim", "append"):
        assert figures["vision_encodes"] <= figures[f"vision_encodes_{policy}"]
