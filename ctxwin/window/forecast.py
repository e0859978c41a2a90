"""Engine calls that a plan represents, with spans that hold no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, count, repeat
from operator import attrgetter, is_not
from typing import TYPE_CHECKING

from ctxwin.engines.segments import Call, Segment, partial_ranges
from ctxwin.hashing import digest
from ctxwin.window.lanes import system_prompt_key
from ctxwin.window.layout import Salt

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.engines.segments import Encoded
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.answer import Plan
    from ctxwin.window.choice import Choice
    from ctxwin.window.state import State


def salt_of(segments: Sequence[Segment], previous: Salt = (0, ""), same: int = 0) -> Salt:
    """Return the prefix-cache space of a layout: "" (the exact one) or a digest of the KV that a forward would not give.

    ``previous``: that of a layout with the same system prompt and ``same`` first chunks.

    Everything up to the last segment that is `approximate` names the space; what stands behind it is what a forward behind
    exactly that gives, so the engine's own chain of block hashes tells it apart. An append or a fork therefore stays in
    its space, and an edit undone comes back to it.
    """
    first = same + 1 if previous[0] <= same else 0
    last = max(compress(count(first), map(attrgetter("approximate"), segments[first:])), default=0)
    if first and not last:
        return previous
    front = segments[: last + 1] if last else ()
    patched = any(map(is_not, map(attrgetter("patch"), front), repeat(None)))
    keys = [segment.key for segment in front] if patched else map(attrgetter("span_key"), front)
    return last, digest("salt", "\n".join(keys)) if last else ""


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
    return [*calls, Call(segments, salt_of(segments)[1], placeholder, has_query=True, query=query)]


def _span(tokens: int) -> SpanKV:
    """Return a placeholder for KV of so many tokens."""
    import torch

    from ctxwin.kv.layout import SpanKV

    rows = torch.empty(1, tokens, 1, 1, device="meta")
    return SpanKV(rows, rows, torch.empty(3, tokens, dtype=torch.int64, device="meta"), 0)
