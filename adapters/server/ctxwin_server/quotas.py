"""Quotas of a tenant per minute: requests, and bytes of bodies."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ctxwin_client.errors import TooManyRequests


class Rate:
    """A token bucket of ``most`` a minute, which is full after a minute of rest. Thread-safe.

    An amount larger than the bucket is accepted once it is full, and paid off afterwards.
    """

    def __init__(self, most: float, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._what, self._clock = most, unit, clock
        self._left, self._at = most, clock()
        self._lock = threading.Lock()

    def take(self, amount: float) -> None:
        """Count ``amount``; raise TooManyRequests, with the seconds to wait, if the bucket does not hold it."""
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
        """Count ``amount`` of a request that was accepted already."""
        with self._lock:
            self._refill()
            self._left -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now
