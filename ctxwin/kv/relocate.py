"""Relocation: the exact half of the operator (Kamera, section 3, eq. 1, first term)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.rope import shift_angles, turn


def relocate(span: SpanKV, spec: KVSpec, start: int) -> SpanKV:
    """The span with its origin at position ``start``.

    Keys turn once, from the span's own frame; each token turns by the difference of the engine's angles, so the result
    is what the engine would have computed there. Every call rounds to the span's dtype: move a stored canonical span
    straight to its place, never an already moved one again.

    Args:
        span: KV in any frame.
        spec: layout of the model.
        start: position of the new origin (>= 0).

    Returns:
        A span that shares ``v`` and ``positions``; the very same span where it stands at ``start`` already. Cost: one
        read and one write of ``k``.

    Raises:
        ValueError: a negative start, or shapes that do not fit ``spec``.
    """
    if start < 0:
        raise ValueError(f"start must be >= 0, got {start}")
    span.validate(spec)
    if start == span.start:
        return span
    delta = shift_angles(spec.rope, span.positions, span.start, start)
    return replace(span, k=turn(spec.rope, span.k, delta), start=start)


def canonicalise(span: SpanKV, spec: KVSpec) -> SpanKV:
    """The span in the canonical frame: keys turned back to the chunk's own origin. Same rules as `relocate`."""
    return relocate(span, spec, 0)


def relocation_error(here: SpanKV, there: SpanKV, spec: KVSpec) -> float:
    """How far the first layer's keys of ``here``, moved to ``there.start``, are from those the engine computed there.

    The first layer's keys depend on nothing but token and position, so an engine can check its spec with two forwards
    over the same few tokens: anything above the rounding of its dtype means a wrong pairing, section or frequency.

    Returns:
        Largest absolute difference over the largest absolute key. Raises ValueError where the spans do not match.
    """
    here.validate(spec)
    there.validate(spec)
    if here.tokens != there.tokens:
        raise ValueError(f"both spans must cover the same tokens, got {here.tokens} and {there.tokens}")
    want = there.k[0].double()
    delta = shift_angles(spec.rope, here.positions, here.start, there.start)
    away = (turn(spec.rope, here.k[0].double(), delta) - want).abs().max()
    return float(away / want.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
