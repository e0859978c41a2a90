"""Retrieval policies: the chunks that a look back recalls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxwin.errors import ChunkUnavailable
from ctxwin.store.lru import LRUCache
from ctxwin.validation import check_integer

if TYPE_CHECKING:
    import torch

    from ctxwin.chunk import Chunk
    from ctxwin.engines.base import Engine
    from ctxwin.policies.base import WindowView

_log = logging.getLogger("ctxwin")
_DECODER = json.JSONDecoder()
_AT_HAND = 4096  # as many as a window remembers evicted chunks


@dataclass(frozen=True)
class ByToolCall:
    """Evicted chunks that an answer's tool calls name, in the order of the calls.

    Reads Hermes and Qwen calls (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``) and the same objects standing
    in plain text, with ``parameters`` for ``arguments`` (Llama) and arguments that are JSON in a string (OpenAI), too.
    What is no JSON or calls another tool is ignored; an id that is not evicted is ignored and logged.

    Args:
        tool: name of the tool.
        argument: its argument that holds an id or a list of ids.

    Cost: one pass over the answer.
    """

    tool: str = "recall"
    argument: str = "id"

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """Evicted placement ids to bring back for ``query``, the best first."""
        named = list(dict.fromkeys(self._named(query))) if isinstance(query, str) else []
        evicted = set(window.evicted)
        for placement in named:
            if placement not in evicted:
                _log.warning("a call of %s names %r, which is not evicted; ignored", self.tool, placement)
        return [placement for placement in named if placement in evicted]

    def _named(self, text: str) -> Iterator[str]:
        for call in _objects(text):
            arguments = call.get("arguments", call.get("parameters"))
            if call.get("name") != self.tool:
                continue
            if isinstance(arguments, str):
                arguments = next(_objects(arguments), None)
            ids = arguments.get(self.argument) if isinstance(arguments, dict) else None
            yield from (i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, str))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects that stand in ``text``."""
    at = text.find("{")
    while at >= 0:
        try:
            parsed, at = _DECODER.raw_decode(text, at)
            yield parsed
        except ValueError as error:  # a number of thousands of digits is one without a position
            at = max(at + 1, getattr(error, "pos", at))  # what stands inside a broken object is not a call of its own
        except RecursionError:
            return  # nested a thousand deep: no tool call
        at = text.find("{", at)


class Pools:
    """Pooled embeddings by media, float32; those used longest ago go first. Thread-safe."""

    def __init__(self) -> None:
        self._cached: LRUCache[torch.Tensor] = LRUCache(_AT_HAND)

    def of(self, engine: Engine, chunk: Chunk) -> torch.Tensor:
        """Mean over all tokens of a chunk's media, float64 ``[hidden]``.

        Raises ChunkUnavailable where embeddings are gone and cannot be computed again, even if their mean is still cached
        here: a chunk that cannot be placed must not be found. Cost: an encoding of the chunk (no vision encode for held
        media), and a read of the embeddings, once for each medium.
        """
        import torch

        media = engine.encode(chunk).media
        rows = torch.stack([self._pooled(engine, m.key) for m in media]).to(torch.float64)
        weights = torch.tensor([m.tokens for m in media], dtype=torch.float64)
        return weights @ rows / weights.sum()

    def _pooled(self, engine: Engine, key: str) -> torch.Tensor:
        name = f"{engine.spec.identity}/{key}"
        return self._cached.get_or_build(name, lambda: engine.embed(key).double().mean(0).float())


@dataclass(frozen=True)
class BySimilarity:
    """The evicted chunks that look most like a picture: cosine of their mean-pooled vision embeddings, highest first.

    The picture is the query itself where that is a chunk with media; otherwise it is the chunk ``to``, or the newest placed
    one with media; ChunkUnavailable where its embeddings are gone and cannot be made again. Evicted chunks of which that is
    true are skipped and logged, chunks without media are never chosen. Among equals the newest comes first.

    Args:
        count: how many come back.
        to: placement id of the picture that a text query is about; None: the newest placed one.
        least: least cosine, in -1..1.

    Cost: an encoding of every evicted chunk and, once each, a read of its embeddings; the pooled vectors of 4,096 media are
    cached. The vision tower runs for a query it has not seen, and for evicted chunks that lost their embeddings but
    not their pixels; never for held ones.
    """

    count: int = 1
    to: str | None = None
    least: float = -1.0
    _pools: Pools = field(default_factory=Pools, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_integer("count", self.count, 1)
        if not -1 <= self.least <= 1:
            raise ValueError(f"least must be a cosine in -1..1, got {self.least!r}")

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """Evicted placement ids to bring back for ``query``, the best first."""
        import torch

        picture = query if not isinstance(query, str) and query.media else self._reference_chunk(window)
        if picture is None:
            return []
        target = self._pools.of(window.engine, picture)
        scored: list[tuple[float, int, str]] = []
        for p in window.snapshot().evicted:
            if not p.chunk.media:
                continue
            try:
                pooled = self._pools.of(window.engine, p.chunk)
            except ChunkUnavailable as error:
                _log.warning("chunk %s is skipped, it cannot be compared: %s", p.id, error)
                continue
            cosine = float(torch.nn.functional.cosine_similarity(target, pooled, dim=0))
            if cosine >= self.least:
                scored.append((-cosine, -p.arrival, p.id))
        return [placement for _, _, placement in sorted(scored)[: self.count]]

    def _reference_chunk(self, window: WindowView) -> Chunk | None:
        if self.to is not None:
            return window.chunk(self.to)
        with_media = [p for p in window.snapshot().placed if p.chunk.media]
        return max(with_media, key=lambda p: p.arrival).chunk if with_media else None
