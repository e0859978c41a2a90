"""The README's example is the one in examples/, and it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_example_that_runs() -> None:
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert example in (ROOT / "README.md").read_text()
    code = [line for line in example.splitlines() if line.strip() and not line.startswith('"""')]
    assert len(code) <= 20


def test_the_quickstart_runs(tmp_path: Path) -> None:
    script = ROOT / "examples" / "quickstart.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    asked = [line for line in lines if line.startswith("t=")]
    assert len(asked) == 10
    computed, prompt = asked[-1].partition("computed ")[2].split(" of ")
    assert int(computed) < int(prompt) / 3, "a slid window must compute the new frame and the query only"
    assert lines[-1].endswith("is what stood there at the start")
