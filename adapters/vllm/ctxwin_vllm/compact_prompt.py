"""Merged segments on vLLM: a prompt with as many tokens as there are slots.

vLLM gives every prompt token a slot and a position. A merged segment (`Segment.merged`) is represented in the prompt by one
filler token a slot, whose KV is loaded and never computed. The tokens after it then have other positions than they would after
all of its tokens. But attention sees differences of positions only, and loaded keys can be rotated to any position. So all keys
up to the last merged segment, which are loaded anyway, are rotated by as much as the later tokens have moved.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ctxwin.engines.segments import Encoded, Segment
from ctxwin.hashing import digest
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.patch import apply_patch
from ctxwin_vllm.cache_namespace import CacheNamespace

_FILLER = 0


def compact_prompt(
    segments: Sequence[Segment], base: int, salt: str, kv: KVSpec
) -> tuple[list[Segment], int, CacheNamespace, int]:
    """Return one request's segments in the form that vLLM takes.

    Args:
        segments: segments of which some are merged; all before the last merged one have spans.
        base: position that the first prompt token stands for.
        salt: salt of the layout's namespace in the prefix cache; never "", since no forward computes merged KV.

    Returns:
        The segments, the position that the first prompt token stands for now, their namespace, and the number of prompt tokens
        that must be loaded: computed, they would be wrong. The namespace includes the rotation, which differs between requests.
    """
    last = max(i for i, segment in enumerate(segments) if segment.merged)
    compact = [_filler(segment) for segment in segments]
    slots = sum(segment.encoded.tokens for segment in compact[: last + 1])
    at = sum(segment.encoded.advance for segment in compact[: last + 1])
    end = segments[last].start + segments[last].encoded.advance
    # The position that the first prompt token stands for, counted back from the end of the last merged segment.
    moved = end - at
    least = min(segment.start for segment in compact[: last + 1]) - moved
    if least < 0:
        compact[: last + 1] = [_relabelled(segment, -least, kv) for segment in compact[: last + 1]]
    return compact, moved, CacheNamespace(digest("merged", salt, moved - base)), slots


def _filler(segment: Segment) -> Segment:
    if not segment.merged:
        return segment
    count = segment.slots
    places = np.tile(np.arange(count, dtype=np.int64), (3, 1))
    return replace(segment, encoded=Encoded(segment.encoded.chunk_id, (_FILLER,) * count, places, count))


def _relabelled(segment: Segment, by: int, kv: KVSpec) -> Segment:
    """Return ``segment`` in frames shifted by ``by``: the same rotation between positions that are not negative."""
    span = segment.span
    assert span is not None, "all segments before a merged one are loaded"
    if segment.patch is not None:  # it is added in the true frame
        span = apply_patch(span, segment.patch, kv, segment.start)
    key = f"{segment.key}@{by}" if segment.key else ""
    moved = replace(span, start=span.start + by)
    object.__setattr__(moved, "origin", span.origin)  # its numbers are the same
    return replace(segment, span=moved, start=segment.start + by, patch=None, patch_key="", span_key=key)
