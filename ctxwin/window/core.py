"""The changing part of a window: its current version and the old ones, one writer, leases, observers."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

from ctxwin.engines.base import Engine
from ctxwin.errors import ReadOnlyWindow, WindowBusy
from ctxwin.window.events import Event, Observer, Op
from ctxwin.window.state import State

_HISTORY = 1024
_log = logging.getLogger("ctxwin")


class Versions:
    """What `ctxwin.window.Window` is built on. Nothing here knows what an edit means."""

    engine: Engine

    def _start(self, engine: Engine, state: State) -> None:
        self.engine = engine
        self._state = state
        self._history: OrderedDict[int, State] = OrderedDict()
        self._lock = threading.Lock()
        self._read_only = False
        self._closed = False
        self._origin: str | None = None  # id of the window it was forked from
        self._observers: tuple[Observer, ...] = ()
        self._told: list[Event] = []  # of the writer, until it is done
        self._leasing = threading.Lock()
        self._leases: set[str] = set()
        self._finalizer = weakref.finalize(self, engine.repo.abandon, self._leases)  # for a window never closed
        self._lease()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls ``observer`` with an `Event` after every operation, of later forks, too; returns what ends that.

        In the thread of the operation, after it took effect; what an observer raises is logged and changes nothing. An
        observer that is there already is not called twice.
        """
        if observer not in self._observers:
            self._observers = (*self._observers, observer)

        def stop() -> None:
            self._observers = tuple(o for o in self._observers if o is not observer)

        return stop

    @property
    def parent(self) -> str | None:
        """Id of the window that this one was forked from."""
        return self._origin

    def close(self) -> None:
        """Gives its leases back; the window cannot be edited or asked afterwards. Idempotent."""
        if not self._closed:
            with self._leasing:  # a thread that still edits must not lease behind this
                self._closed = True
                self._finalizer.detach()
                for key in self._leases:
                    self.engine.repo.release(key)
                self._leases.clear()
            if not self._read_only:  # an old version has the id of a window that goes on
                self._emit(self._event("close"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _writing(self, *, edit: bool = True) -> Iterator[State]:
        if self._closed:
            raise ReadOnlyWindow("this window is closed; restore its snapshot to go on")
        if edit and self._read_only:
            raise ReadOnlyWindow("an old version must not be edited; fork() it, or edit the window it came from")
        if not self._lock.acquire(blocking=False):
            raise WindowBusy("a window has one writer, and it is busy; wait for it, or fork() the window first")
        begin = time.perf_counter()
        told: list[Event] = []
        try:
            yield self._state
            told, self._told = self._told, []
        finally:
            self._told = []
            self._lock.release()
        for event in told:
            self._emit(replace(event, seconds=time.perf_counter() - begin))

    def _commit(
        self, state: State, op: Op | None = None, ids: Sequence[str] = (), *, remember: bool = True, **details: Any
    ) -> None:
        if remember and state.version != self._state.version:
            self._history[self._state.version] = self._state
            while len(self._history) > _HISTORY:
                self._history.popitem(last=False)
        self._state = state
        self._lease()
        if op is not None and self._observers:
            self._told.append(self._event(op, ids, **details))

    def _event(self, op: Op, ids: Sequence[str] = (), **details: Any) -> Event:
        """An operation that has just taken effect."""
        return Event(self._state.window, op, self._state.version, self._state, tuple(ids), self._origin, **details)

    def _emit(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                _log.exception("an observer failed on %s of window %s; the window goes on", event.op, event.window)

    def _lease(self) -> None:
        with self._leasing:  # `plan` may run beside an ask
            wanted = set() if self._closed else self._state.keys()
            for key in wanted - self._leases:
                if self.engine.repo.lease(key):
                    self._leases.add(key)
            for key in self._leases - wanted:
                self.engine.repo.release(key)
                self._leases.discard(key)
