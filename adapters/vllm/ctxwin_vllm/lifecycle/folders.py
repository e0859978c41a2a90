"""Shared memory of engines and vLLM: folders of files for other processes, and vLLM's segments.

A file is written whole or not at all; a folder is removed when its owner is gone. vLLM removes its segments when it shuts down,
but those of a killed process would stay until the whole program ends: hundreds of megabytes for each engine opened since.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from mmap import mmap
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # ships no types

PREFIX = "ctxwin-"  # how a transport's folder is called: this, its owner's process number, and something random
LOCK = "lock"  # a file that the folder's owner keeps locked
SEGMENTS = "segments.json"
"""A file that names what vLLM's processes keep in shared memory, for when all of them are killed with their owner."""
_FOLDER = "/dev/shm/"
_TRACKED = "psm_"  # how Python names segments, of which it keeps a list
_NAMES = (_TRACKED, "vllm_")
_PATIENCE_S = 5.0  # a worker ends by itself, soon after the process that started it was killed
_log = logging.getLogger("ctxwin.engines")


def shared_memory() -> str:
    """Return the folder of transports' files: ``/dev/shm`` where the system has it, else the folder for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def sweep(root: Path) -> list[str]:
    """Remove the folders of ended processes, with their vLLM's segments; return the folders' names."""
    removed = []
    for folder in root.glob(f"{PREFIX}*-*"):
        pid = owner_of(folder)
        if folder.is_dir() and pid is not None and not runs(pid) and not _locked(folder):
            unlink_segments(name for name in (read_json(folder / SEGMENTS) or {}) if is_segment(name))
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    if removed:
        _log.info("removed what ended processes left in %s: %s", root, ", ".join(removed))
    return removed


def _locked(folder: Path) -> bool:
    """Return True if a process uses a folder; containers that share ``/dev/shm`` do not see each other's processes."""
    try:
        with (folder / LOCK).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def owner_of(folder: Path) -> int | None:
    """Return the process that made a folder called ``ctxwin-<pid>-<anything>``."""
    pid = folder.name.removeprefix(PREFIX).partition("-")[0]
    return int(pid) if pid.isdigit() else None


def runs(pid: int) -> bool:
    """Return True if a process runs; a killed one keeps its number until its parent has collected it."""
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def write_file(path: Path, *data: bytes | memoryview) -> None:
    """Write a file of pieces of data atomically; no other user of the machine may read a tenant's KV."""
    partial = path.with_name(f".{path.name}-{threading.get_ident()}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as JSON, as `write_file` does."""
    write_file(path, json.dumps(value, default=asdict).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an object; None where there is no file, or another value in it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return value if isinstance(value, dict) else None


def sum_of(blob: bytes | memoryview | mmap) -> int:
    """Return a checksum at the speed of memory; digests are for files that leave the machine."""
    words = np.frombuffer(blob, dtype="<u8", count=len(blob) // 8)
    rest = int.from_bytes(blob[8 * len(words) :], "little")
    return (int(words.sum(dtype=np.uint64)) + rest + len(blob)) % (1 << 63)


def segments() -> set[str]:
    """Return the names of the segments that child processes have mapped now. Cost: milliseconds."""
    return set().union(*(mapped(child.pid) for child in psutil.Process().children(recursive=True)))


def mapped(pid: int) -> set[str]:
    """Return the names of the segments that one process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return set(filter(is_segment, (line.partition(_FOLDER)[2] for line in lines)))


def is_segment(name: str) -> bool:
    """Return True if a mapped name is that of a segment of vLLM's that still exists."""
    return name.startswith(_NAMES) and "/" not in name and not name.endswith("(deleted)")


def remove_segments(names: Iterable[str]) -> None:
    """Remove the segments that still exist, once the child processes have unmapped them."""
    existing = {name for name in names if Path(_FOLDER, name).exists()}
    until = time.monotonic() + _PATIENCE_S
    used: set[str] = set()
    while existing and existing & (used := segments()) and time.monotonic() < until:
        time.sleep(0.05)
    unlink_segments(existing - used)


def unlink_segments(names: Iterable[str]) -> None:
    """Remove segments, even those in use; a missing one is no error."""
    for name in names:
        with contextlib.suppress(OSError):
            if name.startswith(_TRACKED):
                segment = SharedMemory(name)
                segment.close()
                segment.unlink()  # also strikes it off Python's list
            else:
                Path(_FOLDER, name).unlink()
