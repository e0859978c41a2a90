"""The policies of a window that is given none: `LeastRecentlyRead` and `ById`; `ctxwin.policies` has others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.window.protocols import WindowView
    from ctxwin.window.state import State


Policy = TypeVar("Policy")


def checked_policy(name: str, policy: Policy, method: str) -> Policy:
    """Return ``policy``. Raises TypeError if it has no ``method``, or is a class instead of an instance of it."""
    if isinstance(policy, type):
        raise TypeError(f"{name} must be a policy, got the class {policy.__name__}; pass {policy.__name__}()")
    if not callable(getattr(policy, method, None)):
        raise TypeError(f"{name} must be a policy as in ctxwin.policies, got {policy!r}, which has no {method}()")
    return policy


def check_searchable(name: str, library: Any) -> None:
    """Raise TypeError if ``library`` is no `ctxwin.window.protocols.Searchable`."""
    if not callable(getattr(library, "view", None)):
        if any(kind.__module__.startswith("langchain_core.") for kind in type(library).__mro__):
            raise TypeError(
                f"{name} must be a ctxwin.Library, got LangChain's; pass langchain_ctxwin.Documents({name})"
            )
        raise TypeError(f"{name} must be a ctxwin.Library, got {library!r}; open it with Library(store, NAME)")


@dataclass(frozen=True)
class LeastRecentlyRead:
    """The chunk whose last reading is longest ago leaves first, the oldest among equals.

    A chunk is read when it is placed, when it is recalled, and when `Window.maintenance.touch` says so. Asking reads
    everything that is placed, so it marks nothing.
    """

    def order(self, window: WindowView) -> Iterable[str]:
        """Placed ids, the first to leave at the front."""
        return self.ranked(window.snapshot())

    def ranked(self, state: State) -> Iterable[str]:
        """See `ctxwin.policies.Ranking`."""
        return state.placed.least_recently_read()


@dataclass(frozen=True)
class ById:
    """Evicted chunks whose placement id the query names, in the order it names them. Cost: a text search an id."""

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """Evicted placement ids to bring back for ``query``, the best first."""
        if not isinstance(query, str):
            return []
        positions = {i: query.find(i) for i in window.evicted}
        return sorted((i for i, at in positions.items() if at >= 0), key=lambda i: positions[i])
