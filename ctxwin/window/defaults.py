"""The policies of a window that is given none: `LeastRecentlyRead` and `ById`; `ctxwin.policies` has others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.window.protocols import WindowView
    from ctxwin.window.state import State


@dataclass(frozen=True)
class LeastRecentlyRead:
    """The chunk whose last reading is longest ago leaves first, the oldest among equals. Cost: a sort.

    A chunk is read when it is placed, when it is recalled, and when `Window.maintenance.touch` says so. Asking reads
    everything that is placed, so it marks nothing.
    """

    def order(self, window: WindowView) -> Iterable[str]:
        """Placed ids, the first to leave at the front."""
        return self.ranked(window.snapshot())

    def ranked(self, state: State) -> list[str]:
        """See `ctxwin.policies.Ranking`."""
        return [p.id for p in sorted(state.placed, key=lambda p: (p.read, p.arrival))]


@dataclass(frozen=True)
class ById:
    """Evicted chunks whose placement id the query names, in the order it names them. Cost: a text search an id."""

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """Evicted placement ids to bring back for ``query``, the best first."""
        if not isinstance(query, str):
            return []
        positions = {i: query.find(i) for i in window.evicted}
        return sorted((i for i, at in positions.items() if at >= 0), key=lambda i: positions[i])
