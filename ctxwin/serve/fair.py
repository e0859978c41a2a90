"""Worker threads that tenants share fairly."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Job:
    tenant: str
    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class FairPool:
    """Runs work in at most ``threads`` threads, and chooses among tenants that wait.

    Whoever has the fewest running is next, among equals whoever was served longest ago; a tenant's own requests keep
    their order. So one tenant may have every thread while nobody else asks, and from the next end on it gives way until
    the shares are equal. Thread-safe.

    Args:
        most: of the tenants named here, how much may run at once.
    """

    def __init__(self, threads: int, most: Mapping[str, int] | None = None, *, name: str = "ctxwin-serve") -> None:
        self._name = name
        self._most = threads
        self._caps = dict(most or {})
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._served: dict[str, int] = {}  # when the tenant's newest job began, in jobs
        self._begun = 0
        self._closing = False
        self._changed = threading.Condition()

    def submit(self, tenant: str, work: Callable[..., T], *args: Any) -> Future[T]:
        """``work(*args)``, later; cancelling the future before it begins takes it back. RuntimeError once shut down."""
        job = _Job(tenant, partial(work, *args))
        with self._changed:
            if self._closing:
                raise RuntimeError("no work is taken while the server shuts down")
            self._waiting.setdefault(tenant, deque()).append(job)
            # Not all that waits can begin, and an idle thread may have been told to: one too many is cheap.
            if sum(map(len, self._waiting.values())) > self._idle and len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        job.future.add_done_callback(partial(self._forget, tenant))
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
                    self._changed.wait()
                self._idle -= 1
                if job is None:
                    return
            try:
                job.future.set_result(job.run())
            except BaseException as error:  # its caller's
                job.future.set_exception(error)
            with self._changed:
                self._running[job.tenant] -= 1
                self._changed.notify_all()  # whoever is at its cap may go on
            del job

    def _forget(self, tenant: str, future: Future[Any]) -> None:
        """What was taken back is not kept, with all that it holds, until its turn would have come. O(waiting)."""
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
            able = [t for t in self._waiting if self._running[t] < self._caps.get(t, self._most)]
            if not able:
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
