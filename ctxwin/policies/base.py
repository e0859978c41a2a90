"""The contracts of policies: who leaves a full window, and what comes back into it.

A policy is deterministic. It reads the window, its engine and what their store holds, never a clock or a random number, and
it breaks ties by arrival: the same window loses the same chunks when an operation is run again (a replayed checkpoint, a
resumed thread, a second process). Both methods run inside the window's writer, so they must not edit it; a fork is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.window.window import Window


class Eviction(Protocol):
    """Who leaves first."""

    def order(self, window: Window) -> Iterable[str]:
        """Placed ids, the one to leave first first. Read no further than room is needed, so a generator may test as it goes.

        Pinned ids are skipped by the window; an id that is left out never leaves. A generator is closed when there is room.
        In a look back the window is still as it was: what comes back is not placed yet, and does not leave.
        """


class Retrieval(Protocol):
    """What comes back for a query."""

    def choose(self, window: Window, query: str | Chunk) -> Iterable[str]:
        """Evicted ids to recall for ``query`` (a question, an answer with a tool call, or a picture), best first."""
