"""Eviction policies: the order in which chunks leave a full window."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxwin.errors import BudgetExceeded
from ctxwin.validation import check_integer

if TYPE_CHECKING:
    from ctxwin.policies.base import Branch, WindowView
    from ctxwin.window.state import State

_log = logging.getLogger("ctxwin")


@dataclass(frozen=True)
class OldestFirst:
    """The chunk that arrived first leaves first. Cost: a sort."""

    def order(self, window: WindowView) -> Iterable[str]:
        """Placed ids, the first to leave at the front."""
        return self.ranked(window.snapshot())

    def ranked(self, state: State) -> list[str]:
        """See `ctxwin.policies.Ranking`."""
        return [p.id for p in sorted(state.placed, key=lambda p: p.arrival)]


@dataclass(frozen=True)
class ByPriority:
    """The chunk with the lowest `Chunk.priority` leaves first, the oldest among equals. Cost: a sort."""

    def order(self, window: WindowView) -> Iterable[str]:
        """Placed ids, the first to leave at the front."""
        return self.ranked(window.snapshot())

    def ranked(self, state: State) -> list[str]:
        """See `ctxwin.policies.Ranking`."""
        return [p.id for p in sorted(state.placed, key=lambda p: (p.chunk.priority, p.arrival))]


@dataclass(frozen=True)
class ByDisposability:
    """Chunks that none of the given queries needs leave first, then the rest; oldest first within each group.

    A chunk is disposable when evicting it changes the answer to none of the queries (`Window.disposable`; Kamera, appendix
    E), with the chunks before it in this order already gone: of two pages that say the same, one stays.

    Args:
        queries: the questions that must keep their answers.
        max_tokens: most tokens of each answer.
        kl: most nats of KL(with || without) of the first answer token; None compares the answers' tokens alone.
        clean: judge without what the chunk left in those behind it, as after ``evict(forget=True)``. The eviction itself
            is a plain one, after which they still remember it.

    Chunks are tested one by one, and only until there is room. Cost: two asks a query and tested chunk, the second with
    survivors rotated into place (in an exact window: everything behind the chunk is computed again); for the chunks that
    are needed, too, so the worst case is two asks for each query and each unpinned chunk. `disposable` may use all that
    the engine takes, since a window that needs room is over its budget; where even that is too little, the oldest chunk
    leaves untested, which is logged. A window whose engine fails raises EngineFailed and keeps everything.
    """

    queries: Sequence[str]
    max_tokens: int = 32
    kl: float | None = None
    clean: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.queries, str) or not all(isinstance(q, str) and q for q in self.queries) or not self.queries:
            raise ValueError(f"queries must be a non-empty list of questions, got {self.queries!r}")
        check_integer("max_tokens", self.max_tokens, 1)
        if self.kl is not None and not 0 <= self.kl < math.inf:
            raise ValueError(f"kl must be nats >= 0 or None, got {self.kl!r}")
        object.__setattr__(self, "queries", tuple(self.queries))

    def order(self, window: WindowView) -> Iterator[str]:
        """Placed ids, the first to leave at the front."""
        free = [p.id for p in sorted(window.snapshot().placed, key=lambda p: p.arrival) if not p.pinned]
        needed: list[str] = []
        with window.fork() as branch:  # it loses what has left so far; the window itself is not edited
            for placement in free:
                try:
                    leaves = self._is_disposable(branch, placement)
                except BudgetExceeded as error:
                    _log.warning("chunk %s leaves untested: its queries exceed the window (%s)", placement, error)
                    leaves = True
                if leaves:
                    branch.evict(placement)
                    yield placement
                else:
                    needed.append(placement)
        yield from needed

    def _is_disposable(self, window: Branch, placement: str) -> bool:
        for query in self.queries:
            verdict = window.disposable(placement, query, self.max_tokens, clean=self.clean)
            if not verdict.disposable or (self.kl is not None and verdict.kl > self.kl):
                return False
        return True
