"""A store in this process's memory that evicts the least recently used values first."""

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import filterfalse

from ctxwin.store.base import LeaseCounts, Store, StoreStats, check_key, check_limits, check_value


@dataclass
class _Item:
    value: bytes
    expires: float | None


class MemoryStore(Store):
    """Blobs in memory, at most ``max_bytes`` of them; no copy is made of a value.

    Args:
        max_bytes: sum of the values' sizes; 2 GiB unless told otherwise.
        ttl: seconds after its last `put` at which a value becomes a miss; None keeps it.
        clock: seconds that never go back; tests replace it.
    """

    def __init__(
        self, max_bytes: int = 2 << 30, ttl: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_limits(max_bytes, ttl)
        self.max_bytes = max_bytes
        self.ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._items: OrderedDict[str, _Item] = OrderedDict()  # those that may be evicted, the least recently used first
        self._held: dict[str, _Item] = {}  # those that are leased
        self._held_bytes = 0
        self._tally = LeaseCounts()
        self._bytes = 0
        self._listeners: list[weakref.WeakMethod[Callable[[str], None]]] = []

    def _find(self, key: str) -> _Item | None:
        """The live item, made the most recent one; the lock is held."""
        self._check_open()
        item = self._held.get(key) or self._items.get(key)
        if item is None:
            return None
        if item.expires is not None and self._clock() >= item.expires:
            self._drop(key)
            return None
        if key in self._items:
            self._items.move_to_end(key)
        return item

    def _drop(self, key: str) -> bool:
        self._hold(key, False)
        item = self._items.pop(key, None)
        if item is None:
            return False
        self._bytes -= len(item.value)
        self._tally.drop(key)
        self._announce(key)
        return True

    def _hold(self, key: str, held: bool) -> None:
        """Keep ``key`` from eviction, or no longer; the lock is held."""
        item = (self._items if held else self._held).pop(key, None)
        if item is not None:
            (self._held if held else self._items)[key] = item
            self._held_bytes += len(item.value) if held else -len(item.value)

    def listen(self, dropped: Callable[[str], None]) -> bool:
        with self._lock:
            self._listeners = [listener for listener in self._listeners if listener() is not None]
            self._listeners.append(weakref.WeakMethod(dropped))
        return True

    def _announce(self, key: str) -> None:
        for listener in self._listeners:
            dropped = listener()
            if dropped is not None:
                dropped(key)

    def get(self, key: str) -> bytes | None:
        """The value, or None. O(1)."""
        with self._lock:
            item = self._find(check_key(key))
            self._tally.count("misses" if item is None else "hits")
            return None if item is None else item.value

    def put(self, key: str, value: bytes) -> bool:
        """Store ``value``; False where it cannot fit beside what is leased. O(evicted)."""
        check_key(key)
        check_value(value)
        with self._lock:
            old = self._find(key)
            need = len(value) - (len(old.value) if old else 0)
            if (need if key in self._held else len(value)) + self._held_bytes > self.max_bytes:
                return False
            while self._bytes + need > self.max_bytes:  # ends before ``key``, the most recent one
                self._drop(next(iter(self._items)))
                self._tally.count("evictions")
            expires = None if self.ttl is None else self._clock() + self.ttl
            if old is not None:
                self._announce(key)
            held = key in self._held
            self._hold(key, False)
            self._items[key] = _Item(value, expires)
            self._items.move_to_end(key)
            self._hold(key, held)
            self._bytes += need
            self._tally.count("puts")
            return True

    def delete(self, key: str) -> bool:
        """Remove ``key``, leased or not; False where there was none. O(1)."""
        with self._lock:
            return self._find(check_key(key)) is not None and self._drop(key)

    def contains(self, key: str) -> bool:
        """Return True if `get` would find it; counts as a use. O(1)."""
        with self._lock:
            return self._find(check_key(key)) is not None

    def missing(self, keys: Collection[str]) -> list[str]:
        with self._lock:
            self._check_open()
            if self.ttl is not None:  # those that are leased expire, too
                return [key for key in keys if self._find(key) is None]
            others = [*filterfalse(self._held.__contains__, keys)]
            deque(map(self._items.move_to_end, filter(self._items.__contains__, others)), maxlen=0)
            return [*filterfalse(self._items.__contains__, others)]

    def list(self, prefix: str = "") -> Iterator[str]:
        """A sorted snapshot of the live keys. O(items log items)."""
        with self._lock:
            self._check_open()
            now = self._clock()
            every = (*self._items.items(), *self._held.items())
            live = [k for k, i in every if i.expires is None or now < i.expires]
        return iter(sorted(k for k in live if k.startswith(prefix)))

    def lease(self, key: str) -> bool:
        with self._lock:
            if self._find(check_key(key)) is None:
                return False
            self._tally.lease(key)
            self._hold(key, True)
            return True

    def release(self, key: str) -> None:
        """Release one lease; the last one counts as a use. O(1)."""
        with self._lock:
            self._tally.release(key)
            if not self._tally.holds(key):
                self._hold(key, False)

    def stats(self) -> StoreStats:
        with self._lock:
            return self._tally.stats(len(self._items) + len(self._held), self._bytes)

    def verify(self) -> tuple[int, int]:
        """Every live item counts as good: this process's memory is not checked, decoding a blob checks it."""
        return sum(1 for _ in self.list()), 0

    def close(self) -> None:
        """Drop everything; idempotent. Later calls raise ValueError."""
        with self._lock:
            for key in (*self._items, *self._held):
                self._drop(key)
            self._closed = True
