"""Engine calls that a plan represents, with spans that hold no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ctxwin.engines.segments import Call, Segment, partial_ranges
from ctxwin.window.lanes import system_prompt_key
from ctxwin.window.layout import salt_of

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.engines.segments import Encoded
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.answer import Plan
    from ctxwin.window.choice import Choice
    from ctxwin.window.state import State


def with_forecast(engine: Engine, state: State, choices: Sequence[Choice], plan: Plan, query: Encoded | None) -> Plan:
    """Return ``plan`` with what its requests compute by the engine's own forecast, where it has one."""
    counts = engine.forecast(planned_calls(engine, state, choices, plan, query)) if engine.forecasts else None
    if counts is None or len(counts) != len(plan.steps):
        return plan
    return replace(plan, steps=tuple(replace(s, computed=n) for s, n in zip(plan.steps, counts, strict=True)))


def planned_calls(
    engine: Engine, state: State, choices: Sequence[Choice], plan: Plan, query: Encoded | None = None
) -> list[Call]:
    """Return the calls of ``plan`` in order: canonicals, then the answer. Empty if encoding a chunk would run a vision tower."""
    placeholder = _span(1)
    header = engine.encode_system_prompt(state.system_prompt)
    present = plan.system_prompt_resident or any(step.purpose == "system_prompt" for step in plan.steps)
    calls: list[Call] = []
    if any(step.purpose == "system_prompt" for step in plan.steps):
        calls.append(Call([Segment(header, 0)], placeholder=placeholder))
    # By the name that an ask gives it: the space of vLLM's prefix cache is named by every segment's.
    segments = [Segment(header, 0, span=_span(header.tokens) if present else None, span_key=system_prompt_key(state))]
    formed: set[str] = set()
    for choice, start in zip(choices, state.starts(), strict=True):
        entry, conditioning = choice.entry, choice.conditioning
        if entry.chunk.media and not all(map(engine.repo.contains, engine.media_keys(entry.chunk))):
            return []
        encoded: Encoded = engine.encode(entry.chunk)
        if choice.form_canonical and entry.chunk_id not in formed:
            formed.add(entry.chunk_id)
            prompt = replace(segments[0], span=_span(header.tokens))
            calls.append(Call([prompt, Segment(encoded, state.system_prompt_advance)], placeholder=placeholder))
        segment = Segment(encoded, start, span_key=conditioning.span)
        if not choice.compute:
            merged = conditioning.slots is not None
            span = _span(choice.slots)
            key = f"{conditioning.span}+{conditioning.patch}" if conditioning.patch else conditioning.span
            segment = replace(segment, span=span, approximate=not choice.in_place, span_key=key, merged=merged)
            if choice.partial_base is not None:
                ranges = partial_ranges(encoded.media_ranges, choice.recompute, encoded.tokens)
                segment = replace(segment, recompute=ranges)
        segments.append(segment)
    return [*calls, Call(segments, salt_of(segments).name, placeholder, has_query=True, query=query)]


def _span(tokens: int) -> SpanKV:
    """Return a placeholder for KV of so many tokens."""
    import torch

    from ctxwin.kv.layout import SpanKV

    rows = torch.empty(1, tokens, 1, 1, device="meta")
    return SpanKV(rows, rows, torch.empty(3, tokens, dtype=torch.int64, device="meta"), 0)
