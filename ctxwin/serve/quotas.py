"""What a tenant may ask for in a minute: requests, and bytes of bodies."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ctxwin.serve.errors import TooManyRequests


class Rate:
    """A token bucket: as much in a minute as ``most``, and all of it at once after a minute of rest. Thread-safe.

    What is larger than the bucket is taken once it is full, and paid for afterwards.
    """

    def __init__(self, most: float, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._what, self._clock = most, what, clock
        self._left, self._at = most, clock()
        self._lock = threading.Lock()

    def take(self, amount: float) -> None:
        """Counts ``amount``. Raises TooManyRequests, which says when to come again, where the last minute was too much."""
        with self._lock:
            self._refill()
            lacks = min(amount, self._most) - self._left
            if lacks > 0:
                wait = math.ceil(lacks * 60 / self._most)
                raise TooManyRequests(
                    f"a tenant may send {self._most:g} {self._what} a minute (tenants file); try again in {wait} s",
                    after=wait,
                )
            self._left -= amount

    def charge(self, amount: float) -> None:
        """Counts ``amount`` of a request that was taken already."""
        with self._lock:
            self._refill()
            self._left -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now
