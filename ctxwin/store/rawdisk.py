"""What `DiskStore` is made of: index rows without pickle, and checked blob files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import diskcache

from ctxwin.errors import StoreCorrupt
from ctxwin.store import codec
from ctxwin.store.base import check_key

BLOBS: Final = "blobs"
_FILE: Final = re.compile(rf"{BLOBS}/[0-9a-f]{{2}}/[0-9a-f]{{32}}\.blob")
_SUM: Final = re.compile(r"[0-9a-f]{64}")
MODE_BINARY: Final = 2  # diskcache's code for "the value is a file"


class Row(NamedTuple):
    """What the index knows of a blob: its file, relative to the store's folder, and its checksum."""

    filename: str
    sum: str


class RefusedRowError(ValueError):
    """A row that this store did not write."""


class RawDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Str keys and `Row` values only; nothing is ever pickled or unpickled, and no file is opened here."""

    def __init__(self, directory: str, **_: Any) -> None:
        # Settings come from the database file, which may be foreign: none of them is used.
        super().__init__(directory)

    def put(self, key: Any) -> tuple[str, bool]:
        return check_key(key), True

    def get(self, key: Any, raw: Any) -> str:
        if raw != 1 or not isinstance(key, str):
            raise RefusedRowError("the index has a key that is not a str")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, str, str]:
        if not isinstance(value, Written):
            raise TypeError(f"only written blobs can be indexed, got {type(value).__name__}")
        return value.size, MODE_BINARY, value.row.filename, value.row.sum

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> Row:
        if mode != MODE_BINARY or not isinstance(filename, str) or _FILE.fullmatch(filename) is None:
            raise RefusedRowError(f"the index has a row of mode {mode!r} and file {filename!r}"[:200])
        if not isinstance(value, str) or _SUM.fullmatch(value) is None:
            raise RefusedRowError("the index has a row without a checksum")
        return Row(filename, value)

    def remove(self, file_path: Any) -> None:
        # A planted row must not make us delete a file elsewhere.
        if isinstance(file_path, str) and _FILE.fullmatch(file_path):
            with contextlib.suppress(OSError):
                Path(self._directory, file_path).unlink()


class Written(NamedTuple):
    """A blob file that is on disk and waits for its row; ``size`` in bytes."""

    row: Row
    size: int


def read_blob(path: Path, key: str, summed: str) -> bytes:
    """The value in a blob file; StoreCorrupt where it is not exactly what was put under ``key``, else OSError."""
    with path.open("rb") as file:
        first = file.read(codec.PREFIX.size)
        prefix = codec.read_prefix(first, os.fstat(file.fileno()).st_size)
        head = first + file.read(prefix.body_offset - len(first))
        value = file.read(prefix.body_bytes)
        tail = file.read()
    check = hashlib.sha256(head)
    check.update(value)
    if check.digest() != tail or check.hexdigest() != summed or len(value) != prefix.body_bytes:
        raise StoreCorrupt("its checksum does not match its content")
    header = codec.parse_header(head[codec.PREFIX.size : codec.PREFIX.size + prefix.header_bytes])
    if prefix.kind != codec.RECORD or header != {"key": key}:
        raise StoreCorrupt(f"it was stored under another key, {header.get('key')!r}"[:200])
    return value


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def remove_old(path: Path, min_age: float) -> int | None:
    """Bytes freed, None where the file is too young or gone."""
    try:
        info = path.stat()
        if time.time() - info.st_mtime < min_age:
            return None
        path.unlink()
    except OSError:
        return None
    return info.st_size


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
