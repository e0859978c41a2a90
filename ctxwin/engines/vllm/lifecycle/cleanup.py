"""What vLLM's processes leave in shared memory when they are killed, found and removed by the engine that started them.

vLLM removes its segments when it shuts down; those of a killed process stay until the whole program ends, hundreds of
megabytes for each engine that is opened anew.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # ships no types

_FOLDER = "/dev/shm/"
_TRACKED = "psm_"
"""How Python names segments; it keeps a list of them, too."""
_PATIENCE_S = 5.0
"""A worker ends by itself, soon after the process that started it was killed."""
_NAMES = (_TRACKED, "vllm_")


def segments() -> set[str]:
    """Names of the segments that processes below this one have mapped now. Cost: milliseconds."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        found |= mapped(child.pid)
    return found


def mapped(pid: int) -> set[str]:
    """Names of the segments that one process has mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            name = line.partition(_FOLDER)[2]
            if is_segment(name):
                found.add(name)
    return found


def is_segment(name: str) -> bool:
    """Whether a segment can be one of vLLM's, and is still there."""
    return name.startswith(_NAMES) and "/" not in name and not name.endswith("(deleted)")


def remove(names: Iterable[str]) -> None:
    """Removes those of the segments that are still there, once the processes below this one have let go of them."""
    there = {name for name in names if Path(_FOLDER, name).exists()}
    until = time.monotonic() + _PATIENCE_S
    used: set[str] = set()
    while there and there & (used := segments()) and time.monotonic() < until:
        time.sleep(0.05)
    unlink(there - used)


def unlink(names: Iterable[str]) -> None:
    """Removes segments, whoever uses them; one that is not there is no error."""
    for name in names:
        with contextlib.suppress(OSError):
            if name.startswith(_TRACKED):
                segment = SharedMemory(name)
                segment.close()
                segment.unlink()  # also strikes it off Python's list
            else:
                Path(_FOLDER, name).unlink()
