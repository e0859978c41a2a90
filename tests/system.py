"""Programs of the system that some tests need, found or the test is skipped by name; and how processes of tests end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

REMEDY = "is not installed; run `make system-deps`"


def need_chromium() -> str:
    """Path of Chromium; skips the test (or the module that calls it) where Chromium or Playwright is missing."""
    pytest.importorskip("playwright", reason="Playwright is not installed; run pip install 'ctxwin[web]'")
    return _need("Chromium", "chromium")


def need_redis() -> str:
    """Path of a Redis server; skips likewise."""
    return _need("Redis", "redis-server")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium driven by Playwright, closed at the end; skips like `need_chromium`."""
    path = need_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's own sandbox does not run as root, and containers often forbid it.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def _need(name: str, program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{name} {REMEDY}", allow_module_level=True)
    return found


def running(leader: int, belongs: Callable[[int], int]) -> dict[int, str]:
    """Command lines of what runs in a session (by `os.getsid`) or a group (by `os.getpgid`), by process id.

    An ended process that nobody has waited for does not run.
    """
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] != "Z" and belongs(int(stat.parent.name)) == leader:
                found[int(stat.parent.name)] = (stat.parent / "cmdline").read_text().replace("\0", " ")
    return found


def stop_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, within 30 s, and kill what is left of its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
