"""Work in a thread whose items reach the event loop while it goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ctxwin.errors import AnswerStopped, EngineFailed

T = TypeVar("T")
Put = Callable[[Any], None]
"""Hands one item over."""
Stopped = Callable[[], bool]
"""Whether nobody wants the work any more."""
_STOPPED = "the answer was stopped before its end: the server is shutting down, or the client has left"


class BackgroundWork(Generic[T]):
    """``work(put, stopped)`` in another thread. Iterate over what it puts, then read ``result``.

    `close`, or leaving the iteration early, tells the work to stop; the window it works on is then left as it was.

    Args:
        submit: runs a function in a thread, when it is its turn.
        closing: set when the server shuts down.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], Future[None]],
        work: Callable[[Put, Stopped], T],
        closing: threading.Event,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._stop = threading.Event()
        self.result: T

        def put(item: Any) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, item)

        def run() -> None:
            try:
                put(_End(work(put, lambda: self._stop.is_set() or closing.is_set())))
            except AnswerStopped:
                put(_End(error=EngineFailed(_STOPPED)))
            except BaseException as error:  # raised again where the items are read
                put(_End(error=error))

        def ended(future: Future[None]) -> None:
            if future.cancelled() and not loop.is_closed():  # it never ran
                put(_End(error=EngineFailed(_STOPPED)))

        self._future = submit(run)
        self._future.add_done_callback(ended)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            item = await self._queue.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                self.result = item.result
                return
            yield item

    def close(self) -> None:
        """Tells the work to stop; work that has not begun never does. Idempotent."""
        self._stop.set()
        self._future.cancel()


@dataclass(frozen=True)
class _End:
    result: Any = None
    error: BaseException | None = None
