"""A cache of recently used values, bounded in bytes."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from itertools import compress
from typing import Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """A dict of at most ``max_bytes`` that evicts its least recently used entries.

    Thread-safe; every call is O(1) amortised.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> V | None:
        """Return the value, which counts as a use, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: str, value: V, nbytes: int) -> None:
        """Store ``value``, of ``nbytes``, unless it alone exceeds the bound; then nothing is evicted for it either."""
        self.pop(key)
        if nbytes > self.max_bytes:
            return
        with self._lock:
            self._entries[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self.max_bytes:
                self.nbytes -= self._entries.popitem(last=False)[1][1]

    def get_or_build(self, key: str, build: Callable[[], V]) -> V:
        """Return the value; where there is none, the one that ``build`` returns, which is stored with a size of 1."""
        value = self.get(key)
        if value is None:
            value = build()
            self.put(key, value, 1)
        return value

    def pop(self, key: str) -> None:
        """Remove ``key``, if it is present."""
        with self._lock:
            self.nbytes -= self._entries.pop(key, (None, 0))[1]

    def items(self) -> list[tuple[str, V]]:
        """Return the entries, the least recently used first. O(n)."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._entries.items()]

    def get_all(self, keys: Collection[str]) -> list[V | None]:
        """Return the value of each of ``keys`` that is present, which counts as a use, and None for others."""
        with self._lock:
            entries = [*map(self._entries.get, keys)]
            deque(map(self._entries.move_to_end, compress(keys, entries)), maxlen=0)  # all of them, in C
        return [entry and entry[0] for entry in entries]

    def look_up(self, keys: Collection[str]) -> set[str]:
        """Return those of ``keys`` that are present."""
        with self._lock:
            return self._entries.keys() & keys

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._entries
