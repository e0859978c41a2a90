"""Recurrent states of a hybrid model before a chunk, from which the chunk's patch is formed (`ctxwin.kv.states`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ctxwin.engines.segments import Segment
from ctxwin.kv.states import States, compose_states, recondition_states
from ctxwin.window.state import Placed, Prefix, State, provenance_of, span_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.layout import Layout
    from ctxwin.window.protocols import SpanProvider


def states_after(preceding: States, segments: Iterable[Segment]) -> States:
    """Return the states of a hybrid after spans served after ``preceding``; maps are composed where spans are approximate."""
    for segment in segments:
        assert segment.span is not None
        states = segment.span.states
        if segment.approximate:
            patched = states if segment.patch is None else recondition_states(states, segment.patch.states)
            states = compose_states(preceding, patched)
        preceding = states
    return preceding


def preceding_states(layout: Layout, captured: Mapping[int, SpanKV], index: int) -> States | None:
    """Return the states before the chunk at ``index`` as it was served; None if their KV was not read back.

    Args:
        captured: KV that was computed in place, by index into the segments.
    """
    segments: list[Segment] = []
    for i in range(index, -1, -1):
        segment = replace(layout.segments[i], span=captured.get(i, layout.segments[i].span))
        if segment.span is None:
            return None
        segments.insert(0, replace(segment, approximate=segment.approximate and i not in captured))
        if not segments[0].approximate:
            break
    return states_after({}, segments)


def states_at_conditioning(provider: SpanProvider, state: State, entry: Placed) -> States | None:
    """Return the states before ``entry`` where it was computed; None if its antecedents are not known to be stored.

    Cost: a read of the span that stood in front, and of those in front of that as long as they are patched.
    """
    entries = {p.id: p for p in (*state.placed, *state.evicted)}
    prefix, preceding = Prefix.of(state), list[Placed]()
    for antecedent in entry.kv.antecedents if entry.kv else ():
        p = entries.get(antecedent)
        if p is None or p.kv is None or not _was_conditioned_on(p, prefix):
            return None
        preceding.append(p)
        prefix = prefix.extended_by(p, p.kv)
    if not _was_conditioned_on(entry, prefix):
        return None
    segments: list[Segment] = []
    for p in reversed(preceding):
        segment = _stored_segment(provider, p)
        if segment is None:
            return None
        segments.insert(0, segment)
        if not segment.approximate:
            return states_after({}, segments)
    opening = provider.repo.get_span(span_key(provenance_of(state.system_prompt_key, "system_prompt")))
    return None if opening is None else states_after(opening[0].states, segments)


def _was_conditioned_on(entry: Placed, prefix: Prefix) -> bool:
    return entry.kv is not None and prefix.computed(entry.chunk_id, "resident").provenance == entry.kv.provenance


def _stored_segment(provider: SpanProvider, entry: Placed) -> Segment | None:
    """Return KV of ``entry`` from the store; None if it is not stored whole."""
    kv = entry.kv
    if kv is None or kv.slots is not None:
        return None
    stored, patch = provider.repo.get_span(kv.span), provider.repo.get_patch(kv.patch) if kv.patch else None
    if stored is None or (kv.patch is not None and patch is None):
        return None
    return Segment(provider.engine.encode(entry.chunk), 0, stored[0], patch=patch, approximate=patch is not None)
