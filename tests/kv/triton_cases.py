"""Layouts that the Triton load kernel is tested on, and the reference it is held against."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import kernel_cases
import torch
from kernel_cases import stack
from operator_oracle import make_spec, plain_rope, with_kinds

from ctxwin.kv.kernels import LoadPlan, SpanSlice
from ctxwin.kv.layout import KVSpec

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
PACKAGE = "ctxwin.kv.kernels"
FAMILIES = {
    "gqa": make_spec(layers=2, heads=2, k_dim=16, v_dim=16),
    "mha": make_spec(layers=2, heads=3, k_dim=8, v_dim=12, family="mha"),
    "mla": make_spec(layers=2, heads=1, k_dim=16, v_dim=80, rope=plain_rope(16, pairing="interleaved"), family="mla"),
    "gpt-j": make_spec(layers=2, heads=2, k_dim=16, v_dim=16, rope=plain_rope(12, pairing="interleaved")),
    "partial": make_spec(layers=2, heads=1, k_dim=40, v_dim=16, rope=plain_rope(8)),
    "odd": make_spec(layers=2, heads=2, k_dim=9, v_dim=5, rope=plain_rope(8, pairing="interleaved")),
    "mrope": make_spec(layers=2, heads=1, k_dim=16, v_dim=16, rope=plain_rope(16, sections=(2, 3, 3))),
    "two-kinds": with_kinds(make_spec(layers=2, heads=2, k_dim=16, v_dim=16)),
    "cycling": make_spec(
        layers=2, heads=1, k_dim=16, v_dim=16, rope=plain_rope(16, sections=(4, 2, 2), mrope_interleaved=True)
    ),
}
# Layer 1 has no patch, unless a test says so.
patch_of = partial(kernel_cases.patch_of, layers=(0,))


def exact(parts: list[SpanSlice], spec: KVSpec, heads: slice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64."""
    wide = [replace(p, span=replace(p.span, k=p.span.k.double(), v=p.span.v.double())) for p in parts]
    return stack(LoadPlan(wide, spec, dtype=F64, heads=heads, kernel="reference"))


def close(parts: list[SpanSlice], spec: KVSpec, dtype: torch.dtype, heads: slice | None = None) -> None:
    """No further from float64 than one rounding to the served dtype and float32's own arithmetic; as the CPU kernel."""
    unit = torch.finfo(dtype).eps / 2
    served = stack(LoadPlan(parts, spec, dtype=dtype, heads=heads, kernel="triton"))
    for got, want in zip(served, exact(parts, spec, heads), strict=True):
        assert got.dtype == dtype and got.is_contiguous() and got.shape == want.shape
        away = (got.double() - want).abs()
        assert float((away - unit * want.abs()).max()) < 2e-6 * float(want.abs().max())
