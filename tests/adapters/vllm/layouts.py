"""Layouts of pictures on an engine, and differences of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import Patch

ALL = Sampling(max_tokens=4, logprobs=-1)


def picture(seed: int) -> Chunk:
    pixels = np.random.default_rng(seed).integers(0, 255, (84, 84, 3), dtype=np.uint8)
    return Chunk.image(pixels, text=f"frame {seed}")


def encoded(engine: Engine, seeds: Sequence[int]) -> list[Encoded]:
    return [engine.encode_system_prompt("watch a camera"), *(engine.encode(picture(s)) for s in seeds)]


def laid(
    parts: Sequence[Encoded],
    spans: Sequence[SpanKV | None] | None = None,
    patches: Mapping[int, Patch] | None = None,
    *,
    capture: bool = True,
) -> list[Segment]:
    start, out = 0, []
    for i, part in enumerate(parts):
        span = None if spans is None else spans[i]
        out.append(Segment(part, start, span=span, capture=capture and span is None, patch=(patches or {}).get(i)))
        start += part.advance
    return out


def distance(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Largest difference of two log-probabilities of a token, over the whole vocabulary."""
    assert p.keys() == q.keys() and len(p) > 100
    return max(abs(p[token] - q[token]) for token in p)


def gap(a: Generation, b: Generation) -> float:
    return distance(a.logprobs, b.logprobs)


def spans_of(engine: Engine, seeds: Sequence[int], salt: str) -> list[SpanKV]:
    """Each segment's KV behind those before it."""
    parts = encoded(engine, seeds)
    made = engine.generate(laid(parts), engine.encode_query("what color"), ALL, salt=salt)
    return [made.captured[i] for i in range(len(parts))]
