"""Every store passes the suite that ships in the package."""

from __future__ import annotations

from pathlib import Path

from ctxwin.store.base import Store
from ctxwin.store.disk import DiskStore
from ctxwin.store.memory import MemoryStore
from ctxwin.store.testing import StoreConformance
from ctxwin.store.tiered import TieredStore
from store.wrapped import FaultStore, LoggingStore

LARGE = 1 << 30


class TestMemory(StoreConformance):
    def make_store(self, path: Path, *, max_bytes: int | None = None, ttl: float | None = None) -> Store:
        return MemoryStore(max_bytes or LARGE, ttl)


class TestDisk(StoreConformance):
    examples = 12

    def make_store(self, path: Path, *, max_bytes: int | None = None, ttl: float | None = None) -> Store:
        return DiskStore(path, max_bytes or LARGE, ttl)


class TestTiered(StoreConformance):
    copies = 2
    examples = 12

    def make_store(self, path: Path, *, max_bytes: int | None = None, ttl: float | None = None) -> Store:
        return TieredStore([MemoryStore(max_bytes or LARGE, ttl), DiskStore(path, max_bytes or LARGE, ttl)])


class TestWrappedWithoutFaults(StoreConformance):
    def make_store(self, path: Path, *, max_bytes: int | None = None, ttl: float | None = None) -> Store:
        return LoggingStore(FaultStore(MemoryStore(max_bytes or LARGE, ttl)))
