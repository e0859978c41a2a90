"""Answers that may be asked for again: one request is done once, however often it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ctxwin.hashing import digest
from ctxwin.store.recent import Recent

_BESIDE_BYTES = 512  # Python objects beside a kept answer


class Results:
    """Answers by Idempotency-Key: a client that asks again after a broken connection gets the same one.

    The latest ``most`` bytes are kept, including what stands beside the answers. Thread-safe.
    """

    def __init__(self, most: int = 16 << 20) -> None:
        self._kept: Recent[tuple[str, bytes]] = Recent(most)  # by request: digest of its body, answer
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
                    self._kept.put(name, (asked, raw), len(raw) + _BESIDE_BYTES)
                return raw
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[name]

    def _find(self, name: str, asked: str) -> bytes | None:
        before, raw = self._kept.get(name) or (asked, None)
        if before != asked:
            raise ValueError("an Idempotency-Key must stand for one request, got another body with it; make a new key")
        return raw


@dataclass
class _Turn:
    """Requests with one key, one after another."""

    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
