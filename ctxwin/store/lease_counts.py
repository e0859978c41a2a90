"""Leases of windows on the records of one store, counted by key."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from ctxwin.store.behind import WriteThrough


class LeaseCounts:
    """Base of `SpanRepository`: leases, also on records that ``writer`` has still to write; thread-safe."""

    def __init__(self, writer: WriteThrough[Any]) -> None:
        self._writer = writer
        self._leases: Counter[str] = Counter()
        self._abandoned: deque[Callable[[], None]] = deque()
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
        """Call ``release`` later, before the next put, lookup of leases or edit of a window.

        For finalizers: the garbage collector may run them in a thread that holds the store's lock.
        """
        self._abandoned.append(release)

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
        while self._abandoned:
            try:
                release = self._abandoned.popleft()
            except IndexError:  # another thread took the last one
                return
            release()
