"""The end of a process that ends at once: those below it, and what they keep in shared memory, go with it."""

import contextlib
import os
import shutil
from pathlib import Path

import psutil  # ships no types

from ctxwin.process_exit import before_abandon
from ctxwin_vllm.lifecycle.folders import PREFIX, segments, shared_memory, unlink_segments

TRACKER = "resource_tracker"
"""In the command line of the process that removes what others of `multiprocessing` leave; it ends after them, by itself."""


def end_descendants() -> None:
    """End all processes below this one, and remove what they and this one keep in shared memory.

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


def _stop_descendants() -> set[psutil.Process]:
    """Stop every process below this one but trackers, those started meanwhile, too, and return them."""
    this = psutil.Process()
    stopped: set[psutil.Process] = set()
    visited: set[psutil.Process] = set()
    while children := set(this.children(recursive=True)) - visited:
        for child in children:
            with contextlib.suppress(psutil.Error):
                if TRACKER not in " ".join(child.cmdline()):
                    child.suspend()
                    stopped.add(child)
        visited |= children
    return stopped


before_abandon(end_descendants)
