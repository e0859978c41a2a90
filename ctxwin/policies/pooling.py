"""Mean-pooled vision embeddings, a bounded number of them at hand."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ctxwin.chunk import Chunk
    from ctxwin.engines.base import Engine, MediaSpan

_AT_HAND = 4096  # as many as a window remembers evicted chunks


class Pools:
    """Pooled embeddings by media, float32; those used longest ago go first. Thread-safe."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, str], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, engine: Engine, chunk: Chunk) -> torch.Tensor:
        """Mean over all tokens of a chunk's media, float64 ``[hidden]``.

        Raises ChunkUnavailable where embeddings are gone and cannot be made again, also when they are still at hand here: what
        cannot be placed must not be found. Cost: an encoding of the chunk (no vision encode for held media), and once a
        media a read of its embeddings.
        """
        import torch

        media = engine.encode(chunk).media
        rows = torch.stack([self._pooled(engine, m) for m in media]).to(torch.float64)
        weights = torch.tensor([m.tokens for m in media], dtype=torch.float64)
        return weights @ rows / weights.sum()

    def _pooled(self, engine: Engine, media: MediaSpan) -> torch.Tensor:
        import torch

        key = (engine.spec.identity, media.key)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        made = engine.embed(media.key).to(torch.float64).mean(0).to(torch.float32)
        with self._lock:
            self._held[key] = made
            while len(self._held) > _AT_HAND:
                self._held.popitem(last=False)
        return made
