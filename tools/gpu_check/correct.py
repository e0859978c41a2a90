"""Is every number right? The load kernels on the device against the reference in float64, over layouts, dtypes and caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from ctxwin.kv.kernels.api import LoadPlan
from ctxwin.kv.kernels.choice import Kernel, samples
from ctxwin.kv.kernels.strides import CacheStrides
from ctxwin.kv.layout import KVSpec, RopeSpec
from ctxwin_vllm.resident import ResidentSpans

Row = dict[str, object]
TOKENS = ((37, 9, 5), (700, 2, 129), (5, 300, 41))
BLOCKS = 16
"""Tokens of a paged block."""


def _rope(dim: int, **options: object) -> RopeSpec:
    freqs = tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2))
    return RopeSpec(inv_freq=freqs, rotary_dim=dim, **options)  # type: ignore[arg-type]


LAYOUTS: dict[str, KVSpec] = {
    name: KVSpec(name, family, 2, heads, k_dim, v_dim, rope, "bfloat16")  # type: ignore[arg-type]
    for name, family, heads, k_dim, v_dim, rope in (
        ("gqa 4 x 128", "gqa", 4, 128, 128, _rope(128)),
        ("gqa 8 x 64", "gqa", 8, 64, 64, _rope(64)),
        ("mha 3 x 96", "mha", 3, 96, 96, _rope(96)),
        ("gqa 2 x 256", "gqa", 2, 256, 256, _rope(256)),
        ("blocked M-RoPE (Qwen2.5-VL)", "gqa", 4, 128, 128, _rope(128, sections=(16, 24, 24))),
        (
            "interleaved M-RoPE (Qwen3-VL)",
            "gqa",
            4,
            128,
            128,
            _rope(128, sections=(24, 20, 20), mrope_interleaved=True),
        ),
        ("interleaved pairs, half the head (GLM)", "gqa", 2, 128, 128, _rope(64, pairing="interleaved")),
        ("quarter of the head (Qwen3.5)", "gqa", 2, 256, 256, _rope(64)),
        ("MLA (DeepSeek-V3)", "mla", 1, 64, 512, _rope(64, pairing="interleaved")),
    )
}


@dataclass(frozen=True)
class Case:
    """One comparison: three random parts (moved and patched; moved; patched with the deficit itself)."""

    layout: str
    dtype: str
    tokens: tuple[int, ...]
    kernel: Kernel


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """Yield the cases to compare; Triton's kernel only if the device can run it."""
    kernels: list[Kernel] = ["cpu", "triton"] if device.type == "cuda" or _interpreted() else ["cpu"]
    for layout in LAYOUTS:
        for dtype in ("bfloat16", "float16", "float32"):
            for tokens in TOKENS[:1] if quick else TOKENS:
                for kernel in kernels:
                    yield Case(layout, dtype, tokens, kernel)


def check_all(device: torch.device, *, quick: bool, workers: int | None = None) -> Iterator[Row]:
    """Yield the rows of all cases, in their order.

    On a GPU nearly all of the time goes into compiling kernels, one for each layout and dtype, so ``workers`` processes share
    them; by default as many as there are processors, up to 12, and none on a processor.
    """
    run = partial(check, device=device)
    if workers is None:
        workers = min(12, os.cpu_count() or 1) if device.type == "cuda" else 0
    if not workers:
        yield from map(run, cases(device, quick=quick))
        return
    every = list(cases(device, quick=quick))
    alike = len({(case.tokens, case.kernel) for case in every})
    with torch.multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(run, every, chunksize=alike)


def check(case: Case, device: torch.device) -> Row:
    """Compare one case; ``fault`` describes an error, None if there is none.

    A number may be away from the reference by one rounding to the dtype and by float32's own arithmetic, no more. What a
    kernel writes into a paged cache itself must be what it returns, to the bit, and nothing beside it may change; and so must be
    what it makes of spans that are resident on the device.
    """
    spec, dtype = replace(LAYOUTS[case.layout], dtype=case.dtype), getattr(torch, case.dtype)
    parts = samples(spec, dtype, case.tokens)
    wide = [replace(p, span=replace(p.span, k=p.span.k.double(), v=p.span.v.double())) for p in parts]
    oracle = LoadPlan(wide, spec, dtype=torch.float64, kernel="reference")
    plan = LoadPlan(parts, spec, dtype=dtype, device=device, kernel=case.kernel)
    copies = ResidentSpans(device, range(spec.layers), 1 << 30)
    resident = LoadPlan(copies.attach(parts), spec, dtype=dtype, device=device, kernel=case.kernel)
    unit, worst, fault = torch.finfo(dtype).eps / 2, 0.0, None
    for i in range(spec.layers):
        got = [x.clone() for x in plan.layer(i)]
        for name, here, there in zip(("keys", "values"), got, oracle.layer(i), strict=True):
            scale = float(there.abs().max())
            away = (here.to("cpu").double() - there).abs() - unit * there.abs()
            worst = max(worst, float(away.max()) / scale)
            if not float(away.max()) <= 2e-6 * scale:  # NaN is no number within the bound
                fault = fault or f"{name} of layer {i} are {float(away.max()):.2g} away from the reference"
        if not all(map(torch.equal, got, resident.layer(i))):
            fault = fault or f"layer {i} of resident spans differs"
        if plan.stores:
            fault = fault or _stored(plan, i, spec, device, dtype, got)
    return asdict(case) | {"beyond_one_rounding": worst, "fault": fault}


def _stored(
    plan: LoadPlan, i: int, spec: KVSpec, device: torch.device, dtype: torch.dtype, want: list[torch.Tensor]
) -> str | None:
    """Check `LoadPlan.store` in a paged cache with blocks in a shuffled order; return the error, or None."""
    count = -(-plan.tokens // BLOCKS)
    step = spec.heads * (spec.k_dim + spec.v_dim)  # of one token: its keys, then its values
    cache = torch.full((count + 3, BLOCKS, step), 7.0, dtype=dtype, device=device)
    head = (cache.stride(0), step)
    lines = CacheStrides(BLOCKS, (0, *head, spec.k_dim, 1), (spec.heads * spec.k_dim, *head, spec.v_dim, 1))
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(i))[:count]
    slots = (order[:, None] * BLOCKS + torch.arange(BLOCKS)).flatten()[: plan.tokens].to(device)
    plan.store(i, [cache], lines, slots)
    rows = cache.view(-1, step)
    keys, values = want
    there = torch.cat([keys.reshape(len(slots), -1), values.reshape(len(slots), -1)], dim=1)
    if not torch.equal(rows[slots], there):
        return f"layer {i} in a paged cache differs from what the kernel returns"
    rows[slots] = 7.0
    return None if bool((rows == 7.0).all()) else f"layer {i} was written beside its slots"


def _interpreted() -> bool:
    try:
        from ctxwin.kv.kernels.triton_kernel import interpreted
    except ImportError:
        return False
    return interpreted()
