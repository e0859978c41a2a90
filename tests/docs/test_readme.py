"""The README is short, and shows the example that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ctxwin.tiny import world
from doc_pages import ROOT, blocks
from twins import guard

README = (ROOT / "README.md").read_text()


def lines_of(script: Path, tmp_path: Path) -> list[str]:
    """The lines that a program prints, run elsewhere."""
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


def test_the_lines_of_the_readme_answer_as_the_world_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [block] = blocks(ROOT / "README.md", "python")
    monkeypatch.setitem(sys.modules, "vllm", None)  # the bundled model answers on transformers, at once
    exec(compile(block.code, "README.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    check_lines(capsys.readouterr().out.splitlines())


@guard
def test_the_lines_of_the_readme_answer_as_a_program(tmp_path: Path) -> None:
    """On vLLM, where it is installed."""
    [block] = blocks(ROOT / "README.md", "python")
    script = tmp_path / "readme.py"
    script.write_text(block.code)
    check_lines(lines_of(script, tmp_path))


def check_lines(lines: list[str]) -> None:
    frames = world.make_stream(seed=3, n_frames=10)
    asked = [line for line in lines if line.startswith("t=")]
    assert len(asked) == 10
    for line in [*asked, lines[-1]]:
        question, answer, shown = re.search(r": (\w+ of \d\d\?) (\w*) \(right: (\w+)\)", line).groups()  # type: ignore[union-attr]
        truth = world.answer(frames, question)
        assert truth is not None, f"{question}: two frames bear that mark, or nothing tells the colour"
        assert (answer, shown) == (truth, truth)
    for second, line in enumerate(asked):
        assert world.locate(frames, int(line.partition(" of ")[2][:2]))[0] == second, "asked of the frame that came"  # type: ignore[index]
    computed, prompt = re.search(r"computed (\d+) of (\d+) tokens", asked[-1]).groups()  # type: ignore[union-attr]
    assert int(computed) < int(prompt) / 3, "a slid window must compute the new frame and the query only"
    assert lines[-1].startswith("look back: ")


@guard
def test_an_agent_reuses_what_was_said_before(tmp_path: Path) -> None:
    asked = [line for line in lines_of(ROOT / "examples" / "langchain_agent.py", tmp_path) if line.startswith("t=")]
    assert len(asked) == 10
    for line in asked[1:]:
        reused, prompt = re.search(r"(\d+) of (\d+) tokens reused", line).groups()  # type: ignore[union-attr]
        assert 0 < int(prompt) - int(reused) <= 110, "the new frame, and a question and its exchange at most"
