"""The windows behind a chat model: a few recent ones, of which the most similar is forked for each call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.window.events import Observer
from ctxwin.window.sync import sync
from ctxwin.window.window import Window


class Pool:
    """At most ``size`` windows, least recently used out. Thread-safe: a call works on a fork of its own.

    Args:
        observers: told of every edit and answer, see `Window.observe`.
    """

    def __init__(
        self, engine: Engine, budget: int | None, fidelity: Fidelity | None, size: int, observers: Sequence[Observer] = ()
    ) -> None:  # fmt: skip
        self._engine = engine
        self._budget = budget
        self._fidelity = fidelity
        self._size = size
        self._observers = observers
        self._windows: list[Window] = []  # least recently used first
        self._lock = threading.Lock()

    @contextmanager
    def window(self, system_prompt: str, chunks: Sequence[Chunk]) -> Iterator[Window]:
        """A window that places exactly ``chunks``: a synced fork of the one that shares most with them.

        It is kept when the block ends without an error, instead of the one it came from where they are much the same.
        Raises like `ctxwin.window.sync.sync`.
        """
        base, window = self._forked(system_prompt, chunks)
        try:
            sync(window, chunks)
            yield window
        except BaseException:
            window.close()
            raise
        self._keep(window, base)

    def close(self) -> None:
        """Closes every window, those in use as soon as they are not; their leases are given back."""
        with self._lock:
            windows, self._windows, self._size = self._windows, [], 0
        for window in windows:
            window.close()

    def __len__(self) -> int:
        return len(self._windows)

    def _forked(self, system_prompt: str, chunks: Sequence[Chunk]) -> tuple[Window | None, Window]:
        wanted = Counter(c.id for c in chunks)
        with self._lock:  # so that no other call closes it meanwhile
            known = [w for w in reversed(self._windows) if w.system_prompt == system_prompt]
            base = max(known, key=lambda w: _shared(w, wanted), default=None)
            if base is not None and any(_shared(base, wanted)):
                return base, base.fork()
        window = Window(self._engine, system_prompt, self._budget, self._fidelity)
        for observer in self._observers:
            window.observe(observer)
        return None, window

    def _keep(self, window: Window, base: Window | None) -> None:
        placed = Counter(p.chunk_id for p in window.snapshot().placed)
        with self._lock:
            out = []
            if base in self._windows and base is not None and _same(base, placed):
                self._windows.remove(base)  # the same conversation, gone on
                out.append(base)
            self._windows.append(window)
            while len(self._windows) > self._size:
                out.append(self._windows.pop(0))
        for old in out:
            old.close()


def _same(window: Window, placed: Counter[str]) -> bool:
    """Whether at least half of its chunks are ``placed``; headers are alike between conversations, and do not count."""
    state = window.snapshot()
    return 2 * _shared(window, placed)[0] >= state.tokens - state.system_prompt_tokens


def _shared(window: Window, wanted: Counter[str]) -> tuple[int, int]:
    """Tokens of placed chunks that are wanted, and of evicted ones that are wanted beside them."""
    state, left = window.snapshot(), Counter(wanted)
    counts = []
    for group in (state.placed, state.evicted):
        count = 0
        for p in group:
            if left[p.chunk_id] > 0:
                left[p.chunk_id] -= 1
                count += p.tokens
        counts.append(count)
    return counts[0], counts[1]
