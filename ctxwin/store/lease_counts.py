"""Leases of windows on the records of one store, counted by key."""

import threading
from collections import Counter, deque
from collections.abc import Collection
from typing import Any

from ctxwin.store.behind import WriteThrough


class LeaseCounts:
    """Base of `SpanRepository`: leases, also on records that ``writer`` has still to write; thread-safe."""

    def __init__(self, writer: WriteThrough[Any]) -> None:
        self._writer = writer
        self._leases: Counter[str] = Counter()
        self._shared: Counter[str] = Counter()  # those of them that the store does not know of: it has another one
        self._abandoned: deque[str] = deque()
        self._lock = threading.Lock()

    def lease(self, key: str) -> bool:
        """Protect ``key`` from eviction until `release`; return False where the store does not hold it."""
        self._release_abandoned()
        leased = self._writer.lease(key)
        if leased:
            with self._lock:
                self._leases[key] += 1
        return leased

    def lease_again(self, keys: Collection[str]) -> None:
        """Add a lease to each of ``keys``, all of which the caller has leased. O(keys) in C; the store is not asked."""
        with self._lock:
            self._leases.update(keys)
            self._shared.update(keys)

    def release(self, key: str) -> None:
        """Release one lease of ``key``."""
        self._release_abandoned()
        self._release(key)

    def abandon(self, keys: set[str]) -> None:
        """Empty ``keys`` and release them later, before the next lease, put or lookup of leases.

        For finalizers: the garbage collector may run them in a thread that holds the store's lock.
        """
        self._abandoned.extend(keys)
        keys.clear()

    def leased(self, key: str) -> bool:
        """Return True if ``key`` is leased through this repository."""
        return self.leases(key) > 0

    def leases(self, key: str) -> int:
        """Return the number of leases on ``key`` through this repository."""
        self._release_abandoned()
        with self._lock:
            return self._leases.get(key, 0)

    def _release(self, key: str) -> None:
        with self._lock:
            is_shared = key in self._shared
            for counts in (self._leases, self._shared) if is_shared else (self._leases,):
                counts[key] -= 1
                if counts[key] <= 0:
                    del counts[key]
        if not is_shared:
            self._writer.release(key)

    def _release_abandoned(self) -> None:
        while self._abandoned:
            try:
                key = self._abandoned.popleft()
            except IndexError:  # another thread took the last one
                return
            self._release(key)
