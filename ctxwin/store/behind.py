"""A writer of records, also by a thread while answers go on, and the leases of windows on what was put."""

import json
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ctxwin.store.base import Store

log = logging.getLogger(__name__)
R = TypeVar("R")
Entry = tuple[R, dict[str, Any]]
"""A record and the metadata stored beside it."""


@dataclass(eq=False)
class _Pending(Generic[R]):
    """A record that is not in its store yet.

    Attributes:
        record: the result of a read until then.
        nbytes: memory that it holds.
        leases: leases to take in the store once it is there.
        deleted: True if it shall not be written any more.
        written: done once it is in the store, or was refused or deleted.
    """

    record: Entry[R]
    nbytes: int
    leases: int = 0
    deleted: bool = False
    written: Future[Any] = field(default_factory=Future)


class Writer(Generic[R]):
    """Writes in the order in which they came, at once or by a thread, for which whoever ends the process waits; thread-safe.

    Args:
        store: holds what was written, with its leases.
        write: writes a record under a key; returns False where the store refused it.
        failed: called for each record that the thread could not write.
        max_bytes: memory of pending records from which on `put` waits for the oldest of them; 0 writes each at once.
    """

    def __init__(
        self, store: Store, write: Callable[[str, Entry[R]], bool], failed: Callable[[], None], max_bytes: int
    ) -> None:
        self._store, self._write, self._failed, self._max_bytes = store, write, failed, max_bytes
        self.begin()
        _writers.add(self)

    def begin(self) -> None:
        """Begin with nothing pending, also in a forked process: what is pending there its parent writes."""
        self._lock = threading.RLock()  # held while a record goes over into the store's hands, with its leases
        self._pending: dict[str, _Pending[R]] = {}
        self._nbytes, self._thread = 0, ThreadPoolExecutor(1, "ctxwin-store")

    def put(self, key: str, record: Entry[R], nbytes: int) -> bool:
        """Write ``record``, which holds ``nbytes`` of memory; return False where it is known to be refused.

        One that is pending under its key is not written any more, and leaves its leases to it.
        """
        if not self._max_bytes:
            return self._write(key, record)
        meta = json.loads(json.dumps(record[1], allow_nan=False))
        while (oldest := self._oldest(nbytes)) is not None:
            oldest.written.result()
        with self._lock:
            pending = _Pending((record[0], meta), nbytes)
            if (earlier := self._pending.pop(key, None)) is not None:
                earlier.deleted, pending.leases, earlier.leases = True, earlier.leases, 0
            self._pending[key] = pending
            self._nbytes += nbytes
            try:
                self._thread.submit(self._carry_out, key, pending)
            except RuntimeError:  # the interpreter ends, and takes no more work
                self._carry_out(key, pending)
        return True

    def get(self, key: str) -> Entry[R] | None:
        """Return the record of ``key`` that is not in the store yet, with its metadata as it will be read."""
        pending = self._pending.get(key)
        return None if pending is None else pending.record

    def pending(self, keys: Collection[str]) -> set[str]:
        """Return those of ``keys`` that are not in the store yet."""
        return set(filter(self._pending.__contains__, keys)) if self._pending else set()

    def delete(self, key: str) -> bool:
        """Do not write ``key`` any more, or wait until it is written; return True if it was pending."""
        with self._lock:
            if (pending := self._pending.pop(key, None)) is None:
                return False
            pending.deleted = True
        pending.written.result()
        return True

    def lease(self, key: str) -> bool:
        """Protect ``key`` from eviction; return False where it is neither pending nor stored."""
        with self._lock:
            if (pending := self._pending.get(key)) is not None:
                pending.leases += 1
                return True
        return self._store.lease(key)

    def release(self, key: str) -> None:
        """Release one lease of ``key``."""
        with self._lock:
            if (pending := self._pending.get(key)) is not None and pending.leases:
                pending.leases -= 1
                return
        self._store.release(key)

    def flush(self) -> None:
        """Wait until everything that was put is written. Cost: the writes that are pending."""
        wait_for([pending.written for pending in list(self._pending.values())])

    def _oldest(self, nbytes: int) -> _Pending[R] | None:
        with self._lock:
            full = self._nbytes + nbytes > self._max_bytes
            return next(iter(self._pending.values()), None) if full else None

    def _carry_out(self, key: str, pending: _Pending[R]) -> None:
        try:
            if not pending.deleted:
                self._write(key, pending.record)
        except Exception as error:
            log.warning("%s could not be stored and will be computed again: %s", key, error)
            self._failed()
        finally:
            with self._lock:
                if self._pending.get(key) is pending:
                    del self._pending[key]
                    for _ in range(pending.leases):
                        self._store.lease(key)
                self._nbytes -= pending.nbytes
            pending.written.set_result(None)


_writers: weakref.WeakSet[Writer[Any]] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [*map(Writer.begin, _writers)])


class LeaseCounts:
    """Base of `SpanRepository`: leases, also on records that ``writer`` has still to write; thread-safe."""

    def __init__(self, writer: Writer[Any]) -> None:
        self._writer = writer
        self._leases: Counter[str] = Counter()
        self._abandoned: dict[Callable[[], None], None] = {}
        self._lock = threading.Lock()

    def lease(self, key: str) -> bool:
        """Protect ``key`` from eviction until `release`; return False where the store does not hold it."""
        leased = self._writer.lease(key)
        if leased:
            with self._lock:
                self._leases[key] += 1
        return leased

    def release(self, key: str) -> None:
        """Release one lease of ``key``."""
        with self._lock:
            self._leases[key] -= 1
            if self._leases[key] <= 0:
                del self._leases[key]
        self._writer.release(key)

    def abandon(self, release: Callable[[], None]) -> None:
        """Call ``release`` later, before the next put, lookup of leases or edit of a window; twice is as good as once.

        For finalizers: the garbage collector may run them in a thread that holds the store's lock.
        """
        self._abandoned[release] = None

    def leased(self, key: str) -> bool:
        """Return True if ``key`` is leased through this repository."""
        return self.leases(key) > 0

    def leases(self, key: str) -> int:
        """Return the number of leases on ``key`` through this repository."""
        self.release_abandoned()
        with self._lock:
            return self._leases.get(key, 0)

    def release_abandoned(self) -> None:
        """Release what was abandoned."""
        for release in self._abandoned.copy():
            release()  # what an interrupt ends is done again
            self._abandoned.pop(release, None)
