"""Reads of stored KV: several at a time, in parallel with forwards, each with a time limit.

MPIC, section 3.2, loads what is cached in parallel with computing what is not. Here a layout's reads from disk, Redis or a pool
all begin at once; chunks that have to be computed in front of them are, while they go on (`ctxwin.window.assembly`).
"""

import contextvars
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from time import perf_counter
from typing import Any, TypeVar

from ctxwin import tracing
from ctxwin.engines.cost import CostModel

T = TypeVar("T")
AT_ONCE = 8
"""Most concurrent reads of a process from slow stores."""
PATIENCE_S = 1.0
"""Time limit of a read; twice a forward over the same tokens if that is longer."""
_NEAR = ("at hand", "MemoryStore")


@dataclass
class Reads:
    """Reads of one layout.

    Args:
        costs: of the engine; what a read takes is learnt.
        tier: of the store that holds a key.
    """

    costs: CostModel
    tier: Callable[[str], str]
    _begun: dict[str, tuple[Future[Any], float, float]] = field(default_factory=dict)

    def begin(self, key: str, tokens: int, read: Callable[[], object]) -> None:
        """Start the read that `take` will return; does nothing for a key in memory."""
        tier = self.tier(key)
        if tier in _NEAR or key in self._begun:
            return
        context = contextvars.copy_context()
        future = _threads(os.getpid()).submit(context.run, partial(self._timed, tier, tokens, read))
        self._begun[key] = future, perf_counter(), self.costs.fetch_ms(tier, tokens)

    @property
    def left_ms(self) -> float:
        """Milliseconds that the pending reads will still take, by their prices."""
        now = perf_counter()
        remaining = (ms - 1e3 * (now - at) for future, at, ms in self._begun.values() if not future.done())
        return max(remaining, default=0.0)

    def take(self, key: str, tokens: int, read: Callable[[], T | None]) -> T | None:
        """Return the result of ``read`` for ``key``; None also if it is late. Propagates its exceptions."""
        if key not in self._begun:
            return self._timed(self.tier(key), tokens, read)
        future, at, _ = self._begun[key]
        patience = max(PATIENCE_S, 2e-3 * self.costs.forward_ms(tokens, 0))
        try:
            stored: T | None = future.result(max(0.0, at + patience - perf_counter()))
        except TimeoutError:
            return None
        return stored

    def _timed(self, tier: str, tokens: int, read: Callable[[], T | None]) -> T | None:
        began = self.costs.clock()
        with tracing.span("read", tier=tier, tokens=tokens):
            stored = read()
        if stored is not None:
            self.costs.fetched(tier, tokens, 1e3 * (self.costs.clock() - began))
        return stored


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads of this process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ctxwin-read")
