"""Whoever waits for an engine is told for what: on a terminal by a line, elsewhere by the log, never on stdout."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
from contextlib import redirect_stderr

import pytest

from ctxwin import open_engine
from ctxwin.progress import step, waiting_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CTXWIN_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_opening_an_engine_is_in_the_log(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, "ctxwin.progress"):
        open_engine("tiny:hf").close()
    said = [record.getMessage() for record in caplog.records if record.name == "ctxwin.progress"]
    assert said[0] == "opening tiny:hf"
    assert said[1:3] == ["opening tiny:hf: importing transformers", "opening tiny:hf: loading weights"]
    assert said[-1].startswith("opening tiny:hf: done after ")
    assert capfd.readouterr().out == ""


def test_a_terminal_has_a_line_that_goes_again(capfd: pytest.CaptureFixture[str]) -> None:
    with redirect_stderr(Terminal()) as terminal, waiting_for("opening [it]"):
        step("first")
        with waiting_for("second"):
            step("third")
    shown = terminal.getvalue()
    assert "opening [it]" in shown and "third" in shown
    assert "\x1b[2K" in shown.rpartition("third")[2], "the line is erased"
    assert capfd.readouterr().out == ""


def test_the_switch_leaves_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXWIN_PROGRESS", "0")
    with redirect_stderr(Terminal()) as terminal, waiting_for("opening it"):
        step("first")
    assert terminal.getvalue() == ""


def test_an_error_passes_and_the_next_wait_is_one_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ctxwin.progress"):
        for _ in range(2):
            with pytest.raises(KeyError), waiting_for("opening it"):
                raise KeyError
        step("nobody waits")
    assert [record.getMessage() for record in caplog.records] == ["opening it"] * 2


def test_json_stays_alone_on_stdout_while_a_terminal_is_told() -> None:
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "ctxwin", "doctor", "tiny", "--json"], stdout=subprocess.PIPE, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # the terminal's other side is closed
            break
        if not read:
            break
        shown += read
    assert running.stdout is not None
    assert json.loads(running.stdout.read())["standing"] == "tested" and running.wait() == 0
    assert b"reading the config of tiny" in shown
