"""Merged segments on vLLM: a prompt with as many tokens as there are slots.

vLLM gives every prompt token a slot and a position. A merged segment (`Segment.merged`) stands in the prompt as so many filler
tokens, whose KV is loaded and never computed. What follows then stands at other positions than behind all of the tokens; but
attention sees differences of positions only, and keys that are loaded can be turned to any place. So everything up to the last
merged segment, which has to be loaded anyway, is turned by as much as what follows has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ctxwin.engines.base import Encoded, Segment
from ctxwin.engines.vllm.prefix_space import Space
from ctxwin.hashing import digest
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.patch import apply_patch

_FILLER = 0


def condensed(segments: Sequence[Segment], base: int, salt: str, kv: KVSpec) -> tuple[list[Segment], int, Space, int]:
    """One request's segments as vLLM is to see them.

    Args:
        segments: of which some are merged; those in front of the last merged one have spans.
        base: position that the first prompt token stands for.
        salt: of the layout's space in the prefix cache; never "", for what is merged no forward gives.

    Returns:
        The segments, the position that the first prompt token stands for now, their space, and how many prompt tokens are there
        to be loaded only: computed, they would be wrong. The space holds the turn, which differs between requests of a layout.
    """
    last = max(i for i, segment in enumerate(segments) if segment.merged)
    made = [_filled(segment) for segment in segments]
    slots = sum(segment.encoded.tokens for segment in made[: last + 1])
    at = sum(segment.encoded.advance for segment in made[: last + 1])
    end = segments[last].start + segments[last].encoded.advance
    moved = end - at  # the position that the first prompt token stands for, seen from behind the last merged segment
    least = min(segment.start for segment in made[: last + 1]) - moved
    if least < 0:
        made[: last + 1] = [_relabelled(segment, -least, kv) for segment in made[: last + 1]]
    return made, moved, Space(digest("merged", salt, moved - base)), slots


def _filled(segment: Segment) -> Segment:
    if not segment.merged:
        return segment
    count = segment.slots
    places = np.tile(np.arange(count, dtype=np.int64), (3, 1))
    return replace(segment, encoded=Encoded(segment.encoded.chunk_id, (_FILLER,) * count, places, count))


def _relabelled(segment: Segment, by: int, kv: KVSpec) -> Segment:
    """``segment`` in frames that are ``by`` further on: it turns by as much, between places that are no less than 0."""
    span = segment.span
    assert span is not None, "what stands in front of a merged segment is loaded"
    if segment.patch is not None:  # it is added in the true frame
        span = apply_patch(span, segment.patch, kv, segment.start)
    key = f"{segment.key}@{by}" if segment.key else ""
    moved = replace(span, start=span.start + by)
    return replace(segment, span=moved, start=segment.start + by, patch=None, patch_key="", span_key=key)
