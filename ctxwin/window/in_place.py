"""Forwards over one placed chunk in the context that it has: ahead of an ask, or of its approximation anew."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from ctxwin.window.assembly import Assembly
from ctxwin.window.layout import Layout, Work, salt_of
from ctxwin.window.state import State

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV


def compute_chunk(
    assembly: Assembly, state: State, layout: Layout, index: int, work: Work, *, store: bool = True
) -> Layout:
    """Compute the KV of the chunk at ``index`` as an ask would, behind a prefix with KV; return the layout with it. The window
    does not change: the next ask finds what is stored by its provenance, which only tells of an exact prefix."""
    segments = [assembly.computed_system_prompt(layout.segments[0], work), *layout.segments[1:]]
    layout = replace(layout, segments=tuple(segments))
    span = layout.ahead.get(index + 1) or _in_place(assembly, state, index, layout, work)[0]
    if store:
        assembly.put_chunk(layout, index, span, layout.choices[index].conditioning)
    segments[index + 1] = replace(segments[index + 1], span=span, capture=False)
    return replace(layout, segments=tuple(segments))


def _in_place(assembly: Assembly, state: State, index: int, layout: Layout, work: Work) -> tuple[SpanKV, Layout]:
    """Return KV of a placed chunk in its present context, and the layout it was computed after in the end."""
    segment, preceding = layout.segments[index + 1], layout.segments[: index + 1]
    fallbacks, entries = work.fallbacks, map(attrgetter("entry"), layout.choices[: index + 1])
    span = assembly.prefill(preceding, segment.encoded, segment.start, work, entries, salt_of(preceding).name)
    return span, layout.as_computed(state) if work.fallbacks > fallbacks else layout


def reform(assembly: Assembly, state: State, index: int, layout: Layout, work: Work) -> State:
    """Re-form one placed chunk in its present context: one forward, no vision encode."""
    span, layout = _in_place(assembly, state, index, layout, work)
    choice = layout.choices[index]
    conditioning = choice.prefix.computed(choice.entry.chunk_id, "formed")
    assembly.put_chunk(layout, index, span, conditioning)  # in full: a patch would be another approximation
    formed = choice.entry.replace(kv=conditioning, seen=True, unseen=())
    return state.replace(placed=state.placed.splice(index, index + 1, [formed]))
