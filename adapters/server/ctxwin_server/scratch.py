"""Folders for temporary files of helper processes, owned by the parent, so that a killed helper leaves none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "ctxwin-scratch-"
_LOCK = "lock"
_YOUNG_S = 60.0
"""A younger folder may not have its lock yet."""


class Scratch:
    """A folder for the files of one helper process; its ``TMPDIR`` is `path`.

    It is locked while its owner lives, so that `sweep` can tell it from those of killed owners, in any container.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = self._folder / "files"
        self.path.mkdir(mode=0o700)

    def empty(self) -> None:
        """Remove the files that a job has left. Cost if there are none: listing the folder."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()

    def remove(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def sweep() -> int:
    """Remove this user's folders whose owners were killed; return how many."""
    count = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if folder.is_symlink() or not folder.is_dir() or about.st_uid != os.geteuid():
                continue
            if _is_locked(folder, time.time() - about.st_mtime):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
    return count


def _is_locked(folder: Path, age: float) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return age < _YOUNG_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
