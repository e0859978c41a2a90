"""Idempotency keys: a request is executed once, however often it is sent."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ctxwin.hashing import digest
from ctxwin.store.lru import LRUCache

_BESIDE_BYTES = 512  # overhead of Python objects for each cached answer


class IdempotencyCache:
    """Answers by Idempotency-Key: a client that repeats a request after a broken connection gets the same answer.

    The latest ``most`` bytes are kept, including Python's overhead. Thread-safe.
    """

    def __init__(self, most: int = 16 << 20) -> None:
        self._kept: LRUCache[tuple[str, bytes]] = LRUCache(most)  # by request: digest of its body, answer
        self._turns: dict[str, _Turn] = {}
        self._lock = threading.Lock()

    def run_once(self, path: str, key: str | None, body: bytes, work: Callable[[], bytes]) -> bytes:
        """Return the result of ``work``, or the earlier result under the same key. Blocks while another request computes it.

        A client that lost its connection may repeat its request while the first one still runs: the second waits for the
        first one's answer, and does the work itself if the first failed. Raises ValueError if the key came with another
        body.
        """
        if not key:
            return work()
        # Clients choose keys of up to a header's size: only digests are kept.
        name, body_digest = digest(path, key), digest(body)
        with self._lock:
            turn = self._turns.setdefault(name, _Turn())
            turn.users += 1
        try:
            with turn.lock:
                cached_digest, raw = self._kept.get(name) or (body_digest, None)
                if cached_digest != body_digest:
                    raise ValueError("an Idempotency-Key must stand for one request, got another body; make a new key")
                if raw is None:
                    raw = work()
                    self._kept.put(name, (body_digest, raw), len(raw) + _BESIDE_BYTES)
                return raw
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[name]


@dataclass
class _Turn:
    """Requests with one key, one after another."""

    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
