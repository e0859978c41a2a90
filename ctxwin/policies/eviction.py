"""Who leaves a full window first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxwin.window import Window


@dataclass(frozen=True)
class OldestFirst:
    """The chunk that arrived first leaves first."""

    def order(self, window: Window) -> Iterable[str]:
        return [p.id for p in sorted(window.snapshot().placed, key=lambda p: p.arrival)]
