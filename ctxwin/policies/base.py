"""The contracts of policies: what leaves a full window, what comes back into it, and what they may read of it.

A policy is deterministic, `ByCost` apart, which follows measured prices. It reads the window, its engine and what their
store holds, never a clock or a random number, and it breaks ties by arrival: the same window loses the same chunks when an
operation is run again (a replayed checkpoint, a resumed thread, a second process). Its methods run while the window is being
edited, so they must not edit it themselves; a fork is theirs to edit and costs nothing.
"""

from ctxwin.window.protocols import (
    Batching,
    Branch,
    Eviction,
    LibraryView,
    Placement,
    Ranking,
    Retrieval,
    Searchable,
    WindowView,
)

__all__ = ["Batching", "Branch", "Eviction", "LibraryView", "Placement", "Ranking", "Retrieval"]
__all__ += ["Searchable", "WindowView"]
