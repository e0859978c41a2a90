"""Parts of a load, one after the other, and the reference result that every kernel must reproduce.

The reference says it in the operator's own words: slow, whole spans at once, the oracle of the tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch, apply_patch
from ctxwin.kv.relocate import relocate
from ctxwin.kv.rope import Shift

Heads = tuple[int, int]
"""The first KV head that is served, and the last plus one."""


@dataclass(frozen=True)
class ResidentKV:
    """A copy of a span's KV on the device that serves it; see `ctxwin_vllm.resident`.

    Attributes:
        k, v: contiguous ``[layers, T, heads, dim]``: the layers and KV heads that are served there.
        first: number of the first of these layers.
    """

    k: torch.Tensor
    v: torch.Tensor
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.k.nbytes + self.v.nbytes


@dataclass(frozen=True)
class SpanSlice:
    """Tokens ``[begin, end)`` of one stored span and the place its origin goes to.

    Attributes:
        span: KV in any frame, usually the canonical one (``start == 0``).
        start: position of the span's origin where it is served (>= 0); the same whatever ``begin`` is.
        patch: factors to add in the canonical frame; formed on the whole span.
        begin, end: the tokens to serve, counted within the span; ``end=None`` is the span's end. A prefix hit may cut a
            span anywhere.
        approximate: of a hybrid: the state behind it is composed of the span's map on the one in front (`ctxwin.kv.states`).
        resident: the span's KV on the device, which a kernel may read instead; it holds the same numbers.
    """

    span: SpanKV
    start: int
    patch: Patch | None = None
    begin: int = 0
    end: int | None = None
    approximate: bool = False
    resident: ResidentKV | None = field(default=None, repr=False, compare=False)

    @property
    def stop(self) -> int:
        """``end`` as a number."""
        return self.span.tokens if self.end is None else self.end

    @property
    def tokens(self) -> int:
        """Tokens that are served."""
        return self.stop - self.begin

    def shift(self, frame: bool) -> Shift:
        """What its keys turn by, from stored to served; the patch's share of them (``frame``), from canonical to stored."""
        places = (0, self.span.start) if frame else (self.span.start, self.start)
        return self.span.positions[:, self.begin : self.stop].to("cpu"), *places

    def validate(self, spec: KVSpec) -> None:
        """Raises ValueError where it does not fit ``spec``; O(1)."""
        self.span.validate(spec)
        if self.start < 0:
            raise ValueError(f"start must be >= 0, got {self.start}")
        if not 0 <= self.begin < self.stop <= self.span.tokens:
            raise ValueError(
                f"begin and end must cut at least one token out of {self.span.tokens}, got [{self.begin}, {self.stop})"
            )
        if self.patch is not None:
            self.patch.check_fits(self.span, spec)


def compute_dtype(parts: Sequence[SpanSlice]) -> torch.dtype:
    """float32, as the engines compute; float64 where a span is."""
    return torch.float64 if any(part.span.k.dtype == torch.float64 for part in parts) else torch.float32


def columns_of(spec: KVSpec, heads: Heads) -> tuple[slice, slice]:
    """Columns of a patch's rows that are keys, and those that are values, of these heads."""
    first, last = heads
    keys = spec.heads * spec.k_dim
    return (slice(first * spec.k_dim, last * spec.k_dim), slice(keys + first * spec.v_dim, keys + last * spec.v_dim))


class ReferenceKernel:
    """`apply_patch` or `relocate` on every part, then one concatenation. Same arguments as `CpuKernel`.

    Cost: several float32 copies of all the KV, held until it is dropped.
    """

    def __init__(
        self, parts: Sequence[SpanSlice], spec: KVSpec, *, dtype: torch.dtype, device: torch.device, heads: Heads
    ) -> None:
        compute, (first, last) = compute_dtype(parts), heads
        ks, vs = [], []
        for part in parts:
            span = replace(part.span, k=part.span.k.to(compute), v=part.span.v.to(compute))
            base = span if part.patch is not None else relocate(span, spec, part.start)
            moved = base if part.patch is None else apply_patch(base, part.patch, spec, part.start)
            cut = moved.slice(part.begin, part.stop)
            ks.append(cut.k[:, :, first:last].to(device=device, dtype=dtype))
            vs.append(cut.v[:, :, first:last].to(device=device, dtype=dtype))
        self._k, self._v = torch.cat(ks, dim=1), torch.cat(vs, dim=1)

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        return self._k[i], self._v[i]
