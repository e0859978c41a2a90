"""A store in a folder, shared by processes: records are files, `diskcache` keeps the index.

Order of a put: temporary file, fsync, rename, fsync of the folder, then the row. Order of a removal: the file, then the
row, so that a full disk can be emptied although its index cannot grow. A crash at any point leaves a miss and at most
an orphaned file, never a row that lies; and every read checks the record's seal, in which the key stands too.

The files are the truth. The time that a file was last modified is the record's last use, so reading writes nothing into
the index; an index that is damaged or lost is made again from the records' own headers. Where the clock was set back, a use
is dated just behind the latest one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import diskcache

from ctxwin.errors import StoreCorrupt, StoreUnavailable
from ctxwin.hashing import digest
from ctxwin.store import records
from ctxwin.store.base import NOBODYS, StoreStats, check_key, check_value
from ctxwin.store.codec import SUM_BYTES, ForeignRecordError
from ctxwin.store.disk_index import IndexFolder, RefusedRowError, Written, is_busy, is_damage
from ctxwin.store.failure_log import failure_logger
from ctxwin.store.records import BlobFile, Row, is_record, remove_old
from ctxwin.store.sealed import SealedStore

log = failure_logger(__name__)
T = TypeVar("T")

_MAX_RETRIES: Final = 4  # rows a read follows while other processes put the same key
_ORPHAN_AGE_S: Final = 600.0  # a younger file without a row may be another process's unfinished put
_RETIRED_S: Final = 3600.0
_STALE_FILES: Final = 1024  # records replaced since a walk that are still known, beside as many as the folder holds
_REPAIR_PAUSE_S: Final = 1.0
_LOOK_PAUSE_S: Final = 0.05  # a look at the folders of a store takes a millisecond
_FAILURES: Final = (OSError, sqlite3.Error, diskcache.Timeout)


class DiskStore(SealedStore):
    """Records in the folder ``path``, readable by its owner alone; safe for threads and for processes that share it.

    Args:
        path: created where missing; everything below it belongs to the store.
        max_bytes: limit on the records' bytes; the least recently used leave first, leased ones stay.
        ttl: seconds after its last `put` at which a value becomes a miss; None keeps it.
        timeout: seconds to wait for another process's write to the index.
        secret: seals the records with a keyed code (`codec.Seal`); None with a checksum.

    A folder that is read only is read, by an index elsewhere that follows its writers; puts and deletions are refused, counted.

    Raises:
        OSError: the folder or its index cannot be made. Later failures (disk full, permissions) never raise: a put
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
        super().__init__(max_bytes, ttl, secret)
        self.path = Path(path).absolute()
        if os.path.expandvars(self.path) != str(self.path):  # diskcache expands it, too
            raise ValueError(f"path must be without variables of the environment, got {str(path)!r}; expand them first")
        self.name = str(self.path)
        self._index = IndexFolder(self.path, ttl, timeout, partial(self._tally.count, "corrupt"))
        self._lock = threading.RLock()
        self._oldest: list[BlobFile] | None = None  # a heap, of the last walk and of what was put since
        self._passed: dict[str, BlobFile] = {}  # leased when their turn came
        self._leased: dict[str, int] = {}  # bytes by key
        self._leased_bytes, self._counted = 0, object()
        self._next_repair = self._next_look = 0.0
        self.read_only = self.path.is_dir() and not os.access(self.path, os.W_OK)
        self._scratch = tempfile.TemporaryDirectory(prefix="ctxwin-index-") if self.read_only else None
        try:
            self._cache = self._open_index()
            remove_old((self.path / records.TEMP).glob("*.tmp"), 3600.0)
        except (OSError, sqlite3.OperationalError) as error:
            remedy = "another process holds it; try again" if is_busy(error) else "check its permissions and free space"
            plain = OSError(f"the store {self.path} cannot be opened ({error}); {remedy}")
            plain.errno = getattr(error, "errno", errno.EIO)
            raise plain from None
        used = [blob.used for blob in records.walk(self.path)]
        self._newest = max(used, default=0)  # use, in nanoseconds: the order of uses outlives a clock that is set back
        if self._guarded(0, lambda: len(used) - self._total("count")) > 0:
            self._collect(_ORPHAN_AGE_S)

    def _open_index(self) -> Any:
        """Return the index; make the folders of a store that can be written to."""
        if self._scratch:
            self._times = records.folder_times(self.path)  # before its walk: what is written then is seen later
            return self._index.build(Path(self._scratch.name))
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another user's folder, shared on purpose
            self.path.chmod(0o700)
        self._make_folders()
        return self._index.open()

    def _make_folders(self) -> None:
        for folder in (self.path / records.BLOBS, self.path / records.TEMP):
            folder.mkdir(mode=0o700, exist_ok=True)

    def _row(self, key: str) -> Row | None:
        self._check_open()
        try:
            row = self._cache.get(key)
            if row is None and not self._stands() and self._reopen():
                row = self._cache.get(key)
            return row if isinstance(row, Row) else None
        except RefusedRowError as error:
            self._reject(key, None, error)
        except _FAILURES as error:
            self._log_failure("read", key, error)
        return None

    def _read(self, key: str, *, use: bool = False) -> bytes | None:
        row = self._row(key)
        for _ in range(_MAX_RETRIES):
            if row is None:
                return None
            try:
                head, value, tail = records.read_record(self.path / row.file)
                self._seal.check(key, head, value, tail)
                if tail[-SUM_BYTES:].hex() != row.sum:
                    raise StoreCorrupt("it is not the record that the index names")
            except FileNotFoundError:
                missing_row, row = row, self._row(key)
                if row == missing_row:
                    if self._guarded(False, self._reopen):
                        row = self._row(key)
                        continue
                    self._drop_row(key, missing_row)
                    return None
                # The key was put again between the reads of the row and its file: there is a newer file.
            except ForeignRecordError as error:
                self._pass_over(key, error)
                return None
            except StoreCorrupt as error:
                self._reject(key, row, error)
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
        for _ in range(_MAX_RETRIES):
            row = self._row(check_key(key))
            if row is None:
                return False
            if is_record(self.path / row.file):
                self._use(row)
                return True
            self._guarded(False, self._reopen)
        return False

    def list(self, prefix: str = "") -> Iterator[str]:
        """Iterate over a sorted snapshot of the keys. Cost: a pass over the index."""
        return iter([key for key in self._keys() if key is not None and key.startswith(prefix)])

    def _keys(self) -> tuple[str | None, ...]:
        """Return the unexpired keys, in order; None for each row that this store did not write."""

        def keys() -> tuple[str | None, ...]:
            self._reopen()
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
                self._check_writable()
                if not self._make_room(total, key, row):
                    return False
                written = records.write_record(self.path, head, value, tail)
                self._use(written)
                try:
                    self._cache.set(key, Written(written, total), expire=self.ttl)
                except BaseException:
                    if self._row(key) != written:  # an interrupt may come behind the commit
                        records.remove_record(self.path, written.file)
                    raise
                self._note_put(key, written, total)
                self._make_room(total, key, None, written=True)
        except _FAILURES as error:
            self._log_failure("write", key, error)
            return False
        self._tally.count("puts")
        return True

    def delete(self, key: str) -> bool:
        """Remove ``key``, leased or not; return False where there was none. Works on a full disk too."""
        if not self._guarded(False, self._check_writable, "delete", check_key(key)):
            return False
        row = self._row(key)
        if row is None and self.ttl is not None:  # an expired record leaves as well: clocks are set back
            self._guarded(0, self._cache.expire)
        if row is None:
            return False
        with self._lock:
            self._tally.drop(key)
            self._count_leased(key)
        existed = is_record(self.path / row.file)
        return self._remove(key, row) or existed

    def _check_writable(self) -> Literal[True]:
        if self.read_only:
            raise OSError(errno.EROFS, "its folder is read only")
        self._reopen()  # a row in one that another process has made again would be lost
        return True

    def _stands(self) -> bool:
        """Return False where another process made the index again; now and then, too, of a folder that is read only here."""
        if not self.read_only:
            return self._index.stands(self._cache)
        if due := time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_PAUSE_S
        return not due

    def _reopen(self) -> bool:
        """Open an index again that others made again; return whether it was. Of a read-only folder: a pass over all records."""
        with self._lock:
            if old := self._scratch:
                began, times = time.monotonic(), records.folder_times(self.path)
                if began < self._next_repair or times == self._times:
                    return False
                self._next_repair = began + _REPAIR_PAUSE_S  # where it fails
                scratch = tempfile.TemporaryDirectory(prefix="ctxwin-index-")
                cache = self._index.build(Path(scratch.name))
                self._cache.close()
                self._cache, self._scratch, self._times = cache, scratch, times
                old.cleanup()
                self._next_repair = 2 * time.monotonic() - began  # half of the time at most
            elif self._index.stands(self._cache):
                return False
            else:
                self._make_folders()
                self._cache.close()
                self._cache = self._index.open_or_rebuild()
            self._oldest = None
        return True

    def _note_put(self, key: str, row: Row, size: int) -> None:
        with self._lock:
            self._count_leased(key)
            if self._oldest is not None:
                used = (self.path / row.file).lstat().st_mtime_ns
                heapq.heappush(self._oldest, BlobFile(used, row.file, size))
                if len(self._oldest) > 2 * self._total("count") + _STALE_FILES:
                    self._oldest = None

    def _count_leased(self, key: str) -> None:
        size = self._size(self._row(key)) if self._tally.holds(key) else 0
        self._leased_bytes += size - self._leased.pop(key, 0)
        if size:
            self._leased[key] = size

    def _make_room(self, size: int, key: str, old: Row | None, *, written: bool = False) -> bool:
        """Evict until ``size`` bytes of ``key`` fit; return False, without evictions, where leases prevent it.

        ``old`` is the row that they are about to replace. Cost: O(log n) a record that leaves; a walk of
        the folder where only what other processes wrote can leave; a sum over the leased records where a put is refused after
        they wrote.
        """
        with self._lock:
            spare = self.max_bytes - (0 if written else size) + self._size(old)
            if self._total("size") <= spare:
                return True
            # Other processes replace, expire and evict what is leased here: a sum holds until they write.
            connection = self._cache._con
            state = connection, connection.execute("PRAGMA data_version").fetchone()
            if self._cache.expire() or (state != self._counted and not self._fits(size, key)):
                for name in {*self._tally.leased(), *self._leased}:
                    self._count_leased(name)
                self._counted = state
            if not self._fits(size, key):
                return False
            if self._evict(spare, key):
                return True
            self._passed = {name: blob for name, blob in self._passed.items() if self._tally.holds(name)}
            known = set(self._passed.values())
            self._oldest = sorted(blob for blob in records.walk(self.path) if blob not in known)  # a heap
            # Rows of missing files still count, and a forged row may claim any size.
            failures = self.failures
            if not self._evict(spare, key, partly=True) and self.failures == failures:
                self._rebuild_index()
            return self._total("size") <= spare

    def _fits(self, size: int, key: str) -> bool:
        return self._leased_bytes - self._leased.get(key, 0) + size <= self.max_bytes

    def _evict(self, spare: int, keep: str, partly: bool = False) -> bool:
        """Evict the least recently used until ``spare`` is kept; none, unless ``partly``, where they would not suffice."""
        victims, excess, heap, failures = [], self._total("size") - spare, self._oldest or [], self.failures
        while excess > 0 and heap:
            blob = heapq.heappop(heap)
            path = self.path / blob.file
            try:
                if (used := path.lstat().st_mtime_ns) != blob.used:
                    heapq.heappush(heap, blob._replace(used=used))
                    continue
                key, _ = records.describe_record(path)
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
            if (excess > 0 and not partly) or self.failures > failures:
                heapq.heappush(heap, blob)
            elif self._drop_row(key, row):  # before its file: a full disk may refuse this, and nothing leaves then
                records.remove_record(self.path, row.file)
                self._tally.count("evictions")
        return self._total("size") <= spare

    @contextlib.contextmanager
    def _fencing(self) -> Iterator[None]:
        with self._lock:
            try:
                folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise StoreUnavailable(f"the store {self.path} cannot be locked ({error}); open it again") from error
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)  # of every process
                self._guarded(False, self._reopen)
                yield
            finally:
                os.close(folder)

    def token(self, key: str) -> int:
        """Return the token of a fenced record's owner; 0 where there is none, above all others once retired."""
        return super().token(key) or NOBODYS * self._mark(key).exists()

    def retire(self, key: str) -> bool:
        """Remove a fenced record; no former owner can restore it within the hour. Cost: a file that stays for that time."""
        with self._fencing():
            remove_old((self.path / records.TEMP).glob("*.retired"), _RETIRED_S)
            if not self.read_only and self.contains(key):
                self._guarded(None, self._mark(key).touch, "retire", key)
            return self.delete(key)

    def _mark(self, key: str) -> Path:
        return self.path / records.TEMP / f"{digest('retired', key)}.retired"

    def lease(self, key: str) -> bool:
        """Protect ``key`` from this process's evictions; other processes only see it as recently used."""
        if not self.contains(key):
            return False
        with self._lock:
            self._tally.lease(key)
            if key not in self._leased:
                self._count_leased(key)
        return True

    def release(self, key: str) -> None:
        with self._lock:
            self._tally.release(key)
            if not self._tally.holds(key):
                self._count_leased(key)
            if (blob := self._passed.pop(key, None)) and self._oldest is not None:
                heapq.heappush(self._oldest, blob)

    def stats(self) -> StoreStats:
        """Return this process's counters, and the items and bytes of the folder. O(1)."""
        items, size = (self._guarded(0, partial(self._total, name)) for name in ("count", "size"))
        return self._tally.stats(items, size)

    def verify(self) -> tuple[int, int]:
        """Read every record; return (good, corrupt). Corrupt records, foreign rows and old orphans are deleted.

        Cost: a read of the whole store.
        """
        if odd := self._keys().count(None):
            self._tally.count("corrupt", odd)
            self._repair(damaged=True)
        good, corrupt = super().verify()
        self._collect(_ORPHAN_AGE_S)
        return good, corrupt + odd

    def gc(self, min_age: float = _ORPHAN_AGE_S) -> tuple[int, int]:
        """Remove expired rows and files without a row; return (files, bytes) removed. Cost: a walk of the folder.

        Args:
            min_age: seconds; younger files may be another process's put between its rename and its row.
        """
        self._check_open()
        self._guarded(None, self._cache.expire)
        removed = [remove_old((self.path / records.TEMP).glob("*.tmp"), min_age), self._collect(min_age)]
        if not self.read_only:
            self._index.write_reserve()
        return sum(files for files, _ in removed), sum(size for _, size in removed)

    def _collect(self, min_age: float) -> tuple[int, int]:
        # Files first, rows second: a file whose row appears in between is seen as used.
        files = [self.path / blob.file for blob in records.walk(self.path)] + [*self.path.glob("*.damaged-*")]

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
            if self._scratch:
                self._scratch.cleanup()

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
        now = self._newest = max(time.time_ns(), self._newest + 1)
        with contextlib.suppress(OSError, OverflowError):  # the latter behind a forged time
            os.utime(self.path / row.file, ns=(now, now))

    def _remove(self, key: str, row: Row | None) -> bool:
        if row is not None and not self.read_only:
            records.remove_record(self.path, row.file)
        return self._drop_row(key, row) and not self.read_only

    def _drop_row(self, key: str, row: Row | None) -> bool:
        """Delete ``row`` unless another process has replaced it. None deletes a row that the store refuses to read."""

        def drop() -> bool:
            with self._cache.transact():
                with contextlib.suppress(RefusedRowError):
                    if self._cache.get(key) != row:
                        return False
                return bool(self._cache.delete(key))

        return self._guarded(False, drop, "delete", key)

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
        name, kind = type(error).__name__, (self.name, action, type(error))
        log.warning("store %s could not %s %s: %s: %s", self.name, action, key, name, error, extra={"kind": kind})
        if is_damage(error):
            self._repair()

    def _repair(self, damaged: bool = False) -> None:
        with self._lock:
            if time.monotonic() < self._next_repair and not damaged:
                return
            self._next_repair = time.monotonic() + _REPAIR_PAUSE_S  # a failing disk is not retried on every call
            try:
                self._cache.close()
                self._cache = self._index.open_or_rebuild(damaged)
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
