"""Who leaves and where a chunk comes back, by what it is expected to cost."""

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
            state = edits.evicted(state, [leaves])

    def place(self, window: WindowView, backs: Sequence[Placed]) -> int | None:
        """Index where evicted chunks come back, next to each other, the oldest first; None: each at its chronological place."""
        lanes = _Lanes(window.engine, window.snapshot())
        end = len(lanes.state.placed)
        known, (front, behind) = lanes.returning(backs, None), (lanes.returning(backs, at) for at in (0, end))
        forward = sum(lanes.prices.model.forward_ms(back.tokens, 0) for back in backs)
        if known - min(front, behind) <= _CLEARLY * forward:
            return None
        return 0 if front <= behind else end


class _Lanes:
    """What asks of states near ``state`` would cost, the query apart."""

    def __init__(self, engine: Engine, state: State) -> None:
        self.state = state
        self.prices = Prices(engine.costs, engine.repo.tier)
        self._fidelity = resolve(state.fidelity, engine.spec.model)
        self._has = cache(engine.repo.contains)
        left = [p.kv.span for p in state.evicted[-_RECENT:] if p.kv]
        self._kept = sum(map(self._has, left)) / len(left) if left else 1.0

    def ms(self, state: State) -> dict[str, float]:
        """By placement, a request of its own apart."""
        return {c.placed.id: c.ms for c in choose(state, self._fidelity, self._has, self.prices)}

    def leaving(self, state: State, gone: Placed) -> float:
        """What is expected to be paid for an eviction."""
        before, after = self.ms(state), edits.evicted(state, [gone])
        rest = self.ms(after)
        now = sum(rest.values()) - sum(ms for placement, ms in before.items() if placement != gone.id)
        forward = self.prices.model.forward_ms(gone.tokens, 0)
        read = self.ms(edits.recalled(after, gone, 0)[0])[gone.id]
        again = self._kept * read + (1 - self._kept) * max(read, forward)
        more = max(0.0, again - before[gone.id])  # where it stays it is loaded for every ask, too
        if max(now, more) <= _CLEARLY * forward:
            return 0.0
        return max(0.0, now) + more * (gone.reads + 1 / (1 + max(0, state.version - gone.read)))

    def returning(self, backs: Sequence[Placed], at: int | None) -> float:
        """What an ask costs with ``backs`` at an index."""
        return sum(self.ms(edits.looked_back(self.state, backs, at)).values())
