"""Open windows by id: bounded in number and in idle time, and brought back from the store when they are asked for."""

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
from dataclasses import dataclass, field
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.errors import CtxwinError
from ctxwin.serve.errors import TooManyWindows, UnknownWindow
from ctxwin.serve.limits import Limits
from ctxwin.serve.snapshots import check_snapshot, read_snapshot
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
        gone: whether it left the registry, so that its last user closes it and nothing saves it any more.
        saved, key: the version that stands in the store, and where.
        upkeep: held while the window is worked on in the background; who comes meanwhile waits for it.
        kept_up: the version that this was last done for, and whether bytes were short then.
    """

    window: Window
    used: float
    users: int = 0
    gone: bool = False
    saved: State | None = None
    key: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    upkeep: threading.Lock = field(default_factory=threading.Lock)
    kept_up: tuple[State, bool] | None = None


class OpenWindows:
    """The open windows of all tenants together: at most ``most``. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._registries: list[WindowRegistry] = []

    def add(self, registry: WindowRegistry) -> None:
        """Counts the windows of one more tenant."""
        self._registries.append(registry)

    def make_room(self) -> None:
        """Puts an idle window aside where there are too many, of the tenant that has most; raises TooManyWindows.

        Call it without the lock of a registry.
        """
        while sum(map(len, self._registries)) >= self._most:
            if not any(registry.give_way() for registry in sorted(self._registries, key=len, reverse=True)):
                raise TooManyWindows(
                    f"all {self._most} windows of the server are in use (--max-windows-total); try again later, or raise it"
                )


