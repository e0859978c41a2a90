"""The files of `DiskStore`: records that are read without trust."""

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ctxwin.errors import StoreCorrupt
from ctxwin.files import atomic_write
from ctxwin.store import codec
from ctxwin.store.base import check_key

BLOBS: Final = "blobs"
TEMP: Final = "tmp"
_FILE: Final = re.compile(rf"{BLOBS}/[0-9a-f]{{2}}/[0-9a-f]{{32}}\.blob")


class Row(NamedTuple):
    """Index entry of a record: its file, relative to the store's folder, and its final checksum, in hex."""

    file: str
    sum: str


class BlobFile(NamedTuple):
    """A record as a walk over the folder finds it; ``used`` in nanoseconds since the epoch, ``size`` in bytes."""

    used: int
    file: str
    size: int

    @property
    def name(self) -> str:
        """The file's name, whose first 16 digits are when it was written, in nanoseconds since the epoch."""
        return self.file.rpartition("/")[2]


def walk(folder: Path) -> Iterator[BlobFile]:
    """Every file among the records of ``folder``, whatever it is, without opening it."""
    with contextlib.suppress(OSError):
        for shard in os.scandir(folder / BLOBS):
            with contextlib.suppress(OSError):
                for entry in os.scandir(shard.path):
                    with contextlib.suppress(OSError):
                        info = entry.stat(follow_symlinks=False)
                        yield BlobFile(info.st_mtime_ns, f"{BLOBS}/{shard.name}/{entry.name}", info.st_size)


def folder_times(folder: Path) -> dict[str, int]:
    """Return when each folder of the records of ``folder`` last gained or lost one, in nanoseconds since the epoch."""
    return {shard.name: shard.stat().st_mtime_ns for shard in (folder / BLOBS).glob("*")}


def write_record(folder: Path, head: bytes, value: bytes, tail: bytes) -> Row:
    """Write a record under a new name, synced; leave nothing where it raises OSError."""
    name = f"{time.time_ns():016x}{secrets.token_hex(8)}"
    file = f"{BLOBS}/{name[-2:]}/{name}.blob"
    path = folder / file
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    atomic_write(path, (head, value, tail), durable=True, mode=0o600, temporary=folder / TEMP / f"{name}.tmp")
    return Row(file, tail[-codec.SUM_BYTES :].hex())


def read_record(path: Path) -> tuple[bytes, bytes, bytes]:
    """``(head, value, tail)`` of a record, unchecked but for its lengths; StoreCorrupt or OSError."""
    with _regular(path) as file:
        first = file.read(codec.PREFIX.size)
        prefix = codec.read_prefix(first, os.fstat(file.fileno()).st_size)
        head = first + file.read(prefix.body_offset - len(first))
        return head, file.read(prefix.body_bytes), file.read(prefix.sum_bytes)


def describe_record(path: Path) -> tuple[str, str]:
    """The key that a record names and its sum in hex, both unchecked; StoreCorrupt or OSError. The value is not read."""
    with _regular(path) as file:
        first = file.read(codec.PREFIX.size)
        prefix = codec.read_prefix(first, os.fstat(file.fileno()).st_size)
        header = codec.parse_header(first + file.read(prefix.header_bytes), prefix)
        file.seek(prefix.body_end)
        tail = file.read(prefix.sum_bytes)
    try:
        return check_key(header.get("key")), tail[-codec.SUM_BYTES :].hex()
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
    """Return True if ``path`` is a regular file, of ``size`` bytes where given."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and (size is None or info.st_size == size)


def remove_record(folder: Path, file: Any) -> None:
    """Remove a record's file, if it is there; a planted name of a file elsewhere is passed over."""
    if is_blob(file):
        with contextlib.suppress(OSError):
            (folder / file).unlink()


def remove_old(paths: Iterable[Path], min_age: float) -> tuple[int, int]:
    """Remove the files that are at least ``min_age`` seconds old; (files, bytes) removed."""
    sizes = []
    for path in paths:
        with contextlib.suppress(OSError):
            info = path.lstat()
            if time.time() - info.st_mtime >= min_age:
                path.unlink()
                sizes.append(info.st_size)
    return len(sizes), sum(sizes)


def is_blob(file: Any) -> bool:
    """Return True if ``file`` is a name that `write_record` gives."""
    return isinstance(file, str) and _FILE.fullmatch(file) is not None
