"""The parent of a serving process: starts it again when its engine died, and ends together with it.

The child stands in a process group of its own, so that Ctrl-C reaches it once, through its parent, and so that nothing of it
is left when it has ended. It reads its standard input, whose other end only the parent has: when the parent is gone, however that
came about, the child ends, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxwin.errors import EngineFailed

JOURNAL = "_CTXWIN_SERVE_JOURNAL"
"""Environment variable of a supervised process: the file that outlives it, see `ctxwin.serve.quarantine`."""
DIED = 75
"""Exit status of a server whose engine died (sysexits' "temporary failure")."""
_SERVED_S = 600.0
_LONGEST_PAUSE_S = 30.0
_GROUP_S = 10.0
_log = logging.getLogger("ctxwin.serve")


class EngineDied(EngineFailed):
    """The engine ended by itself while it served."""


def supervise(command: Sequence[str], restarts: int, pause: float = 1.0) -> int:
    """Runs ``command`` until it ends for another reason than `DIED`; returns its exit status. Main thread only.

    Args:
        restarts: how often in a row it is started again; one that has served for ten minutes starts a new row.
        pause: seconds before the first of them, doubled for each that follows, up to 30.
    """
    child: subprocess.Popen[bytes] | None = None
    told: list[int] = []
    woken = threading.Event()

    def forward(number: int, _: Any) -> None:
        told.append(number)
        woken.set()
        if child is not None:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tempfile.TemporaryDirectory(prefix="ctxwin-serve-") as folder:
            environment = {**os.environ, JOURNAL: str(Path(folder) / "suspects.json")}
            row = 0
            while True:
                began = time.monotonic()
                child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, process_group=0)
                if told:  # between the two lines before
                    child.send_signal(told[-1])
                status = child.wait()
                _end_group(child.pid)
                row = 1 if time.monotonic() - began > _SERVED_S else row + 1
                if status != DIED or told or row > restarts:
                    return status if status >= 0 else 128 - status
                wait = min(_LONGEST_PAUSE_S, pause * 2 ** (row - 1))
                _log.error("the engine died; starting again in %g s (%d of %d, --restarts)", wait, row, restarts)
                if woken.wait(wait):
                    return 128 + told[-1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_group(group: int) -> None:
    """Waits until no process of ``group`` is left; those that stay are killed."""
    until = time.monotonic() + _GROUP_S
    while True:
        with contextlib.suppress(ChildProcessError):  # the orphans are ours where this process is a container's first
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        late = time.monotonic() > until
        try:
            os.killpg(group, signal.SIGKILL if late else 0)
        except (ProcessLookupError, PermissionError):
            return
        if late and time.monotonic() > until + 5:
            return
        time.sleep(0.05)


def journal() -> Path | None:
    """The journal of a supervised process, which ends from now on when its parent does; None for any other."""
    path = os.environ.get(JOURNAL)
    if path is None:
        return None

    def follow() -> None:
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="ctxwin-parent", daemon=True).start()
    return Path(path)
