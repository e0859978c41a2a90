"""A cache of recently used values, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """A dict of at most ``max_bytes`` whose least recently used entries leave; thread-safe, every call O(1) amortised."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._held: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> V | None:
        """The value, which counts as used, or None."""
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: str, value: V, nbytes: int) -> None:
        """Keeps ``value``, of ``nbytes``, unless it alone exceeds the bound; then nothing is evicted for it either."""
        self.pop(key)
        if nbytes > self.max_bytes:
            return
        with self._lock:
            self._held[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self.max_bytes:
                self.nbytes -= self._held.popitem(last=False)[1][1]

    def pop(self, key: str) -> None:
        """Forgets ``key``, if it is held."""
        with self._lock:
            self.nbytes -= self._held.pop(key, (None, 0))[1]

    def items(self) -> list[tuple[str, V]]:
        """What is held now, the least recently used first. O(n)."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._held.items()]

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._held
