"""What a look back brings into the window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.window import Window


@dataclass(frozen=True)
class ById:
    """Evicted chunks whose placement id the query names, in the order it names them."""

    def choose(self, window: Window, query: str | Chunk) -> Iterable[str]:
        if not isinstance(query, str):
            return []
        found = {i: query.find(i) for i in window.evicted}
        return sorted((i for i, at in found.items() if at >= 0), key=lambda i: found[i])
