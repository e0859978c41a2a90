"""The load kernel against its reference, against float64 and an oracle that shares no code with either."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import placed, random_positions, random_span, specs, worst

from ctxwin.kv import KVSpec, SpanKV
from ctxwin.operator import Patch, deficit, fit_basis, form_patch, project, relocate
from ctxwin.operator.kernels import Part, Placing

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
LAYOUTS = ["joint", "per_layer", "shared joint", "shared per_layer", "dense", "rank 0"]


def stack(placing: Placing) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers; what is served is valid until the next call only, hence the copies."""
    pairs = [tuple(x.clone() for x in placing.layer(i)) for i in range(placing.layers)]
    return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def both(parts: list[Part], spec: KVSpec, **options) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    return stack(Placing(parts, spec, **options)), stack(Placing(parts, spec, kernel="reference", **options))


def patch_of(spec: KVSpec, span: SpanKV, layout: str, seed: int, dtype=F64, layers="all", rank=2) -> Patch:
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
    shape = "per_layer" if layout == "per_layer" else "joint"
    return form_patch(other, base, spec, rank=kept, layers=layers, layout=shape, dtype=dtype)


@st.composite
def loads(draw, dtype=F64) -> tuple[KVSpec, list[Part], slice | None]:
    """Parts of every kind on any layout: frames, places, cuts, patches, heads."""
    spec = draw(specs())
    parts = []
    for seed in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 9))
        begin = draw(st.integers(0, tokens - 1))
        end = draw(st.sampled_from([None, *range(begin + 1, tokens + 1)]))
        canonical = placed(spec, random_span(spec, tokens, seed, positions=random_positions(tokens, seed)), 0)
        frame = draw(st.sampled_from([0, 0, 0, 17, 4000]))
        patch = None
        if draw(st.booleans()):
            layers = draw(st.sampled_from(["all", "deep", (0,), ()]))
            patch = patch_of(spec, canonical, draw(st.sampled_from(LAYOUTS)), seed, layers=layers)
        span = relocate(canonical, spec, frame)
        span = replace(span, k=span.k.to(dtype), v=span.v.to(dtype))
        parts.append(Part(span, draw(st.sampled_from([0, frame, 3, 2500])), patch, begin, end))
    first = draw(st.integers(0, spec.heads - 1))
    heads = draw(st.sampled_from([None, slice(first, draw(st.integers(first + 1, spec.heads)))]))
    return spec, parts, heads


@settings(max_examples=150, deadline=None)
@given(loads())
def test_every_load_is_the_reference_in_float64(load):
    spec, parts, heads = load
    (k, v), (want_k, want_v) = both(parts, spec, dtype=F64, heads=heads)
    assert k.shape == want_k.shape and v.shape == want_v.shape
    assert worst(k, want_k) < 1e-12
    assert worst(v, want_v) < 1e-12
