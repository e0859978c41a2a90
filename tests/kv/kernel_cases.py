"""Spans and patches of every kind that a load kernel is held against its reference with."""

from __future__ import annotations

from dataclasses import replace

import torch
from operator_oracle import placed, random_positions, random_span

from ctxwin.kv.deficit import deficit
from ctxwin.kv.kernels import LoadPlan
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Layers, Patch, form_patch
from ctxwin.kv.pooling import fit_basis, project

LAYOUTS = ["joint", "per_layer", "quantized", "shared joint", "shared per_layer", "dense", "rank 0"]


def stack(plan: LoadPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers; what is served is valid until the next call but one, hence the copies."""
    pairs = [tuple(x.clone() for x in plan.layer(i)) for i in range(plan.layers)]
    return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def canonical(spec: KVSpec, tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> SpanKV:
    span = placed(spec, random_span(spec, tokens, seed, positions=random_positions(tokens, seed)), 0)
    return replace(span, k=span.k.to(dtype), v=span.v.to(dtype))


def patch_of(
    spec: KVSpec,
    span: SpanKV,
    layout: str,
    seed: int,
    dtype: torch.dtype = torch.float64,
    layers: Layers = "all",
    rank: int = 2,
) -> Patch:
    """A patch of the given layout, formed on ``span`` (canonical) and random conditioned KV."""
    base = replace(span, k=span.k.double(), v=span.v.double())
    other = random_span(spec, span.tokens, seed + 77, positions=span.positions)
    other = replace(other, k=base.k + 0.3 * other.k, v=base.v + 0.3 * other.v)
    lost = deficit(other, base, spec)
    if layout.startswith("shared") and layers:
        basis = fit_basis([lost], spec, rank, layers=layers, layout=layout.split()[1], dtype=dtype)
        return project(lost, basis, spec, dtype=dtype)
    if layout == "dense":
        patch = form_patch(other, base, spec, layers=layers, layout="per_layer", dtype=dtype)
        assert patch.dense or not patch.layers
        return patch
    kept = 0 if layout == "rank 0" else rank
    shape = layout if layout in ("per_layer", "quantized") else "joint"
    return form_patch(other, base, spec, rank=kept, layers=layers, layout=shape, dtype=dtype)
