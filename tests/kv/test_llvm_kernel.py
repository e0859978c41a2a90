"""The load kernel on a CPU's vectors, against the reference in float64: paged caches, gaps, processors and threads."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LAYOUTS, canonical, patch_of, stack
from operator_oracle import make_spec, plain_rope, with_kinds

from ctxwin.kv.kernels import CacheStrides, LoadPlan, SpanSlice, choice, choose
from ctxwin.kv.kernels.parts import ReferenceKernel
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.relocate import relocate

llvm_kernel = pytest.importorskip("ctxwin.kv.kernels.llvm_kernel")
simd = pytest.importorskip("ctxwin.kv.kernels.simd")
pytestmark = pytest.mark.usefixtures("poisoned")

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
CPU = torch.device("cpu")
WIDE = make_spec(layers=3, heads=2, k_dim=64, v_dim=64, rope=plain_rope(64))
PARTIAL = make_spec(layers=2, heads=2, k_dim=48, v_dim=32, rope=plain_rope(32))
NEAR = make_spec(layers=2, heads=2, k_dim=40, v_dim=16, rope=plain_rope(24, pairing="interleaved"))
MLA = make_spec(layers=2, heads=1, k_dim=64, v_dim=80, rope=plain_rope(64, pairing="interleaved"), family="mla")
ODD = make_spec(layers=2, heads=3, k_dim=9, v_dim=5, rope=plain_rope(8))
KINDS = with_kinds(make_spec(layers=2, heads=2, k_dim=32, v_dim=32, rope=plain_rope(32)))
CASES = {
    "wide, transposed": (WIDE, BF16, 32, True),
    "wide, rows": (WIDE, BF16, 16, False),
    "partial, transposed": (PARTIAL, F16, 16, True),
    "neighbours, transposed": (NEAR, BF16, 48, True),
    "latent, rows": (MLA, BF16, 32, False),
    "odd, transposed": (ODD, F32, 20, True),
    "kinds, rows": (KINDS, F32, 8, False),
}


def cache_of(spec: KVSpec, dtype: torch.dtype, size: int, transposed: bool) -> tuple[torch.Tensor, CacheStrides]:
    """A cache of 12 blocks in which nothing is a number, keys ``[heads, size, k_dim]``, or their transposes, before values."""
    heads, k, v = spec.heads, spec.k_dim, spec.v_dim
    head = size * (k + v)
    cache = torch.full((12, heads * head), torch.nan, dtype=dtype)
    steps = (1, head, size) if transposed else (k, head, 1)
    return cache, CacheStrides(size, (0, heads * head, *steps), (size * k, heads * head, v, head, 1))


def rows_of(cache: torch.Tensor, strides: tuple[int, ...], slots: torch.Tensor, size: int, heads: int, dim: int):
    """The numbers ``[T, heads, dim]`` of slots, and where they lie."""
    base, block, token, head, step = strides
    at = base + (slots // size * block + slots % size * token)[:, None, None]
    at = at + torch.arange(heads)[:, None] * head + torch.arange(dim) * step
    return cache.view(-1)[at], at


@st.composite
def loads(draw, spec: KVSpec, dtype: torch.dtype, size: int) -> tuple[list[SpanSlice], torch.Tensor]:
    """Parts of every kind, and slots in runs with gaps between them."""
    parts = []
    for seed in range(draw(st.integers(1, 3))):
        tokens = draw(st.integers(1, 40))
        begin = draw(st.integers(0, tokens - 1))
        origin = canonical(spec, tokens, seed)
        frame = draw(st.sampled_from([0, 0, 17, 4000]))
        patch = None
        if draw(st.booleans()):
            layers, rank = draw(st.sampled_from(["all", (0,)])), draw(st.integers(1, tokens))
            layout, precision = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([dtype, dtype, BF16]))
            patch = patch_of(spec, origin, layout, seed, dtype=precision, layers=layers, rank=rank)
        span = relocate(origin, spec, frame)
        span = replace(span, k=span.k.to(dtype), v=span.v.to(dtype))
        end = draw(st.sampled_from([None, draw(st.integers(begin + 1, tokens))]))
        parts.append(SpanSlice(span, draw(st.sampled_from([0, frame, 2500])), patch, begin, end))
    total = sum(part.tokens for part in parts)
    if draw(st.booleans()):
        return parts, torch.arange(total) + draw(st.integers(0, 12 * size - total if total < 12 * size else 0))
    order = torch.randperm(12 * size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return parts, order[:total].sort().values if draw(st.booleans()) else order[:total]


def assert_stored(parts: list[SpanSlice], spec: KVSpec, dtype, size: int, transposed: bool, slots, heads=None) -> None:
    """All layers are within one rounding and float32's arithmetic of the reference, and other slots are as they were."""
    first, last, _ = (heads or slice(None)).indices(spec.heads)
    wide = [replace(p, span=replace(p.span, k=p.span.k.double(), v=p.span.v.double())) for p in parts]
    oracle = ReferenceKernel(wide, spec, dtype=F64, device=CPU, heads=(first, last))
    small = replace(spec, heads=last - first)
    caches = [cache_of(small, dtype, size, transposed) for _ in range(spec.layers)]
    plan = LoadPlan(parts, spec, dtype=dtype, heads=heads, kernel="llvm")
    assert plan.kernel == "llvm"
    plan.store(0, [cache for cache, _ in caches], caches[0][1], slots)
    unit = torch.finfo(dtype).eps / 2
    for i, (cache, strides) in enumerate(caches):
        for line, want in zip((strides.k, strides.v), oracle.layer(i), strict=True):
            got, at = rows_of(cache, line, slots, size, small.heads, want.shape[-1])
            away = (got.double() - want).abs() - unit * want.abs()
            assert float(away.max()) < 1e-5 * float(want.abs().max())
            cache.view(-1)[at] = torch.nan
        assert bool(cache.isnan().all())


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_slot_is_the_references(case, data):
    spec, dtype, size, transposed = CASES[case]
    parts, slots = data.draw(loads(spec, dtype, size))
    assert_stored(parts, spec, dtype, size, transposed, slots)


