"""Counted lines of Python of an operation, and windows of many chunks to count them on."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.layout import SpanKV
from ctxwin.window.layout import Work
from window.fake import DIM, LAYERS, FakeEngine

SMALL, LARGE = 32, 128
Setup = Callable[[int], Callable[[], object]]


def lines(operation: Callable[[], object]) -> int:
    """Lines of Python that a call runs in this thread, without those of finalizers of garbage that is found meanwhile."""
    count, tracer = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(tracer)
        gc.enable()
    return count


def exponent(setup: Setup, small: int = SMALL, large: int = LARGE) -> float:
    """Power of the size with which the work grows; the first call only fills caches."""
    setup(4)()
    few, many = lines(setup(small)), lines(setup(large))
    return math.log(many / few) / math.log(large / small)


def on(prepare: Callable[[int], Any], operation: Callable[[Any], object]) -> Setup:
    """``operation`` on what ``prepare`` gives for a size."""
    return lambda n: partial(operation, prepare(n))


class NullEngine(FakeEngine):
    """KV of zeros in linear time, where no answer is looked at."""

    def _forward(self, front: list[SpanKV], encoded: Encoded, start: int) -> SpanKV:
        zeros = torch.zeros(LAYERS, encoded.tokens, 1, DIM, dtype=torch.float64)
        return SpanKV(zeros, zeros, torch.from_numpy(encoded.positions.copy()), start)

    def prefill(self, context: Sequence[Segment], target: Encoded, start: int, **options: Any) -> SpanKV:
        return self._forward([], target, start)

    def _run(self, segments: Sequence[Segment]) -> tuple[list[SpanKV], dict[int, SpanKV], int, int]:
        spans = [s.span if s.span is not None else self._forward([], s.encoded, s.start) for s in segments]
        computed = {i: span for i, span in enumerate(spans) if segments[i].span is None}
        captured = {i: span for i, span in computed.items() if segments[i].capture}
        return spans, captured, sum(segments[i].tokens for i in computed), 0


def engine_for(n: int) -> FakeEngine:
    """An engine for windows of so many chunks."""
    return (FakeEngine if n <= LARGE else NullEngine)(max_tokens=10**6)


def opened(n: int, mode: Any = "patched", engine: FakeEngine | None = None) -> Window:
    """A window of ``n`` chunks whose KV is held."""
    window = Window(engine or engine_for(n), "h", 10**6, fidelity=Fidelity(mode))
    window.extend([Chunk.tokens([i % 40]) for i in range(n)])
    window.ask("q", 1)
    return window


def lay_out(window: Window) -> None:
    """All of an ask but the engine's call, and what it writes back."""
    assembly, state = window.core.assembly, window.snapshot()
    assembly.write_back(state, assembly.build_layout(state, window.fidelity, Work()), {}, window.fidelity)


def standing(n: int) -> Window:
    """A window of ``n`` chunks that did not move since they were planned and asked."""
    window = opened(n)
    window.ask("q", 1)
    window.plan()
    return window
