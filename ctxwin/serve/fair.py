"""Worker threads and places in line that tenants share fairly, and work in them whose items reach the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ctxwin.errors import AnswerStopped, EngineFailed
from ctxwin.serve.errors import TooManyRequests

T = TypeVar("T")
Put = Callable[[Any], None]
"""Hands one item over."""
Stopped = Callable[[], bool]
"""Whether nobody wants the work any more."""
_RESTING = 2.0
"""How many times the processor time of its last work a tenant rests while others ask, for Python runs one thread at a time:
what one tenant computes, the event loop and the other tenants' threads wait for."""
_LIGHT, _LONGEST_REST, _LATELY = 0.01, 2.0, 0.2
"""Seconds: the processor time that asks for no rest, the longest rest, and how long a tenant counts after it last asked."""
_STOPPED = "the answer was stopped before its end: the server is shutting down, or the client has left"


@dataclass(frozen=True)
class _Job:
    """Something that waits for its turn. Without ``run`` it takes a place only, and its future holds what gives that back."""

    tenant: str
    run: Callable[[], Any] | None
    future: Future[Any] = field(default_factory=Future)


class FairPool:
    """Runs work in at most ``threads`` threads, and chooses among tenants that wait.

    The tenant with the fewest requests running is next, among equals the one that was served longest ago; a tenant's own
    requests keep their order. So one tenant may have every thread while nobody else asks, and gives way from the next end
    on until the shares are equal. While others ask, a tenant whose work took long on the processor rests for twice
    that time before its next work begins. Thread-safe.

    Args:
        most: of the tenants named here, how much may run at once.
        waiting: how many requests of one tenant may wait.
    """

    def __init__(
        self, threads: int, most: Mapping[str, int] | None = None, *, waiting: int = 1 << 20, name: str = "ctxwin-serve"
    ) -> None:
        self._name = name
        self._most = threads
        self._caps = dict(most or {})
        self._most_waiting = waiting
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._served: dict[str, int] = {}  # when the tenant's newest job began, in jobs
        self._begun = 0
        self._asked: dict[str, float] = {}  # when the tenant last asked for a turn
        self._rests: dict[str, float] = {}  # until when it rests where others ask
        self._rested: float | None = None  # when the first of those that wait and rest has rested
        self._closing = False
        self._changed = threading.Condition()

    def submit(self, tenant: str, work: Callable[..., T], *args: Any) -> Future[T]:
        """``work(*args)``, later; cancelling the future before it begins takes it back.

        Raises TooManyRequests where too much of this tenant's waits already, RuntimeError once shut down.
        """
        return self._enqueue(_Job(tenant, partial(work, *args)))

    def reserve(self, tenant: str) -> Future[Callable[[], None]]:
        """A place among what runs, later, for work that needs no thread of ours: its result gives the place back.

        Fails like `submit`. Cancelling the future before it is done takes it back.
        """
        return self._enqueue(_Job(tenant, None))

    def _enqueue(self, job: _Job) -> Future[Any]:
        with self._changed:
            if self._closing:
                raise RuntimeError("no work is taken while the server shuts down")
            line = self._waiting.setdefault(job.tenant, deque())
            if len(line) >= self._most_waiting:
                raise TooManyRequests(
                    f"at most {self._most_waiting} requests may wait (--max-waiting); try again when some have ended"
                )
            line.append(job)
            self._asked[job.tenant] = time.monotonic()
            # Not all that waits can begin, and an idle thread may have been told to: one too many is cheap.
            if sum(map(len, self._waiting.values())) > self._idle and len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        job.future.add_done_callback(partial(self._forget, job.tenant))
        return job.future

    def waiting(self, tenant: str) -> int:
        """Requests of ``tenant`` that have not begun."""
        with self._changed:
            return len(self._waiting.get(tenant, ()))

    def shutdown(self) -> None:
        """Cancels what waits, and returns when what runs has ended. Idempotent."""
        with self._changed:
            self._closing = True
            dropped = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._changed.notify_all()
        for job in dropped:
            job.future.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while (job := self._next()) is None and not self._closing:
                    self._changed.wait(self._until_rested())
                self._idle -= 1
                if job is None:
                    return
            if job.run is None:
                job.future.set_result(partial(self._end, job.tenant))
                continue
            began = time.thread_time()
            try:
                job.future.set_result(job.run())
            except BaseException as error:  # its caller's
                job.future.set_exception(error)
            self._end(job.tenant, time.thread_time() - began)
            del job

    def _end(self, tenant: str, worked: float = 0.0) -> None:
        with self._changed:
            if worked > _LIGHT:
                self._rests[tenant] = time.monotonic() + min(_RESTING * worked, _LONGEST_REST)
            self._running[tenant] -= 1
            self._changed.notify_all()  # whoever is at its cap may go on

    def _beside_others(self, tenant: str, now: float) -> bool:
        """Whether another tenant has asked lately, or its work runs."""
        return any(t != tenant and (at > now - _LATELY or self._running[t]) for t, at in self._asked.items())

    def _until_rested(self) -> float | None:
        """Seconds until a tenant that `_next` has passed over has rested; None where it passed over none."""
        return None if self._rested is None else max(0.0, self._rested - time.monotonic())

    def _forget(self, tenant: str, future: Future[Any]) -> None:
        """Drops what was taken back at once, with all that it holds. O(waiting)."""
        if not future.cancelled():
            return
        with self._changed:
            left = deque(job for job in self._waiting.get(tenant, ()) if job.future is not future)
            if left:
                self._waiting[tenant] = left
            else:
                self._waiting.pop(tenant, None)

    def _next(self) -> _Job | None:
        """Takes the next job out of its queue; it counts as running."""
        while True:
            now = time.monotonic()
            able = [t for t in self._waiting if self._running[t] < self._caps.get(t, self._most)]
            tired = [t for t in able if self._rests.get(t, 0.0) > now and self._beside_others(t, now)]
            self._rested = min((self._rests[t] for t in tired), default=None)
            able = [t for t in able if t not in tired]
            if not able or self._running.total() >= self._most:
                return None
            tenant = min(able, key=lambda t: (self._running[t], self._served.get(t, 0)))
            job = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if job.future.set_running_or_notify_cancel():
                self._begun += 1
                self._served[tenant] = self._begun
                self._running[tenant] += 1
                return job


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

        def put(item: Any, error: BaseException | None = None, *, last: bool = False) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, (item, error, last))

        def run() -> None:
            try:
                put(work(put, lambda: self._stop.is_set() or closing.is_set()), last=True)
            except AnswerStopped:
                put(None, EngineFailed(_STOPPED))
            except BaseException as error:  # raised again where the items are read
                put(None, error)

        def ended(future: Future[None]) -> None:
            if future.cancelled() and not loop.is_closed():  # it never ran
                put(None, EngineFailed(_STOPPED))

        self._future = submit(run)
        self._future.add_done_callback(ended)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            item, error, last = await self._queue.get()
            if error is not None:
                raise error
            if last:
                self.result = item
                return
            yield item

    def close(self) -> None:
        """Tells the work to stop; work that has not begun never does. Idempotent."""
        self._stop.set()
        self._future.cancel()
