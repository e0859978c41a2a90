"""Worker threads and slots that tenants share fairly, and background work whose items reach the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ctxwin.errors import AnswerStopped, EngineFailed
from ctxwin_client.errors import TooManyRequests

T = TypeVar("T")
Put = Callable[[Any], None]
"""Passes one item to the event loop."""
Stopped = Callable[[], bool]
"""Returns whether the result is no longer wanted."""
_RESTING = 2.0
"""Rest of a tenant while others ask, in multiples of the processor time of its last work. Python runs one thread at a time, so
the event loop and other tenants' threads wait for what one tenant computes."""
_LIGHT, _LONGEST_REST, _LATELY = 0.01, 2.0, 0.2
"""Seconds: the processor time that asks for no rest, the longest rest, and how long a tenant counts after it last asked."""
_STOPPED = "the answer was stopped before its end: the server is shutting down, or the client has left"


@dataclass(frozen=True)
class _Job:
    """Queued work. Without ``run`` it takes a slot only, and its future holds a function that frees the slot."""

    tenant: str
    run: Callable[[], Any] | None
    future: Future[Any] = field(default_factory=Future)


class FairPool:
    """Runs work in at most ``threads`` threads, and chooses among tenants that wait.

    The tenant with the fewest running requests is next, among equals the one served longest ago; a tenant's own requests
    keep their order. So one tenant may use every thread while nobody else asks, and yields threads as its requests end until
    the shares are equal. While others ask, a tenant whose work used much processor time rests for twice that time before
    its next work begins. Thread-safe.

    Args:
        most: concurrency limits by tenant; each: limit of any other tenant.
        waiting: most queued requests of one tenant.
    """

    def __init__(
        self,
        threads: int,
        most: Mapping[str, int] | None = None,
        *,
        each: int | None = None,
        waiting: int = 1 << 20,
        name: str = "ctxwin-serve",
    ) -> None:
        self._name, self._most, self._most_waiting = name, threads, waiting
        self._caps = dict(most or {})
        self._each = threads if each is None else each
        self._threads: list[threading.Thread] = []
        self._idle = self._begun = 0
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._served: dict[str, int] = {}  # when the tenant's newest job began, in jobs
        self._asked: dict[str, float] = {}  # when the tenant last asked for a turn
        self._rests: dict[str, float] = {}  # until when it rests where others ask
        self._rested: float | None = None  # when the first of those that wait and rest has rested
        self._closing = False
        self._changed = threading.Condition()

    def submit(self, tenant: str, work: Callable[..., T], *args: Any) -> Future[T]:
        """Schedule ``work(*args)``; cancelling the future before it begins withdraws it.

        Raises TooManyRequests if too many requests of this tenant wait already, RuntimeError once shut down.
        """
        return self._enqueue(_Job(tenant, partial(work, *args)))

    async def run(self, tenant: str, work: Callable[..., T], *args: Any) -> T:
        """Return ``work(*args)``, run in a thread, in the caller's context, when it is the tenant's turn. Raises as `submit`."""
        return await asyncio.wrap_future(self.submit(tenant, copy_context().run, work, *args))

    def reserve(self, tenant: str) -> Future[Callable[[], None]]:
        """Reserve a slot for work that needs no thread of this pool; the future's result frees the slot.

        Raises as `submit`. Cancelling the future before it is done withdraws the request.
        """
        return self._enqueue(_Job(tenant, None))

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot within the block, which begins when it is the tenant's turn. Raises as `submit`."""
        future = self.reserve(tenant)
        try:
            give_back = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda late: late.cancelled() or late.result()())
            raise
        try:
            yield
        finally:
            give_back()

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
            # Not all queued work can begin, and idle threads may be about to take some: one thread too many is cheap.
            if sum(map(len, self._waiting.values())) > self._idle and len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        job.future.add_done_callback(partial(self._forget, job.tenant))
        return job.future

    def waiting(self, tenant: str) -> int:
        """Return how many requests of ``tenant`` have not begun."""
        with self._changed:
            return len(self._waiting.get(tenant, ()))

    def shutdown(self) -> None:
        """Cancel queued work, and return once running work has ended. Idempotent."""
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
                    # until a tenant that `_next` has skipped is rested
                    self._changed.wait(None if self._rested is None else max(0.0, self._rested - time.monotonic()))
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
            self._changed.notify(len(self._threads) if self._waiting else 0)  # tenants at their cap may continue

    def _beside_others(self, tenant: str, now: float) -> bool:
        """Return whether another tenant has asked recently, or has work running."""
        return any(t != tenant and (at > now - _LATELY or self._running[t]) for t, at in self._asked.items())

    def _forget(self, tenant: str, future: Future[Any]) -> None:
        """Drop withdrawn work at once, with everything it references. O(waiting)."""
        if not future.cancelled():
            return
        with self._changed:
            remaining = deque(job for job in self._waiting.get(tenant, ()) if job.future is not future)
            if remaining:
                self._waiting[tenant] = remaining
            else:
                self._waiting.pop(tenant, None)

    def _next(self) -> _Job | None:
        """Remove the next job from its queue and count it as running; None where none may run."""
        while True:
            now = time.monotonic()
            candidates = [t for t in self._waiting if self._running[t] < self._caps.get(t, self._each)]
            resting = [t for t in candidates if self._rests.get(t, 0.0) > now and self._beside_others(t, now)]
            self._rested = min((self._rests[t] for t in resting), default=None)
            candidates = [t for t in candidates if t not in resting]
            if not candidates or self._running.total() >= self._most:
                return None
            tenant = min(candidates, key=lambda t: (self._running[t], self._served.get(t, 0)))
            job = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if job.future.set_running_or_notify_cancel():
                self._begun += 1
                self._served[tenant] = self._begun
                self._running[tenant] += 1
                return job


class BackgroundWork(Generic[T]):
    """Run of ``work(put, stopped)`` in another thread. Iterate over its items, then read ``result``.

    `close`, or leaving the iteration early, tells the work to stop; its window then stays unchanged.

    Args:
        submit: runs a function in a thread once it is its turn.
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
        """Tell the work to stop; work that has not begun never does. Idempotent."""
        self._stop.set()
        self._future.cancel()
