"""Open windows by id: bounded in number and in idle time, brought back from their snapshots when they are asked for."""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.errors import CtxwinError
from ctxwin.serve.errors import TooManyWindows, UnknownWindow
from ctxwin.serve.limits import Limits
from ctxwin.serve.snapshots import check_snapshot
from ctxwin.window.state import State
from ctxwin.window.window import Window

WINDOW_ID = re.compile(r"[0-9a-z]{1,64}")
_SECRET = secrets.token_bytes(32)
"""Of this process: a snapshot that it signed is taken back as it is, any other is checked like a client's."""
_TRIES = 8
"""Windows that are offered to a store which refuses snapshots, before a new window is refused."""
_log = logging.getLogger("ctxwin.serve")


@dataclass
class _Entry:
    """An open window, and who uses it.

    Attributes:
        used: when it was used last.
        gone: whether it left the registry, so that its last user closes it.
    """

    window: Window
    used: float
    users: int = 0
    gone: bool = False


class WindowRegistry:
    """Windows of one tenant. Thread-safe.

    Args:
        most: windows that may be open; the least recently used idle one is put aside for a new one.
        limits: of the server; its ``window_ttl_s`` are the idle seconds after which `sweep` puts a window aside.
        clock: seconds; tests replace it.
        watch: called with every window that is opened or brought back, to observe it.

    A window that is put aside is closed and leaves a snapshot in the store, from which its id opens again; where the store
    refuses the snapshot it stays open. A full store may drop snapshots later. A branch that was brought back no longer
    knows which window it was forked from, so `Window.adopt` takes it by force only.
    """

    def __init__(
        self,
        engine: Engine,
        most: int,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        watch: Callable[[Window], None] = lambda window: None,
    ) -> None:
        self._engine = engine
        self._most = most
        self._limits = limits
        self._ttl_s = limits.window_ttl_s
        self._clock = clock
        self._watch = watch
        self._held: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    def add(self, window: Window, *, watched: bool = False) -> Window:
        """Keeps ``window``; TooManyWindows (and it is closed) where every other one is in use."""
        try:
            with self._lock:
                if self._closed:
                    raise TooManyWindows("the server is shutting down; try another one")
                self._make_room()
                self._held[window.id] = _Entry(window, self._clock())
        except TooManyWindows:
            window.close()
            raise
        if not watched:
            self._watch(window)
        return window

    def restore(self, state: State) -> Window:
        """A window from a client's snapshot, under the snapshot's id unless that is taken; see `Window.restore`.

        Paths in it are dropped: a client must not make the server read files. What it says of tokens and positions must
        be what its content has (ValueError), for the engine and the budget go by it. Cost: encoding every placed chunk;
        media that the store has take no run of the vision tower.
        """
        state = check_snapshot(self._engine, state, self._limits)
        if not WINDOW_ID.fullmatch(state.window) or self._is_taken(state.window):
            state = state.replace(window="")
        window = Window.restore(self._engine, state)
        with self._lock:
            if not self._is_taken(window.id):
                return self.add(window)
        window.close()  # two snapshots of one window at the same time: the other one has the id
        return self.add(Window.restore(self._engine, state.replace(window="")))

    def _is_taken(self, window_id: str) -> bool:
        with self._lock:
            return window_id in self._held or bool(self._kept(window_id))

    @contextmanager
    def using(self, window_id: str) -> Iterator[Window]:
        """The window with that id; it stays open until the block ends. Raises UnknownWindow, TooManyWindows."""
        held = self._take(window_id)
        try:
            yield held.window
        finally:
            with self._lock:
                held.users -= 1
                held.used = self._clock()
                if self._held.get(window_id) is held:
                    self._held.move_to_end(window_id)
                last = held.gone and held.users == 0
            if last:
                held.window.close()

    def remove(self, window_id: str) -> None:
        """Closes a window for good: its snapshot goes, too. Raises UnknownWindow."""
        with self._lock:
            held = self._held.pop(window_id, None)
            kept = self._kept(window_id)
            if held is None and not kept:
                raise UnknownWindow(_unknown(window_id))
            for key in kept:
                self._engine.repo.delete(key)
            if held is not None:
                held.gone = True
                idle = held.users == 0
        if held is not None and idle:
            held.window.close()

    def sweep(self) -> int:
        """Closes windows that were idle for too long; returns how many."""
        with self._lock:
            before = self._clock() - self._ttl_s
            old = [i for i, held in self._held.items() if held.users == 0 and held.used <= before]
            return sum(map(self._put_aside, old))

    def close(self) -> None:
        """Puts every window aside; those in use are closed as soon as they are not."""
        with self._lock:
            self._closed = True
            for window_id in list(self._held):
                if not self._put_aside(window_id):
                    self._release(window_id)

    def _take(self, window_id: str) -> _Entry:
        with self._lock:
            held = self._held.get(window_id)
            if held is None:
                held = self._bring_back(window_id)
            held.users += 1
            return held

    def _bring_back(self, window_id: str) -> _Entry:
        # Under the lock, so that two requests do not open one window twice; a window costs a template's tokens to open.
        kept = self._kept(window_id)
        state = next((found for key in reversed(kept) if (found := self._stored(key, window_id)) is not None), None)
        if state is None or self._closed:
            raise UnknownWindow(_unknown(window_id))
        window = self.add(Window.restore(self._engine, state))
        for key in kept:
            self._engine.repo.delete(key)
        return self._held[window.id]

    def _stored(self, key: str, window_id: str) -> State | None:
        """The snapshot under ``key``, checked where somebody else wrote it; None where it is no snapshot of the window."""
        record = self._engine.repo.get_json(key, bound=False)
        try:
            state = State.model_validate(record["state"])
            if not hmac.compare_digest(str(record["mac"]), _mac(key, record["state"])):
                state = check_snapshot(self._engine, state, self._limits)
        except (CtxwinError, ValueError, TypeError, KeyError) as error:
            _log.warning("the stored snapshot of window %s was not taken: %s", window_id, error)
            return None
        return state if state.window == window_id else None

    def _make_room(self) -> None:
        if len(self._held) < self._most:
            return
        idle = [i for i, held in self._held.items() if held.users == 0]
        if not idle:
            raise TooManyWindows(f"all {self._most} windows are in use; close some, or try again later")
        if not any(self._put_aside(window_id) for window_id in idle[:_TRIES]):
            raise TooManyWindows(
                f"{self._most} windows are open and the store takes no more snapshots; close some, or make room there"
            )

    def _put_aside(self, window_id: str) -> bool:
        """Leaves a snapshot in the store and closes the window; False, and it stays open, where the store refuses that."""
        state = self._held[window_id].window.snapshot().model_dump(mode="json")
        # A value never changes under its key: the time tells snapshots of one window apart.
        key = f"window/{window_id}/{time.time_ns():020d}"
        try:
            taken = self._engine.repo.put_json(key, {"state": state, "mac": _mac(key, state)}, bound=False)
        except OSError as error:
            _log.warning("the store failed: %s", error)
            taken = False
        if taken:
            self._release(window_id)
        else:
            _log.warning("the store refused the snapshot of window %s", window_id)
        return taken

    def _release(self, window_id: str) -> None:
        held = self._held.pop(window_id)
        held.gone = True
        if held.users == 0:
            held.window.close()

    def _kept(self, window_id: str) -> list[str]:
        if not WINDOW_ID.fullmatch(window_id):
            return []
        return sorted(self._engine.repo.store.list(f"window/{window_id}/"))


def _unknown(window_id: Any) -> str:
    return f"window must be the id of a window of yours, got {str(window_id)[:80]!r}; open one with POST /v1/windows"


def _mac(key: str, state: dict[str, Any]) -> str:
    text = json.dumps(state, sort_keys=True, allow_nan=False)
    return hmac.new(_SECRET, f"{key}\n{text}".encode(), "sha256").hexdigest()
