"""An install without extras: what is missing is one clear line that names the command, wherever it is met.

A child process in which the extras' modules cannot be imported stands in for such an install.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ctxwin.extras import COMMAND_EXTRAS, EXTRA_OF

CORE_ONLY = f"import sys; sys.modules.update(dict.fromkeys({sorted(EXTRA_OF)!r}))\n"
"""None in sys.modules is Python's own mark for a module that is not installed."""


def core_only(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", CORE_ONLY + code], capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )
    return done


def command(*args: str) -> str:
    return f"sys.argv = ['ctxwin', *{list(args)!r}]\nfrom ctxwin.cli.main import main\nmain()"


@pytest.mark.parametrize(
    ("args", "extra"),
    [
        (["demo"], "video"),
        (["eval", "run"], "evals"),
        (["mcp", "--demo"], "mcp"),
        (["serve", "tiny"], "vllm"),
        (["bench", "reuse"], "vllm"),
        (["store", "stats", "redis://127.0.0.1:1/0"], "redis"),
    ],
)
def test_a_command_names_the_extra_it_lacks(args: list[str], extra: str, tmp_path: Path) -> None:
    done = core_only(command(*args), tmp_path)
    assert done.returncode in (1, 2), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert f"pip install 'ctxwin[{extra}]'" in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from langchain_ctxwin.langgraph import WindowNode", "langgraph"),
        ("from langchain_ctxwin import ChatCtxwin", "langgraph"),
        ("import ctxwin_server.routes", "serve"),
        ("from ctxwin.tiny.clip import write_clip; write_clip('x.mp4', [])", "video"),
        ("from ctxwin import Chunk; Chunk.video('x.mp4')", "video"),
        ("from ctxwin import open_store; open_store('redis://127.0.0.1:1/0')", "redis"),
    ],
)
def test_the_library_names_the_extra_it_lacks(code: str, extra: str, tmp_path: Path) -> None:
    done = core_only(code, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ctxwin.errors.MissingExtra: "), done.stderr
    assert f"pip install 'ctxwin[{extra}]'" in last


def test_the_core_answers_without_any_extra(tmp_path: Path) -> None:
    code = """
from ctxwin import Chunk, Window, open_engine
with open_engine("tiny") as engine, Window(engine, system_prompt="You watch a camera.", budget=200) as window:
    window.append(Chunk.text("The door is open."))
    print(window.ask("Is it?", max_tokens=2).usage.engine)
"""
    done = core_only(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hf")


@pytest.mark.parametrize("name", COMMAND_EXTRAS)
def test_a_command_of_a_missing_distribution_names_its_extra(name: str, tmp_path: Path) -> None:
    nothing_else = "import importlib.metadata as m\nm.entry_points = lambda **_: []\n"
    done = core_only(nothing_else + command(name, "anything", "--model", "x"), tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {name} is not installed; run pip install 'ctxwin[{COMMAND_EXTRAS[name]}]'\n"


def test_a_command_that_does_not_import_leaves_the_others(tmp_path: Path) -> None:
    """As where one distribution is older than the other."""
    broken = "sys.modules['ctxwin_evals.command'] = None\n"
    done = core_only(broken + command("eval", "run", "tiny"), tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: eval of ctxwin_evals 0.1.0 does not fit this ctxwin")
    assert core_only(broken + command("view", "--help"), tmp_path).returncode == 0


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["eval", "--help"], ["doctor", "--json"]])
def test_commands_that_need_no_extra_work_without(args: list[str], tmp_path: Path) -> None:
    done = core_only(command(*args), tmp_path)
    assert done.returncode == 0, done.stderr
