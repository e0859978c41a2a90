"""The index of a `DiskStore`: rows in `diskcache` without pickle, and how they are opened, checked and made again.

`diskcache` unpickles rows by itself (CVE-2025-69872: whoever can write to the folder runs code in the reader), so its
`Disk` is replaced by `RawDisk`, which neither writes nor reads anything but our own rows: a pickled row is a miss.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import diskcache

from ctxwin.errors import StoreCorrupt
from ctxwin.store.base import check_key
from ctxwin.store.records import TEMP, Row, describe_record, is_blob, is_record, remove_record, walk

log = logging.getLogger(__name__)

_SUM: Final = re.compile(r"[0-9a-f]{64}")
_FILE: Final = diskcache.core.DBNAME
_RESERVE_FILE: Final = "ballast"  # the name in existing folders
_RESERVE_BYTES: Final = 512 << 10  # deleted where the disk is too full to open the index: room to delete records
_SETTINGS: Final = {
    # The store applies its own limit: diskcache's cull does not respect leases.
    "eviction_policy": "none",
    "cull_limit": 0,
    "statistics": 0,
    "tag_index": 0,
    "size_limit": 1 << 62,
    "disk_min_file_size": 0,
    "disk_pickle_protocol": 0,
    "sqlite_journal_mode": "wal",
    "sqlite_synchronous": 2,  # a power cut must not lose the row of a record that was acknowledged
}


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
        """A key as the database holds it."""
        return check_key(key), True

    def get(self, key: Any, raw: Any) -> str | None:
        """The key of a row; None for a row that this store did not write."""
        return key if raw == 1 and isinstance(key, str) else None

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, str, str]:
        """A `Written` record as the database holds it."""
        if not isinstance(value, Written):
            raise TypeError(f"only written records can be indexed, got {type(value).__name__}")
        return value.size, diskcache.core.MODE_BINARY, value.row.file, value.row.sum

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> Row:
        """The row; RefusedRowError where this store cannot have written it."""
        if not is_blob(filename) or mode != diskcache.core.MODE_BINARY:
            raise RefusedRowError(f"the index has a row of mode {mode!r} and file {filename!r}"[:200])
        if not isinstance(value, str) or _SUM.fullmatch(value) is None:
            raise RefusedRowError("the index has a row without a checksum")
        return Row(filename, value)

    def remove(self, file_path: Any) -> None:
        """Remove the file of a row that is replaced or has expired."""
        remove_record(self._folder, file_path)


class Index(diskcache.Cache):  # type: ignore[misc]  # diskcache has no types
    """`diskcache.Cache` that an interrupt cannot leave locked."""

    _txn_id: int | None

    def __init__(self, folder: Path, timeout: float) -> None:
        super().__init__(str(folder), timeout=timeout, disk=RawDisk, **_SETTINGS)

    @contextlib.contextmanager
    def _transact(self, retry: bool = False, filename: Any = None) -> Iterator[Any]:
        """As diskcache's; an exception between its ``BEGIN`` or ``COMMIT`` and what it notes of them is rolled back, too."""
        outermost = self._txn_id != threading.get_ident()
        try:
            with super()._transact(retry, filename) as work:
                yield work
        except BaseException:
            if outermost and self._con.in_transaction:
                self._txn_id = None
                self._con.rollback()
            raise


