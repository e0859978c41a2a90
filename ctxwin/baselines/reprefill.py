"""References to compare answers with: an exact re-prefill of what is placed now, and blind reuse of frames prefilled alone.

Neither touches the window's spans in the store or its part of the engine's prefix cache; only vision embeddings are shared.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV


class Reference:
    """Baseline that answers questions over frames in an order, from scratch or blindly.

    Args:
        engine: the engine of the window.
        system_prompt: the window's system prompt.
    """

    def __init__(self, engine: Engine, system_prompt: Encoded) -> None:
        self._engine = engine
        self._system_prompt = system_prompt
        self._alone: dict[str, SpanKV] = {}
        self._head: SpanKV | None = None

    def reprefill(self, frames: Sequence[Encoded], query: Encoded, sampling: Sampling) -> Generation:
        """One exact forward over system prompt, frames and query; nothing is reused."""
        return self._engine.generate(self._layout(frames, None), query, sampling, salt=_fresh())

    def blind(self, frames: Sequence[Encoded], query: Encoded, sampling: Sampling) -> Generation:
        """Every frame's KV as it is behind the system prompt alone, moved to its place."""
        if self._head is None:
            self._head = self._engine.prefill([], self._system_prompt, 0, salt=_fresh())
        front = [Segment(self._system_prompt, 0, span=self._head, span_key="system_prompt")]
        for frame in frames:
            if frame.chunk_id not in self._alone:
                start = self._system_prompt.advance
                self._alone[frame.chunk_id] = self._engine.prefill(front, frame, start, salt=_fresh())
        spans = [self._head, *(self._alone[frame.chunk_id] for frame in frames)]
        return self._engine.generate(self._layout(frames, spans), query, sampling, salt=_fresh())

    def _layout(self, frames: Sequence[Encoded], spans: Sequence[SpanKV] | None) -> list[Segment]:
        at, segments = 0, []
        for i, encoded in enumerate((self._system_prompt, *frames)):
            segments.append(Segment(encoded, at, span=None if spans is None else spans[i], span_key=encoded.chunk_id))
            at += encoded.advance
        return segments


def _fresh() -> str:
    """A salt never used before, so that the prefix cache neither serves this prompt nor keeps it for another one."""
    return uuid.uuid4().hex
