"""How a server ends: no new requests, what runs may finish, and only then does the engine stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctxwin.errors import EngineFailed


class Draining:
    """The requests that run, and whether more are taken. Thread-safe."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = threading.Condition()
        self.begun = False

    @contextmanager
    def request(self, *, awaited: bool = True) -> Iterator[None]:
        """While a request runs; ``awaited``: not a socket, which may stay open for ever. Raises EngineFailed once draining."""
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
        """Takes no more requests and waits for those that run; returns how many are left after ``seconds``. Blocks."""
        until = time.monotonic() + seconds
        with self._changed:
            self.begun = True
            self._changed.wait_for(lambda: not self._running, max(0.0, until - time.monotonic()))
            return self._running
