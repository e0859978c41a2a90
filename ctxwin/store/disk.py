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
import heapq
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import diskcache

from ctxwin.errors import StoreCorrupt
from ctxwin.store.base import Store, StoreStats, Tally, check_key, check_limits, check_value
from ctxwin.store.codec import SUM_BYTES, ForeignRecordError, Seal
from ctxwin.store.failure_log import failure_logger
from ctxwin.store.records import (
    BLOBS,
    TEMP,
    BlobFile,
    RawDisk,
    RefusedRowError,
    Row,
    Written,
    check_index,
    describe_record,
    is_damage,
    is_record,
    read_record,
    remove_old,
    remove_record,
    walk,
    write_record,
)

log = failure_logger(__name__)
T = TypeVar("T")

_INDEX: Final = diskcache.core.DBNAME
_RESERVE_FILE: Final = "ballast"  # the name in existing folders
_RESERVE_BYTES: Final = 512 << 10
"""Size of a file that is deleted where the disk is too full to open the index, so that records can be deleted."""
_MAX_RETRIES: Final = 4
"""Number of rows a read follows while other processes put the same key."""
_ORPHAN_AGE_S: Final = 600.0
"""Age at which a file without a row is an orphan; a younger one may be another process's unfinished put."""
_REPAIR_PAUSE_S: Final = 1.0
_FAILURES: Final = (OSError, sqlite3.Error, diskcache.Timeout)
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
    "sqlite_synchronous": 1,
}


