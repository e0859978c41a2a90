"""Stored vision embeddings: what lets the tower run once for the same media, also across restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxwin.engines.encoding.families import Grid
from ctxwin.store.failure_log import failure_logger
from ctxwin.store.lru import LRUCache

if TYPE_CHECKING:
    import torch

    from ctxwin.store.spans import SpanRepository

_log = failure_logger("ctxwin.engines")


class Embeddings:
    """Vision embeddings by key, with their patch grid, in a repository.

    What the store refuses (full, everything leased) is kept in memory, up to 256 MiB, for the forward that follows an
    encode.
    """

    def __init__(self, repository: SpanRepository) -> None:
        self._repository = repository
        self._refused: LRUCache[tuple[torch.Tensor, Grid]] = LRUCache(256 << 20)

    def get(self, key: str) -> tuple[torch.Tensor, Grid] | None:
        """``([tokens, width], (t, h, w))``, or None where either is gone or unreadable."""
        refused = self._refused.get(key)
        if refused is not None:
            return refused
        grid = self._repository.get_json(_grid_key(key))
        if grid is None:
            return None
        embeddings = self._repository.get_embedding(key)
        return None if embeddings is None else (embeddings, (int(grid[0]), int(grid[1]), int(grid[2])))

    @staticmethod
    def keys(key: str) -> tuple[str, str]:
        """Store keys of all that `put` writes under ``key``."""
        return key, _grid_key(key)

    def contains(self, key: str) -> bool:
        """Return True if `get` should find them, without reading them."""
        return key in self._refused or (self._repository.contains(key) and self._repository.contains(_grid_key(key)))

    def put(self, key: str, embeddings: torch.Tensor, grid: Grid) -> None:
        """Stores them, in memory where the store refuses them."""
        embeddings = embeddings.detach().to("cpu").contiguous()
        # The grid goes first: embeddings without their grid would be useless, a grid alone is a miss.
        if self._repository.put_json(_grid_key(key), list(grid)) and self._repository.put_embedding(key, embeddings):
            return
        _log.warning("the store refused vision embeddings %s; they stay in memory only", key, extra={"kind": "refused"})
        self._refused.put(key, (embeddings, grid), embeddings.nbytes)


def _grid_key(key: str) -> str:
    return "grid/" + key.partition("/")[2]