@dataclass(frozen=True)
class IndexFolder:
    """The folder of a store as the place of its index, which is rebuilt from the records where it is missing or damaged.

    Attributes:
        path: of the store.
        ttl, timeout: as in `DiskStore`.
        damaged: called for an index that is damaged.
    """

    path: Path
    ttl: float | None
    timeout: float
    damaged: Callable[[], None]

    def open(self, reserve: bool = True) -> Any:
        """Open the index; where the disk is too full for that, delete the reserve file first. Raises its errors."""
        try:
            return self.open_or_rebuild()
        except (OSError, sqlite3.OperationalError) as error:
            if is_damage(error) or is_busy(error) or isinstance(error, PermissionError) or not reserve:
                raise
            try:
                (self.path / _RESERVE_FILE).unlink()
            except OSError:  # no reserve, or a disk that is read only
                raise error from None
            log.warning("the index of store %s cannot be opened (%s); its reserve file is deleted", self.path, error)
        return self.open(reserve=False)

    def open_or_rebuild(self, damaged: bool = False) -> Any:
        """Open the index. A damaged one is renamed, and a missing one is rebuilt from the records."""
        with (self.path / "lock").open("w") as lock:
            os.fchmod(lock.fileno(), 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = self.path / _FILE
            for abandoned in (self.path / TEMP).glob("tmp*"):  # by a process that was killed while it built one
                shutil.rmtree(abandoned, ignore_errors=True)
            try:
                if index.exists() and not damaged:
                    check_index(index, self.timeout)
                    return self._new_index()
            except (sqlite3.DatabaseError, AttributeError, TypeError, ValueError) as error:
                if isinstance(error, sqlite3.OperationalError) and not is_damage(error):
                    raise
                log.warning("the index of the store %s is damaged (%s); it is made again", self.path, error)
                self.damaged()
            with tempfile.TemporaryDirectory(dir=self.path / TEMP) as folder:  # a full disk leaves the old index
                self.build(Path(folder)).close()
                if index.exists():
                    index.replace(self.path / f"{_FILE}.damaged-{secrets.token_hex(4)}")
                for tail in ("-wal", "-shm"):
                    (self.path / (_FILE + tail)).unlink(missing_ok=True)
                (Path(folder) / _FILE).replace(index)
            return self._new_index()

    def build(self, folder: Path) -> Any:
        """Return an index in ``folder`` of all records: by name, so that of two records of one key the later one wins."""
        cache = Index(folder, self.timeout)
        with cache.transact():
            for blob in sorted(walk(self.path), key=lambda blob: blob.name):
                with contextlib.suppress(OSError, StoreCorrupt, TypeError, ValueError):
                    key, code = describe_record(self.path / blob.file)
                    # When the same value was last put again is not known.
                    left = None if self.ttl is None else self.ttl - time.time() + int(blob.name[:16], 16) / 1e9
                    if left is None or left > 0:
                        cache.set(key, Written(Row(blob.file, code), blob.size), expire=left)
        return cache

    def _new_index(self) -> Any:
        cache = Index(self.path, self.timeout)
        for tail in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                (self.path / (_FILE + tail)).chmod(0o600)
        self.write_reserve()
        cache.opened = (self.path / _FILE).stat()
        return cache

    def stands(self, cache: Any) -> bool:
        """Return True if ``cache`` is the file in the folder, False once that was deleted or another process made it again."""
        with contextlib.suppress(OSError):
            return os.path.samestat(cache.opened, (self.path / _FILE).stat())
        return False

    def write_reserve(self) -> None:
        """Make the reserve file, unless it is there or the disk is full."""
        reserve = self.path / _RESERVE_FILE
        if is_record(reserve, _RESERVE_BYTES):
            return
        try:
            # Random, so that no file system can compress it.
            with os.fdopen(os.open(reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(os.urandom(_RESERVE_BYTES))
        except OSError:  # too full for it already
            reserve.unlink(missing_ok=True)


def check_index(path: Path, timeout: float) -> None:
    """Raise sqlite3.DatabaseError where the file is damaged or no index, or another process holds it for ``timeout`` seconds.

    diskcache would wait for a minute, whatever its timeout is. Cost: a read of the index.
    """
    with contextlib.closing(sqlite3.connect(path, timeout)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        ((verdict,), *_) = connection.execute("PRAGMA quick_check(1)").fetchall()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if verdict != "ok" or not {"Cache", "Settings"} <= tables:
            raise sqlite3.DatabaseError(verdict if verdict != "ok" else f"it has the tables {sorted(tables)}")
        totals = dict(connection.execute("SELECT key, value FROM Settings WHERE key IN ('count', 'size')"))
    if len(totals) != 2 or any(type(value) is not int or value < 0 for value in totals.values()):
        raise sqlite3.DatabaseError(f"its totals are {totals}"[:200])


def is_busy(error: BaseException) -> bool:
    """Return True if another process holds the index."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def is_damage(error: BaseException) -> bool:
    """Return True if the index itself is damaged, instead of the disk, the permissions or another process being at fault."""
    if isinstance(error, sqlite3.OperationalError):
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_IOERR_SHM", "SQLITE_IOERR_WRITE")):
            return False  # so SQLite says that a disk is full, too
        return any(sign in str(error) for sign in ("no such table", "no such column", "malformed", "disk I/O error"))
    return isinstance(error, sqlite3.DatabaseError)
