"""A store in a folder, shared by processes: records are files, `diskcache` keeps the index.

Order of a put: temporary file, fsync, rename, fsync of the folder, then the row. Order of a removal: the file, then the
row, so that a full disk can be emptied although its index cannot grow. A crash at any point leaves a miss and at most
an orphaned file, never a row that lies; and every read checks the record's seal, in which the key stands too.

The files are the truth. The time that a file was last modified is the record's last use, so reading writes nothing into
the index; an index that is damaged or lost is made again from the records' own headers.

`diskcache` unpickles rows by itself (CVE-2025-69872: whoever can write to the folder runs code in the reader), so its
`Disk` is replaced by `RawDisk`, which neither writes nor reads anything but our own rows: a pickled row is a miss.
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
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import diskcache

from ctxwin.errors import StoreCorrupt
from ctxwin.store.base import Store, StoreStats, Tally, check_key, check_limits, check_value
from ctxwin.store.codec import SUM_BYTES, ForeignRecordError, Seal
from ctxwin.store.records import (
    BLOBS,
    TEMP,
    BlobFile,
    RawDisk,
    RefusedRowError,
    Row,
    Written,
    describe_record,
    is_record,
    read_record,
    remove_old,
    remove_record,
    walk,
    write_record,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_INDEX: Final = diskcache.core.DBNAME
_BALLAST: Final = "ballast"
_BALLAST_BYTES: Final = 512 << 10
"""Given up where the disk is so full that the index cannot even be opened, so that something can be deleted."""
_LOOKS: Final = 4
"""Rows a read follows while others put the same key."""
_ORPHAN_AGE_S: Final = 600.0
"""A younger file may be another process's put between its rename and its row."""
_REPAIR_PAUSE_S: Final = 1.0
_FAILURES: Final = (OSError, sqlite3.Error, diskcache.Timeout)
_SETTINGS: Final = {
    # Rows are tiny, and the limit is ours: diskcache's own cull knows no leases.
    "eviction_policy": "none",
    "cull_limit": 0,
    "statistics": 0,
    "tag_index": 0,
    "size_limit": 1 << 62,
    "disk_min_file_size": 0,
    "disk_pickle_protocol": 0,
    "sqlite_journal_mode": "wal",
    "sqlite_synchronous": 1,
}


