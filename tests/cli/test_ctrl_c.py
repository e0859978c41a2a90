"""Ctrl-C of a command that runs: one plain line, exit status 130, nothing left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import system
from ctxwin.cli import stopping

LIMIT_S = 120.0
GUARD = (pytest.mark.slow, pytest.mark.guard)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has loaded is read from /proc")
@pytest.mark.parametrize(
    ("command", "said", "loaded"),
    [
        pytest.param(command, said, loaded, marks=marks, id=f"{command.split()[0]}-{loaded}")
        for command, said, torch_marks in (
            ("demo --engine hf --out out", "the same command", ()),
            ("eval run tiny/single_hop --n 500 --output out", "the same command", GUARD),
            ("bench reuse", "nothing is kept", ()),
            ("doctor tiny", "nothing was left running", GUARD),
        )
        for loaded, marks in (("_pydantic_core", ()), ("libtorch_cpu", torch_marks))
    ],
)
def test_ctrl_c_is_one_line(command: str, said: str, loaded: str, tmp_path: Path) -> None:
    """Pressed as in a terminal, for all processes: while the command line is imported, and while a model is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ctxwin", *command.split()], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        until = time.monotonic() + LIMIT_S
        while process.poll() is None and loaded not in Path(f"/proc/{process.pid}/maps").read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        if process.poll() is not None and command.startswith("doctor"):
            pytest.skip("it asks no model for what it says")
        os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, text
    assert "Traceback" not in text and "Error" not in text, text
    assert text.strip().splitlines()[-1] == "stopped" or (said in text and "stopped" in text), text
    assert not system.running(process.pid, os.getsid)


SWALLOWS = """
import sys, time
import typer
import ctxwin.cli.main as cli
from ctxwin.cli import stopping
stopping._PATIENCE_S = 0.2

@cli.app.command("swallow")
def swallow(kind: str) -> None:
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            if kind == "turns":
                raise ImportError("a library of C failed to load") from None

sys.argv = ["ctxwin", "swallow", sys.argv[1]]
cli.main()
"""


@pytest.mark.parametrize("kind", ["turns", "swallows"])
def test_a_library_that_swallows_it_stops_nobody(kind: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SWALLOWS, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and said.strip().startswith("stopped") and len(said.strip().splitlines()) == 1


def test_ending_takes_less_than_5_seconds() -> None:
    assert stopping._PATIENCE_S < 5
