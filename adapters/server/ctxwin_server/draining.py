"""Draining at shutdown: no new requests, running ones may finish, and only then the engine stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctxwin.errors import EngineFailed


class Draining:
    """The running requests, and whether new ones are accepted. Thread-safe."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = threading.Condition()
        self.begun = False

    @contextmanager
    def request(self, *, awaited: bool = True) -> Iterator[None]:
        """Count a request as running within the block; raise EngineFailed once draining.

        ``awaited``: whether `drain` waits for it; false for sockets, which may stay open forever.
        """
        with self._changed:
            if self.begun:
                raise EngineFailed("the server is shutting down; try another one")
            self._running += awaited
        try:
            yield
        finally:
            with self._changed:
                self._running -= awaited
                self._changed.notify_all()

    def drain(self, seconds: float) -> int:
        """Refuse new requests and wait for running ones; return how many still run after ``seconds``. Blocks."""
        until = time.monotonic() + seconds
        with self._changed:
            self.begun = True
            self._changed.wait_for(lambda: not self._running, max(0.0, until - time.monotonic()))
            return self._running