class DiskStore(Store):
    """Records in the folder ``path``, readable by its owner alone; safe for threads and for processes that share it.

    Args:
        path: created where missing; everything below it belongs to the store.
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
        self._oldest: list[BlobFile] = []  # a heap
        self._passed: dict[str, BlobFile] = {}  # leased when their turn came
        self._leased: tuple[object, int] = None, 0
        self._next_repair = 0.0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.path / BLOBS, self.path / TEMP):
            folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(OSError):  # another user's folder, shared on purpose
            self.path.chmod(0o700)
        self._cache = self._open_index()
        remove_old((self.path / TEMP).glob("*.tmp"), 3600.0)
        if self._guarded(0, lambda: sum(1 for _ in walk(self.path)) - self._total("count")) > 0:
            self._collect(_ORPHAN_AGE_S)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None. Cost: a row, a file read, one SHA-256 (about 1 GB/s)."""
        value = self._read(check_key(key), use=True)
        self._tally.count("misses" if value is None else "hits")
        return value

    def _row(self, key: str) -> Row | None:
        self._check_open()
        try:
            row = self._cache.get(key)
            return row if isinstance(row, Row) else None
        except RefusedRowError as error:
            self._reject(key, None, str(error))
        except _FAILURES as error:
            self._log_failure("read", key, error)
        return None

    def _read(self, key: str, *, use: bool = False) -> bytes | None:
        row = self._row(key)
        for _ in range(_MAX_RETRIES):
            if row is None:
                return None
            try:
                head, value, tail = read_record(self.path / row.file)
                self._seal.check(key, head, value, tail)
                if tail[-SUM_BYTES:].hex() != row.sum:
                    raise StoreCorrupt("it is not the record that the index names")
            except FileNotFoundError:
                missing_row, row = row, self._row(key)
                if row == missing_row:
                    self._drop_row(key, missing_row)
                    return None
                # The key was put again between the reads of the row and its file: there is a newer file.
            except ForeignRecordError as error:
                self._tally.count("foreign")
                log.warning("stored record %s is not read, and stays: %s", key, error)
                return None
            except StoreCorrupt as error:
                self._reject(key, row, str(error))
                return None
            except _FAILURES as error:
                self._log_failure("read", key, error)
                return None
            else:
                if use:
                    self._use(row)
                return value
        return None

    def contains(self, key: str) -> bool:
        """Return True if `get` would find a file; counts as a use. O(1), the record is not read."""
        row = self._row(check_key(key))
        if row is None or not is_record(self.path / row.file):
            return False
        self._use(row)
        return True

    def list(self, prefix: str = "") -> Iterator[str]:
        """Iterate over a sorted snapshot of the keys. Cost: a pass over the index."""
        return iter([key for key in self._keys() if key is not None and key.startswith(prefix)])

    def _keys(self) -> tuple[str | None, ...]:
        """Return the unexpired keys, in order; None for each row that this store did not write."""

        def keys() -> tuple[str | None, ...]:
            self._cache.expire()
            return tuple(self._cache.iterkeys())

        return self._guarded((), keys, "list", "its keys")

    def put(self, key: str, value: bytes) -> bool:
        """Store ``value``; return False where it cannot fit beside the records leased here, or the disk refuses it.

        Cost: one SHA-256, a synced file, a row; without the file where the same value is stored already.
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
                self._make_room(total, key, None, written=True)
        except _FAILURES as error:
            self._log_failure("write", key, error)
            return False
        self._tally.count("puts")
        return True

    def delete(self, key: str) -> bool:
        """Remove ``key``, leased or not; return False where there was none. Works on a full disk too."""
        row = self._row(check_key(key))
        if row is None:
            return False
        self._tally.drop(key)
        existed = is_record(self.path / row.file)
        return self._remove(key, row) or existed

    def _make_room(self, size: int, key: str, old: Row | None, *, written: bool = False) -> bool:
        """Evict until ``size`` bytes of ``key`` fit; return False, without evictions, where leases prevent it.

        ``old`` is the row that they are about to replace. Cost: O(evicted); a walk of the folder where no record that the
        walk before found may leave; a sum over the leased records where a put is refused, unless nothing has changed since.
        """
        with self._lock:
            spare = self.max_bytes - (0 if written else size) + self._size(old)
            if self._total("size") <= spare:
                return True
            self._cache.expire()
            # Other processes replace, expire and evict what is leased here: a sum holds until anybody writes.
            connection, leased_key = self._cache._con, self._tally.holds(key) and key
            commits = connection.execute("PRAGMA data_version").fetchone()  # of other connections
            state = (connection, commits, connection.total_changes, self._tally.changes, leased_key)
            if self._leased[0] == state and self._leased[1] + size > self.max_bytes:
                return False
            if self._evict(spare, key):
                return True
            self._leased = state, sum(self._size(self._row(name)) for name in self._tally.leased() - {key})
            if self._leased[1] + size > self.max_bytes:
                return False
            self._passed = {name: blob for name, blob in self._passed.items() if self._tally.holds(name)}
            known = set(self._passed.values())
            self._oldest = sorted(blob for blob in walk(self.path) if blob not in known)  # a heap
            # Rows of missing files still count, and a forged row may claim any size.
            if not self._evict(spare, key, partly=True):
                self._rebuild_index()
            return self._total("size") <= spare

    def _evict(self, spare: int, keep: str, partly: bool = False) -> bool:
        """Evict the least recently used until ``spare`` is kept; none, unless ``partly``, where they would not suffice."""
        victims, excess = [], self._total("size") - spare
        while excess > 0 and self._oldest:
            blob = heapq.heappop(self._oldest)
            path = self.path / blob.file
            try:
                if path.lstat().st_mtime_ns != blob.used:  # used since the walk
                    continue
                key, _ = describe_record(path)
            except (OSError, StoreCorrupt):
                continue
            row = self._row(key)
            if row is None or row.file != blob.file:
                continue
            if key == keep or self._tally.holds(key):
                self._passed[key] = blob
            else:
                victims.append((blob, key, row))
                excess -= blob.size
        for blob, key, row in victims:
            if excess > 0 and not partly:
                heapq.heappush(self._oldest, blob)
            elif self._remove(key, row):
                self._tally.count("evictions")
        return self._total("size") <= spare

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
        """Protect ``key`` from this process's evictions; other processes only see it as recently used."""
        if not self.contains(key):
            return False
        self._tally.lease(key)
        return True

    def release(self, key: str) -> None:
        self._tally.release(key)
        with self._lock:
            if blob := self._passed.pop(key, None):
                heapq.heappush(self._oldest, blob)

    def stats(self) -> StoreStats:
        """Return this process's counters, and the items and bytes of the folder. O(1)."""
        items, size = (self._guarded(0, partial(self._total, name)) for name in ("count", "size"))
        return self._tally.stats(items, size)

    def verify(self) -> tuple[int, int]:
        """Read every record; return (good, corrupt). Corrupt records, foreign rows and old orphans are deleted.

        Cost: a read of the whole store.
        """
        keys = self._keys()
        if odd := keys.count(None):
            self._tally.count("corrupt", odd)
            self._repair(damaged=True)
        good, corrupt = 0, odd
        for key in filter(None, keys):
            foreign = self._tally["foreign"]
            if self._read(key) is not None:
                good += 1
            elif self._tally["foreign"] == foreign:
                corrupt += 1
        self._collect(_ORPHAN_AGE_S)
        return good, corrupt

    def gc(self, min_age: float = _ORPHAN_AGE_S) -> tuple[int, int]:
        """Remove expired rows and files without a row; return (files, bytes) removed. Cost: a walk of the folder.

        Args:
            min_age: seconds; younger files may be another process's put between its rename and its row.
        """
        self._check_open()
        self._guarded(None, self._cache.expire)
        removed = [remove_old((self.path / TEMP).glob("*.tmp"), min_age), self._collect(min_age)]
        self._write_reserve()
        return sum(files for files, _ in removed), sum(size for _, size in removed)

    def _collect(self, min_age: float) -> tuple[int, int]:
        # Files first, rows second: a file whose row appears in between is seen as used.
        files = [self.path / blob.file for blob in walk(self.path)] + [*self.path.glob("*.damaged-*")]

        def rows() -> set[str] | None:
            indexed = [self._row(key) for key in self._cache.iterkeys() if key is not None]
            return {row.file for row in indexed if row is not None}

        used = self._guarded(None, rows, "list", "its keys")
        if used is None:  # without the index every file would look orphaned
            return 0, 0
        return remove_old((path for path in files if path.relative_to(self.path).as_posix() not in used), min_age)

    def close(self) -> None:
        """Close the index. Idempotent; later calls raise ValueError."""
        if not self._closed:
            self._closed = True
            self._cache.close()

    def _total(self, name: str) -> int:
        """Return the index's ``count`` of rows or ``size`` of records; raise sqlite3.DatabaseError for an impossible value."""
        try:
            value = self._cache.reset(name)
        except (TypeError, ValueError) as error:  # no row of that name, or several
            raise sqlite3.DatabaseError(f"the index has no {name}: {error}") from None
        if type(value) is not int or value < 0:
            raise sqlite3.DatabaseError(f"the {name} of the index must be a number from 0, got {value!r}"[:200])
        return value

    def _size(self, row: Row | None) -> int:
        with contextlib.suppress(OSError):
            return 0 if row is None else (self.path / row.file).lstat().st_size
        return 0

    def _use(self, row: Row) -> None:
        now = time.time_ns()
        with contextlib.suppress(OSError):
            os.utime(self.path / row.file, ns=(now, now))

    def _remove(self, key: str, row: Row | None) -> bool:
        if row is not None:
            remove_record(self.path, row.file)
        return self._drop_row(key, row)

    def _drop_row(self, key: str, row: Row | None) -> bool:
        """Delete ``row`` unless another process has replaced it. None deletes a row that the store refuses to read."""

        def drop() -> bool:
            with self._cache.transact():
                with contextlib.suppress(RefusedRowError):
                    if self._cache.get(key) != row:
                        return False
                return bool(self._cache.delete(key))

        return self._guarded(False, drop, "delete", key)

    def _reject(self, key: str, row: Row | None, why: str) -> None:
        self._tally.count("corrupt")
        log.warning("stored record %s is corrupt and was deleted: %s", key, why)
        self._remove(key, row)

    def _guarded(self, fallback: T, call: Callable[[], T], action: str = "read", key: str = "the index") -> T:
        """Return ``call()``; where the index fails, log the failure and return ``fallback``."""
        self._check_open()
        try:
            return call()
        except _FAILURES as error:
            self._log_failure(action, key, error)
            return fallback

    def _log_failure(self, action: str, key: str, error: BaseException) -> None:
        with self._lock:
            self.failures += 1
        name, kind = type(error).__name__, (str(self.path), action, type(error))
        log.warning("store %s could not %s %s: %s: %s", self.path, action, key, name, error, extra={"kind": kind})
        if is_damage(error):
            self._repair()

    def _open_index(self, reserve: bool = True) -> Any:
        try:
            return self._open_or_rebuild()
        except (OSError, sqlite3.OperationalError) as error:
            try:
                if is_damage(error) or not reserve:
                    raise
                (self.path / _RESERVE_FILE).unlink()
            except (OSError, sqlite3.OperationalError):  # no reserve, or a disk that is read only
                why = f"the index of the store {self.path} cannot be opened ({error})"
                raise OSError(f"{why}; check its permissions and free space") from None
            log.warning("the index of store %s cannot be opened (%s); its reserve file is deleted", self.path, error)
        return self._open_index(reserve=False)

    def _open_or_rebuild(self, damaged: bool = False) -> Any:
        """Open the index. A damaged one is renamed, and a missing one is rebuilt from the records."""
        with (self.path / "lock").open("w") as lock:
            os.fchmod(lock.fileno(), 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = self.path / _INDEX
            try:
                if index.exists() and not damaged:
                    check_index(index)
                    return self._new_index()
            except (sqlite3.DatabaseError, AttributeError, TypeError, ValueError) as error:
                if isinstance(error, sqlite3.OperationalError) and not is_damage(error):
                    raise
                log.warning("the index of the store %s is damaged (%s); it is made again", self.path, error)
                self._tally.count("corrupt")
            if index.exists():
                index.replace(self.path / f"{_INDEX}.damaged-{secrets.token_hex(4)}")
            for tail in ("-wal", "-shm"):
                (self.path / (_INDEX + tail)).unlink(missing_ok=True)
            cache = self._new_index()
            # By name, the newest last: of two records of one key the later one wins.
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
        self._write_reserve()
        return cache

    def _repair(self, damaged: bool = False) -> None:
        with self._lock:
            if time.monotonic() < self._next_repair and not damaged:
                return
            self._next_repair = time.monotonic() + _REPAIR_PAUSE_S  # a failing disk is not retried on every call
            try:
                self._cache.close()
                self._cache = self._open_or_rebuild(damaged)
            except _FAILURES as error:
                log.warning("the index of the store %s cannot be mended: %s", self.path, error)

    def _rebuild_index(self) -> None:
        """Drop rows whose files are missing; rebuild the index where its total is still wrong."""
        rows = {key: self._row(key) for key in self._keys() if key is not None}
        for key, row in rows.items():
            if row is not None and not (self.path / row.file).exists():
                self._drop_row(key, row)
        if self._total("size") > sum(map(self._size, rows.values())):
            self._repair(damaged=True)

    def _write_reserve(self) -> None:
        reserve = self.path / _RESERVE_FILE
        if is_record(reserve, _RESERVE_BYTES):
            return
        try:
            # Random, so that no file system can compress it.
            with os.fdopen(os.open(reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(os.urandom(_RESERVE_BYTES))
        except OSError:  # too full for it already
            reserve.unlink(missing_ok=True)
