"""The Triton load kernel against the reference, under Triton's interpreter: the same program, with numpy as its processor.

What only a compiler can tell stands at the end: that the kernel compiles for the GPUs it is meant for. No test here runs
it on one; `choice.trial` does, wherever an engine starts on a GPU.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import kernel_cases
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import LAYOUTS, canonical, stack
from operator_oracle import make_spec, plain_rope, with_kinds, worst

from ctxwin.kv.kernels import CacheStrides, LoadPlan, SpanSlice, choice, choose
from ctxwin.kv.kernels.parts import ResidentKV
from ctxwin.kv.kernels.resident import RESIDENT_BYTES, ResidentSpans
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch
from ctxwin.kv.relocate import relocate

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned")

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


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Iterator[Any]:
    """`TritonKernel`, its program bound to the interpreter, which Triton decides when the module is imported."""
    names = [f"{PACKAGE}.fused", f"{PACKAGE}.triton_kernel"]
    package = sys.modules[PACKAGE]

    def forget() -> None:
        for name in names:
            sys.modules.pop(name, None)
            vars(package).pop(name.rpartition(".")[2], None)

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        module = importlib.import_module(names[1])
    assert module.interpreted()
    yield module.TritonKernel
    forget()


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


@pytest.mark.parametrize(
    ("family", "dtype", "layout"),
    [
        ("gqa", BF16, "joint"), ("gqa", F16, "per_layer"), ("mha", F32, "joint"), ("mla", BF16, "per_layer"),
        ("gpt-j", F16, "shared joint"), ("partial", BF16, "shared per_layer"), ("odd", F32, "per_layer"),
        ("mrope", BF16, "joint"), ("cycling", F32, "rank 0"), ("two-kinds", BF16, "dense"),
    ],
)  # fmt: skip
def test_rounds_once(family, dtype, layout):
    """Patched and moved behind a cut, moved alone, patched where it lies; a block of tokens that a part does not fill."""
    spec = FAMILIES[family]
    spans = [canonical(spec, tokens, seed, dtype) for seed, tokens in enumerate((19, 2, 3))]
    patches = [patch_of(spec, spans[i], name, 5, BF16) for i, name in ((0, layout), (2, "dense"))]
    close(
        [SpanSlice(spans[0], 3000, patches[0], 2), SpanSlice(spans[1], 77), SpanSlice(spans[2], 0, patches[1])],
        spec,
        dtype,
    )


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_load_is_the_reference_in_float64(data):
    spec = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
    parts = []
    for seed in range(data.draw(st.integers(1, 3))):
        tokens = data.draw(st.integers(1, 18))
        begin = data.draw(st.integers(0, tokens - 1))
        origin, patch = canonical(spec, tokens, seed), None
        if data.draw(st.booleans()):
            patch = patch_of(spec, origin, data.draw(st.sampled_from(LAYOUTS)), seed, layers=(0, 1))
        frame = data.draw(st.sampled_from([0, 0, 17, 4000]))
        start = data.draw(st.sampled_from([0, frame, 2500]))
        parts.append(SpanSlice(relocate(origin, spec, frame), start, patch, begin))
    first = data.draw(st.integers(0, spec.heads - 1))
    heads = data.draw(st.sampled_from([None, slice(first, first + 1)]))
    got = stack(LoadPlan(parts, spec, dtype=F64, heads=heads, kernel="triton"))
    for mine, want in zip(got, exact(parts, spec, heads), strict=True):
        assert mine.shape == want.shape and worst(mine, want) < 1e-12


def test_ranks_and_lengths_that_fill_no_block():
    """Ranks of none, one, less than a block of them, and two blocks and one; in one launch, on parts of odd lengths."""
    spec = make_spec(layers=1, heads=1, k_dim=16, v_dim=24)
    parts = []
    noise = torch.Generator().manual_seed(0)
    for seed, (rank, tokens) in enumerate([(0, 1), (1, 16), (8, 17), (33, 34)]):
        patch = Patch(
            "test-model", "joint", (0,), 1, 16, 24, rank, torch.randn(tokens, rank, generator=noise),
            torch.randn(1, rank, 40, generator=noise),
        )  # fmt: skip
        patch.validate()
        parts.append(SpanSlice(canonical(spec, tokens, seed, F32), 100 * seed, patch))
    close(parts, spec, F32)


@pytest.mark.parametrize("layout", ["joint", "dense"])
def test_ranks_of_a_tensor_parallel_group_hold_the_whole_together(layout):
    spec = FAMILIES["mha"]
    span = canonical(spec, 5, 1)
    parts = [SpanSlice(span, 60, patch_of(spec, span, layout, 3)), SpanSlice(span, 900)]
    shares = [stack(LoadPlan(parts, spec, dtype=F64, heads=h, kernel="triton")) for h in (slice(0, 1), slice(1, 3))]
    for share, whole in zip(zip(*shares, strict=True), exact(parts, spec), strict=True):
        assert worst(torch.cat(share, dim=2), whole) < 1e-12


def test_what_rests_is_bit_for_bit_what_is_stored():
    """Unmoved beside moved, unpatched beside patched, and in the layer that the patch does not cover."""
    spec = FAMILIES["odd"]
    rests, moves = canonical(spec, 6, 0, BF16), canonical(spec, 4, 1, BF16)
    plan = LoadPlan(
        [SpanSlice(rests, 0), SpanSlice(moves, 50, patch_of(spec, moves, "joint", 1, BF16)),
         SpanSlice(relocate(rests, spec, 9), 9)],
        spec, dtype=BF16, kernel="triton",
    )  # fmt: skip
    k, v = stack(plan)
    assert torch.equal(k[:, :6], rests.k) and torch.equal(v[:, :6], rests.v)
    assert torch.equal(k[:, 10:], relocate(rests, spec, 9).k) and torch.equal(v[:, 10:], rests.v)
    assert torch.equal(v[1, 6:10], moves.v[1]) and not torch.equal(v[0, 6:10], moves.v[0])


def test_rounds_to_bfloat16_as_torch_does():
    """Ties, carries into the exponent, overflow, subnormal results, signed zeros, infinities; NaN stays NaN."""
    spec = make_spec(layers=1, heads=1, k_dim=2, v_dim=64)
    bits = torch.randint(-(2**31), 2**31 - 1, (16, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    ends = [0x8000, 0x18000, 0x7FFF, 0x8001, 0x17FFF, 0xFFFF, 0x10000, 0]
    bits[0] = torch.tensor([(0x3F80 + i) << 16 | end for i in range(8) for end in (e & 0xFFFF for e in ends)])
    bits[1, :8] = torch.tensor([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x80000000, 0])
    wide = bits.to(torch.int32).view(F32).reshape(1, 16, 1, 64)
    span = SpanKV(torch.zeros(1, 16, 1, 2), wide, torch.zeros(3, 16, dtype=torch.int64), 0)
    _, got = LoadPlan([SpanSlice(span, 7)], spec, dtype=BF16, kernel="triton").layer(0)
    want = wide[0].to(BF16)
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(got.view(torch.int16)[number], want.view(torch.int16)[number])


@pytest.mark.parametrize("stored, served", [(F32, BF16), (BF16, F32), (F64, F16)])
def test_served_in_another_dtype_than_stored(stored, served):
    """Rounded once, from the sum; parts that are stored in two dtypes at once."""
    spec = FAMILIES["mrope"]
    spans = canonical(spec, 5, 0, stored), canonical(spec, 3, 1, BF16)
    close([SpanSlice(spans[0], 40, patch_of(spec, spans[0], "joint", 2, F64)), SpanSlice(spans[1], 9)], spec, served)


@pytest.mark.parametrize("staged_bytes", [0, 32 << 20], ids=["one by one", "at once"])
def test_leaves_what_is_stored_alone_and_takes_any_order_of_layers(staged_bytes, monkeypatch):
    monkeypatch.setattr(sys.modules[f"{PACKAGE}.triton_kernel"], "STAGED_BYTES", staged_bytes)
    spec = FAMILIES["gqa"]
    span = canonical(spec, 8, 0, F32)
    patch = patch_of(spec, span, "joint", 1, F32)
    assert patch.right is not None
    tensors = span.k, span.v, span.positions, patch.left, patch.right
    stored = [x.clone() for x in tensors]
    plan = LoadPlan([SpanSlice(span, 700, patch), SpanSlice(span, 0)], spec, dtype=F32, kernel="triton")
    k, v = stack(plan)
    for i in (1, 0, 0):
        again = plan.layer(i)
        assert torch.equal(again[0], k[i]) and torch.equal(again[1], v[i])
    assert all(torch.equal(before, after) for before, after in zip(stored, tensors, strict=True))


def test_layers_are_staged_through_two_host_buffers(kernel, monkeypatch):
    """As on a GPU, which a second buffer and a list of events play: no buffer is filled while its copy may be under way."""
    events: list[str] = []

    class Event:
        made = 0

        def __init__(self) -> None:
            self.name, Event.made = Event.made, Event.made + 1

        def record(self, stream: Any) -> None:
            events.append(f"copied {self.name}")

        def synchronize(self) -> None:
            events.append(f"wait {self.name}")

    played = SimpleNamespace(
        empty=lambda size, dtype, **where: torch.empty(size, dtype=dtype), uint8=torch.uint8, dtype=torch.dtype,
        cuda=SimpleNamespace(Event=Event, current_stream=lambda device: None),
    )  # fmt: skip
    staging = importlib.import_module(f"{PACKAGE}.staging")
    monkeypatch.setattr(staging, "torch", played)
    module = sys.modules[f"{PACKAGE}.triton_kernel"]
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(module, "Staging", lambda fields, device: staging.Staging(fields, gpu))
    monkeypatch.setattr(module, "STAGED_BYTES", 0)
    spec = make_spec(layers=3, heads=1, k_dim=8, v_dim=8)
    span = canonical(spec, 4, 0, F32)
    close([SpanSlice(span, 60, patch_of(spec, span, "joint", 1, F32, layers=(1,)))], spec, F32)
    assert events == ["wait 1", "copied 1", "wait 0", "copied 0", "wait 1", "copied 1"]


SIZE = 16


def caches(spec: KVSpec, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Empty caches of three blocks as backends lay them out, with views ``[blocks, SIZE, heads, dim]`` of keys, values."""
    heads, k, v = spec.heads, spec.k_dim, spec.v_dim
    hnd = torch.zeros(3, heads, SIZE, k + v, dtype=dtype)
    nhd = torch.zeros(3, SIZE, heads, k + v, dtype=dtype).transpose(1, 2)  # the same shape, strided otherwise
    beside = torch.zeros(3, 2, SIZE, heads, k + v, dtype=dtype)[:, 0].transpose(1, 2)  # another layer's blocks between
    turned = torch.zeros(3, heads, (k + v) * SIZE, dtype=dtype)  # keys as [dim, SIZE], then values as [SIZE, dim]
    keys = turned[..., : k * SIZE].unflatten(2, (k, SIZE)).permute(0, 3, 1, 2)
    values = turned[..., k * SIZE :].unflatten(2, (SIZE, v)).transpose(1, 2)
    views = {
        name: (x, *(y.transpose(1, 2) for y in x.split([k, v], dim=-1)))
        for name, x in (("HND", hnd), ("NHD", nhd), ("strided", beside))
    }
    return views | {"transposed keys": (turned, keys, values)}


