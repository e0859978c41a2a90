"""Folders that hand files from one process to another: written whole or not at all, and removed when their owner is gone."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # ships no types

from ctxwin.engines.vllm.lifecycle import cleanup

PREFIX = "ctxwin-"
"""How a transport's folder is called: this, its owner's process number, and something random."""
LOCK = "lock"
"""A file that the folder's owner keeps locked."""
SEGMENTS = "segments.json"
"""A file that names what vLLM's processes keep in shared memory, for when all of them are killed with their owner."""
_log = logging.getLogger("ctxwin.engines")


def shared_memory() -> str:
    """Where transports keep their files: ``/dev/shm`` where the system has it, else the folder for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def sweep(root: Path) -> list[str]:
    """Removes the folders of processes that do not run any more, with their vLLM's segments; returns the folders' names."""
    gone = []
    for folder in root.glob(f"{PREFIX}*-*"):
        pid = owner_of(folder)
        if folder.is_dir() and pid is not None and not runs(pid) and not _locked(folder):
            cleanup.unlink(name for name in (read_json(folder / SEGMENTS) or {}) if cleanup.is_segment(name))
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder.name)
    if gone:
        _log.info("removed what ended processes left in %s: %s", root, ", ".join(gone))
    return gone


def _locked(folder: Path) -> bool:
    """Whether some process uses a folder: containers that share ``/dev/shm`` do not see each other's processes."""
    try:
        with (folder / LOCK).open("r+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def owner_of(folder: Path, prefix: str = PREFIX) -> int | None:
    """The process that made a folder called ``<prefix><pid>-<anything>``."""
    pid = folder.name.removeprefix(prefix).partition("-")[0]
    return int(pid) if pid.isdigit() else None


def runs(pid: int) -> bool:
    """Whether a process runs; a killed one keeps its number until its parent has collected it."""
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def write_file(path: Path, data: bytes) -> None:
    """All of it or nothing; nobody else on the machine may read a tenant's KV."""
    partial = path.with_name(f".{path.name}-{threading.get_ident()}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """As `write_file`."""
    write_file(path, json.dumps(value).encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """An object; None where there is no file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None
