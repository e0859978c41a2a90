"""The end of a process that has served: its exit functions run, the interpreter is not taken down.

Taking it down collects every object of the model and of its libraries, which takes two to three seconds a process, and C++
libraries then print what they still hold as leaks. All of it goes with the process anyway.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import psutil  # ships no types

from ctxwin.engines.vllm.lifecycle.folders import PREFIX, segments, shared_memory, unlink_segments

TRACKER = "resource_tracker"
"""In the command line of the process that removes what others of `multiprocessing` leave; it ends after them, by itself."""


def leave(status: int) -> NoReturn:
    """End this process with ``status`` after its exit functions. Main thread only."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def leave_when_shut_down() -> None:
    """Let this process, which shuts down in order, end by `leave`. Idempotent."""
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    atexit.unregister(_leave_at_exit)  # else `leave` would run it again
    leave(0)


def abandon(status: int) -> NoReturn:
    """End this process and all below it at once, with what they keep in shared memory; for one that serves nothing yet.

    All are stopped before the first is killed: one that reads what its parent hands over at its start would else live long
    enough to print the traceback of a pipe that broke.
    """
    names = segments()
    for child in _stop_descendants():
        with contextlib.suppress(psutil.Error):
            child.kill()
    unlink_segments(names)
    for folder in Path(shared_memory()).glob(f"{PREFIX}{os.getpid()}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


def _stop_descendants() -> set[psutil.Process]:
    """Stop every process below this one but trackers, those started meanwhile, too, and return them."""
    this = psutil.Process()
    stopped: set[psutil.Process] = set()
    seen: set[psutil.Process] = set()
    while found := set(this.children(recursive=True)) - seen:
        for child in found:
            with contextlib.suppress(psutil.Error):
                if TRACKER not in " ".join(child.cmdline()):
                    child.suspend()
                    stopped.add(child)
        seen |= found
    return stopped
