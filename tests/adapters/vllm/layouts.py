"""Layouts of pictures on an engine, and differences of answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.layout import SpanKV

ALL = Sampling(max_tokens=4, logprobs=-1)


def picture(seed: int) -> Chunk:
    pixels = np.random.default_rng(seed).integers(0, 255, (84, 84, 3), dtype=np.uint8)
    return Chunk.image(pixels, text=f"frame {seed}")


def encoded(engine: Engine, seeds: Sequence[int]) -> list[Encoded]:
    return [engine.encode_system_prompt("watch a camera"), *(engine.encode(picture(s)) for s in seeds)]


def laid(parts: Sequence[Encoded], spans: Sequence[SpanKV | None] | None = None, capture: bool = True) -> list[Segment]:
    start, out = 0, []
    for i, part in enumerate(parts):
        span = None if spans is None else spans[i]
        out.append(Segment(part, start, span=span, capture=capture and span is None))
        start += part.advance
    return out


def gap(a: Generation, b: Generation) -> float:
    assert a.logprobs.keys() == b.logprobs.keys() and len(a.logprobs) > 100
    return max(abs(a.logprobs[token] - b.logprobs[token]) for token in a.logprobs)


def spans_of(engine: Engine, seeds: Sequence[int], salt: str) -> list[SpanKV]:
    """Each segment's KV behind those before it."""
    parts = encoded(engine, seeds)
    made = engine.generate(laid(parts), engine.encode_query("what color"), ALL, salt=salt)
    return [made.captured[i] for i in range(len(parts))]
