"""An install without extras: what is missing is one clear line that names the command, wherever it is met.

A child process in which the extras' modules cannot be imported stands in for such an install.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ctxwin.extras import COMMAND_EXTRAS, EXTRA_OF

CORE_ONLY = f"import sys; sys.modules.update(dict.fromkeys({sorted(EXTRA_OF)!r}))\n"
"""None in sys.modules is Python's own mark for a module that is not installed."""
FORKS = (
    CORE_ONLY
    + """
import json, os, traceback
from ctxwin.cli import audit, demo, doctor, library, stopping, store, view

for line in sys.stdin:
    code, folder = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    status = 0
    try:
        exec(code, {"__name__": "__main__", "sys": sys})
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""
)
"""Runs each program of its input in a fork of itself, so that what all of them import is imported once."""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


CoreOnly = Callable[[str], Done]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    started = [sys.executable, "-c", FORKS]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def core_only(forks: subprocess.Popen[str], tmp_path: Path) -> CoreOnly:
    """Runs a program where no extra is installed."""

    def run(code: str) -> Done:
        assert forks.stdin is not None and forks.stdout is not None
        forks.stdin.write(json.dumps([code, str(tmp_path)]) + "\n")
        forks.stdin.flush()
        status = int(forks.stdout.readline())
        return Done(status, (tmp_path / "out").read_text(), (tmp_path / "err").read_text())

    return run


def command(*args: str) -> str:
    return f"sys.argv = ['ctxwin', *{list(args)!r}]\nfrom ctxwin.cli.main import main\nmain()"


@pytest.mark.parametrize(
    ("args", "extra"),
    [
        (["demo"], "video"),
        (["eval", "run"], "evals"),
        (["mcp", "--demo"], "mcp"),
        (["serve", "tiny"], "vllm"),
        (["bench", "reuse"], "evals"),
        (["store", "stats", "redis://127.0.0.1:1/0"], "redis"),
    ],
)
def test_a_command_names_the_extra_it_lacks(args: list[str], extra: str, core_only: CoreOnly) -> None:
    done = core_only(command(*args))
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
        ("import ctxwin_server.http.routes", "serve"),
        ("from ctxwin_client import RemoteWindow", "openai"),
        ("from ctxwin.tiny.clip import write_clip; write_clip('x.mp4', [])", "video"),
        ("from ctxwin import Chunk; Chunk.video('x.mp4')", "video"),
        ("from ctxwin import open_store; open_store('redis://127.0.0.1:1/0')", "redis"),
    ],
)
def test_the_library_names_the_extra_it_lacks(code: str, extra: str, core_only: CoreOnly) -> None:
    done = core_only(code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ctxwin.errors.MissingExtra: "), done.stderr
    assert f"pip install 'ctxwin[{extra}]'" in last


def test_the_core_answers_without_any_extra(core_only: CoreOnly) -> None:
    code = """
from ctxwin import Chunk, Window, open_engine
with open_engine("tiny") as engine, Window(engine, system_prompt="You watch a camera.", budget=200) as window:
    window.append(Chunk.text("The door is open."))
    print(window.ask("Is it?", max_tokens=2).usage.engine)
"""
    done = core_only(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hf")


@pytest.mark.parametrize("name", COMMAND_EXTRAS)
def test_a_command_of_a_missing_distribution_names_its_extra(name: str, core_only: CoreOnly) -> None:
    nothing_else = "import importlib.metadata as m\nm.entry_points = lambda **_: []\n"
    done = core_only(nothing_else + command(name, "anything", "--model", "x"))
    assert done.returncode == 2
    assert done.stderr == f"error: {name} is not installed; run pip install 'ctxwin[{COMMAND_EXTRAS[name]}]'\n"


def test_a_command_that_does_not_import_leaves_the_others(core_only: CoreOnly) -> None:
    """As where one distribution is older than the other."""
    broken = "sys.modules['ctxwin_evals.command'] = None\n"
    done = core_only(broken + command("eval", "run", "tiny"))
    assert done.returncode == 2 and done.stderr.startswith("error: eval of ctxwin_evals 0.1.0 does not fit this ctxwin")
    assert core_only(broken + command("view", "--help")).returncode == 0


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["eval", "--help"],
        pytest.param(["doctor", "--json"], marks=[pytest.mark.slow, pytest.mark.guard]),
    ],
)
def test_commands_that_need_no_extra_work_without(args: list[str], core_only: CoreOnly) -> None:
    done = core_only(command(*args))
    assert done.returncode == 0, done.stderr
