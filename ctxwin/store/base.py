"""The store contract: bytes keyed by content, with leases."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_KEY = re.compile(r"[!-~]{1,512}")


def check_key(key: Any) -> str:
    """``key`` itself; TypeError or ValueError where it is not 1 to 512 printable ASCII characters without blanks."""
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str like 'span/<hex digest>', got {type(key).__name__}")
    if _KEY.fullmatch(key) is None:
        raise ValueError(f"a key must be 1 to 512 printable ASCII characters without blanks, got {key[:80]!r}")
    return key


def check_value(value: Any) -> None:
    """TypeError where ``value`` is not bytes: a mutable buffer could change under its key."""
    if not isinstance(value, bytes):
        raise TypeError(f"a value must be bytes, got {type(value).__name__}; use bytes(value)")


def drop_lease(leases: dict[str, int], key: str) -> None:
    """Takes one lease off ``key``, which is forgotten with its last; one that was never taken changes nothing."""
    left = leases.get(key, 0) - 1
    if left > 0:
        leases[key] = left
    else:
        leases.pop(key, None)


@dataclass(frozen=True)
class StoreStats:
    """Counters of one store since it was opened; ``items`` and ``bytes`` are what it holds now."""

    items: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evictions: int = 0
    corrupt: int = 0
    leased: int = 0


class Store(ABC):
    """Immutable blobs by key. A key is ``namespace/hex-digest``; a value never changes under its key.

    Thread-safe. A blob that fails its checks is a miss: deleted, counted in ``stats().corrupt``, logged. Leased keys
    are never evicted by the store's own size limit; leases are per process and counted, so each ``lease`` needs a
    ``release``. ``get``, ``contains`` and ``lease`` count as a use for the order of eviction.
    """

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value, or None where there is none (or it was corrupt)."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> bool:
        """Stores ``value``; False where it was refused (over the size limit with everything leased, disk full)."""

    @abstractmethod
    def delete(self, key: str) -> bool: ...

    @abstractmethod
    def contains(self, key: str) -> bool:
        """Whether ``get`` would find a value, without reading it."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]: ...

    @abstractmethod
    def lease(self, key: str) -> bool:
        """Protects ``key`` from eviction; False where it is not held."""

    @abstractmethod
    def release(self, key: str) -> None: ...

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def verify(self) -> tuple[int, int]:
        """Checks every blob; returns (good, corrupt). Corrupt ones are deleted."""

    @abstractmethod
    def close(self) -> None: ...
