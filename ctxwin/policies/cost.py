"""Eviction and placement by expected cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ctxwin.profiles import resolve
from ctxwin.window import edits
from ctxwin.window.lanes import choose
from ctxwin.window.prices import Prices

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.policies.base import WindowView
    from ctxwin.window.state import Placed, State

_CLEARLY = 0.25
_RECENT = 32


@dataclass(frozen=True)
class ByCost:
    """The chunk whose leaving is expected to cost least a token leaves first; what comes back goes where that is cheapest.

    Leaving costs what the lanes of the chunks behind it cost more without it (in an exact window they are all computed again),
    and, where the chunk is needed again, what it then costs more than had it stayed: nothing much where its KV is kept, a
    forward where it is not. Which of the two is told by what left before: the share of it whose KV is still held. It is
    expected to be needed as often as it was recalled or touched, and 1 / (1 + edits since it was read last) times more:
    GreedyDual-Size with frequency (Cherkasova, 1998) with measured costs. What is next to nothing counts as nothing, and
    the oldest of those leaves first. Chunks that no answer has read yet leave last.

    What comes back goes to its chronological place unless the front or the end of the window is clearly cheaper, by a quarter
    of a forward over it. At the front nothing is in front of it that its KV lacks, so it is served as it is; in
    the middle it must often be formed. The window is then not in chronological order: use it where chunks say when they were.

    An exact window keeps its beginning, whose loss would be the dearest, and drops what came later.

    Cost: for each chunk that leaves, two choices of lanes for each one placed; three for what comes back. Reads no KV.
    """

    def order(self, window: WindowView) -> Iterator[str]:
        """Placed ids, the first to leave at the front."""
        lanes = _Lanes(window.engine, window.snapshot())
        state = lanes.state
        while free := [p for p in state.placed if not p.pinned]:
            leaves = min(free, key=lambda p: (not p.seen, lanes.leaving(state, p) / p.tokens, p.arrival))
            yield leaves.id
            state = edits.evict(state, [leaves])

    def place(self, window: WindowView, backs: Sequence[Placed]) -> int | None:
        """Index where evicted chunks come back, next to each other, the oldest first; None: as `Placement` says."""
        lanes = _Lanes(window.engine, window.snapshot())
        end = len(lanes.state.placed)
        chronological, at_front, at_end = (lanes.returning(backs, at) for at in (None, 0, end))
        forward = sum(lanes.prices.model.forward_ms(back.tokens, 0) for back in backs)
        if chronological - min(at_front, at_end) <= _CLEARLY * forward:
            return None
        return 0 if at_front <= at_end else end


class _Lanes:
    """Costs of asks of states near ``state``, without the query."""

    def __init__(self, engine: Engine, state: State) -> None:
        self.state, self._engine = state, engine
        self.prices = Prices(engine.costs, engine.repo.tier)
        self._fidelity = resolve(state.fidelity, engine.spec.model)
        self._has = cache(engine.repo.contains)
        recent_spans = [p.kv.span for p in state.evicted[-_RECENT:] if p.kv]
        self._kept = sum(map(self._has, recent_spans)) / len(recent_spans) if recent_spans else 1.0

    def ms(self, state: State) -> dict[str, float]:
        """Return milliseconds by placement, without requests of their own."""
        choices = choose(state, self._fidelity, self._has, self.prices, engine=self._engine)
        return {c.entry.id: c.ms for c in choices}

    def leaving(self, state: State, entry: Placed) -> float:
        """Return the expected cost of an eviction in milliseconds."""
        current, after = self.ms(state), edits.evict(state, [entry])
        remaining = self.ms(after)
        now = sum(remaining.values()) - sum(ms for placement, ms in current.items() if placement != entry.id)
        forward = self.prices.model.forward_ms(entry.tokens, 0)
        read = self.ms(edits.recall(after, entry, 0)[0])[entry.id]
        return_ms = self._kept * read + (1 - self._kept) * max(read, forward)
        extra = max(0.0, return_ms - current[entry.id])  # where it stays it is loaded for every ask, too
        if max(now, extra) <= _CLEARLY * forward:
            return 0.0
        return max(0.0, now) + extra * (entry.reads + 1 / (1 + max(0, state.version - entry.read)))

    def returning(self, backs: Sequence[Placed], at: int | None) -> float:
        """Return the cost of an ask with ``backs`` at an index, in milliseconds."""
        return sum(self.ms(edits.look_back(self.state, backs, at)).values())
