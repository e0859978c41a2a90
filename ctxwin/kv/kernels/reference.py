"""The load kernel said in the operator's own words: slow, whole spans at once, the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ctxwin.kv.kernels.parts import Part, compute_dtype
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.patch import apply_patch
from ctxwin.kv.relocate import relocate


class ReferenceKernel:
    """`apply_patch` or `relocate` on every part, then one concatenation. Same arguments as `CpuKernel`.

    Cost: several float32 copies of all the KV, held until it is dropped.
    """

    def __init__(
        self, parts: Sequence[Part], spec: KVSpec, *, dtype: torch.dtype, device: torch.device, heads: tuple[int, int]
    ) -> None:
        compute, (first, last) = compute_dtype(parts), heads
        ks, vs = [], []
        for part in parts:
            span = replace(part.span, k=part.span.k.to(compute), v=part.span.v.to(compute))
            base = span if part.patch is not None else relocate(span, spec, part.start)
            served = base if part.patch is None else apply_patch(base, part.patch, spec, part.start)
            cut = served.slice(part.begin, part.stop)
            ks.append(cut.k[:, :, first:last].to(device=device, dtype=dtype))
            vs.append(cut.v[:, :, first:last].to(device=device, dtype=dtype))
        self._k, self._v = torch.cat(ks, dim=1), torch.cat(vs, dim=1)

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        return self._k[i], self._v[i]
