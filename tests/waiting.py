"""Waiting for what happens elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Return True once ``done`` is true, False if it is not in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
