"""Memory of a server's processes, and the bound above which new work is refused.

A machine that runs out of memory kills the largest process, with every request in it. So before that the server refuses new
work, while running work continues and frees memory.
"""

import contextlib
import ctypes
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ctxwin_client.errors import MemoryShort

_SHARE = 0.8
_POLL_S, _CHILDREN_S, _TRIM_S = 0.25, 5.0, 10.0
"""Seconds between two measurements, two listings of processes, and two attempts to free memory."""
_IDLE_TRIM_S = 60.0
"""The heap of a busy server frays: after 4,700 requests 710 of its 1,125 MB were free."""
_ARENAS, _MAPPED_BYTES = 2, 1 << 18
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h
_log = logging.getLogger("ctxwin.serve")


def machine_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this machine, or its container's limit if that is lower."""
    limits = [int(line.split()[1]) << 10 for line in _lines(proc / "meminfo") if line.startswith("MemTotal:")]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups if not controllers else cgroups / "memory"
        name = "memory.max" if not controllers else "memory.limit_in_bytes"
        # A container sees its own group as the root, or as a path that its root does not have.
        folders = [root, *(root.joinpath(*Path(path).parts[1 : n + 1]) for n in range(1, len(Path(path).parts)))]
        for folder in folders:
            limits += [int(value) for value in _lines(folder / name) if value.strip().isdecimal()]
    return min(filter(None, limits), default=0)


def process_tree(root: int) -> list[int]:
    """Return a process and its descendants. Cost: one file read for each of their threads."""
    pids, at = [root], 0
    while at < len(pids):
        with contextlib.suppress(OSError):
            for thread in os.scandir(f"/proc/{pids[at]}/task"):
                with contextlib.suppress(OSError):
                    pids += map(int, Path(thread.path, "children").read_text().split())
        at += 1
    return pids


def memory_of(pids: list[int]) -> int:
    """Return the private bytes of processes, plus the largest shared part of one of them. Cost: one file read each."""
    private, shared = 0, 0
    for pid in pids:
        for line in _lines(Path(f"/proc/{pid}/status")):
            if line.startswith("RssAnon:"):
                private += int(line.split()[1]) << 10
            elif line.startswith("RssShmem:"):
                shared = max(shared, int(line.split()[1]) << 10)
    return private + shared


class Memory:
    """Monitor of the memory of this process and its descendants. Thread-safe.

    Args:
        limit: bytes from which new work is refused; None is 80 % of `machine_bytes`.
        measure: returns the bytes of the processes with these ids; tests replace it.

    Attributes:
        used: bytes at the last measurement; refused: number of refused requests.
    """

    def __init__(self, limit: int | None = None, measure: Callable[[list[int]], int] = memory_of) -> None:
        self.limit = int(machine_bytes() * _SHARE) if limit is None else limit
        self.used = self.refused = 0
        self._measure = measure
        self._pids: list[int] = []
        self._looked = self._trimmed = float("-inf")
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def short(self) -> bool:
        """True while new work is refused."""
        return self.used >= self.limit > 0

    def check(self) -> None:
        """Raise MemoryShort, and count the refusal, while new work is refused."""
        if self.short:
            self.refused += 1
            raise MemoryShort(
                f"the server's processes have {self.used >> 20} MiB of memory, of {self.limit >> 20} MiB (--max-memory); try "
                "again when others have ended, or another server"
            )

    def look(self) -> None:
        """Measure; above the limit, and now and then below it, also free unused memory."""
        now = time.monotonic()
        if now - self._looked > _CHILDREN_S:
            self._pids, self._looked = process_tree(os.getpid()), now
        was_short, self.used = self.short, self._measure(self._pids)
        if self.short and now - self._trimmed > _TRIM_S:
            self._trimmed = now
            gc.collect()  # only here: it stops the server for as long as it takes
            give_back()
            self.used = self._measure(self._pids)
        elif now - self._trimmed > _IDLE_TRIM_S:
            self._trimmed = now
            give_back()
        if self.short != was_short:
            state = "no new work is taken" if self.short else "new work is taken again"
            used, limit = self.used >> 20, self.limit >> 20
            _log.warning("%d MiB of %d MiB of memory are used (--max-memory): %s", used, limit, state)

    def start(self) -> None:
        """Start a thread that measures four times a second; the allocator keeps this process's heap compact from now on."""
        keep_compact()
        self._thread = threading.Thread(target=self._run, name="ctxwin-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                self.look()
            except Exception:
                _log.exception("the memory of the server could not be measured")


def keep_compact() -> None:
    """Have threads share `_ARENAS` heaps, and blocks of `_MAPPED_BYTES` stand apart, which return to the machine when freed.

    By default there are eight heaps a core, and each thread frays its own.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_ARENA_MAX, _ARENAS)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def give_back() -> None:
    """Return free pages of the allocator to the machine."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []
