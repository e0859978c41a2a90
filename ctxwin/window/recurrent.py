"""Of a hybrid: the recurrent states in front of a chunk, which a patch of its own is formed behind (`ctxwin.kv.states`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ctxwin.engines.base import Segment
from ctxwin.kv.states import States, composed, reconditioned
from ctxwin.window.state import Front, Placed, State, provenance_of, span_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.assembly import Assembly, Laid


def states_behind(front: States, segments: Iterable[Segment]) -> States:
    """The states of a hybrid behind spans that are served behind ``front``: composed of their maps where they are approximate."""
    for segment in segments:
        assert segment.span is not None
        own = segment.span.states
        if segment.approximate:
            own = composed(front, own if segment.patch is None else reconditioned(own, segment.patch.states))
        front = own
    return front


def states_in_front(laid: Laid, captured: Mapping[int, SpanKV], index: int) -> States | None:
    """The states in front of the chunk at ``index`` as it was served; None where their KV was not read back.

    Args:
        captured: KV that was computed in place, by index into the segments.
    """
    behind: list[Segment] = []
    for i in range(index, -1, -1):
        segment = replace(laid.segments[i], span=captured.get(i, laid.segments[i].span))
        if segment.span is None:
            return None
        behind.insert(0, replace(segment, approximate=segment.approximate and i not in captured))
        if not behind[0].approximate:
            break
    return states_behind({}, behind)


def states_before(assembly: Assembly, state: State, placed: Placed) -> States | None:
    """The states in front of ``placed`` where it was computed; None where what stood there is not known to be held.

    Cost: a read of the span that stood in front, and of those in front of that as long as they are patched.
    """
    known = {p.id: p for p in (*state.placed, *state.evicted)}
    front, fronts = Front.of(state), list[Placed]()
    for antecedent in placed.kv.antecedents if placed.kv else ():
        p = known.get(antecedent)
        if p is None or p.kv is None or not _computed_here(p, front):
            return None
        fronts.append(p)
        front = front.behind(p, p.kv)
    if not _computed_here(placed, front):
        return None
    behind: list[Segment] = []
    for p in reversed(fronts):
        segment = _held(assembly, p)
        if segment is None:
            return None
        behind.insert(0, segment)
        if not segment.approximate:
            return states_behind({}, behind)
    opening = assembly.repo.get_span(span_key(provenance_of(state.system_prompt_key, "system_prompt")))
    return None if opening is None else states_behind(opening[0].states, behind)


def _computed_here(placed: Placed, front: Front) -> bool:
    """Whether ``placed`` was conditioned on what ``front`` says, in that order."""
    return placed.kv is not None and front.computed(placed.chunk_id, "resident").provenance == placed.kv.provenance


def _held(assembly: Assembly, placed: Placed) -> Segment | None:
    """KV of ``placed`` as the store holds it; None where it does not, or has no states for it."""
    kv = placed.kv
    if kv is None or kv.slots is not None:
        return None
    found, patch = assembly.repo.get_span(kv.span), None
    if kv.patch is not None:
        patch = assembly.repo.get_patch(kv.patch)
        if patch is None:
            return None
    if found is None:
        return None
    return Segment(assembly.engine.encode(placed.chunk), 0, found[0], patch=patch, approximate=patch is not None)