class DiskStore(Store):
    """Records in the folder ``path``, readable by its owner alone; safe for threads and for processes that share it.

    Args:
        path: made where missing; everything below it belongs to the store.
        max_bytes: limit on the records' bytes; the least recently used leave first, leased ones stay.
        ttl: seconds after its last `put` at which a value becomes a miss; None keeps it.
        timeout: seconds to wait for another process's write to the index.
        secret: seals the records with a keyed code (`codec.Seal`); None with a checksum.

    Raises:
        OSError: the folder cannot be made or written to. Later failures (disk full, permissions) never raise: a put
            returns False, a get is a miss, and both are counted in `failures` and logged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int = 50 * 10**9,
        ttl: float | None = None,
        timeout: float = 10.0,
        secret: bytes | None = None,
    ) -> None:
        check_limits(max_bytes, ttl)
        self.path = Path(path).absolute()
        self.max_bytes = max_bytes
        self.ttl = ttl
        self.failures = 0
        self._timeout = timeout
        self._seal = Seal(secret)
        self._tally = Tally()
        self._lock = threading.RLock()
        self._oldest: deque[BlobFile] = deque()
        self._next_repair = 0.0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.path / BLOBS, self.path / TEMP):
            folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(OSError):  # somebody else's folder, shared on purpose
            self.path.chmod(0o700)
        self._cache = self._open_index()
        self._clean_temp(3600.0)
        if self._or(0, lambda: sum(1 for _ in walk(self.path)) - len(self._cache)) > 0:
            self._collect(_ORPHAN_AGE_S)

    def get(self, key: str) -> bytes | None:
        """The value, or None. Cost: a row, a file read, one SHA-256 (about 1 GB/s)."""
        value = self._read(check_key(key), use=True)
        self._tally.count("misses" if value is None else "hits")
        return value

    def _row(self, key: str) -> Row | None:
        self._check_open()
        try:
            row = self._cache.get(key)
        except RefusedRowError as error:
            self._reject(key, None, str(error))
            return None
        except _FAILURES as error:
            self._failed("read", key, error)
            return None
        return row if isinstance(row, Row) else None

    def _read(self, key: str, *, use: bool = False) -> bytes | None:
        row = self._row(key)
        for _ in range(_LOOKS):
            if row is None:
                return None
            try:
                head, value, tail = read_record(self.path / row.file)
                self._seal.check(key, head, value, tail)
                if tail[-SUM_BYTES:].hex() != row.sum:
                    raise StoreCorrupt("it is not the record that the index names")
            except FileNotFoundError:
                gone, row = row, self._row(key)
                if row == gone:
                    self._drop_row(key, gone)
                    return None
                # Somebody put the key anew between the row and its file: there is a newer file.
            except ForeignRecordError as error:
                self._tally.count("foreign")
                log.warning("stored record %s is not read, and stays: %s", key, error)
                return None
            except StoreCorrupt as error:
                self._reject(key, row, str(error))
                return None
            except _FAILURES as error:
                self._failed("read", key, error)
                return None
            else:
                if use:
                    self._use(row)
                return value
        return None

    def contains(self, key: str) -> bool:
        """Whether `get` would find a file of some size; counts as a use. O(1), the record is not read."""
        row = self._row(check_key(key))
        if row is None or not is_record(self.path / row.file):
            return False
        self._use(row)
        return True

    def list(self, prefix: str = "") -> Iterator[str]:
        """A sorted snapshot of the keys. Cost: a pass over the index."""
        return iter([key for key in self._keys() if key is not None and key.startswith(prefix)])

    def _keys(self) -> tuple[str | None, ...]:
        """The keys that have not expired, in order; None for each row that this store did not write."""

        def keys() -> tuple[str | None, ...]:
            self._cache.expire()
            return tuple(self._cache.iterkeys())

        return self._or((), keys, "list", "its keys")

    def put(self, key: str, value: bytes) -> bool:
        """Stores ``value``; False where it cannot fit beside what is leased here, or the disk refuses.

        Cost: one SHA-256, a synced file, a row; without the file where the same value is there already.
        """
        check_key(key)
        check_value(value)
        head, tail = self._seal.close(key, value)
        total = len(head) + len(value) + len(tail)
        row = self._row(key)
        try:
            if row is not None and row.sum == tail[-SUM_BYTES:].hex() and is_record(self.path / row.file, total):
                self._cache.touch(key, expire=self.ttl)
                self._use(row)
            else:
                if not self._make_room(total, key, row):
                    return False
                written = write_record(self.path, head, value, tail)
                try:
                    self._cache.set(key, Written(written, total), expire=self.ttl)
                except BaseException:
                    remove_record(self.path, written.file)
                    raise
                self._make_room(0, key, None)
        except _FAILURES as error:
            self._failed("write", key, error)
            return False
        self._tally.count("puts")
        return True

    def delete(self, key: str) -> bool:
        """Removes ``key``, leased or not; False where there was none. Works on a full disk, too."""
        row = self._row(check_key(key))
        if row is None:
            return False
        self._tally.drop(key)
        held = is_record(self.path / row.file)
        return self._remove(key, row) or held

    def _make_room(self, need: int, keep: str, old: Row | None) -> bool:
        """Evicts until ``need`` more bytes fit beside ``keep``; False (and nothing evicted) where leases do not allow it.

        ``old`` is the row that ``keep`` is about to lose. Cost: O(evicted), and now and then a walk over the folder.
        """
        with self._lock:
            spare = self.max_bytes - need + (0 if old is None else self._size(old))
            if self._bytes() <= spare:
                return True
            self._cache.expire()
            leased = self._tally.leased() | {keep}
            rows = [self._row(key) for key in leased - ({keep} if need else set())]
            if sum(self._size(row) for row in rows if row is not None) + need > self.max_bytes:
                return False
            for fresh in (False, True):
                if fresh:
                    self._oldest = deque(sorted(walk(self.path)))
                while self._oldest and self._bytes() > spare:
                    self._evict(self._oldest.popleft(), leased)
            if self._bytes() > spare:  # rows whose files are gone still count, and a planted row counts what it likes
                self._mend()
            return self._bytes() <= spare

    def _evict(self, blob: BlobFile, leased: set[str]) -> None:
        path = self.path / blob.file
        try:
            if path.lstat().st_mtime_ns != blob.used:  # used since the walk
                return
            key, _ = describe_record(path)
        except (OSError, StoreCorrupt):
            return
        row = self._row(key)
        if row is not None and row.file == blob.file and key not in leased and self._remove(key, row):
            self._tally.count("evictions")

    @contextlib.contextmanager
    def _fencing(self) -> Iterator[None]:
        with self._lock:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)  # of every process
                yield
            finally:
                os.close(folder)

    def lease(self, key: str) -> bool:
        """Protects ``key`` from this process's evictions; another process only sees it as recently used."""
        if not self.contains(key):
            return False
        self._tally.lease(key)
        return True

    def release(self, key: str) -> None:
        self._tally.release(key)

    def stats(self) -> StoreStats:
        """Counters of this process; items and bytes of the folder. O(1)."""
        return self._tally.stats(self._or(0, lambda: len(self._cache)), self._or(0, self._bytes))

    def verify(self) -> tuple[int, int]:
        """Reads every record; (good, corrupt). Corrupt records, foreign rows and old orphans go; foreign records stay.

        Cost: a read of the whole store.
        """
        keys = self._keys()
        if odd := keys.count(None):
            self._tally.count("corrupt", odd)
            self._repair(damaged=True)
        good, corrupt = 0, odd
        for key in keys:
            foreign = self._tally["foreign"]
            if key is None:
                continue
            if self._read(key) is not None:
                good += 1
            elif self._tally["foreign"] == foreign:
                corrupt += 1
        self._collect(_ORPHAN_AGE_S)
        return good, corrupt

    def gc(self, min_age: float = _ORPHAN_AGE_S) -> tuple[int, int]:
        """Removes expired rows and files no row points at; (files, bytes) removed. Cost: a walk of the folder.

        Args:
            min_age: seconds; younger files may be another process's put between its rename and its row.
        """
        self._check_open()
        self._or(None, self._cache.expire)
        removed = [self._clean_temp(min_age), self._collect(min_age)]
        self._keep_ballast()
        return sum(files for files, _ in removed), sum(size for _, size in removed)

    def _collect(self, min_age: float) -> tuple[int, int]:
        # Files first, rows second: a file whose row appears in between is seen as used.
        found = [self.path / blob.file for blob in walk(self.path)] + [*self.path.glob("*.damaged-*")]

        def rows() -> set[str] | None:
            kept = [self._row(key) for key in self._cache.iterkeys() if key is not None]
            return {row.file for row in kept if row is not None}

        used = self._or(None, rows, "list", "its keys")
        if used is None:  # without the index every file would look orphaned
            return 0, 0
        return remove_old((path for path in found if path.relative_to(self.path).as_posix() not in used), min_age)

    def close(self) -> None:
        """Closes the index; idempotent. Later calls raise ValueError."""
        if not self._closed:
            self._closed = True
            self._cache.close()

    def _bytes(self) -> int:
        return int(self._cache.reset("size"))

    def _size(self, row: Row) -> int:
        try:
            return (self.path / row.file).lstat().st_size
        except OSError:
            return 0

    def _use(self, row: Row) -> None:
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.path / row.file, ns=(now, now))

    def _remove(self, key: str, row: Row) -> bool:
        remove_record(self.path, row.file)
        return self._drop_row(key, row)

    def _drop_row(self, key: str, row: Row | None) -> bool:
        """Deletes the row that was seen: if another process has replaced it meanwhile, it stays. None: any that is refused."""

        def drop() -> bool:
            with self._cache.transact():
                try:
                    if self._cache.get(key) != row:
                        return False
                except RefusedRowError:
                    pass
                return bool(self._cache.delete(key))

        return self._or(False, drop, "delete", key)

    def _reject(self, key: str, row: Row | None, why: str) -> None:
        self._tally.count("corrupt")
        log.warning("stored record %s is corrupt and was deleted: %s", key, why)
        if row is not None:
            remove_record(self.path, row.file)
        self._drop_row(key, row)

    def _or(self, otherwise: T, call: Callable[[], T], what: str = "read", key: str = "the index") -> T:
        """What ``call`` returns; where the index fails, that is noted, and ``otherwise`` is returned."""
        self._check_open()
        try:
            return call()
        except _FAILURES as error:
            self._failed(what, key, error)
            return otherwise

    def _failed(self, what: str, key: str, error: BaseException) -> None:
        with self._lock:
            self.failures += 1
        log.warning("store %s could not %s %s: %s: %s", self.path, what, key, type(error).__name__, error)
        if _is_damage(error):
            self._repair()

    def _open_index(self) -> Any:
        try:
            return self._open_or_mend()
        except (OSError, sqlite3.OperationalError) as error:
            ballast = self.path / _BALLAST
            if _is_damage(error) or not ballast.exists():
                raise _not_opened(self.path, error) from None
            log.warning("the index of the store %s cannot be opened (%s); its ballast goes", self.path, error)
            ballast.unlink()
        try:
            return self._open_or_mend()
        except (OSError, sqlite3.OperationalError) as error:
            raise _not_opened(self.path, error) from None

    def _open_or_mend(self, damaged: bool = False) -> Any:
        """The index; where it is damaged it is put aside, and where it is missing it is made from the records."""
        with (self.path / "lock").open("w") as lock:
            os.fchmod(lock.fileno(), 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = self.path / _INDEX
            try:
                if index.exists() and not damaged:
                    _check_index(index)
                    return self._new_index()
            except (sqlite3.DatabaseError, AttributeError, TypeError, ValueError) as error:
                if isinstance(error, sqlite3.OperationalError) and not _is_damage(error):
                    raise
                log.warning("the index of the store %s is damaged (%s); it is made again", self.path, error)
                self._tally.count("corrupt")
            if index.exists():
                index.replace(self.path / f"{_INDEX}.damaged-{secrets.token_hex(4)}")
            for tail in ("-wal", "-shm"):
                (self.path / (_INDEX + tail)).unlink(missing_ok=True)
            cache = self._new_index()
            # By name, the newest last: of two records of one key the later one counts.
            for blob in sorted(walk(self.path), key=lambda blob: Path(blob.file).name):
                with contextlib.suppress(OSError, StoreCorrupt, TypeError):
                    key, code = describe_record(self.path / blob.file)
                    cache.set(key, Written(Row(blob.file, code), blob.size), expire=self.ttl)
            return cache

    def _new_index(self) -> Any:
        cache = diskcache.Cache(str(self.path), timeout=self._timeout, disk=RawDisk, **_SETTINGS)
        for tail in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                (self.path / (_INDEX + tail)).chmod(0o600)
        self._keep_ballast()
        return cache

    def _repair(self, damaged: bool = False) -> None:
        with self._lock:
            if time.monotonic() < self._next_repair and not damaged:
                return
            self._next_repair = time.monotonic() + _REPAIR_PAUSE_S  # a disk that fails is not asked on every call
            try:
                self._cache.close()
                self._cache = self._open_or_mend(damaged)
            except _FAILURES as error:
                log.warning("the index of the store %s cannot be mended: %s", self.path, error)

    def _mend(self) -> None:
        """Drops rows whose files are gone; where the index still does not add up, makes it again."""
        rows = {key: self._row(key) for key in self._keys() if key is not None}
        for key, row in rows.items():
            if row is not None and not (self.path / row.file).exists():
                self._drop_row(key, row)
        held = sum(self._size(row) for row in rows.values() if row is not None)
        if self._bytes() > held:
            self._repair(damaged=True)

    def _keep_ballast(self) -> None:
        ballast = self.path / _BALLAST
        if is_record(ballast, _BALLAST_BYTES):
            return
        try:
            # Random, so that no file system can store it in less.
            with os.fdopen(os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(os.urandom(_BALLAST_BYTES))
        except OSError:  # too full for it already
            ballast.unlink(missing_ok=True)

    def _clean_temp(self, min_age: float) -> tuple[int, int]:
        return remove_old((self.path / TEMP).glob("*.tmp"), min_age)


def _check_index(path: Path) -> None:
    """Raises sqlite3.DatabaseError where the file is damaged or no index. Cost: a read of the index."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        ((found,), *_) = connection.execute("PRAGMA quick_check(1)").fetchall()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if found != "ok" or not {"Cache", "Settings"} <= tables:
        raise sqlite3.DatabaseError(found if found != "ok" else f"it has the tables {sorted(tables)}")


def _is_damage(error: BaseException) -> bool:
    """Whether the index itself is at fault, not the disk, the permissions or another process."""
    if isinstance(error, sqlite3.OperationalError):
        return any(sign in str(error) for sign in ("no such table", "no such column", "malformed", "disk I/O error"))
    return isinstance(error, sqlite3.DatabaseError)


def _not_opened(path: Path, error: BaseException) -> OSError:
    return OSError(f"the index of the store {path} cannot be opened ({error}); check its permissions and free space")
