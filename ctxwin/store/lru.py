"""A cache of recently used values, bounded in bytes."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import compress, count, filterfalse, islice, repeat
from operator import is_not
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class LRUCache(Generic[V]):
    """A dict of at most ``max_bytes`` that evicts its least recently used entries.

    Thread-safe; every call is O(1) amortised.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[Any, tuple[V, int]] = OrderedDict()
        self._views: dict[Any, object] = {}  # the newest of a key
        self._former: dict[Any, object] = {}  # the one before
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """Return the value, which counts as a use, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: V, nbytes: int) -> None:
        """Store ``value``, of ``nbytes``, unless it alone exceeds the bound; then nothing is evicted for it either."""
        with self._lock:  # throughout: nobody misses what is replaced, and two that replace it count one size
            self._drop(key)
            if nbytes > self.max_bytes:
                return
            self._entries[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self.max_bytes:
                oldest, (_, size) = self._entries.popitem(last=False)
                self.nbytes -= size
                self._views.pop(oldest, None)
                self._former.pop(oldest, None)

    def get_or_build(self, key: Hashable, build: Callable[[], V]) -> V:
        """Return the value; where there is none, the one that ``build`` returns, which is stored with a size of 1."""
        value = self.get(key)
        if value is None:
            value = build()
            self.put(key, value, 1)
        return value

    def pop(self, key: Hashable) -> None:
        """Remove ``key``, if it is present."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        self.nbytes -= self._entries.pop(key, (None, 0))[1]
        self._views.pop(key, None)
        self._former.pop(key, None)

    def items(self) -> list[tuple[str, V]]:
        """Return the entries, the least recently used first. O(n)."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._entries.items()]

    def missing(self, keys: Collection[str]) -> list[str]:
        """Return those of ``keys`` that are not present, in their order."""
        with self._lock:
            return [*filterfalse(self._entries.__contains__, keys)]

    def attach(self, key: str, value: V, view: object) -> None:
        """Keep ``view`` beside the value of ``key`` as long as it stays, if it is still ``value``.

        The two newest views are kept, so that a value that stands at two places of a window has one for each.
        """
        with self._lock:
            if key in self._entries and self._entries[key][0] is value:
                newest = self._views.get(key)
                if view is not newest and view is not self._former.get(key):
                    self._views[key] = view
                    if newest is not None:  # `count_attached` is asked about None where a caller has no view
                        self._former[key] = newest

    def count_attached(self, views: Sequence[object], keys: Sequence[str]) -> int:
        """Return how many of the first ``views`` are attached to their keys; that counts as a use of these."""
        with self._lock:
            others = compress(count(), map(is_not, map(self._views.get, keys, repeat(self)), views))
            lacking = (at for at in others if self._former.get(keys[at], self) is not views[at])
            number = next(lacking, min(len(keys), len(views)))
            deque(map(self._entries.move_to_end, islice(keys, number)), maxlen=0)
        return number

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._entries
