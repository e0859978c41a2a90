"""`IdleWorker`: a thread that works on one running model while its engine idles, and the `TimeAllowance` of such work."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

Job = TypeVar("Job")
POLL_S = 0.02
"""Each poll of a serving engine costs a concurrent request half a millisecond of processor time."""
IDLE_SHARE = 0.5
"""Largest share of an engine's time, and of the tokens of a window's answers, that may be computed ahead for nothing."""
_STOP_S = 2.0


class TimeAllowance:
    """Seconds that may still be spent: they accrue at a share of the time that passes, up to one."""

    def __init__(self) -> None:
        self._left_s, self._clock = 1.0, time.monotonic()

    def add(self, seconds: float, share: float = IDLE_SHARE) -> float:
        """Return the seconds left with so many more, or fewer."""
        now = time.monotonic()
        self._left_s = min(1.0, self._left_s + (now - self._clock) * share + seconds)
        self._clock = now
        return self._left_s


class IdleWorker(ABC, Generic[Job]):
    """A thread that does one job after the other, and runs only while there are any.

    Jobs are queued, taken and given up under the lock of ``_wake``.
    """

    _name: ClassVar[str]

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._current: Job | None = None
        self._holds = 0

    @classmethod
    def of(cls, engine: Engine, make: Callable[[], Self]) -> Self:
        """Return the worker of an engine and of all that share its model; ``make`` makes it."""
        with _opening:
            workers = _workers.setdefault(engine.shared, {})
            if cls not in workers:
                workers[cls] = make()
            return cast("Self", workers[cls])

    @abstractmethod
    def _has_jobs(self) -> bool:
        """Return True if jobs are queued."""

    @abstractmethod
    def _take(self) -> Job | None:
        """Take a job that may begin from the queue; None where none may yet."""

    @abstractmethod
    def _perform(self, job: Job) -> None:
        """Do a job, without the lock. Never raises."""

    def _give_up(self, job: Job) -> None:
        """End the job in progress soon; one that polls ``_holds`` does so by itself."""

    def _start(self) -> None:
        """Start the thread unless it runs, and tell it of a new job."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._wake.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no job is left. Returns False after ``timeout`` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: self._current is None and not self._has_jobs(), timeout)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Suspend all jobs inside the block, which begins once the job in progress has been given up."""
        self._suspend()
        try:
            yield
        finally:
            with self._wake:
                self._holds -= 1
                self._wake.notify_all()

    def _suspend(self, timeout: float | None = None) -> None:
        with self._wake:
            self._holds += 1
            if self._current is not None:
                self._give_up(self._current)
            self._wake.wait_for(lambda: self._current is None, timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._current = None
                self._wake.notify_all()
                while self._current is None:
                    if not self._has_jobs():
                        self._thread = None
                        self._wake.notify_all()
                        return
                    self._current = None if self._holds else self._take()
                    if self._current is None:
                        self._wake.wait(POLL_S)
            self._perform(self._current)


_workers: weakref.WeakKeyDictionary[Any, dict[type, Any]] = weakref.WeakKeyDictionary()
_opening = threading.Lock()


@atexit.register
def _stop_all() -> None:
    """Stop every worker: a thread that runs a model while the interpreter shuts down would crash it."""
    for workers in list(_workers.values()):
        for worker in list(workers.values()):
            worker._suspend(_STOP_S)
