"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


def atomic_write(path: Path, data: bytes, *, durable: bool = False) -> Path:
    """Writes ``path`` as a whole: a reader sees the old bytes or the new ones, also after a crash.

    Missing parent folders are made. Concurrent writers may share a process or only a network folder.

    Args:
        durable: waits until the bytes are on the disk before the file takes its name.

    Returns ``path``. Raises OSError; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def sync_folder(folder: Path) -> None:
    """Makes renames within ``folder`` survive a power cut; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
