"""Reads of stored KV: several at a time, beside what is computed meanwhile, and never waited for without end.

MPIC, section 3.2, loads what is cached in parallel with computing what is not. Here a layout's reads from disk, Redis or a pool
all begin at once; chunks that have to be computed in front of them are, while they go on (`ctxwin.window.assembly`).
"""

from __future__ import annotations

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
"""Reads of a process from slow stores that go on at a time."""
PATIENCE_S = 1.0
"""How long a read may take at least; where a forward over the same tokens takes longer, twice that."""
_NEAR = ("at hand", "MemoryStore")


@dataclass
class Reads:
    """Those of one layout.

    Args:
        costs: of the engine; what a read takes is learnt.
        tier: of the store that holds a key.
    """

    costs: CostModel
    tier: Callable[[str], str]
    _begun: dict[str, tuple[Future[Any], float, float]] = field(default_factory=dict)

    def begin(self, key: str, tokens: int, read: Callable[[], object]) -> None:
        """Starts what `take` will ask for; nothing where it is at hand anyway."""
        tier = self.tier(key)
        if tier in _NEAR or key in self._begun:
            return
        context = contextvars.copy_context()
        future = _threads(os.getpid()).submit(context.run, partial(self._timed, tier, tokens, read))
        self._begun[key] = future, perf_counter(), self.costs.fetch_ms(tier, tokens)

    @property
    def left_ms(self) -> float:
        """How long the reads that were begun will take on, by their prices."""
        now = perf_counter()
        left = (ms - 1e3 * (now - at) for future, at, ms in self._begun.values() if not future.done())
        return max(left, default=0.0)

    def take(self, key: str, tokens: int, read: Callable[[], T | None]) -> T | None:
        """What ``read`` finds under ``key``; None also where it is late. Raises what it raises."""
        if key not in self._begun:
            return self._timed(self.tier(key), tokens, read)
        future, at, _ = self._begun[key]
        patience = max(PATIENCE_S, 2e-3 * self.costs.forward_ms(tokens, 0))
        try:
            found: T | None = future.result(max(0.0, at + patience - perf_counter()))
        except TimeoutError:
            return None
        return found

    def _timed(self, tier: str, tokens: int, read: Callable[[], T | None]) -> T | None:
        began = self.costs.clock()
        with tracing.span("read", tier=tier, tokens=tokens):
            found = read()
        if found is not None:
            self.costs.fetched(tier, tokens, 1e3 * (self.costs.clock() - began))
        return found


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Of this process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ctxwin-read")
