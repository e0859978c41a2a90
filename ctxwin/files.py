"""Atomic replacement of files."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4


def atomic_write(
    path: Path,
    data: bytes | Iterable[bytes],
    *,
    durable: bool = False,
    mode: int = 0o666,
    temporary: Path | None = None,
) -> Path:
    """Write ``path`` atomically: a reader sees the old bytes or the new ones, also after a crash.

    Missing parent folders are created. Concurrent writers may share a process or only a network folder.

    Args:
        data: the bytes, or parts of them in order.
        durable: wait until the bytes are on the disk before the file is renamed, and then for the rename.
        mode: permissions of a new file, less the umask.
        temporary: path of the temporary file, on the same file system; default: beside ``path``.

    Returns ``path``. Raises OSError, which names ``path``; the temporary file is removed then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary or path.with_name(f".{uuid4().hex}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    return path


def check_writable(folder: Path) -> None:
    """Create ``folder`` if it is missing. Raises ValueError where no file can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{folder} must be a writable folder, got: {error.strerror}; choose another") from error


def sync_folder(folder: Path) -> None:
    """Make renames within ``folder`` survive a power cut; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
