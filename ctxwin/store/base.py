"""The store contract: bytes keyed by content, with leases."""

from __future__ import annotations

import re
import struct
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from ctxwin.errors import StaleOwner

_KEY = re.compile(r"[!-~]{1,512}")
_TOKEN: Final = struct.Struct(">Q")
_ONE_PROCESS: Final = threading.RLock()


def is_key(key: Any) -> bool:
    """Whether ``key`` is a str of 1 to 512 printable ASCII characters without blanks."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_key(key: Any) -> str:
    """``key`` itself; TypeError or ValueError where it is not 1 to 512 printable ASCII characters without blanks."""
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str like 'span/<hex digest>', got {type(key).__name__}")
    if not is_key(key):
        raise ValueError(f"a key must be 1 to 512 printable ASCII characters without blanks, got {key[:80]!r}")
    return key


def check_value(value: Any) -> None:
    """TypeError where ``value`` is not bytes: a mutable buffer could change under its key."""
    if not isinstance(value, bytes):
        raise TypeError(f"a value must be bytes, got {type(value).__name__}; use bytes(value)")


def check_limits(max_bytes: int, ttl: float | None) -> None:
    """ValueError unless ``max_bytes`` is positive and ``ttl`` is None or positive."""
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    if ttl is not None and ttl <= 0:
        raise ValueError(f"ttl must be positive seconds or None, got {ttl}")


@dataclass(frozen=True)
class StoreStats:
    """Counters of one store since it was opened; ``items``, ``bytes`` and ``leased`` are what it holds now.

    ``foreign`` counts reads of undamaged records that were sealed with another key, or with none: misses that stay.
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


class Tally:
    """Leases and counters of one store; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def count(self, name: str, by: int = 1) -> None:
        """Adds to one of the counters of `StoreStats`."""
        with self._lock:
            self._counts[name] += by

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def lease(self, key: str) -> None:
        """Takes one more lease on ``key``."""
        with self._lock:
            self._leases[key] = self._leases.get(key, 0) + 1

    def release(self, key: str) -> None:
        """Gives one lease back, and forgets ``key`` with its last; one that was never taken changes nothing."""
        with self._lock:
            left = self._leases.get(key, 0) - 1
            if left > 0:
                self._leases[key] = left
            else:
                self._leases.pop(key, None)

    def drop(self, key: str) -> None:
        """Forgets all leases on ``key``."""
        with self._lock:
            self._leases.pop(key, None)

    def holds(self, key: str) -> bool:
        """Whether ``key`` is leased."""
        with self._lock:
            return key in self._leases

    def leased(self) -> set[str]:
        """The leased keys now."""
        with self._lock:
            return set(self._leases)

    def stats(self, items: int, size: int) -> StoreStats:
        """The counters beside what the store holds: ``items`` of ``size`` bytes together."""
        with self._lock:
            return StoreStats(items=items, bytes=size, leased=len(self._leases), **self._counts)


class Store(ABC):
    """Immutable blobs by key. A key is ``namespace/hex-digest``; a value never changes under its key.

    Thread-safe. A blob that fails its checks is a miss: deleted, counted in ``stats().corrupt``, logged. One that was
    sealed with another key is a miss as well, but stays, and is counted in ``stats().foreign``. Leased keys are never
    evicted by the store's own size limit; leases are counted, so each ``lease`` needs a ``release``.
    ``get``, ``contains`` and ``lease`` count as a use for the order of eviction.

    Beside blobs it holds fenced records, which do change: `claim`, `commit`, `retire`. A record belongs to whoever claimed it
    last, by a fencing token that only grows (Kleppmann, Designing Data-Intensive Applications, chapter 8), so that an owner
    that was cut off, or thought dead, cannot write over its successor's versions.

    Attributes:
        shared: whether servers on several machines use it at once, so that a record may change hands at any time.
        evicts: whether its server may drop by itself what it was told to keep, a fenced record, say.
    """

    shared: bool = False
    evicts: bool = False
    _closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the store is closed; open another one")

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, or None where there is none (or it was corrupt)."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> bool:
        """Stores ``value``; False where it was refused (over the size limit with everything leased, disk full)."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether ``get`` would find a value, without reading it."""

    def tier(self, key: str) -> str:
        """Which kind of store a read of ``key`` would come from, for its price; whatever where it is not held. O(1)."""
        return type(self).__name__

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys that begin with ``prefix``."""

    @abstractmethod
    def lease(self, key: str) -> bool:
        """Protects ``key`` from eviction; False where it is not held."""

    @abstractmethod
    def release(self, key: str) -> None:
        """Gives back one lease of a key."""

    def claim(self, key: str) -> tuple[int, bytes] | None:
        """Takes a fenced record over: its new token and its value; None where there is none. Older tokens are void then.

        Raises StoreUnavailable where a shared store does not answer. Cost: a read and a small write.
        """
        with self._fencing():
            held = self.get(key)
            if held is None:
                return None
            token = _TOKEN.unpack_from(held)[0] + 1 if len(held) >= _TOKEN.size else 1
            # A full disk refuses this, and still gives its windows back: what it holds then belongs to two.
            self.put(key, _TOKEN.pack(token) + held[_TOKEN.size :])
            return token, held[_TOKEN.size :]

    def commit(self, key: str, value: bytes, token: int) -> bool:
        """Writes a fenced record as its owner; a new one has the token 1. False where the store refuses it, as `put` does.

        Raises:
            StaleOwner: somebody has claimed or retired it since ``token`` was given.
            StoreUnavailable: a shared store does not answer.
        """
        with self._fencing():
            if self.token(key) > token:
                raise StaleOwner(f"{key} must be written by its owner, got token {token}; claim it again")
            return self.put(key, _TOKEN.pack(token) + value)

    def read(self, key: str) -> bytes | None:
        """The value of a fenced record, which stays its owner's; None where there is none. Raises StoreUnavailable."""
        held = self.get(key)
        return None if held is None else held[_TOKEN.size :]

    def token(self, key: str) -> int:
        """The token of a fenced record's owner; 0 where there is none. Raises StoreUnavailable."""
        held = self.get(key) or b""
        return int(_TOKEN.unpack_from(held)[0]) if len(held) >= _TOKEN.size else 0

    def retire(self, key: str) -> bool:
        """Removes a fenced record for good; returns whether it was there. Raises StoreUnavailable."""
        return self.delete(key)

    def prefetch(self, keys: Iterable[str]) -> None:  # noqa: B027  # most stores have nothing to bring up
        """Says what will be read soon. A store in tiers brings it up meanwhile; returns at once."""

    def hold(self, key: str, value: str, seconds: float) -> str:
        """Claims a name for ``value`` among all who share the store, for that long unless it is held again.

        Returns whose it is: ``value``, or what another one holds it for. Raises StoreUnavailable.
        """
        return value

    def _fencing(self) -> AbstractContextManager[Any]:
        """Held while a fenced record is read and written; a store of several processes excludes those, too."""
        return _ONE_PROCESS

    @abstractmethod
    def stats(self) -> StoreStats:
        """What is held, and what was counted since the store was opened."""

    def limit(self) -> int:
        """Most bytes that it holds, its ``max_bytes``; 0 where it has no limit."""
        return int(getattr(self, "max_bytes", 0))

    @abstractmethod
    def verify(self) -> tuple[int, int]:
        """Checks every blob; returns (good, corrupt) and deletes the corrupt ones.

        What was sealed with another key cannot be checked: it stays, and counts in ``stats().foreign`` only.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives back what the store holds of the machine; idempotent."""
