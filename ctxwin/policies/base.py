"""The contracts of policies: who leaves a full window, and what comes back into it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.window import Window


class Eviction(Protocol):
    """Who leaves first."""

    def order(self, window: Window) -> Iterable[str]:
        """Placed ids, the one to leave first first. Read no further than room is needed, so a generator may test as it goes.

        Pinned ids are skipped by the window; an id that is left out never leaves.
        """


class Retrieval(Protocol):
    """What comes back for a query."""

    def choose(self, window: Window, query: str | Chunk) -> Iterable[str]:
        """Evicted ids to recall for ``query`` (a question, an answer with a tool call, or a picture), best first."""
