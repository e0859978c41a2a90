"""Readers of a shelf: what is linked answers the question, for less than a prefix cache computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from examples.agent_runs import EXAMPLES, figures_of
from twins import guard

for module, extra in (("pypdfium2", "pdf"), ("matplotlib", "evals"), ("bm25s", "library")):
    pytest.importorskip(module, reason=f"{module} is not installed; run pip install 'ctxwin[{extra}]'")


@pytest.mark.slow
def test_what_is_linked_answers_and_costs_less_than_with_a_prefix_cache(tmp_path: Path) -> None:
    figures = figures_of("library_agent", "--picture", str(tmp_path / "linked.png"))
    assert figures["known"] == figures["compared"] == figures["asks"] == 3 * 24
    assert figures["right"] >= 0.95 * figures["known"] and figures["agree"] >= 0.95 * figures["compared"]
    assert figures["computed_tokens"] <= 0.7 * min(figures[f"computed_tokens_{p}"] for p in ("naive", "trim", "append"))
    assert figures["vision_encodes"] <= 16, "each file once, when it was put on the shelf"
    with Image.open(tmp_path / "linked.png") as picture:
        assert picture.width > 600 and picture.height > 600


@guard
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.pdf").write_bytes(b"no pdf")
    command = [sys.executable, str(EXAMPLES / "library_agent.py"), "--model", "tiny:hf"]
    done = subprocess.run(
        [*command, str(tmp_path / "broken.pdf"), "--ask", "?"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and "broken.pdf" in done.stderr and "Traceback" not in done.stderr
