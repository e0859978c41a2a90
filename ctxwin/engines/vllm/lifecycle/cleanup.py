"""What vLLM's processes leave in shared memory when they are killed, found and removed by the engine that started them.

vLLM removes its segments when it shuts down; those of a killed process stay until the whole program ends: hundreds of
megabytes for each engine opened since.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # ships no types

_FOLDER = "/dev/shm/"
_TRACKED = "psm_"  # how Python names segments, of which it keeps a list
_NAMES = (_TRACKED, "vllm_")
_PATIENCE_S = 5.0  # a worker ends by itself, soon after the process that started it was killed


def segments() -> set[str]:
    """Names of the segments that processes below this one have mapped now. Cost: milliseconds."""
    return set().union(*(mapped(child.pid) for child in psutil.Process().children(recursive=True)))


def mapped(pid: int) -> set[str]:
    """Names of the segments that one process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return set(filter(is_segment, (line.partition(_FOLDER)[2] for line in lines)))


def is_segment(name: str) -> bool:
    """Whether a segment can be one of vLLM's, and still exists."""
    return name.startswith(_NAMES) and "/" not in name and not name.endswith("(deleted)")


def remove(names: Iterable[str]) -> None:
    """Removes those of the segments that still exist, once the processes below this one have let go of them."""
    there = {name for name in names if Path(_FOLDER, name).exists()}
    until = time.monotonic() + _PATIENCE_S
    used: set[str] = set()
    while there and there & (used := segments()) and time.monotonic() < until:
        time.sleep(0.05)
    unlink(there - used)


def unlink(names: Iterable[str]) -> None:
    """Removes segments, whoever uses them; a missing one is no error."""
    for name in names:
        with contextlib.suppress(OSError):
            if name.startswith(_TRACKED):
                segment = SharedMemory(name)
                segment.close()
                segment.unlink()  # also strikes it off Python's list
            else:
                Path(_FOLDER, name).unlink()
