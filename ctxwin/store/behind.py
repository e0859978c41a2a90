"""Writes that a thread carries out, one after another, while answers go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

R = TypeVar("R")


@dataclass(eq=False)
class PendingWrite(Generic[R]):
    """A record that is not in its store yet.

    Attributes:
        record: what a read gives until then.
        nbytes: memory that it holds.
        leases: leases to take in the store once it is there.
        deleted: True if it shall not be written any more.
        written: done once it is in the store, or was refused or deleted.
    """

    record: R
    nbytes: int
    leases: int = 0
    deleted: bool = False
    written: Future[Any] = field(default_factory=Future)


class WriteBehind(Generic[R]):
    """Pending writes by key, carried out in the order in which they came. Thread-safe; whoever ends the process waits for them.

    Args:
        write: writes a record under a key; its failures are its own.
        lease: takes a lease in the store.
        max_bytes: memory of pending records from which on `add` waits for the oldest of them.

    Attributes:
        lock: held while a record goes over into the store's hands: whoever changes its leases takes it, too.
    """

    def __init__(self, write: Callable[[str, R], object], lease: Callable[[str], object], max_bytes: int) -> None:
        self._write, self._lease, self._max_bytes = write, lease, max_bytes
        self.lock = threading.RLock()
        self._pending: dict[str, PendingWrite[R]] = {}
        self._nbytes = 0
        self._thread: ThreadPoolExecutor | None = None

    def add(self, key: str, record: R, nbytes: int) -> None:
        """Write ``record`` soon. One that is pending under its key is not written any more, and leaves its leases to it."""
        while (oldest := self._oldest(nbytes)) is not None:
            oldest.written.result()
        with self.lock:
            pending = PendingWrite(record, nbytes)
            earlier = self._pending.pop(key, None)
            if earlier is not None:
                earlier.deleted, pending.leases, earlier.leases = True, earlier.leases, 0
            self._pending[key] = pending
            self._nbytes += nbytes
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "ctxwin-store")
            try:
                self._thread.submit(self._carry_out, key, pending)
            except RuntimeError:  # the interpreter ends, and takes no more work
                self._carry_out(key, pending)

    def get(self, key: str) -> PendingWrite[R] | None:
        """Return the pending write of ``key``."""
        return self._pending.get(key)

    def delete(self, key: str) -> bool:
        """Do not write ``key`` any more, or wait until it is written; return True if it was pending."""
        with self.lock:
            pending = self._pending.pop(key, None)
            if pending is None:
                return False
            pending.deleted = True
        pending.written.result()
        return True

    def flush(self) -> None:
        """Wait until everything that was added is written. Cost: the writes that are pending."""
        wait_for([pending.written for pending in list(self._pending.values())])

    def _oldest(self, nbytes: int) -> PendingWrite[R] | None:
        with self.lock:
            full = self._nbytes + nbytes > self._max_bytes
            return next(iter(self._pending.values()), None) if full else None

    def _carry_out(self, key: str, pending: PendingWrite[R]) -> None:
        try:
            if not pending.deleted:
                self._write(key, pending.record)
        finally:
            with self.lock:
                if self._pending.get(key) is pending:
                    del self._pending[key]
                    for _ in range(pending.leases):
                        self._lease(key)
                self._nbytes -= pending.nbytes
            pending.written.set_result(None)
