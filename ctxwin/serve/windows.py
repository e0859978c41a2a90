"""Open windows by id: bounded in number and in idle time, brought back from their snapshots when they are asked for."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.errors import ChunkUnavailable
from ctxwin.hashing import digest
from ctxwin.serve.errors import TooManyWindows, UnknownWindow
from ctxwin.serve.specs import without_sources
from ctxwin.window.state import Placed, State
from ctxwin.window.window import Window

_ID = re.compile(r"[0-9a-z]{1,64}")
_log = logging.getLogger("ctxwin.serve")


@dataclass
class _Held:
    window: Window
    used: float
    users: int = 0
    gone: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Registry:
    """Windows of one tenant. Thread-safe.

    Args:
        most: windows that may be open; the least recently used idle one is closed for a new one.
        ttl_s: idle seconds after which `sweep` closes a window.
        clock: seconds; tests replace it.
        watch: called with every window that is opened or brought back, to observe it.

    A window that is closed here leaves a snapshot in the store (which may drop it when it is full), under which its id
    opens again. A branch that was brought back has lost which window it was forked from: `Window.adopt` takes it by force.
    """

    def __init__(
        self, engine: Engine, most: int, ttl_s: float, *, clock: Callable[[], float] = time.monotonic,
        watch: Callable[[Window], None] = lambda window: None,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._most = most
        self._ttl_s = ttl_s
        self._clock = clock
        self._watch = watch
        self._held: OrderedDict[str, _Held] = OrderedDict()  # least recently used first
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
                self._held[window.id] = _Held(window, self._clock())
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
        state = _without_paths(state, self._engine.spec.max_tokens)
        _check_counts(self._engine, state)
        with self._lock:  # so that two snapshots of one window do not both get its id
            taken = state.window in self._held or bool(self._kept(state.window))
            return self.add(Window.restore(self._engine, state.replace(window="") if taken else state))

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
            for window_id in old:
                self._put_aside(window_id)
        return len(old)

    def close(self) -> None:
        """Puts every window aside; those in use are closed as soon as they are not."""
        with self._lock:
            self._closed = True
            for window_id in list(self._held):
                self._put_aside(window_id)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _take(self, window_id: str) -> _Held:
        with self._lock:
            held = self._held.get(window_id)
            if held is None:
                held = self._bring_back(window_id)
            held.users += 1
            return held

    def _bring_back(self, window_id: str) -> _Held:
        # Under the lock, so that two requests do not open one window twice; a window costs a template's tokens to open.
        kept = self._kept(window_id)
        state = None
        for key in reversed(kept):
            state = state or self._engine.repo.get_json(key, bound=False)
        if state is None or self._closed:
            raise UnknownWindow(_unknown(window_id))
        window = self.add(Window.restore(self._engine, state))
        for key in kept:
            self._engine.repo.delete(key)
        return self._held[window.id]

    def _make_room(self) -> None:
        while len(self._held) >= self._most:
            idle = next((i for i, held in self._held.items() if held.users == 0), None)
            if idle is None:
                raise TooManyWindows(f"all {self._most} windows are in use; close some, or try again later")
            self._put_aside(idle)

    def _put_aside(self, window_id: str) -> None:
        held = self._held.pop(window_id)
        state = held.window.snapshot()
        # A value never changes under its key: the time tells snapshots of one window apart.
        key = f"window/{window_id}/{time.time_ns():020d}"
        if not self._engine.repo.put_json(key, state.model_dump(mode="json"), bound=False):
            _log.warning("the snapshot of window %s was refused by the store; its id will be unknown", window_id)
        held.gone = True
        if held.users == 0:
            held.window.close()

    def _kept(self, window_id: str) -> list[str]:
        if not _ID.fullmatch(window_id):
            return []
        return sorted(self._engine.repo.store.list(f"window/{window_id}/"))


def _unknown(window_id: Any) -> str:
    return f"window must be the id of a window of yours, got {str(window_id)[:80]!r}; open one with POST /v1/windows"


def _without_paths(state: State, most: int) -> State:
    def clean(placed: Placed) -> Placed:
        parts = without_sources(placed.chunk.parts)
        return placed.replace(chunk=placed.chunk.model_copy(update={"parts": parts}))

    if not 1 <= state.budget <= most:
        raise ValueError(f"the snapshot's budget must be in 1..{most} (what the engine takes), got {state.budget}")
    if not _ID.fullmatch(state.window):
        state = state.replace(window="")
    return state.replace(placed=tuple(map(clean, state.placed)), evicted=tuple(map(clean, state.evicted)))


def _check_counts(engine: Engine, state: State) -> None:
    """Raises ValueError for a snapshot that no window on ``engine`` gave."""
    everything = (*state.placed, *state.evicted)
    if len({p.id for p in everything}) < len(everything) or min(state.version, state.arrivals) < 0:
        raise ValueError(
            "a snapshot must hold every placement once, and no negative counts; send it as the window gave it"
        )
    for p in everything:
        if p.chunk_id != p.chunk.id:
            raise ValueError(f"the snapshot's chunk {p.id} must have the content {p.chunk_id}, got {p.chunk.id}")
    if state.engine != digest(engine.spec.name, engine.spec.identity):
        return  # of another model: everything is counted again
    system_prompt = engine.encode_system_prompt(state.system_prompt)
    counts = [
        (
            "system_prompt",
            state.system_prompt_tokens,
            state.system_prompt_advance,
            system_prompt.tokens,
            system_prompt.advance,
        )
    ]
    for p in state.placed:
        try:
            encoded = engine.encode(p.chunk)
        except ChunkUnavailable:  # what needs its content will say so; until then it only must not lead out of range
            if p.tokens < 1 or not 0 <= p.advance <= engine.spec.max_tokens:
                raise
        else:
            counts.append((f"chunk {p.id}", p.tokens, p.advance, encoded.tokens, encoded.advance))
    for what, tokens, advance, *true in counts:
        if [tokens, advance] != true:
            raise ValueError(
                f"the snapshot's {what} must have {true[0]} tokens over {true[1]} positions, got {tokens} over {advance}; "
                "send it as the window gave it"
            )
    if state.tokens > state.budget:
        raise ValueError(f"the snapshot must fit its budget of {state.budget} tokens, got {state.tokens}")