def places(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Where each number of a block lies in it, as `PagedKV` learns it: by writing its index."""
    cut = keys[0].numel()
    keys[0] = torch.arange(cut).view(keys[0].shape)
    values[0] = torch.arange(cut, cut + values[0].numel()).view(values[0].shape)
    found = cache[0].reshape(-1).to(torch.int64)
    cache.zero_()
    return found.argsort()


@pytest.mark.parametrize(
    ("layout", "family"), [("HND", "gqa"), ("NHD", "mla"), ("strided", "gqa"), ("transposed keys", "odd")]
)
def test_writes_the_slots_of_a_paged_cache(layout, family):
    spec = FAMILIES[family]
    cache, keys, values = caches(spec, F32)[layout]
    lines = CacheStrides.find(cache, places(cache, keys, values), SIZE, spec.heads, (spec.k_dim, spec.v_dim))
    assert lines is not None
    span = canonical(spec, 9, 0, F32)
    plan = LoadPlan(
        [SpanSlice(span, 800, patch_of(spec, span, "joint", 1, F32)), SpanSlice(span, 3)],
        spec,
        dtype=F32,
        kernel="triton",
    )
    slots = torch.randperm(3 * SIZE, generator=torch.Generator().manual_seed(1))
    mine, others = slots[:18], slots[18:]
    second, *views = caches(spec, F32)[layout]
    plan.store(0, [cache, second], lines, mine)
    for i, pair in enumerate([(keys, values), views]):
        for written, want in zip(pair, plan.layer(i), strict=True):
            assert torch.equal(written[mine // SIZE, mine % SIZE], want)
            assert not written[others // SIZE, others % SIZE].any()


def test_a_packing_in_tiles_has_no_lines():
    """Pairs of tokens interleaved, as matrix units like it."""
    spec = FAMILIES["gqa"]
    block = torch.arange(SIZE * spec.heads * 32).view(SIZE // 2, spec.heads, 32, 2).permute(0, 3, 1, 2)
    keys, values = block.flatten(0, 1).split(16, dim=-1)
    found = torch.cat([keys.reshape(-1), values.reshape(-1)])
    cache = torch.zeros(2, SIZE, spec.heads, 32)
    assert CacheStrides.find(cache, found, SIZE, spec.heads, (16, 16)) is None


def test_refuses_what_does_not_fit_a_cache():
    spec = FAMILIES["gqa"]
    cache, keys, values = caches(spec, F32)["NHD"]
    lines = CacheStrides.find(cache, places(cache, keys, values), SIZE, spec.heads, (16, 16))
    assert lines is not None
    parts = [SpanSlice(canonical(spec, 4, 0, F32), 5)]
    plan = LoadPlan(parts, spec, dtype=F32, kernel="triton")
    assert plan.stores and not LoadPlan(parts, spec, dtype=F32).stores
    with pytest.raises(ValueError, match=r"must hold torch.float32 and there must be 4 slots .* and 3 on cpu"):
        plan.store(0, [cache], lines, torch.arange(3))
    with pytest.raises(ValueError, match=r"got torch.bfloat16 on cpu"):
        plan.store(0, [cache.to(BF16)], lines, torch.arange(4))
    with pytest.raises(IndexError, match=r"\[0, 2\)"):
        plan.store(1, [cache, cache], lines, torch.arange(4))


class TestResident:
    """Parts that are read where they lie on the device, which is the processor's memory here."""

    @settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_what_is_resident_is_served_as_what_is_staged(self, kernel, data):
        """To the bit: beside parts that are staged, cut, patched, a share of the heads, in one launch or one a layer."""
        spec = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
        spans = [canonical(spec, data.draw(st.integers(1, 18)), seed, BF16) for seed in range(3)]
        parts = []
        for seed in range(data.draw(st.integers(1, 4))):
            span = spans[data.draw(st.integers(0, 2))]
            begin = data.draw(st.integers(0, span.tokens - 1))
            patch = patch_of(spec, span, "joint", seed, BF16) if data.draw(st.booleans()) else None
            parts.append(SpanSlice(span, data.draw(st.integers(0, 3000)), patch, begin))
        first = data.draw(st.integers(0, spec.heads - 1))
        heads = data.draw(st.sampled_from([slice(0, spec.heads), slice(first, first + 1)]))
        copies = ResidentSpans(1 << 20, torch.device("cpu"), heads, range(spec.layers))
        attached = [
            new if data.draw(st.booleans()) else old for old, new in zip(parts, copies.attach(parts), strict=True)
        ]
        staged_bytes = data.draw(st.sampled_from([0, 32 << 20]))
        with pytest.MonkeyPatch.context() as patch_of_module:
            patch_of_module.setattr(sys.modules[f"{PACKAGE}.triton_kernel"], "STAGED_BYTES", staged_bytes)
            got, want = (
                stack(LoadPlan(some, spec, dtype=BF16, heads=heads, kernel="triton")) for some in (attached, parts)
            )
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])

    def test_a_copy_is_made_once_and_goes_with_its_span(self):
        spec = FAMILIES["gqa"]
        spans = [canonical(spec, 4, seed, F32) for seed in range(4)]
        one = spans[0].nbytes
        copies = ResidentSpans(3 * one, torch.device("cpu"), slice(None), range(spec.layers))
        for _ in range(3):
            attached = copies.attach([SpanSlice(span, 7) for span in spans[:3]])
            assert all(part.resident is not None for part in attached)
        assert copies.nbytes == copies.copied_bytes == 3 * one
        assert [part.resident is None for part in copies.attach([SpanSlice(span, 7) for span in spans])] == [
            False, False, False, True,
        ], "nothing leaves that the same load reads"  # fmt: skip
        copies.attach([SpanSlice(spans[1], 0), SpanSlice(spans[3], 0)])
        assert copies.copied_bytes == 4 * one and copies.nbytes == 3 * one
        assert copies.attach([SpanSlice(spans[2], 0)])[0].resident is not None
        assert copies.copied_bytes == 4 * one, "the least recently used one left"
        del spans[1:], attached
        copies.attach([SpanSlice(spans[0], 0)])
        assert copies.nbytes == one

    def test_what_was_read_on_the_device_is_kept_there(self):
        spec = FAMILIES["gqa"]
        span = canonical(spec, 4, 0, F32)
        copies = ResidentSpans(span.nbytes, torch.device("cpu"), slice(None), range(spec.layers))
        copies.keep(span, span.k, span.v)
        assert copies.attach([SpanSlice(span, 7)])[0].resident is not None and not copies.copied_bytes
        other = canonical(spec, 4, 1, F32)
        copies.keep(other, other.k, other.v)
        assert copies.nbytes == span.nbytes
        copies.clear()
        assert not copies.nbytes

    def test_equal_numbers_of_another_tensor_are_another_span(self):
        """A copy is never found by a name or a place in memory that a later span has as well."""
        spec = FAMILIES["gqa"]
        copies = ResidentSpans(1 << 20, torch.device("cpu"), slice(None), range(spec.layers))
        for seed in range(50):
            span = canonical(spec, 2, seed, F32)
            resident = copies.attach([SpanSlice(span, 0)])[0].resident
            assert resident is not None and torch.equal(resident.k, span.k) and torch.equal(resident.v, span.v)
            del span
        assert copies.nbytes <= resident.nbytes

    def test_no_memory_of_the_device_is_no_failure(self, monkeypatch, caplog):
        spec = FAMILIES["gqa"]
        copies = ResidentSpans(1 << 20, torch.device("cpu"), slice(None), range(spec.layers))

        def fail(rows: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(copies, "_upload", fail)
        assert copies.attach([SpanSlice(canonical(spec, 2, 0, F32), 0)])[0].resident is None
        assert copies.max_bytes == 0 and "no memory of cpu" in caplog.text

    def test_refuses_copies_of_another_shape(self):
        spec = FAMILIES["mha"]
        span = canonical(spec, 3, 0, F32)
        wrong = SpanSlice(span, 0, resident=ResidentKV(span.k[:, 1:].clone(), span.v))
        with pytest.raises(ValueError, match=r"contiguous \[layers, 3, 3, 8\] on cpu, got \(2, 2, 3, 8\)"):
            LoadPlan([wrong], spec, dtype=F32, kernel="triton")


class TestPagedKV:
    """`PagedKV` with the kernel that writes slots itself, on backends of the test's own."""

    class Backend:
        """``[blocks, heads, SIZE, dims]`` seen as ``[blocks, SIZE, heads, dims]``, keys beside values."""

        def do_kv_cache_update(self, layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: Any):
            cache.transpose(1, 2)[slots // SIZE, slots % SIZE] = torch.cat([k, v], dim=-1)

    class InPairs(Backend):
        """Tokens interleaved two by two."""

        def do_kv_cache_update(self, layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: Any):
            pairs = cache.transpose(1, 2).flatten(2).view(len(cache), SIZE // 2, -1, 2)
            at = slots % SIZE
            pairs[slots // SIZE, at // 2, :, at % 2] = torch.cat([k, v], dim=-1).flatten(1)

    def paged(self, backend: Any, spec: KVSpec) -> Any:
        from ctxwin_vllm.paged import PagedKV

        caches = [torch.zeros(3, SIZE, spec.heads, spec.k_dim + spec.v_dim).transpose(1, 2) for _ in range(2)]
        layers = {
            f"model.layers.{i}.attn": SimpleNamespace(kv_cache=cache, impl=backend, kv_cache_dtype="auto")
            for i, cache in enumerate(caches)
        }
        return PagedKV(layers, spec, SIZE, kernel="triton")

    @pytest.mark.parametrize("direct", [True, False])
    def test_what_is_written_is_read_back(self, direct, monkeypatch):
        spec = FAMILIES["gqa"]
        paged = self.paged(self.Backend() if direct else self.InPairs(), spec)
        assert paged.kernel == "triton" and paged.direct == direct
        span = canonical(spec, 7, 0, F32)
        parts = [SpanSlice(span, 33, patch_of(spec, span, "joint", 1, F32)), SpanSlice(span, 0)]
        plan = LoadPlan(parts, spec, dtype=F32, kernel=paged.kernel)
        if direct:
            monkeypatch.setattr(plan, "layer", None)
        assert paged.write(plan, paged.slots([2, 1], 9, 23)) == plan.nbytes
        for got, want in zip(paged.read([2, 1], 9, 23), exact(parts, spec), strict=True):
            assert worst(got, want) < 1e-6
        slow = LoadPlan(parts, spec, dtype=F32, kernel="cpu")  # no store of its own: by the backend's
        paged.write(slow, paged.slots([2, 1], 9, 23))
        assert torch.equal(torch.cat(paged.read([2, 1], 9, 23), 3), torch.cat(stack(slow), 3))

    def test_what_was_loaded_once_is_read_where_it_lies(self, monkeypatch):
        monkeypatch.setenv(RESIDENT_BYTES, str(1 << 20))
        spec = FAMILIES["gqa"]
        paged = self.paged(self.Backend(), spec)
        spans = [canonical(spec, 5, seed, F32) for seed in range(3)]
        want = [exact([SpanSlice(span, 10)], spec) for span in spans]
        stored = [span.k.clone() for span in spans]
        for turn in range(2):
            for span, oracle in zip(spans, want, strict=True):
                paged.write(paged.plan([SpanSlice(span, 10)], spec, None), paged.slots([turn], 0, 5))
                for got, wanted in zip(paged.read([turn], 0, 5), oracle, strict=True):
                    assert worst(got, wanted) < 1e-6
                span.k.zero_()  # what crosses again would be zeros
        assert paged.resident is not None and paged.resident.copied_bytes == sum(span.nbytes for span in spans)
        assert not any(torch.equal(span.k, k) for span, k in zip(spans, stored, strict=True))
        monkeypatch.setenv(RESIDENT_BYTES, "4 GB")
        with pytest.raises(ValueError, match="CTXWIN_RESIDENT_BYTES must be a number of bytes, got '4 GB'"):
            self.paged(self.Backend(), spec).plan([SpanSlice(spans[0], 0)], spec, None)

    def test_a_write_that_misses_its_slots_is_not_used(self, kernel, monkeypatch, caplog):
        right = kernel.store
        monkeypatch.setattr(
            kernel, "store", lambda self, i, cache, lines, slots: right(self, i, cache, lines, slots ^ 1)
        )
        monkeypatch.setattr(choice, "_faults", [])
        with caplog.at_level(logging.WARNING, "ctxwin.engines"):
            paged = self.paged(self.Backend(), FAMILIES["gqa"])
        assert not paged.direct and len(caplog.records) == len(choice.faults()) == 1
        assert "does not write the paged cache itself on cpu: keys of layer 0 are" in choice.faults()[0]


class TestChoice:
    """`choose` where there is a GPU, which the interpreter plays: its kernel runs on the CPU whatever the device's name."""

    GPU = torch.device("cuda", 0)

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch) -> None:
        monkeypatch.setattr(choice, "_good", {})
        monkeypatch.setattr(choice, "_faults", [])
        monkeypatch.delenv(choice.KERNEL, raising=False)

    def at(self, monkeypatch, kernel: Any) -> None:
        """Trials of ``kernel`` run on the CPU."""
        cpu = torch.device("cpu")
        module = sys.modules[f"{PACKAGE}.triton_kernel"]
        monkeypatch.setattr(
            module, "TritonKernel", lambda *args, **options: kernel(*args, **{**options, "device": cpu})
        )

    def test_by_device_argument_and_environment(self, kernel, monkeypatch):
        spec = FAMILIES["partial"]
        assert choose(spec, F32, torch.device("cpu")) == "cpu"
        self.at(monkeypatch, kernel)
        assert choose(spec, F32, self.GPU) == "triton" and not choice.faults()
        assert choose(spec, F32, self.GPU, kernel="reference") == "reference"
        monkeypatch.setenv(choice.KERNEL, "cpu")
        assert choose(spec, F32, self.GPU) == "cpu"
        assert choose(spec, F32, self.GPU, kernel="triton") == "triton"
        monkeypatch.setenv(choice.KERNEL, "cuda")
        with pytest.raises(ValueError, match="must be one of cpu, reference, triton, got 'cuda' in CTXWIN_KERNEL"):
            choose(spec, F32, torch.device("cpu"))

    def test_no_triton(self, monkeypatch):
        monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
        assert choose(FAMILIES["gqa"], F32, self.GPU) == "cpu" and not choice.faults()

    @pytest.mark.parametrize("wrong", ["keys", "values", "nan", "compiler"])
    def test_a_fault_is_logged_once_and_counted(self, wrong, kernel, monkeypatch, caplog):
        spec = FAMILIES["partial"]

        class Wrong(kernel):
            def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
                k, v = super().layer(i)
                if wrong == "compiler":
                    raise RuntimeError("out of registers")
                if wrong == "nan":
                    v[-1, 0, -1] = torch.nan
                else:
                    (k if wrong == "keys" else v).mul_(1 + 2.0**-10)  # tf32's unit
                return k, v

        self.at(monkeypatch, Wrong)
        with caplog.at_level(logging.WARNING, "ctxwin.engines"):
            assert [choose(spec, F32, self.GPU) for _ in range(2)] == ["cpu", "cpu"]
        assert len(caplog.records) == len(choice.faults()) == 1
        said = {"compiler": "RuntimeError: out of registers", "nan": "values of layer 0 are nan"}.get(wrong, wrong)
        assert f"not used on cuda:0 for torch.float32: {said}" in choice.faults()[0]


def test_a_cpu_needs_the_interpreter(kernel, monkeypatch):
    spec = FAMILIES["gqa"]
    module = sys.modules[f"{PACKAGE}.triton_kernel"]
    monkeypatch.setattr(module, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="kernel triton must run on a GPU, got device cpu"):
        LoadPlan([SpanSlice(canonical(spec, 2, 0), 0)], spec, dtype=F64, kernel="triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("factors", ["bf16", "fp32"])
def test_compiles_for_gpus(capability, factors):
    """To machine code, without a GPU: a patched paged load of bfloat16 with heads of 128. Factors of 16 bits are multiplied by
    matrix units; those of 32 are not, which would be in tf32."""
    narrow = factors == "bf16"
    code = f"""
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ctxwin.kv.kernels.fused import FIELDS, TARGETS, load_layers
fixed = dict(FIELDS=FIELDS, TARGETS=TARGETS, HEADS=4, K_DIM=128, V_DIM=128, WIDTH=1024, HALF=64, STEP=1, OFFSET=64,
             REST=0, TASKS=3, PATCHED=True, FRAMED=True, PAGED=True, NARROW={narrow}, ALIGNMENT=16, PART_ALIGNMENT=16,
             BLOCK_SIZE=16, COMPUTE=tl.float32, STORED=tl.bfloat16, OUT=tl.bfloat16, BLOCK_T=16,
             BLOCK_HALF=64, BLOCK_REST=16, BLOCK_V=64, BLOCK_R=16)
types = ["*{factors}"] + ["*i64"] * 3 + ["*fp32"] * 2 + ["*i64"] + ["i32"] * 13
names = load_layers.arg_names
signature = dict(zip(names, types)) | dict.fromkeys(fixed, "constexpr")
assert list(signature) == names
built = triton.compile(ASTSource(load_layers, signature, fixed), target=GPUTarget("cuda", {capability}, 32))
code = built.asm["ptx"]
assert built.asm["cubin"] and "fma.rn.f32" in code and ("mma" in code) == {narrow} and "tf32" not in code
print("compiled")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "compiled", done.stderr


WINDOW = """
import json, ctxwin
from ctxwin import Chunk, Fidelity, Window
from ctxwin.kv.kernels import choice
with ctxwin.open_engine("tiny") as engine:
    window = Window(engine, system_prompt="H", budget=400, fidelity=Fidelity(mode="patched", rank=4))
    first, *_ = [window.append(Chunk.text(text)) for text in ("red cube left", "blue ball right", "green cone")]
    window.ask("red?", max_tokens=1)
    window.evict(first)
    answer = window.ask("blue?", max_tokens=1, logprobs=5)
    paged = engine._core.transport.paged
    loads = answer.usage.bytes_loaded, answer.usage.reused_tokens
    print(json.dumps([paged.kernel, paged.direct, choice.faults(), loads, answer.first_token_logprobs]))
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_a_window_on_vllm_answers_as_with_the_cpu_kernel():
    """vLLM's own paged cache, written slot by slot by the kernel: keys of its CPU attention lie transposed there."""
    said = {}
    for name in ("triton", "cpu"):
        env = {**os.environ, "CTXWIN_KERNEL": name, "TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, "-c", WINDOW], capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        said[name] = json.loads(done.stdout.splitlines()[-1])
    assert said["triton"][0] == "triton" and not said["triton"][2]
    loads, logprobs = said["triton"][3:]
    assert loads == said["cpu"][3] and loads[0] > 0 and "survivor" in loads[1]
    assert logprobs.keys() == said["cpu"][4].keys()
    assert all(abs(logprobs[token] - other) < 1e-4 for token, other in said["cpu"][4].items())
