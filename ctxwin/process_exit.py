"""The end of this process: in order, without taking the interpreter down, or at once, with everything that it has started."""

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

_callbacks: list[Callable[[], None]] = []


def leave(status: int) -> NoReturn:
    """End this process with ``status`` after its exit functions. Main thread only.

    Taking the interpreter down collects every object of the model and of its libraries, which takes two to three seconds a
    process, and C++ libraries then print what they still hold as leaks. All of it goes with the process anyway.
    """
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


def before_abandon(callback: Callable[[], None]) -> None:
    """Let `abandon` call ``callback`` first: it removes what would outlive this process. Idempotent."""
    if callback not in _callbacks:
        _callbacks.append(callback)


def abandon(status: int) -> NoReturn:
    """End this process at once, with what callers of `before_abandon` keep outside it; for one that serves nothing yet."""
    for callback in _callbacks:
        # Called by signal handlers, in the midst of anything: no failure may keep the others from their turn, or this process
        # from its end, and a log's stream may be the very thing that was interrupted.
        with contextlib.suppress(Exception):
            callback()
    os._exit(status)
