"""A low-water mark around any eviction policy; `ctxwin.window.sliding` says what one costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxwin.policies.base import Eviction, Placement, Ranking
from ctxwin.window.defaults import LeastRecentlyRead, checked_policy
from ctxwin.window.sliding import mark_tokens

if TYPE_CHECKING:
    from ctxwin.policies.base import WindowView
    from ctxwin.window.state import Placed, State


@dataclass(frozen=True)
class LowWater:
    """Any eviction policy, with a mark that a window over its budget falls to at once. Cost: that policy's.

    Args:
        low_water: tokens of system prompt, chunks and what is reserved; a float is a share of the budget.
        eviction: who leaves first.

    The newest chunk stays, wherever the mark lies. Goes before the mark of the window itself.
    """

    low_water: float = 0.5
    eviction: Eviction = field(default_factory=LeastRecentlyRead)

    def __post_init__(self) -> None:
        mark_tokens(self.low_water, max(1, int(self.low_water)))
        checked_policy("eviction", self.eviction, "order")

    def order(self, window: WindowView) -> Iterable[str]:
        """Placed ids, the first to leave at the front."""
        return self.eviction.order(window)

    def ranked(self, state: State) -> Iterable[str] | None:
        """The order of ``eviction`` for a state, where that can be told."""
        return self.eviction.ranked(state) if isinstance(self.eviction, Ranking) else None

    def place(self, window: WindowView, backs: Sequence[Placed]) -> int | None:
        """Where ``eviction`` places what comes back."""
        return self.eviction.place(window, backs) if isinstance(self.eviction, Placement) else None