@pytest.mark.parametrize("transposed", [True, False])
def test_a_rank_stores_its_heads(transposed):
    span = canonical(WIDE, 37, 0)
    patch = patch_of(WIDE, span, "joint", 1, dtype=BF16)
    parts = [SpanSlice(replace(span, k=span.k.to(BF16), v=span.v.to(BF16)), 55, patch, 3)]
    assert_stored(parts, WIDE, BF16, 32, transposed, torch.arange(34) + 9, slice(1, 2))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_what_stays_is_the_same_to_the_bit(dtype):
    """NaN, infinities and negative zeros among them."""
    span = canonical(WIDE, 50, 0)
    k, v = span.k.to(dtype), span.v.to(dtype)
    for x in (k, v):
        x[:, ::7, :, 0], x[:, ::7, :, 1], x[:, ::7, :, 2] = -0.0, torch.inf, torch.nan
    plan = LoadPlan([SpanSlice(replace(span, k=k, v=v), 0)], WIDE, dtype=dtype, kernel="llvm")
    bits = torch.int32 if dtype is F32 else torch.int16
    for got, want in zip(stack(plan), (k, v), strict=True):
        assert torch.equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("transposed", [True, False])
def test_long_parts_are_written_a_few_tiles_of_all_layers_at_a_time(transposed, monkeypatch):
    monkeypatch.setattr(llvm_kernel, "TOKENS_AT_ONCE", 64)
    span = canonical(WIDE, 150, 0, F32)
    parts = [SpanSlice(span, 500, patch_of(WIDE, span, "joint", 1, dtype=F32), 3), SpanSlice(span, 77, None, 0, 33)]
    assert_stored(parts, WIDE, F32, 16, transposed, torch.arange(180) + 5)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("size", "transposed", "past"), [(32, True, 1), (32, False, 1), (20, True, 0)])
def test_large_loads_are_written_past_the_cache_in_whole_lines(size, transposed, past, dtype, monkeypatch):
    monkeypatch.setattr(llvm_kernel, "PAST_BYTES", 0)
    calls = []
    run = llvm_kernel._run
    monkeypatch.setattr(llvm_kernel, "_run", lambda tasks: (calls.extend(task[1][5] for task in tasks), run(tasks)))
    span = canonical(WIDE, 90, 0)
    span = replace(relocate(span, WIDE, 31), k=relocate(span, WIDE, 31).k.to(dtype), v=span.v.to(dtype))
    joint = patch_of(WIDE, canonical(WIDE, 90, 0), "joint", 1, dtype=dtype, rank=33)
    parts = [SpanSlice(span, 500, joint, 1), SpanSlice(span, 77, None, 2), SpanSlice(span, 31, None, 3, 40)]
    assert_stored(parts, WIDE, dtype, size, transposed, torch.arange(3, 3 + 89 + 88 + 37))
    assert set(calls) == {past}


