"""A store in a folder, shared by processes: blobs are files, `diskcache` keeps the index.

Order of a put: temporary file, fsync, rename, fsync of the folder, then the row. Order of a removal: the row, then the
file. So a crash at any point leaves a miss and at most an orphaned file (`DiskStore.gc`), never a row that lies; and
every read checks a SHA-256 over the blob, in which the key stands too.

`diskcache` unpickles rows by itself (CVE-2025-69872: whoever can write to the folder runs code in the reader), so its
`Disk` is replaced by `RawDisk`, which neither writes nor reads anything but our own rows: a pickled row is a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import diskcache

from ctxwin.errors import StoreCorrupt
from ctxwin.store import codec
from ctxwin.store.base import Store, StoreStats, check_key, check_value, drop_lease
from ctxwin.store.rawdisk import (
    BLOBS,
    RawDisk,
    RefusedRowError,
    Row,
    Written,
    read_blob,
    remove_old,
    size_of,
    sync_folder,
)

log = logging.getLogger(__name__)

_TEMP: Final = "tmp"
_LOOKS: Final = 4
"""Rows a read follows while others put the same key."""
_FAILURES: Final = (OSError, sqlite3.Error, diskcache.Timeout)


class DiskStore(Store):
    """Blobs in the folder ``path``; safe for threads and for processes that share it.

    Args:
        path: made where missing; everything below it belongs to the store.
        max_bytes: limit on the blobs' bytes; the least recently used leave first, leased ones stay.
        ttl: seconds after its last `put` at which a value becomes a miss; None keeps it.
        timeout: seconds to wait for another process's write to the index.

    Raises:
        OSError: the folder cannot be made or written to. Later failures (disk full, permissions) never raise: a put
            returns False, a get is a miss, and both are counted in `failures` and logged.
    """

    def __init__(
        self, path: str | os.PathLike[str], max_bytes: int = 50 * 10**9, ttl: float | None = None, timeout: float = 10.0
    ) -> None:
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}")
        if ttl is not None and ttl <= 0:
            raise ValueError(f"ttl must be positive seconds or None, got {ttl}")
        self.path = Path(path).absolute()
        self.max_bytes = max_bytes
        self.ttl = ttl
        self.failures = 0
        self._timeout = timeout
        self._lock = threading.Lock()
        self._leases: dict[str, int] = {}
        self._hits = self._misses = self._puts = self._evictions = self._corrupt = 0
        self._closed = False
        for folder in (self.path, self.path / BLOBS, self.path / _TEMP):
            folder.mkdir(parents=True, exist_ok=True)
        self._cache = self._open_index()
        self._clean_temp(3600.0)

    def _open_index(self) -> Any:
        settings = {
            # Rows are tiny and the limit is ours (diskcache's own cull knows no leases); "none" keeps reads free of
            # write transactions, the access time is set in `_touch`.
            "eviction_policy": "none", "cull_limit": 0, "statistics": 0, "tag_index": 0, "size_limit": 1 << 62,
            "disk_min_file_size": 0, "disk_pickle_protocol": 0, "sqlite_journal_mode": "wal", "sqlite_synchronous": 1,
        }  # fmt: skip
        try:
            return diskcache.Cache(str(self.path), timeout=self._timeout, disk=RawDisk, **settings)
        except sqlite3.OperationalError as error:
            raise OSError(
                f"the index of the store {self.path} cannot be opened ({error}); check its permissions"
            ) from None
        except (sqlite3.DatabaseError, AttributeError, TypeError, ValueError) as error:
            # Not ours or damaged. Its blobs become orphans: misses now, removed by `gc`.
            aside = self.path / f"{diskcache.core.DBNAME}.damaged-{secrets.token_hex(4)}"
            log.warning("index of store %s is damaged (%s); moved to %s, starting empty", self.path, error, aside.name)
            (self.path / diskcache.core.DBNAME).replace(aside)
            for tail in ("-wal", "-shm"):
                with contextlib.suppress(OSError):
                    (self.path / (diskcache.core.DBNAME + tail)).unlink()
            self._corrupt += 1
            return diskcache.Cache(str(self.path), timeout=self._timeout, disk=RawDisk, **settings)

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """The value, or None. Cost: a row, a file read, one SHA-256 (about 1 GB/s)."""
        value = self._read(check_key(key))
        with self._lock:
            if value is None:
                self._misses += 1
            else:
                self._hits += 1
        if value is not None:
            self._touch(key)
        return value

    def _row(self, key: str) -> Row | None:
        if self._closed:
            raise ValueError("the store is closed; open another one")
        try:
            row = self._cache.get(key)
        except RefusedRowError as error:
            self._reject(key, None, str(error))
            return None
        except _FAILURES as error:
            self._failed("read", key, error)
            return None
        return row if isinstance(row, Row) else None

    def _read(self, key: str) -> bytes | None:
        row = self._row(key)
        for _ in range(_LOOKS):
            if row is None:
                return None
            try:
                return read_blob(self.path / row.filename, key, row.sum)
            except FileNotFoundError:
                gone, row = row, self._row(key)
                if row == gone:
                    self._forget(key, gone.filename)
                    return None
                # Somebody put the key anew between the row and its file: there is a newer file.
            except StoreCorrupt as error:
                self._reject(key, row.filename, str(error))
                return None
            except _FAILURES as error:
                self._failed("read", key, error)
                return None
        return None

    def contains(self, key: str) -> bool:
        """Whether `get` would find a file of some size; counts as a use. O(1), the blob is not read."""
        row = self._row(check_key(key))
        if row is None or not (self.path / row.filename).is_file():
            return False
        self._touch(key)
        return True

    def list(self, prefix: str = "") -> Iterator[str]:
        """A sorted snapshot of the keys."""
        now = time.time()
        return iter(
            [
                key
                for key, expires in self._query(
                    "SELECT key, expire_time FROM Cache WHERE typeof(key) = 'text' AND raw = 1 AND mode = 2"
                    " AND key >= ? AND key < ? ORDER BY key",
                    (prefix, prefix + "\x7f"),
                )
                if expires is None or expires > now
            ]
        )

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> bool:
        """Stores ``value``; False where it cannot fit beside what is leased here, or the disk refuses.

        Cost: one SHA-256, a synced file, a row; without the file where the same value is there already.
        """
        check_key(key)
        check_value(value)
        try:
            head = codec.frame_head(codec.RECORD, {"key": key}, len(value))
            summed = hashlib.sha256(head)
            summed.update(value)
            total = len(head) + len(value) + codec.SUM_BYTES
            row = self._row(key)
            if row is not None and row.sum == summed.hexdigest() and size_of(self.path / row.filename) == total:
                self._cache.touch(key, expire=self.ttl)
                self._touch(key)
            else:
                if not self._make_room(total, key):
                    return False
                filename = self._write((head, value, summed.digest()))
                try:
                    self._cache.set(key, Written(Row(filename, summed.hexdigest()), total), expire=self.ttl)
                except BaseException:
                    self._cache.disk.remove(filename)
                    raise
                self._make_room(0, key)
        except _FAILURES as error:
            self._failed("write", key, error)
            return False
        with self._lock:
            self._puts += 1
        return True

    def _write(self, parts: Iterable[bytes]) -> str:
        name = secrets.token_hex(16)
        filename = f"{BLOBS}/{name[:2]}/{name}.blob"
        target = self.path / filename
        temp = self.path / _TEMP / f"{name}.tmp"
        try:
            with temp.open("xb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            target.parent.mkdir(exist_ok=True)
            temp.replace(target)
            sync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise
        return filename

    def delete(self, key: str) -> bool:
        """Removes ``key``, leased or not; False where there was none."""
        if self._row(check_key(key)) is None:
            return False
        with self._lock:
            self._leases.pop(key, None)
        try:
            return bool(self._cache.delete(key))
        except _FAILURES as error:
            self._failed("delete", key, error)
            return False

    def _make_room(self, need: int, keep: str) -> bool:
        """Evicts until ``need`` more bytes fit; False (and nothing evicted) where leases do not allow it."""
        if self._bytes() + need <= self.max_bytes:
            return True
        self._cache.expire()
        with self._lock:
            leased = set(self._leases)
        leased.add(keep)
        rows = self._query(
            "SELECT rowid, key, CAST(COALESCE(size, 0) AS INTEGER), filename FROM Cache ORDER BY access_time, rowid"
        )
        kept: int = sum(size for _, key, size, _ in rows if key in leased and key != keep)
        held: int = sum(size for _, _, size, _ in rows)
        # The key's own old blob goes when its row is replaced.
        held -= sum(size for _, key, size, _ in rows if key == keep and need)
        if kept + need > self.max_bytes:
            return False
        for rowid, key, size, filename in rows:
            if held + need <= self.max_bytes:
                break
            if key in leased:
                continue
            held -= size
            if self._remove_row(rowid, filename):
                with self._lock:
                    self._evictions += 1
        return held + need <= self.max_bytes

    # -- leases ------------------------------------------------------------------------------------------------------

    def lease(self, key: str) -> bool:
        """Protects ``key`` from this process's evictions; another process only sees it as recently used."""
        if not self.contains(key):
            return False
        with self._lock:
            self._leases[key] = self._leases.get(key, 0) + 1
        return True

    def release(self, key: str) -> None:
        with self._lock:
            drop_lease(self._leases, key)

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Counters of this process; items and bytes of the folder."""
        rows = self._query("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM Cache WHERE raw = 1 AND mode = 2")
        items, size = rows[0] if rows else (0, 0)
        with self._lock:
            return StoreStats(
                items=items, bytes=size, hits=self._hits, misses=self._misses, puts=self._puts,
                evictions=self._evictions, corrupt=self._corrupt, leased=len(self._leases),
            )  # fmt: skip

    def verify(self) -> tuple[int, int]:
        """Reads every blob; (good, corrupt). Corrupt and foreign rows are deleted. Cost: a read of the whole store."""
        before = self._corrupt
        foreign = self._query(
            "SELECT rowid, filename FROM Cache WHERE typeof(key) != 'text' OR raw IS NOT 1 OR mode IS NOT 2"
        )
        for rowid, filename in foreign:
            self._remove_row(rowid, filename)
            with self._lock:
                self._corrupt += 1
        missing = good = 0
        for key in self.list():
            at = self._corrupt
            if self._read(key) is not None:
                good += 1
            elif self._corrupt == at:
                missing += 1
        return good, self._corrupt - before + missing

    def gc(self, min_age: float = 600.0) -> tuple[int, int]:
        """Removes expired rows and files no row points at; (files, bytes) removed. Cost: a walk of the folder.

        Args:
            min_age: seconds; younger files may be another process's put between its rename and its row.
        """
        if self._closed:
            raise ValueError("the store is closed; open another one")
        with contextlib.suppress(*_FAILURES):
            self._cache.expire()
        removed = self._clean_temp(min_age)
        # Files first, rows second: a file whose row appears in between is seen as used.
        paths = itertools.chain((self.path / BLOBS).rglob("*"), self.path.glob("*.damaged-*"))
        found = [path for path in paths if path.is_file()]
        try:
            used = {name for (name,) in self._cache._sql("SELECT filename FROM Cache").fetchall()}
        except _FAILURES as error:
            # Without the index every file would look orphaned.
            self._failed("read", "the index", error)
            return removed
        count, freed = removed
        for path in found:
            if path.relative_to(self.path).as_posix() not in used:
                size = remove_old(path, min_age)
                count, freed = count + (size is not None), freed + (size or 0)
        return count, freed

    def close(self) -> None:
        """Closes the index; idempotent. Later calls raise ValueError."""
        if not self._closed:
            self._closed = True
            self._cache.close()

    # -- index and bookkeeping ---------------------------------------------------------------------------------------

    def _query(self, statement: str, arguments: tuple[Any, ...] = ()) -> Sequence[tuple[Any, ...]]:
        """Reads the index table. Its columns are diskcache's file format (fixed in the 5.x line we require)."""
        if self._closed:
            raise ValueError("the store is closed; open another one")
        try:
            return tuple(self._cache._sql(statement, arguments).fetchall())
        except _FAILURES as error:
            self._failed("read", "the index", error)
            return ()

    def _bytes(self) -> int:
        rows = self._query("SELECT COALESCE(SUM(size), 0) FROM Cache")
        return int(rows[0][0]) if rows else 0

    def _remove_row(self, rowid: int, filename: Any) -> bool:
        """Deletes exactly the row that was seen: if another process has replaced its file meanwhile, it stays."""
        try:
            with self._cache.transact(retry=False):
                done = self._cache._sql(
                    "DELETE FROM Cache WHERE rowid = ? AND filename IS ?", (rowid, filename)
                ).rowcount
        except _FAILURES as error:
            self._failed("delete", "a row", error)
            return False
        if done:
            self._cache.disk.remove(filename)
        return bool(done)

    def _forget(self, key: str, filename: str | None) -> None:
        for rowid, named in self._query("SELECT rowid, filename FROM Cache WHERE key = ?", (key,)):
            if filename is None or named == filename:
                self._remove_row(rowid, named)

    def _reject(self, key: str, filename: str | None, why: str) -> None:
        with self._lock:
            self._corrupt += 1
        log.warning("stored blob %s is corrupt and was deleted: %s", key, why)
        self._forget(key, filename)

    def _touch(self, key: str) -> None:
        with contextlib.suppress(*_FAILURES):
            self._cache._sql("UPDATE Cache SET access_time = ? WHERE key = ? AND raw = 1", (time.time(), key))

    def _failed(self, what: str, key: str, error: BaseException) -> None:
        with self._lock:
            self.failures += 1
        log.warning("store %s could not %s %s: %s: %s", self.path, what, key, type(error).__name__, error)

    def _clean_temp(self, min_age: float) -> tuple[int, int]:
        sizes = [remove_old(path, min_age) for path in (self.path / _TEMP).glob("*.tmp")]
        return sum(s is not None for s in sizes), sum(s or 0 for s in sizes)
