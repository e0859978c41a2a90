"""Stores around a store that tests want: injected faults, and observation."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ctxwin.errors import StoreCorrupt
from ctxwin.store.base import Store, StoreStats
from ctxwin.store.codec import Seal
from store.wrappers import WrapperStore


class FaultStore(WrapperStore):
    """Injects seeded faults; the same seed and calls give the same faults.

    Args:
        miss: probability that a `get` finds nothing although the value is there.
        corrupt: probability that a `get` finds the value's record with one bit turned or its tail cut off, which deletes it.
        refuse: probability that a `put` is refused.
        latency_s: seconds that every `get` and `put` takes on top.
        sleep: how to wait; tests replace it.

    Attributes:
        faults: how many of each kind were injected: ``miss``, ``corrupt``, ``refuse``.
    """

    def __init__(
        self,
        inner: Store,
        *,
        seed: int = 0,
        miss: float = 0.0,
        corrupt: float = 0.0,
        refuse: float = 0.0,
        latency_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        for name, value in (("miss", miss), ("corrupt", corrupt), ("refuse", refuse)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be a probability, got {value}")
        if latency_s < 0:
            raise ValueError(f"latency_s must be at least 0 seconds, got {latency_s}")
        self.faults: Counter[str] = Counter()
        self._rates = {"miss": miss, "corrupt": corrupt, "refuse": refuse}
        self._latency_s = latency_s
        self._sleep = sleep
        self._random = random.Random(seed)
        self._seal = Seal()
        self._lock = threading.Lock()

    def _strikes(self, fault: str) -> bool:
        with self._lock:
            struck = self._random.random() < self._rates[fault]
            self.faults[fault] += struck
        return struck

    def _wait(self) -> None:
        if self._latency_s:
            self._sleep(self._latency_s)

    def get(self, key: str) -> bytes | None:
        self._wait()
        if self._strikes("miss"):
            return None
        value = self.inner.get(key)
        return self._damaged(key, value) if value is not None and self._strikes("corrupt") else value

    def _damaged(self, key: str, value: bytes) -> bytes | None:
        """What a store makes of its damaged record: a miss, unless the seal lets it pass."""
        head, code = self._seal.close(key, value)
        record = head + value + code
        with self._lock:
            at, turn = self._random.randrange(len(record)), self._random.random() < 0.5
        try:
            return self._seal.open(
                key, record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :] if turn else record[:at]
            )
        except StoreCorrupt:
            self.inner.delete(key)
            return None

    def stats(self) -> StoreStats:
        inner = self.inner.stats()
        return replace(inner, corrupt=inner.corrupt + self.faults["corrupt"])

    def put(self, key: str, value: bytes) -> bool:
        self._wait()
        if self._strikes("refuse"):
            return False
        return self.inner.put(key, value)


class LoggingStore(WrapperStore):
    """Counts every call and logs it with its bytes and time.

    Attributes:
        calls: calls by method name.
        bytes_read, bytes_written: of values that `get` returned and `put` was given.
    """

    def __init__(self, inner: Store, logger: logging.Logger | None = None, level: int = logging.DEBUG) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.bytes_read = 0
        self.bytes_written = 0
        self._logger = logger or logging.getLogger(__name__)
        self._level = level
        self._lock = threading.Lock()

    def _note(self, method: str, key: str, outcome: object, started: float, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.calls[method] += 1
            self.bytes_read += read
            self.bytes_written += written
        took = time.perf_counter() - started
        self._logger.log(self._level, "%s %s -> %s, %d bytes, %.6f s", method, key, outcome, read + written, took)

    def get(self, key: str) -> bytes | None:
        started = time.perf_counter()
        value = self.inner.get(key)
        self._note("get", key, "miss" if value is None else "hit", started, read=len(value or b""))
        return value

    def put(self, key: str, value: bytes) -> bool:
        started = time.perf_counter()
        taken = self.inner.put(key, value)
        self._note("put", key, "stored" if taken else "refused", started, written=len(value))
        return taken

    def delete(self, key: str) -> bool:
        started = time.perf_counter()
        deleted = self.inner.delete(key)
        self._note("delete", key, deleted, started)
        return deleted

    def contains(self, key: str) -> bool:
        started = time.perf_counter()
        held = self.inner.contains(key)
        self._note("contains", key, held, started)
        return held

    def lease(self, key: str) -> bool:
        started = time.perf_counter()
        leased = self.inner.lease(key)
        self._note("lease", key, leased, started)
        return leased

    def release(self, key: str) -> None:
        started = time.perf_counter()
        self.inner.release(key)
        self._note("release", key, None, started)
