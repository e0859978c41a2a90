"""Spans as records: their tensors in a blob, checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ctxwin.errors import StoreCorrupt
from ctxwin.kv.layout import KVSpec, SpanKV, outputs_in, outputs_named
from ctxwin.kv.states import named, states_in
from ctxwin.store import codec
from ctxwin.store.fp8 import pack_fp8, unpack_fp8

if TYPE_CHECKING:
    import torch

_FARTHEST: Final = 1 << 31
_AT_ONCE: Final = 1 << 16  # numbers that stay in a processor's cache


def encode_span(span: SpanKV, header: Mapping[str, Any]) -> bytes:
    """Return the record of ``span`` with ``header`` beside it. Cost: one copy to the CPU and a SHA-256."""
    kv, packing = pack_fp8({"k": span.k, "v": span.v})
    tensors = kv | {"positions": span.positions} | outputs_named(span.outputs) | named(span.states)
    return codec.encode_tensors(tensors, {**header, **packing}, checked=False)


def decode_span(blob: bytes, spec: KVSpec | None) -> tuple[SpanKV, dict[str, Any]]:
    """Return the span of a record, a view of it, and its header.

    Raises StoreCorrupt or ValueError for what cannot be KV of a model with the layout ``spec``; None checks only that the span
    is consistent. Cost: a SHA-256 of the blob and a pass over its numbers.
    """
    tensors, header = codec.decode_tensors(blob, checked=False)
    tensors = unpack_fp8(tensors, header)
    kv = tensors["k"], tensors["v"], tensors["positions"]
    span = SpanKV(*kv, int(header["start"]), outputs_in(tensors), states_in(tensors))
    _check_span(span, spec)
    if len(header["user"]["token_ids"]) != span.tokens:
        raise StoreCorrupt(f"a span must have one token id per token, got {len(header['user']['token_ids'])}")
    object.__setattr__(span, "blob", blob)
    return span, header


def _check_span(span: SpanKV, spec: KVSpec | None) -> None:
    """Raise StoreCorrupt or ValueError for a span that cannot be KV of the model."""
    import torch

    if spec is not None:
        span.validate(spec)
    if span.k.ndim != 4 or span.v.shape[:3] != span.k.shape[:3] or tuple(span.positions.shape) != (3, span.tokens):
        raise StoreCorrupt(f"a span's shapes must fit each other, got {span.k.shape}, {span.v.shape}")
    if span.positions.dtype != torch.int64 or not 0 <= span.start < _FARTHEST:
        raise StoreCorrupt(f"span positions must be int64, start >= 0, got {span.positions.dtype}, {span.start}")
    if span.tokens and not 0 <= int(span.positions.min()) <= int(span.positions.max()) < _FARTHEST:
        raise StoreCorrupt(f"a span's positions must be in [0, {_FARTHEST}), got {span.positions.aminmax()}")
    check_finite(span.k, span.v, *span.outputs.values(), *span.states.values())
    if spec is not None and spec.recurrent and span.tokens and not span.states:
        raise StoreCorrupt("a span of this model must hold the states behind its last token, got none")
    if any(rows.shape[:1] != (span.tokens,) for rows in span.outputs.values()):
        raise StoreCorrupt(f"a span's outputs must have {span.tokens} rows")


def check_finite(*tensors: torch.Tensor) -> None:
    """Raise StoreCorrupt for tensors with NaN or infinite numbers, or of an integer dtype. Cost: a pass over them."""
    for tensor in tensors:
        if not tensor.dtype.is_floating_point:
            raise StoreCorrupt(f"it must hold floating-point numbers, got {tensor.dtype}")
        if not all_finite(tensor):
            raise StoreCorrupt("it holds numbers that are not finite")


def all_finite(tensor: torch.Tensor) -> bool:
    """Return True if a tensor of floating-point numbers holds no NaN or infinity.

    Cost: a pass over it, on a CPU by numpy in this thread alone: threads of torch would spin for milliseconds behind it, on the
    cores where vLLM computes.
    """
    import torch

    if tensor.device.type != "cpu":
        return not tensor.numel() or all(bool(bound.isfinite()) for bound in tensor.aminmax())
    flat = tensor.detach().flatten()
    if flat.element_size() != 2:
        numbers = (flat.float() if flat.element_size() == 1 else flat).numpy()
        return all(np.isfinite(numbers[at : at + _AT_ONCE]).all() for at in range(0, len(numbers), _AT_ONCE))
    bits, exponent = flat.view(torch.int16).numpy(), 0x7F80 if flat.dtype is torch.bfloat16 else 0x7C00
    return all((bits[at : at + _AT_ONCE] & exponent).max() < exponent for at in range(0, len(bits), _AT_ONCE))
