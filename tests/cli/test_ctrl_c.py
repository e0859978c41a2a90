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
from ctxwin import open_store
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
from ctxwin.process_exit import before_abandon
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
            if kind == "closes":  # an engine, which takes longer than is waited for
                before_abandon(lambda: time.sleep(1))
                time.sleep(0.4)
                raise

sys.argv = ["ctxwin", "swallow", sys.argv[1]]
cli.main()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_store_export_that_is_ended_leaves_no_half_file(number: int, status: int, tmp_path: Path) -> None:
    store = open_store(f"disk:{tmp_path / 'kv'}")
    assert all(store.put(f"span/{i}", bytes(10)) for i in range(3))
    store.close()
    code = (
        "import sys, time\n"
        "import ctxwin.cli.main as cli\n"
        "from ctxwin.store.disk import DiskStore\n"
        "DiskStore.get = lambda *_: (print('ready', flush=True), time.sleep(60))\n"
        "sys.argv = ['ctxwin', 'store', 'export', 'kv', 'all.ctxwin']\n"
        "cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert len([*tmp_path.glob(".*.tmp")]) == 1
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said.strip()) == (status, "stopped; nothing is half done; give the same command again")
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_a_forked_child_dies_of_a_signal_as_without_a_command() -> None:
    code = (
        "import os, signal, time\n"
        "from ctxwin.cli import stopping\n"
        "stopping.stop_commands()\n"
        "begun, begin = os.pipe()\n"
        "if not (child := os.fork()):\n"
        "    os.write(begin, b'1')\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "os.read(begun, 1)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(os.waitpid(child, 0)[1], flush=True)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (process.returncode, process.stdout, process.stderr) == (0, f"{int(signal.SIGTERM)}\n", "")


@pytest.mark.parametrize("kind", ["turns", "swallows", "closes"])
def test_a_library_that_swallows_it_stops_nobody(kind: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SWALLOWS, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and said.strip() == "stopped; nothing was left running"


def test_ending_takes_less_than_5_seconds() -> None:
    assert stopping._PATIENCE_S < 5
