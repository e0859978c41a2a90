"""The README is short, and shows the example that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def lines_of(example: str, tmp_path: Path) -> list[str]:
    """What an example prints, a line an answer."""
    script = ROOT / "examples" / example
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_readme_shows_the_example_that_runs() -> None:
    docstring, _, example = (ROOT / "examples" / "quickstart.py").read_text().partition("\n\n")
    assert docstring.startswith('"""')
    assert example in README
    assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_the_quickstart_runs(tmp_path: Path) -> None:
    lines = lines_of("quickstart.py", tmp_path)
    asked = [line for line in lines if line.startswith("t=")]
    assert len(asked) == 10
    computed, prompt = asked[-1].partition("computed ")[2].split(" of ")
    assert int(computed) < int(prompt) / 3, "a slid window must compute the new frame and the query only"
    assert lines[-1].endswith("is what stood there at the start")


def test_an_agent_reuses_what_was_said_before(tmp_path: Path) -> None:
    asked = [line for line in lines_of("langchain_agent.py", tmp_path) if line.startswith("t=")]
    assert len(asked) == 10
    for line in asked[1:]:
        reused, prompt = re.search(r"(\d+) of (\d+) tokens reused", line).groups()  # type: ignore[union-attr]
        assert 0 < int(prompt) - int(reused) <= 110, "the new frame, and a question and its exchange at most"