@pytest.mark.parametrize("absent", [["amx"], ["amx", "avx512bf16"], ["amx", "avx512bf16", "avx512f"]])
def test_processors_with_less(absent, monkeypatch):
    """Without products of matrices and dot products of bfloat16, and with shorter vectors."""
    features = simd._features()
    fewer = type(features)({**features, **{name: False for name in features if name.startswith(tuple(absent))}})
    if "avx512f" in absent:
        fewer = type(features)({**fewer, **{name: False for name in fewer if name.startswith("avx512")}})
    monkeypatch.setattr(simd, "_features", lambda: fewer)
    monkeypatch.setattr(simd, "compile_layout", simd.compile_layout.__wrapped__)
    span = canonical(WIDE, 37, 0)
    narrow = replace(relocate(span, WIDE, 31), k=relocate(span, WIDE, 31).k.to(BF16), v=span.v.to(BF16))
    parts = [SpanSlice(narrow, 500, patch_of(WIDE, span, "joint", 1, dtype=BF16, rank=5)), SpanSlice(narrow, 77)]
    assert_stored(parts, WIDE, BF16, 32, True, torch.arange(74) + 9)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_layers_have_directions_of_their_own(dtype, transposed):
    """None, one, and more than a matrix register holds, whose last ones are odd."""
    span = canonical(WIDE, 45, 0)
    patch = patch_of(WIDE, span, "quantized", 1, dtype=BF16, rank=20)
    count = patch.left.shape[-1]
    assert count > 35
    kept = torch.arange(count) < torch.tensor([0, 1, 35])[:, None]
    factors = replace(patch.quantized, bits=kept.to(torch.uint8) * 8)
    assert factors.ranks == [0, 1, 35]
    patch = replace(patch, left=patch.left * kept[:, None], right=patch.right * kept[..., None], quantized=factors)
    narrow = replace(relocate(span, WIDE, 31), k=relocate(span, WIDE, 31).k.to(dtype), v=span.v.to(dtype))
    parts = [SpanSlice(narrow, 500, patch, begin, end) for begin, end in ((0, None), (3, 8), (20, 45))]
    parts.append(SpanSlice(replace(narrow, start=500), 500, patch))  # nothing turns
    assert_stored(parts, WIDE, dtype, 32, transposed, torch.arange(3, 3 + 45 + 5 + 25 + 45))


def test_products_of_stored_bfloat16_are_the_processors_whatever_is_served(monkeypatch):
    layouts, compile_layout = [], simd.compile_layout
    monkeypatch.setattr(simd, "compile_layout", lambda layout: layouts.append(layout) or compile_layout(layout))
    span = canonical(WIDE, 37, 0, F32)
    for dtype in (BF16, F16, F32):
        for stored in (BF16, F32):
            narrow = replace(span, k=span.k.to(dtype), v=span.v.to(dtype))
            patch = patch_of(WIDE, span, "joint", 1, dtype=stored)
            assert_stored([SpanSlice(narrow, 500, patch)], WIDE, dtype, 32, False, torch.arange(37))
    assert [layout.factor_dtype for layout in layouts] == ["bfloat16", "float32"] * 3
    assert [simd._Emitter(layout).dots for layout in layouts] == [simd._Emitter(layouts[0]).bfloats, False] * 3


def test_threads_serve_what_one_serves(monkeypatch):
    spans = [canonical(WIDE, tokens, tokens, F32) for tokens in (40, 3, 17)]
    parts = [SpanSlice(span, 900, patch_of(WIDE, span, "per_layer", 1, dtype=F32)) for span in spans]
    alone = stack(LoadPlan(parts, WIDE, dtype=F32, kernel="llvm"))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = stack(LoadPlan(parts, WIDE, dtype=F32, kernel="llvm"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, many) for one, many in zip(alone, together, strict=True))


class TestChoice:
    """`choose` on a CPU."""

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch) -> None:
        monkeypatch.setattr(choice, "_good", {})
        monkeypatch.setattr(choice, "_faults", [])
        monkeypatch.delenv(choice.KERNEL, raising=False)

    def test_by_layout(self):
        assert choose(ODD, F32, CPU) == "llvm" and choose(ODD, F64, CPU) == "cpu"
        assert not choice.faults()
        plan = LoadPlan([SpanSlice(canonical(ODD, 4, 0), 3)], ODD, dtype=F32, kernel="llvm")
        assert plan.kernel == "cpu" and not plan.stores  # a span of float64

    def test_without_llvmlite(self, monkeypatch):
        monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
        assert choose(ODD, F32, CPU) == "cpu" and not choice.faults()

    def test_a_fault_is_logged_once_and_counted(self, monkeypatch, caplog):
        def fail(layout: object) -> None:
            raise RuntimeError("no such target")

        monkeypatch.setattr(simd, "compile_layout", fail)
        with caplog.at_level(logging.WARNING, "ctxwin.engines"):
            assert [choose(ODD, F32, CPU) for _ in range(2)] == ["cpu", "cpu"]
        assert len(caplog.records) == len(choice.faults()) == 1
        assert "llvm load kernel is not used on cpu for torch.float32: RuntimeError: no such target" in caplog.text


def test_refuses_a_cache_of_other_strides():
    plan = LoadPlan([SpanSlice(canonical(ODD, 4, 0, F32), 3)], ODD, dtype=F32, kernel="llvm")
    cache, strides = cache_of(ODD, F32, 8, False)
    with pytest.raises(ValueError, match="strides must have the numbers of a key or its tokens side by side"):
        plan.store(0, [cache], replace(strides, v=(*strides.v[:4], 2)), torch.arange(4))
