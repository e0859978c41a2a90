"""Relocation: the exact half of the operator (Kamera, section 3, eq. 1, first term)."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.rope import Move

# Largest relocation error that the arithmetic of a dtype explains. Engines round cosine, sine and the key; the first
# layer's keys depend on nothing else. Measured on models that turn so: 6e-7, 1e-3 and 9e-3. Others miss by 0.1 to 1.4.
_BOUNDS = {"float64": 1e-5, "float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
# The same for deeper layers, whose keys also carry the rounding of all layers before; of the median token.
_DEEP_BOUND = 0.1


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
    return replace(span, k=Move(spec, span.positions, span.start, start).all(span.k), start=start)


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
    move = Move(spec, here.positions, here.start, there.start)
    away = (move.layer(0, here.k[0].double()) - want).abs().max()
    return float(away / want.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def check_relocation(spec: KVSpec, compute: Callable[[int], SpanKV], far: int) -> float:
    """Accepts a model by measurement: its keys must turn from one place to another as ``spec`` says.

    To be called once by every engine when it opens, on the model at hand.

    Args:
        spec: layout of the model's KV, read off its config.
        compute: KV of some tokens with nothing in front and their origin at the position given, as the engine computes it:
            the same tokens on each call, a dozen or more; for a model with sections, their three positions should differ.
        far: the other position, away from 0 but such that the tokens fit the model's context.

    Returns:
        The first layer's relocation error (`relocation_error`).

    Raises:
        UnsupportedModel: the error is above what rounding to the dtype explains, deeper layers do not turn alike, or the KV
            is not laid out as ``spec`` says. Cost: two forwards over those tokens.
    """
    try:
        here, there = compute(0), compute(far)
        error = relocation_error(here, there, spec)
        moved = relocate(here, spec, far)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as problem:
        raise UnsupportedModel(f"the model's KV is not laid out as its config says: {problem}") from problem
    bound = _BOUNDS.get(spec.dtype, _BOUNDS["bfloat16"])
    if not error <= bound:
        raise UnsupportedModel(
            f"the model's keys do not turn as its config says: moved by {far} positions they are {error:.2g} away from its "
            f"own, where {spec.dtype} explains {bound:.2g}; cached KV cannot be moved"
        )
    for name, got, want in (("keys", moved.k, there.k), ("values", moved.v, there.v)):
        away = (got.double() - want.double()).flatten(2).norm(dim=-1) / want.double().flatten(2).norm(dim=-1)
        worst = away.nan_to_num().median(dim=1).values
        if float(worst.max()) > _DEEP_BOUND:
            raise UnsupportedModel(
                f"the {name} of the model's layer {int(worst.argmax())} do not move as its config says: moved by {far} "
                f"positions they are {float(worst.max()):.2g} away from its own, more than {_DEEP_BOUND}; cached KV "
                "cannot be moved"
            )
    return error
