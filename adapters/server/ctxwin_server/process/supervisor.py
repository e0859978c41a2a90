"""The parent of a serving process: starts it again when its engine died or it was killed, and ends together with it.

It bounds the shutdown, too. A serving child gets time to drain and to save its windows; one that is still opening its engine has
nothing to lose. Whatever remains of either is killed afterwards, and a second signal kills at once.

The child has a process group of its own, so that Ctrl-C reaches it once, through its parent, and no process of it remains. It
reads its standard input, whose other end only the parent holds: when the parent ends for any reason, so does the child.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxwin.errors import EngineFailed
from ctxwin.files import atomic_write

JOURNAL = "_CTXWIN_SERVE_JOURNAL"
"""Environment variable of a supervised process: the file that outlives it, see `ctxwin_server.app.quarantine`."""
DIED = 75
"""Exit status of a server whose engine died (sysexits' "temporary failure")."""
_KILLED = frozenset((signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT))
"""Signals that end a server unintentionally: a machine without memory sends SIGKILL, a full ``/dev/shm`` SIGBUS."""
_SERVED_S = 600.0
_LONGEST_PAUSE_S = 30.0
_GROUP_S = 10.0
"""Seconds for the remaining processes of a dead server to end before it is restarted."""
_OPENING_S = 1.5
"""Seconds for a server to end while it is opening its engine."""
_CLOSING_S = 2.4
"""Seconds for a server to end after draining: more than its own bounds, see `ctxwin_server.vllm.server`."""
_LEFT_S = 0.3
"""Seconds for the remaining processes of an ended server."""
_SERVING = "serving"
_TRACKER = b"resource_tracker"
_TRACKER_LINES = "ignore:resource_tracker:UserWarning"
_log = logging.getLogger("ctxwin.serve")


class EngineDied(EngineFailed):
    """The engine ended by itself while it served."""


def supervise(command: Sequence[str], restarts: int, pause: float = 1.0) -> int:
    """Run ``command`` until it ends for another reason than `DIED`; return its exit status. Main thread only.

    A process killed by others is restarted like one whose engine died. SIGTERM, SIGINT and, unless it is ignored, SIGHUP end it
    within its drain time and `_CLOSING_S`; the status is 0 then, 130 or 129.

    Args:
        restarts: most restarts in a row; serving for ten minutes starts a new row.
        pause: seconds before the first restart, doubled for each further one, up to 30.
    """
    child: subprocess.Popen[bytes] | None = None
    signals: list[int] = []
    woken = threading.Event()
    waiting = False

    def forward(number: int, _: Any) -> None:
        nonlocal waiting
        if number == signal.SIGHUP and signals:  # a terminal that closes may send it twice
            return
        signals.append(number)
        woken.set()
        if len(signals) > 1 and child is not None:
            _kill_group(child.pid)
        elif waiting:
            waiting = False
            raise _ShutdownRequested

    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup has it
        numbers.remove(signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, forward) for number in numbers}
    try:
        with tempfile.TemporaryDirectory(prefix="ctxwin-serve-") as folder:
            suspects, serving = Path(folder) / "suspects.json", Path(folder) / _SERVING
            # Python's tracker removes what a killed process of the server has left; its warnings are not needed.
            warnings = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _TRACKER_LINES]))
            environment = {**os.environ, JOURNAL: str(suspects), "PYTHONWARNINGS": warnings}
            attempts = 0
            while not signals:
                began = time.monotonic()
                serving.unlink(missing_ok=True)
                child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, process_group=0)
                with contextlib.suppress(_ShutdownRequested):
                    waiting = True
                    if not signals:  # between the lines before
                        child.wait()
                    waiting = False
                if signals:
                    _end(child, _time_to_end(serving))
                    break
                status = child.returncode
                _end_group(child.pid, _GROUP_S)
                attempts = 1 if time.monotonic() - began > _SERVED_S else attempts + 1
                died = status == DIED or -status in _KILLED
                if not died or attempts > restarts:
                    return status if status >= 0 else 128 - status
                wait = min(_LONGEST_PAUSE_S, pause * 2 ** (attempts - 1))
                cause = "the engine died" if status == DIED else _cause(-status)
                _log.error("%s; starting again in %g s (%d of %d, --restarts)", cause, wait, attempts, restarts)
                child = None
                woken.wait(wait)
            return 0 if signals[0] == signal.SIGTERM else 128 + signals[0]
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class _ShutdownRequested(BaseException):
    """Raised when a signal tells this process to end."""


def _end(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Tell a server to end, and kill it and its descendants after ``seconds``."""
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    _end_group(child.pid, _LEFT_S if child.returncode is not None else 0.0)


def _time_to_end(serving: Path) -> float:
    try:
        return float(serving.read_text()) + _CLOSING_S
    except (OSError, ValueError):
        return _OPENING_S


def serves(drain: float) -> None:
    """Tell the parent that this process serves, and that its requests get ``drain`` seconds at shutdown."""
    if (path := os.environ.get(JOURNAL)) is not None:
        atomic_write(Path(path).with_name(_SERVING), str(drain).encode())


def _cause(number: int) -> str:
    if number != signal.SIGKILL:
        return f"the server was ended by {signal.Signals(number).name}"
    return "the server was killed (SIGKILL), as a machine without memory does (--max-memory)"


def _end_group(group: int, seconds: float) -> None:
    """Wait until no process of ``group`` is left; kill those that stay for ``seconds``."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ChildProcessError):  # a container's first process inherits orphans
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        late = time.monotonic() > until
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        if late:
            _kill_group(group)
        if late and time.monotonic() > until + _LEFT_S:
            return
        time.sleep(0.05)


def _kill_group(group: int) -> None:
    """Kill every process of ``group`` but Python's trackers, which clean up after the others and then end.

    The group is stopped first, in one step: one that reads from another would else print a traceback before its turn comes.
    """
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGSTOP)
    members = list(_members(group))
    for process in members:
        with contextlib.suppress(OSError):
            tracker = _TRACKER in Path(f"/proc/{process}/cmdline").read_bytes()
            os.kill(process, signal.SIGCONT if tracker else signal.SIGKILL)
    if not members:  # no /proc, or nobody is left
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def _members(group: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                yield int(stat.parent.name)


def journal() -> Path | None:
    """Return the journal of a supervised process, and end it when its parent ends; None for any other."""
    path = os.environ.get(JOURNAL)
    if path is None:
        return None

    def follow() -> None:
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="ctxwin-parent", daemon=True).start()
    return Path(path)
