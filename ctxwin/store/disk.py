"""A store in a folder, shared by processes: records are files, and a small SQLite file is their index.

Order of a put: temporary file, fsync, rename, fsync of the folder, then the row. Order of a removal: the file, then the
row, so that a full disk can be emptied although its index cannot grow. A crash at any point leaves a miss and at most
an orphaned file, never a row that lies; and every read checks the record's seal, in which the key stands too.

The files are the truth. The time that a file was last modified is the record's last use, so reading writes nothing into
the index.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from ctxwin.errors import StoreCorrupt
from ctxwin.store.base import Store, StoreStats, Tally, check_key, check_limits, check_value, is_key
from ctxwin.store.codec import ForeignRecordError, Seal
from ctxwin.store.index import FAILURES, Index, is_damage
from ctxwin.store.records import (
    BLOBS,
    TEMP,
    BlobFile,
    Row,
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

_LOOKS: Final = 4
"""Rows that a read follows while others put the same key."""
_ORPHAN_AGE_S: Final = 600.0
"""A younger file may be another process's put between its rename and its row."""


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
        self.failures = 0
        self._seal = Seal(secret)
        self._tally = Tally()
        self._lock = threading.RLock()
        self._oldest: deque[BlobFile] = deque()
        self._closed = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.path / BLOBS, self.path / TEMP):
            folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(OSError):  # somebody else's folder, shared on purpose
            self.path.chmod(0o700)
        self._index = Index(self.path, timeout, ttl, self._tally)
        self._clean_temp(3600.0)
        if sum(1 for _ in walk(self.path)) > self._totals()[0]:
            self._collect(_ORPHAN_AGE_S)

    def get(self, key: str) -> bytes | None:
        """The value, or None. Cost: a row, a file read, one SHA-256 (about 1 GB/s)."""
        value = self._read(check_key(key), use=True)
        self._tally.count("misses" if value is None else "hits")
        return value

    def _row(self, key: str) -> Row | None:
        row = self._or(None, lambda: self._index.get(key), "read", key)
        if row is not None and not row.ours:
            self._reject(key, row, "its row in the index is not of this store")
            return None
        return row

    def _read(self, key: str, *, use: bool = False) -> bytes | None:
        row = self._row(key)
        for _ in range(_LOOKS):
            if row is None:
                return None
            try:
                head, value, tail = read_record(self.path / row.file)
                self._seal.check(key, head, value, tail)
                if tail[-32:].hex() != row.sum:
                    raise StoreCorrupt("it is not the record that the index names")
            except FileNotFoundError:
                gone, row = row, self._row(key)
                if row == gone:
                    self._drop(key, gone)
                    return None
                # Somebody put the key anew between the row and its file: there is a newer file.
            except ForeignRecordError as error:
                self._tally.count("foreign")
                log.warning("stored record %s is not read, and stays: %s", key, error)
                return None
            except StoreCorrupt as error:
                self._reject(key, row, str(error))
                return None
            except FAILURES as error:
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
        return iter([key for key in self._keys() if is_key(key) and key.startswith(prefix)])

    def _keys(self) -> tuple[Any, ...]:
        """The keys that have not expired, in order; in a foreign index of any type."""

        def keys() -> tuple[Any, ...]:
            self._index.expire()
            return self._index.keys()

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
            if row is not None and row.sum == tail[-32:].hex() and is_record(self.path / row.file, total):
                self._index.renew(key)
                self._use(row)
            else:
                if not self._make_room(total, key, row):
                    return False
                written = write_record(self.path, head, value, tail)
                try:
                    self._index.set(key, written, total)
                except BaseException:
                    remove_record(self.path, written.file)
                    raise
                self._make_room(0, key, None)
        except FAILURES as error:
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
            if self._index.totals()[1] <= spare:
                return True
            self._index.expire()
            leased = self._tally.leased() | {keep}
            rows = [self._row(key) for key in leased - ({keep} if need else set())]
            if sum(self._size(row) for row in rows if row is not None) + need > self.max_bytes:
                return False
            for fresh in (False, True):
                excess = self._index.totals()[1] - spare
                if fresh and excess > 0:
                    self._oldest = deque(sorted(walk(self.path)))
                while self._oldest and excess > 0:
                    excess -= self._evict(self._oldest.popleft(), leased)
            if self._index.totals()[1] > spare:  # rows whose files are gone still count, as do planted ones
                self._mend()
            return self._index.totals()[1] <= spare

    def _evict(self, blob: BlobFile, leased: set[str]) -> int:
        """Removes a record that was not used since the walk and is not leased; the bytes that this gave back."""
        path = self.path / blob.file
        try:
            if path.lstat().st_mtime_ns != blob.used:
                return 0
            key, _ = describe_record(path)
        except (OSError, StoreCorrupt):
            return 0
        row = self._row(key)
        if row is not None and row.file == blob.file and key not in leased and self._remove(key, row):
            self._tally.count("evictions")
            return blob.size
        return 0

    def lease(self, key: str) -> bool:
        """Protects ``key`` from this process's evictions; another process only sees it as recently used."""
        if not self.contains(key):
            return False
        self._tally.lease(key)
        return True

    def release(self, key: str) -> None:
        self._tally.release(key)

    def stats(self) -> StoreStats:
        """Counters of this process; items and bytes of the folder. Cost: a pass over the sizes in the index."""
        return self._tally.stats(*self._totals())

    def verify(self) -> tuple[int, int]:
        """Reads every record; (good, corrupt). Corrupt records, foreign rows and old orphans go; foreign records stay.

        Cost: a read of the whole store.
        """
        keys = self._keys()
        if odd := sum(not is_key(key) for key in keys):
            self._tally.count("corrupt", odd)
            self._index.repair(damaged=True)
        good, corrupt = 0, odd
        for key in filter(is_key, keys):
            foreign = self._tally["foreign"]
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
        self._or(None, self._index.expire)
        removed = [self._clean_temp(min_age), self._collect(min_age)]
        self._index.keep_ballast()
        return sum(files for files, _ in removed), sum(size for _, size in removed)

    def _collect(self, min_age: float) -> tuple[int, int]:
        # Files first, rows second: a file whose row appears in between is seen as used.
        found = [self.path / blob.file for blob in walk(self.path)] + [*self._index.leftovers()]
        used = self._or(None, self._index.files, "list", "its files")
        if used is None:  # without the index every file would look orphaned
            return 0, 0
        return remove_old((path for path in found if path.relative_to(self.path).as_posix() not in used), min_age)

    def close(self) -> None:
        """Closes the index; idempotent. Later calls raise ValueError."""
        self._closed = True
        self._index.close()

    def _totals(self) -> tuple[int, int]:
        return self._or((0, 0), self._index.totals)

    def _size(self, row: Row) -> int:
        try:
            return (self.path / row.file).lstat().st_size
        except OSError:
            return 0

    def _use(self, row: Row) -> None:
        with contextlib.suppress(OSError):
            now = time.time_ns()  # finer than the kernel's own clock of files
            os.utime(self.path / row.file, ns=(now, now))

    def _remove(self, key: str, row: Row) -> bool:
        remove_record(self.path, row.file)
        return self._drop(key, row)

    def _drop(self, key: str, row: Row) -> bool:
        return self._or(False, lambda: self._index.drop(key, row), "delete", key)

    def _reject(self, key: str, row: Row, why: str) -> None:
        self._tally.count("corrupt")
        log.warning("stored record %s is corrupt and was deleted: %s", key, why)
        self._remove(key, row)

    def _or(self, otherwise: T, call: Callable[[], T], what: str = "read", key: str = "the index") -> T:
        """What ``call`` returns; where the index fails, that is noted, and ``otherwise`` is returned."""
        if self._closed:
            raise ValueError("the store is closed; open another one")
        try:
            return call()
        except FAILURES as error:
            self._failed(what, key, error)
            return otherwise

    def _failed(self, what: str, key: str, error: BaseException) -> None:
        with self._lock:
            self.failures += 1
        log.warning("store %s could not %s %s: %s: %s", self.path, what, key, type(error).__name__, error)
        if is_damage(error):
            self._index.repair()

    def _mend(self) -> None:
        """Drops rows whose files are gone; where the index still does not add up, makes it again."""
        rows = {key: self._row(key) for key in self._keys() if is_key(key)}
        for key, row in rows.items():
            if row is not None and not (self.path / row.file).exists():
                self._drop(key, row)
        if self._index.totals()[1] > sum(self._size(row) for row in rows.values() if row is not None):
            self._index.repair(damaged=True)

    def _clean_temp(self, min_age: float) -> tuple[int, int]:
        return remove_old((self.path / TEMP).glob("*.tmp"), min_age)
