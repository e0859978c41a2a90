"""The same tests with LangGraph's strict serializer: nothing in the state is of a type of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_with_the_strict_serializer() -> None:
    files = [str(HERE / name) for name in ("test_running_again.py", "test_branches.py", "test_window_node.py")]
    # Both savers have one serializer.
    # The log is printed: a blocked type does not fail, it comes back as something else, and a warning says so.
    options = ["-q", "-p", "no:cacheprovider", "-o", "log_cli=true", "--log-cli-level=WARNING"]
    chosen = ["-k", "not on_the_model and not ten_lines and not memory", *files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen], capture_output=True, text=True, cwd=HERE.parents[2], timeout=300,
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Blocked deserialization" not in done.stdout + done.stderr
