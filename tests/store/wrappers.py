"""A store around a store: observation and faults are wrappers, never flags of the stores themselves."""

from __future__ import annotations

from collections.abc import Iterator

from ctxwin.store.base import Store, StoreStats


class WrapperStore(Store):
    """Passes every call on to ``inner``; subclasses change some of them. Closing it closes ``inner``."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def get(self, key: str) -> bytes | None:
        return self.inner.get(key)

    def put(self, key: str, value: bytes) -> bool:
        return self.inner.put(key, value)

    def delete(self, key: str) -> bool:
        return self.inner.delete(key)

    def contains(self, key: str) -> bool:
        return self.inner.contains(key)

    def tier(self, key: str) -> str:
        return self.inner.tier(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        return self.inner.list(prefix)

    def lease(self, key: str) -> bool:
        return self.inner.lease(key)

    def release(self, key: str) -> None:
        self.inner.release(key)

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def limit(self) -> int:
        return self.inner.limit()

    def verify(self) -> tuple[int, int]:
        return self.inner.verify()

    def close(self) -> None:
        self.inner.close()
