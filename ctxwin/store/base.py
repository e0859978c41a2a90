"""The store contract: bytes keyed by content, with leases."""

import re
import struct
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from ctxwin.errors import StaleOwner, StoreFull

_KEY = re.compile(r"[!-~]{1,512}")
_TOKEN: Final = struct.Struct(">Q")
NOBODYS: Final = 1 << 62  # token of a record that was retired: above that of any owner
_ONE_PROCESS: Final = threading.RLock()


def is_key(key: Any) -> bool:
    """Return True if ``key`` is a str of 1 to 512 printable ASCII characters without blanks."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_key(key: Any) -> str:
    """Return ``key``; raise TypeError or ValueError where it is not 1 to 512 printable ASCII characters without blanks."""
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str like 'span/<hex digest>', got {type(key).__name__}")
    if not is_key(key):
        raise ValueError(f"a key must be 1 to 512 printable ASCII characters without blanks, got {key[:80]!r}")
    return key


def check_value(value: Any) -> None:
    """Raise TypeError where ``value`` is not bytes: a mutable buffer could change under its key."""
    if not isinstance(value, bytes):
        raise TypeError(f"a value must be bytes, got {type(value).__name__}; use bytes(value)")


def check_limits(max_bytes: int, ttl: float | None) -> None:
    """Raise ValueError unless ``max_bytes`` is positive and ``ttl`` is None or positive."""
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    if ttl is not None and not (isinstance(ttl, int | float) and ttl > 0):
        raise ValueError(f"ttl must be positive seconds or None, got {ttl!r}")


def store_full(what: str) -> StoreFull:
    """Return the error for a store that refuses ``what``."""
    return StoreFull(f"the store must take {what}, and is full or read only; make room, raise its limit, or use a copy")


@dataclass(frozen=True)
class StoreStats:
    """Counters of one store since it was opened; ``items``, ``bytes`` and ``leased`` are its current contents.

    ``foreign`` counts reads of undamaged records sealed with another key, or with none: misses that are not deleted.
    """

    items: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evictions: int = 0
    corrupt: int = 0
    foreign: int = 0
    leased: int = 0


class LeaseCounts:
    """Leases and counters of one store; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self.changes = 0  # of the set of leased keys

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of the counters of `StoreStats`."""
        with self._lock:
            self._counts[name] += by

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def lease(self, key: str) -> None:
        """Add a lease on ``key``."""
        with self._lock:
            self.changes += key not in self._leases
            self._leases[key] = self._leases.get(key, 0) + 1

    def release(self, key: str) -> None:
        """Release one lease on ``key``; without a lease this changes nothing."""
        with self._lock:
            remaining = self._leases.get(key, 0) - 1
            if remaining > 0:
                self._leases[key] = remaining
            else:
                self.changes += self._leases.pop(key, None) is not None

    def drop(self, key: str) -> None:
        """Remove all leases on ``key``."""
        with self._lock:
            self.changes += self._leases.pop(key, None) is not None

    def holds(self, key: str) -> bool:
        """Return True if ``key`` is leased."""
        with self._lock:
            return key in self._leases

    def leased(self) -> set[str]:
        """Return the leased keys."""
        with self._lock:
            return set(self._leases)

    def stats(self, items: int, size: int) -> StoreStats:
        """Return the counters of a store that holds ``items`` of ``size`` bytes together."""
        with self._lock:
            return StoreStats(items=items, bytes=size, leased=len(self._leases), **self._counts)


class Store(ABC):
    """Immutable blobs by key. A key is ``namespace/hex-digest``; a value never changes under its key.

    Thread-safe. A blob that fails its checks is a miss: deleted, counted in ``stats().corrupt``, logged. One that was
    sealed with another key is a miss as well, but stays, and is counted in ``stats().foreign``. Keys leased in this
    process are never evicted by its size limit; leases are counted, so each ``lease`` needs a ``release``. A store outside this
    process does these checks with `ctxwin.store.codec.Seal`; it may have ``gc(min_age) -> (files, bytes)``, for the command.
    ``get``, ``contains`` and ``lease`` count as a use for the order of eviction.

    Beside blobs it holds fenced records, which do change: `claim`, `commit`, `retire`. A record belongs to its latest claimant,
    by a fencing token that only grows (Kleppmann, Designing Data-Intensive Applications, chapter 8), so that an owner that was
    disconnected, or presumed dead, cannot overwrite its successor's versions.

    Attributes:
        shared: whether servers on several machines use it at once, so that a record's owner may change at any time.
        evicts: whether its server may evict records by itself, fenced ones included.
        archive_secret: seals the archives of its records (`ctxwin.store.archive`); None where it was opened without a key.
    """

    shared: bool = False
    evicts: bool = False
    archive_secret: bytes | None = None
    _closed = False

    def __repr__(self) -> str:
        kind = " ".join(filter(None, (type(self).__name__, str(getattr(self, "name", getattr(self, "path", ""))))))
        if self._closed or self.shared:  # whose server would have to answer
            return f"<{kind}{' closed' * self._closed}>"
        stats = self.stats()
        return f"<{kind} {stats.items:,} entries, {stats.bytes:,} of {self.limit():,} bytes>"

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the store is closed; open another one")

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return the value, or None where there is none (or it was corrupt)."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> bool:
        """Store ``value``; return False where it was refused (over the size limit with everything leased, disk full)."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Remove a key; return True if it existed."""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Return True if ``get`` would find a value, without reading it."""

    def persists(self, key: str) -> bool:
        """Return True if the value is where it stays longest: in the last of several tiers."""
        return self.contains(key)

    def missing(self, keys: Collection[str]) -> list[str]:
        """Return those of ``keys`` that it does not contain, in their order; the others count as used."""
        return [key for key in keys if not self.contains(key)]

    def tier(self, key: str) -> str:
        """Return the kind of store that a read of ``key`` would come from, for its price; arbitrary for an absent key. O(1)."""
        return type(self).__name__

    def reachable(self) -> bool:
        """Return True if its server answers, or it has none. Cost: a round trip, none shortly after a failure."""
        return not self._closed

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Iterate over the keys that begin with ``prefix``."""

    @abstractmethod
    def lease(self, key: str) -> bool:
        """Protect ``key`` from eviction; return False where it is absent."""

    @abstractmethod
    def release(self, key: str) -> None:
        """Release one lease of a key."""

    def claim(self, key: str) -> tuple[int, bytes] | None:
        """Take over a fenced record and invalidate older tokens; return its new token and value, None where there is none.

        Raises StoreUnavailable where a shared store does not answer. Cost: a read and a small write.
        """
        with self._fencing():
            record = self.get(key)
            if record is None:
                return None
            token = _TOKEN.unpack_from(record)[0] + 1 if len(record) >= _TOKEN.size else 1
            # A full disk refuses the write and the claim still succeeds: the record then has two owners.
            self.put(key, _TOKEN.pack(token) + record[_TOKEN.size :])
            return token, record[_TOKEN.size :]

    def commit(self, key: str, value: bytes, token: int) -> bool:
        """Write a fenced record as its owner; a new one has the token 1. Return False where the store refuses it, as `put`.

        Raises:
            StaleOwner: the record was claimed or retired after ``token`` was issued.
            StoreUnavailable: a shared store does not answer.
        """
        with self._fencing():
            if self.token(key) > token:
                raise StaleOwner(f"{key} must be written by its owner, got token {token}; claim it again")
            return self.put(key, _TOKEN.pack(token) + value)

    def read(self, key: str) -> bytes | None:
        """Return the value of a fenced record without claiming it; None where there is none. Raises StoreUnavailable."""
        record = self.get(key)
        return None if record is None else record[_TOKEN.size :]

    def token(self, key: str) -> int:
        """Return the token of a fenced record's owner; 0 where there is none, `NOBODYS` where a store of several processes had it
        retired within the hour. Raises StoreUnavailable."""
        record = self.get(key) or b""
        return int(_TOKEN.unpack_from(record)[0]) if len(record) >= _TOKEN.size else 0

    def retire(self, key: str) -> bool:
        """Remove a fenced record permanently; return True if it existed. Raises StoreUnavailable."""
        return self.delete(key)

    def prefetch(self, keys: Iterable[str]) -> None:  # noqa: B027  # most stores have nothing to prefetch
        """Announce keys that will be read soon; a tiered store loads them in the background. Returns at once."""

    def hold(self, key: str, value: str, seconds: float) -> str:
        """Claim a name for ``value`` among all users of the store, for ``seconds`` unless it is renewed.

        Returns the name's current value: ``value``, or that of an earlier claim. Raises StoreUnavailable.
        """
        return value

    def _fencing(self) -> AbstractContextManager[Any]:
        """Return the lock for reading and writing a fenced record; a store of several processes excludes those too."""
        return _ONE_PROCESS

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the current contents and the counters since the store was opened."""

    def limit(self) -> int:
        """Return the limit of its size, its ``max_bytes``; 0 for no limit."""
        return int(getattr(self, "max_bytes", 0))

    def listen(self, dropped: Callable[[str], None]) -> bool:
        """Have the method ``dropped`` called with each key whose value leaves this process's memory, while its object exists.

        Return False where the store holds no values there, and calls nothing. What is decoded from such a value shares its
        bytes, and takes no memory of its own until it is dropped.
        """
        return False

    @abstractmethod
    def verify(self) -> tuple[int, int]:
        """Check every blob; return (good, corrupt) and delete the corrupt ones.

        Records sealed with another key cannot be checked: they stay, and count in ``stats().foreign`` only.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the store's resources. Idempotent."""
