"""The files of `DiskStore`: rows of its index without pickle, and records read without trust."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import diskcache

from ctxwin.errors import StoreCorrupt
from ctxwin.files import sync_folder
from ctxwin.store import codec
from ctxwin.store.base import check_key

BLOBS: Final = "blobs"
_FILE: Final = re.compile(rf"{BLOBS}/[0-9a-f]{{2}}/[0-9a-f]{{32}}\.blob")
_CODE: Final = re.compile(r"[0-9a-f]{64}")


class Row(NamedTuple):
    """What the index knows of a record: its file, relative to the store's folder, and the code it ends with, in hex."""

    filename: str
    code: str


class Written(NamedTuple):
    """A record that is on disk and waits for its row; ``size`` in bytes."""

    row: Row
    size: int


class RefusedRowError(ValueError):
    """A row that this store did not write."""


class RawDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Str keys and `Row` values only; nothing is ever pickled or unpickled, and no file is opened here."""

    def __init__(self, directory: str, **_: Any) -> None:
        # Settings come from the database file, which may be foreign: none of them is used.
        super().__init__(directory)
        self._folder = Path(directory)

    def put(self, key: Any) -> tuple[str, bool]:
        return check_key(key), True

    def get(self, key: Any, raw: Any) -> str | None:
        """The key of a row; None for a row that this store did not write."""
        return key if raw == 1 and isinstance(key, str) else None

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, str, str]:
        if not isinstance(value, Written):
            raise TypeError(f"only written records can be indexed, got {type(value).__name__}")
        return value.size, diskcache.core.MODE_BINARY, value.row.filename, value.row.code

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> Row:
        ours = isinstance(filename, str) and _FILE.fullmatch(filename)
        if not ours or mode != diskcache.core.MODE_BINARY:
            raise RefusedRowError(f"the index has a row of mode {mode!r} and file {filename!r}"[:200])
        if not isinstance(value, str) or _CODE.fullmatch(value) is None:
            raise RefusedRowError("the index has a row without a checksum")
        return Row(filename, value)

    def remove(self, file_path: Any) -> None:
        # A planted row must not make us delete a file elsewhere.
        if isinstance(file_path, str) and _FILE.fullmatch(file_path):
            with contextlib.suppress(OSError):
                (self._folder / file_path).unlink()


class BlobFile(NamedTuple):
    """A record as a walk over the folder finds it; ``used`` in nanoseconds since the epoch."""

    used: int
    filename: str
    size: int


def walk(folder: Path) -> Iterator[BlobFile]:
    """Every file in ``folder``'s records, whatever it is, without opening it."""
    with contextlib.suppress(OSError):
        for shard in os.scandir(folder / BLOBS):
            with contextlib.suppress(OSError):
                for entry in os.scandir(shard.path):
                    with contextlib.suppress(OSError):
                        info = entry.stat(follow_symlinks=False)
                        yield BlobFile(info.st_mtime_ns, f"{BLOBS}/{shard.name}/{entry.name}", info.st_size)


def write_record(folder: Path, temporary: Path, name: str, parts: tuple[bytes, ...]) -> str:
    """Writes a record under a new ``name``, synced, and returns its filename; leaves nothing where it raises OSError."""
    filename = f"{BLOBS}/{name[-2:]}/{name}.blob"
    target, temp = folder / filename, temporary / f"{name}.tmp"
    try:
        with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            target.parent.mkdir(mode=0o700)
        temp.replace(target)
        sync_folder(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise
    return filename


def read_record(path: Path) -> tuple[bytes, bytes, bytes]:
    """``(head, value, code)`` of a record, unchecked but for its lengths; StoreCorrupt or OSError."""
    with _regular(path) as file:
        first = file.read(codec.PREFIX.size)
        prefix = codec.read_prefix(first, os.fstat(file.fileno()).st_size)
        head = first + file.read(prefix.body_offset - len(first))
        value = file.read(prefix.body_bytes)
        return head, value, file.read(prefix.sum_bytes)


def describe_record(path: Path) -> tuple[str, str]:
    """The key that a record names and its code, both unchecked; StoreCorrupt or OSError. Cost: the value is not read."""
    with _regular(path) as file:
        first = file.read(codec.PREFIX.size)
        prefix = codec.read_prefix(first, os.fstat(file.fileno()).st_size)
        header = codec.parse_header(first + file.read(prefix.header_bytes), prefix)
        file.seek(prefix.body_end)
        code = file.read(prefix.sum_bytes).hex()
    try:
        return check_key(header.get("key")), code
    except (TypeError, ValueError) as error:
        raise StoreCorrupt(str(error)) from None


def _regular(path: Path) -> Any:
    """An open file; a pipe, a device or a link in its place must neither be waited for nor followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise StoreCorrupt("it is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StoreCorrupt("it is not a regular file")
    return os.fdopen(descriptor, "rb")


def is_record(path: Path, size: int | None = None) -> bool:
    """Whether ``path`` is a regular file, of ``size`` bytes where given."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and (size is None or info.st_size == size)


def remove_old(path: Path, min_age: float) -> int | None:
    """Bytes freed, None where the file is too young or gone."""
    try:
        info = path.lstat()
        if time.time() - info.st_mtime < min_age:
            return None
        path.unlink()
    except OSError:
        return None
    return info.st_size
