"""vLLM's processes end with the engine's, from their first moment on, however that process ended.

vLLM's own do not all notice: one that is still starting waits for an answer that will never come, the others hold their memory
for ever. A death signal of the kernel is tied to the thread that started a process, which may end long before its program. So
each of them watches, in a thread, for the end of the process that opened the engine.

The watch has to begin before the connector is made, which is after the model was loaded. vLLM gives each process that it
spawns its configuration, which holds the name of the transport's folder: a `Lifeline`, which starts the watch where it
arrives. A forked process inherits it instead; of those that the engine's own process forks, only the ones of a thread that
is `starting` vLLM are vLLM's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

from ctxwin_vllm.lifecycle.folders import mapped, owner_of, runs, unlink_segments

WATCH_S = 1.0
"""How often to check that the process that started this one still runs; the engine's end is noticed at once."""
PATIENCE_S = 10.0  # how long vLLM may take to end in good order
_watched: set[tuple[int, str]] = set()  # (process, folder)
_starts = threading.local()


class Lifeline(str):
    """The name of a transport's folder. A process of `multiprocessing` that receives it ends with the folder's owner."""

    def __new__(cls, folder: str) -> Lifeline:
        line = super().__new__(cls, folder)
        util.register_after_fork(line, _forked)
        return line

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _arrived, (str(self),)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Processes that this thread forks meanwhile are vLLM's."""
    _starts.here = True
    try:
        yield
    finally:
        _starts.here = False


def end_with_owner(folder: Path) -> None:
    """Ends this process soon after the one that owns a folder, or after the one of vLLM that started it. Idempotent."""
    owner, key = owner_of(folder), (os.getpid(), folder.name)
    if owner is None or owner == os.getpid() or key in _watched:
        return
    _watched.add(key)
    threading.Thread(target=_watch, args=(folder, owner, os.getppid()), name="ctxwin-watch", daemon=True).start()


def _arrived(folder: str) -> Lifeline:
    end_with_owner(Path(folder))
    return Lifeline(folder)


def _forked(line: Lifeline) -> None:
    """In a process that `multiprocessing` has forked from one that held ``line``."""
    parent = multiprocessing.parent_process()  # may have been killed already
    watched = parent is not None and (parent.pid, Path(line).name) in _watched
    if watched or getattr(_starts, "here", False):
        end_with_owner(Path(line))


def _watch(folder: Path, owner: int, parent: int) -> None:
    ended = _wait(owner, parent)
    if ended:
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM ends its workers and frees its shared memory on this one
    time.sleep(PATIENCE_S)
    if ended:  # else the engine is left to remove them
        unlink_segments(mapped(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)  # while it starts, vLLM only makes a note of a SIGTERM


def _wait(owner: int, parent: int) -> bool:
    """Returns when the owner has ended (True), or the parent has while the owner runs (False)."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # no Linux, an old one, or a sandbox; then by number
        while runs(owner):
            if os.getppid() != parent:
                return False
            time.sleep(WATCH_S)
        return True
    ended = select.poll()  # `select.select` takes no numbers above 1023, which a busy process has
    ended.register(handle, select.POLLIN)
    try:
        while not ended.poll(1000 * WATCH_S):
            if os.getppid() != parent:
                # Both may have been killed: the kernel reports in no particular order.
                return bool(ended.poll(1000 * WATCH_S))
        return True
    finally:
        os.close(handle)
