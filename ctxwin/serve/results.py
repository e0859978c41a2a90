"""Answers that may be asked for again: one request is done once, however often it is sent."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ctxwin.hashing import digest

_BESIDE_BYTES = 512  # Python objects beside a kept answer


class Results:
    """Answers by Idempotency-Key: a client that asks again after a broken connection gets the same one.

    The newest ``most`` bytes are kept, including what stands beside the answers. Thread-safe.
    """

    def __init__(self, most: int = 16 << 20) -> None:
        self._most = most
        self._bytes = 0
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()  # by request: digest of its body, answer
        self._turns: dict[str, _Turn] = {}
        self._lock = threading.Lock()

    def once(self, path: str, key: str | None, body: bytes, work: Callable[[], bytes]) -> bytes:
        """What ``work`` gives, or has given under the same key. Blocks while another request does it.

        A client that lost its connection may ask again while its first request still runs: the second waits for the
        first one's answer, and does the work itself where the first failed. Raises ValueError where the key came with
        another body.
        """
        if not key:
            return work()
        # Keys are the client's, up to the size of a header: only digests are kept.
        name, asked = digest(path, key), digest(body)
        with self._lock:
            turn = self._turns.setdefault(name, _Turn())
            turn.users += 1
        try:
            with turn.lock:
                raw = self._find(name, asked)
                if raw is None:
                    raw = work()
                    self._keep(name, asked, raw)
                return raw
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[name]

    def _find(self, name: str, asked: str) -> bytes | None:
        with self._lock:
            before, raw = self._kept.get(name, (asked, None))
        if before != asked:
            raise ValueError("an Idempotency-Key must stand for one request, got another body with it; make a new key")
        return raw

    def _keep(self, name: str, asked: str, raw: bytes) -> None:
        with self._lock:
            self._kept[name] = asked, raw
            self._bytes += len(raw) + _BESIDE_BYTES
            while self._bytes > self._most and self._kept:
                self._bytes -= len(self._kept.popitem(last=False)[1][1]) + _BESIDE_BYTES


@dataclass
class _Turn:
    """Requests with one key, one after another."""

    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