class WindowRegistry:
    """Windows of one tenant. Thread-safe.

    Args:
        most: windows that may be open; the least recently used idle one is put aside for a new one.
        limits: of the server; its ``window_ttl_s`` are the idle seconds after which `sweep` puts a window aside.
        total: the windows of all tenants.
        watch: called with every window that is opened or brought back, to observe it.

    The version that a request leaves behind is in the store before the request is answered. So a window that was put aside,
    or was open when the process was killed, opens again under its id. Where the store refuses a version the window stays
    open. A full store may drop snapshots of windows that are not open. A branch that was brought back no longer knows which
    window it was forked from, so `Window.adopt` takes it by force only.
    """

    def __init__(
        self,
        engine: Engine,
        most: int,
        limits: Limits,
        total: OpenWindows,
        *,
        watch: Callable[[Window], None] = lambda window: None,
    ) -> None:
        self._engine = engine
        self._most = most
        self._limits = limits
        self._total = total
        self._ttl_s = limits.window_ttl_s
        self._watch = watch
        self._held: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()
        self._closed = False
        total.add(self)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, window: Window, *, watched: bool = False) -> Window:
        """Keeps ``window``; TooManyWindows (and it is closed) where every other one is in use."""
        try:
            self._total.make_room()
        except TooManyWindows:
            window.close()
            raise
        return self._admit(window, watched=watched)

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
        self._total.make_room()  # not under the lock
        with self._lock:
            if not self._is_taken(window.id):
                return self._admit(window)
        window.close()  # two snapshots of one window at the same time: the other one has the id
        return self.add(Window.restore(self._engine, state.replace(window="")))

    def _is_taken(self, window_id: str) -> bool:
        with self._lock:
            return window_id in self._held or bool(self._kept(window_id))

    @contextmanager
    def using(self, window_id: str) -> Iterator[Window]:
        """The window with that id; it stays open until the block ends, and its version is in the store then.

        Raises UnknownWindow, TooManyWindows.
        """
        held = self._take(window_id)
        try:
            with held.upkeep:
                pass
            yield held.window
        finally:
            held.used = time.monotonic()
            self._leave(held)
            with self._lock:
                if self._held.get(window_id) is held:
                    self._held.move_to_end(window_id)

    def _leave(self, held: _Entry) -> None:
        """Ends a use: its version is in the store then, and what left the registry meanwhile is closed."""
        self._save(held)
        with self._lock:
            held.users -= 1
            last = held.gone and held.users == 0
        if last:
            held.window.close()

    def remove(self, window_id: str) -> None:
        """Closes a window for good: its snapshot goes, too. Raises UnknownWindow."""
        with self._lock:
            held = self._held.get(window_id)
            if held is not None:
                self._release(window_id)
            kept = self._kept(window_id)
            if held is None and not kept:
                raise UnknownWindow(_unknown(window_id))
            for key in kept:
                self._engine.repo.delete(key)

    def sweep(self) -> int:
        """Closes windows that were idle for too long; returns how many."""
        with self._lock:
            before = time.monotonic() - self._ttl_s
            old = [i for i, held in self._held.items() if held.users == 0 and held.used <= before]
            return sum(map(self._put_aside, old))

    def economise(self) -> int:
        """Compresses windows that nobody uses (`Window.compress`, ``if_short=True``); returns the bytes given back.

        Each version is looked at once, and once more where bytes got short since. Ends as soon as somebody waits for the engine.
        Who asks for the window meanwhile waits for it.
        """
        freed = 0
        with self._lock:
            entries = list(self._held.values())
        for held in entries:
            if self._engine.busy:
                break
            looked = held.window.core.state, held.window.core.assembly.demand().short
            with self._lock:
                if held.users or held.gone or held.kept_up == looked:
                    continue
                held.users += 1
                held.upkeep.acquire()
            try:
                freed += held.window.compress(if_short=True)
                held.kept_up = held.window.core.state, looked[1]
            except CtxwinError as error:  # it is served as it is
                _log.warning("window %s was not compressed: %s", held.window.id, error)
            finally:
                held.upkeep.release()
                self._leave(held)
        return freed

    def close(self) -> None:
        """Puts every window aside; those in use are closed as soon as they are not."""
        with self._lock:
            self._closed = True
            for window_id in list(self._held):
                if not self._put_aside(window_id):
                    self._release(window_id)

    def give_way(self) -> bool:
        """Puts the least recently used idle window aside that the store takes; False where there is none."""
        with self._lock:
            idle = [i for i, held in self._held.items() if held.users == 0]
            return any(self._put_aside(window_id) for window_id in idle[:_TRIES])

    def _take(self, window_id: str) -> _Entry:
        if window_id not in self._held and self._kept(window_id):
            self._total.make_room()
        with self._lock:
            held = self._held.get(window_id) or self._bring_back(window_id)
            held.users += 1
            return held

    def _bring_back(self, window_id: str) -> _Entry:
        # Under the lock, so that two requests do not open one window twice; a window costs a template's tokens to open.
        kept = self._kept(window_id)
        found = ((key, state) for key in reversed(kept) if (state := self._stored(key, window_id)) is not None)
        newest, state = next(found, ("", None))
        if state is None or self._closed:
            raise UnknownWindow(_unknown(window_id))
        self._admit(Window.restore(self._engine, state), key=newest)
        self._engine.repo.lease(newest)
        for key in kept:
            if key != newest:
                self._engine.repo.delete(key)
        return self._held[window_id]

    def _stored(self, key: str, window_id: str) -> State | None:
        """The snapshot under ``key``, checked where somebody else wrote it; None where it is no snapshot of the window."""
        record = self._engine.repo.get_json(key, bound=False)
        try:
            if hmac.compare_digest(str(record["mac"]), _mac(key, record["state"])):
                state = State.model_validate(record["state"])
            else:
                state = check_snapshot(self._engine, read_snapshot(record["state"], self._limits), self._limits)
        except (CtxwinError, ValueError, TypeError, KeyError) as error:
            _log.warning("the stored snapshot of window %s was not taken: %s", window_id, error)
            return None
        return state if state.window == window_id else None

    def _admit(self, window: Window, *, watched: bool = False, key: str = "") -> Window:
        """Keeps ``window``, whose version stands under ``key`` or is saved; closes it where there is no room."""
        held = _Entry(window, time.monotonic(), saved=window.core.state if key else None, key=key)
        try:
            with self._lock:
                self._check_room()
                self._held[window.id] = held
        except TooManyWindows:
            window.close()
            raise
        if not watched:
            self._watch(window)
        self._save(held)
        return window

    def _check_room(self) -> None:
        if self._closed:
            raise TooManyWindows("the server is shutting down; try another one")
        if len(self._held) < self._most or self.give_way():
            return
        if all(held.users for held in self._held.values()):
            raise TooManyWindows(f"all {self._most} windows are in use (--max-windows); close some, or try again later")
        raise TooManyWindows(
            f"{self._most} windows are open (--max-windows) and the store takes no more snapshots; close some, or make room "
            "there"
        )

    def _save(self, held: _Entry) -> bool:
        """Brings the store up to the window's current version; False where the store refuses it."""
        repo = self._engine.repo
        with held.lock:
            state = held.window.core.state
            if state is held.saved or held.gone:
                return True
            # A value never changes under its key: the time tells versions of one window apart.
            key, packed = f"window/{held.window.id}/{time.time_ns():020d}", state.model_dump(mode="json")
            try:
                taken = repo.put_json(key, {"state": packed, "mac": _mac(key, packed)}, bound=False)
            except OSError as error:
                _log.warning("the store failed: %s", error)
                taken = False
            if not taken:
                _log.warning("the store refused the snapshot of window %s", held.window.id)
                return False
            repo.lease(key)  # until it is replaced, or the window is put aside
            if held.key:
                repo.release(held.key)
                repo.delete(held.key)
            held.saved, held.key = state, key
            return True

    def _put_aside(self, window_id: str) -> bool:
        """Closes a window whose snapshot is in the store; False, and it stays open, where the store refuses that."""
        saved = self._save(self._held[window_id])
        if saved:
            self._release(window_id)
        return saved

    def _release(self, window_id: str) -> None:
        held = self._held.pop(window_id)
        with held.lock:
            held.gone = True
            if held.key:
                self._engine.repo.release(held.key)
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
