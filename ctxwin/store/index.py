"""The index of `DiskStore`: key, file, sum, size and expiry of every record, in one SQLite file.

The records are the truth: an index that is damaged or lost is made again from their own headers. No row is believed
either; whoever reads one asks `Row.ours`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ctxwin.errors import StoreCorrupt
from ctxwin.store.base import Tally
from ctxwin.store.records import Row, describe_record, is_record, remove_record, walk

log = logging.getLogger(__name__)

FAILURES: Final = (OSError, sqlite3.Error)
"""What an index or a record may fail with although nothing is wrong with the caller."""
_NAME: Final = "index.db"
_BALLAST: Final = "ballast"
_BALLAST_BYTES: Final = 512 << 10
"""Given up where the disk is so full that the index cannot even be opened, so that something can be deleted."""
_REPAIR_PAUSE_S: Final = 1.0
_SETUP: Final = (
    "PRAGMA journal_mode = wal",
    "PRAGMA synchronous = normal",
    "CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, file, sum, size, expires) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS sizes ON records (size)",
    "CREATE INDEX IF NOT EXISTS deadlines ON records (expires)",
)


class Index:
    """The rows of the store in ``folder``; threads and processes may share it.

    Args:
        folder: of the store.
        timeout: seconds to wait for another process's write.
        ttl: seconds until a row that is written now expires; None keeps it.
        tally: counts an index that had to be made again as corrupt.

    Raises:
        OSError: it can be neither opened nor made. Other methods raise one of `FAILURES`.
    """

    def __init__(self, folder: Path, timeout: float, ttl: float | None, tally: Tally) -> None:
        self._folder, self._timeout, self._ttl, self._tally = folder, timeout, ttl, tally
        self._path = folder / _NAME
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inherited: list[Any] = []
        self._process = 0
        self._next_repair = 0.0
        try:
            self._open()
        except (OSError, sqlite3.OperationalError) as error:
            ballast = folder / _BALLAST
            if is_damage(error) or not ballast.exists():
                raise self._not_opened(error) from None
            log.warning("the index of the store %s cannot be opened (%s); its ballast goes", folder, error)
            ballast.unlink()
            try:
                self._open()
            except (OSError, sqlite3.OperationalError) as again:
                raise self._not_opened(again) from None

    def get(self, key: str) -> Row | None:
        """The row of ``key``, unless it has expired; it may be foreign."""
        rows, _ = self._run(
            "SELECT file, sum FROM records WHERE key = ? AND (expires IS NULL OR expires > ?)", key, time.time()
        )
        return Row(*rows[0]) if rows else None

    def set(self, key: str, row: Row, size: int) -> None:
        """Writes a row; the file of the one that it replaces goes."""
        with self._lock:
            self._run("BEGIN IMMEDIATE")
            try:
                old, _ = self._run("SELECT file FROM records WHERE key = ?", key)
                values = (key, *row, size, self._deadline())
                self._run("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", *values)
                self._run("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._run("ROLLBACK")
                raise
        if old and old[0][0] != row.file:
            remove_record(self._folder, old[0][0])

    def renew(self, key: str) -> None:
        """Lets the time to live of ``key`` begin anew."""
        self._run("UPDATE records SET expires = ? WHERE key = ?", self._deadline(), key)

    def drop(self, key: str, row: Row) -> bool:
        """Deletes the row that was seen; if another process has replaced it meanwhile, that one stays."""
        return self._run("DELETE FROM records WHERE key = ? AND file IS ? AND sum IS ?", key, *row)[1] > 0

    def expire(self) -> None:
        """Removes what has expired: files first, so that a full disk can be emptied."""
        rows, _ = self._run("SELECT key, file, sum FROM records WHERE expires <= ?", time.time())
        for key, file, total in rows:
            remove_record(self._folder, file)
            self.drop(key, Row(file, total))

    def keys(self) -> tuple[Any, ...]:
        """The keys in order; in a foreign index of any type."""
        return tuple(key for (key,) in self._run("SELECT key FROM records ORDER BY key")[0])

    def files(self) -> frozenset[Any]:
        """The files that rows name."""
        return frozenset(file for (file,) in self._run("SELECT file FROM records")[0])

    def totals(self) -> tuple[int, int]:
        """Rows, and the bytes that they claim. Cost: a pass over the sizes."""
        ((count, size),), _ = self._run("SELECT count(*), total(size) FROM records")
        return int(count), int(size)

    def repair(self, damaged: bool = False) -> None:
        """Opens the index again, and makes it anew where it is (or is known to be) damaged."""
        with self._lock:
            if time.monotonic() < self._next_repair and not damaged:
                return
            self._next_repair = time.monotonic() + _REPAIR_PAUSE_S  # a disk that fails is not asked on every call
            try:
                self._open(damaged)
            except FAILURES as error:
                log.warning("the index of the store %s cannot be mended: %s", self._folder, error)

    def leftovers(self) -> Iterable[Path]:
        """Damaged indexes that were put aside."""
        return self._folder.glob(f"{_NAME}.damaged-*")

    def keep_ballast(self) -> None:
        """Makes the file that is given up on a full disk, unless it is there or the disk is too full for it already."""
        ballast = self._folder / _BALLAST
        if is_record(ballast, _BALLAST_BYTES):
            return
        try:
            # Random, so that no file system can store it in less.
            with os.fdopen(os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(os.urandom(_BALLAST_BYTES))
        except OSError:
            ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file; idempotent."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _deadline(self) -> float | None:
        return None if self._ttl is None else time.time() + self._ttl

    def _run(self, statement: str, *values: Any) -> tuple[list[Any], int]:
        """The rows that a statement returns, and how many it changed."""
        with self._lock:
            if self._connection is None or self._process != os.getpid():
                self._connect()
            assert self._connection is not None
            cursor = self._connection.execute(statement, values)
            return cursor.fetchall(), cursor.rowcount

    def _connect(self) -> None:
        if self._connection is not None:
            self._inherited.append(self._connection)  # the parent's: closing it here would harm the parent's index
        self._connection, self._process = None, os.getpid()
        connection = sqlite3.connect(self._path, self._timeout, isolation_level=None, check_same_thread=False)
        try:
            for statement in _SETUP:
                connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        for tail in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                Path(f"{self._path}{tail}").chmod(0o600)
        self.keep_ballast()

    def _open(self, damaged: bool = False) -> None:
        """Opens the file; where it is damaged it is put aside, and where it is missing it is made from the records."""
        with self._lock, (self._folder / "lock").open("w") as lock:
            os.fchmod(lock.fileno(), 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.close()
            try:
                if self._path.exists() and not damaged:
                    _check(self._path)
                    return self._connect()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                log.warning("the index of the store %s is damaged (%s); it is made again", self._folder, error)
                self._tally.count("corrupt")
            if self._path.exists():
                self._path.replace(f"{self._path}.damaged-{secrets.token_hex(4)}")
            for tail in ("-wal", "-shm"):
                Path(f"{self._path}{tail}").unlink(missing_ok=True)
            self._connect()
            # By name, the newest last: of two records of one key the later one counts.
            for blob in sorted(walk(self._folder), key=lambda blob: Path(blob.file).name):
                with contextlib.suppress(OSError, StoreCorrupt):
                    key, total = describe_record(self._folder / blob.file)
                    if (row := Row(blob.file, total)).ours:
                        self.set(key, row, blob.size)

    def _not_opened(self, error: BaseException) -> OSError:
        told = f"the index of the store {self._folder} cannot be opened ({error}); check its permissions and free space"
        return OSError(told)


def _check(path: Path) -> None:
    """Raises sqlite3.DatabaseError where the file is damaged or no index. Cost: a read of the index."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT key, file, sum, size, expires FROM records LIMIT 1").fetchall()
        ((found,), *_) = connection.execute("PRAGMA quick_check(1)").fetchall()
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def is_damage(error: BaseException) -> bool:
    """Whether the index itself is at fault, not the disk, the permissions or another process."""
    if isinstance(error, sqlite3.OperationalError):
        return any(sign in str(error) for sign in ("no such table", "no such column", "malformed", "disk I/O error"))
    return isinstance(error, sqlite3.DatabaseError)
