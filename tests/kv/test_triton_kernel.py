"""The Triton load kernel against the reference, under Triton's interpreter: the same program, with numpy as its processor.

What only a compiler can tell stands at the end: that the kernel compiles for the GPUs it is meant for. No test here runs
it on one; `choice.trial` does, wherever an engine starts on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import LAYOUTS, canonical, stack
from operator_oracle import make_spec, worst
from triton_cases import BF16, F16, F32, F64, FAMILIES, PACKAGE, close, exact, patch_of

from ctxwin.kv.kernels import LoadPlan, SpanSlice
from ctxwin.kv.kernels.parts import ResidentKV
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import Patch
from ctxwin.kv.relocate import relocate
from ctxwin_vllm.resident import ResidentSpans

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned", "kernel")


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
        copies = ResidentSpans(torch.device("cpu"), range(spec.layers), 1 << 20)
        attached = [
            new if data.draw(st.booleans()) else old
            for old, new in zip(parts, copies.attach(parts, heads), strict=True)
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
        copies = ResidentSpans(torch.device("cpu"), range(spec.layers), 3 * one)
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
        copies = ResidentSpans(torch.device("cpu"), range(spec.layers), span.nbytes)
        copies.keep(span.origin, span.k, span.v)
        assert copies.attach([SpanSlice(span, 7)])[0].resident is not None and not copies.copied_bytes
        other = canonical(spec, 4, 1, F32)
        copies.keep(other.origin, other.k, other.v)
        assert copies.nbytes == span.nbytes
        copies.clear()
        assert not copies.nbytes

    def test_what_lies_in_page_locked_memory_crosses_from_there(self, monkeypatch):
        """As KV that was read back does; staging it would take page-locked memory, which this machine has none of."""
        spec = FAMILIES["gqa"]
        copies = ResidentSpans(torch.device("meta"), range(spec.layers), 1 << 20)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
        span = canonical(spec, 4, 0, F32)
        (part,) = copies.attach([SpanSlice(span, 7)])
        assert (
            part.resident is not None and part.resident.k.device.type == "meta" and copies.copied_bytes == span.nbytes
        )

    def test_equal_numbers_of_another_tensor_are_another_span(self):
        """A copy is never found by a name or a place in memory that a later span has as well."""
        spec = FAMILIES["gqa"]
        copies = ResidentSpans(torch.device("cpu"), range(spec.layers), 1 << 20)
        for seed in range(50):
            span = canonical(spec, 2, seed, F32)
            resident = copies.attach([SpanSlice(span, 0)])[0].resident
            assert resident is not None and torch.equal(resident.k, span.k) and torch.equal(resident.v, span.v)
            del span
        assert copies.nbytes <= resident.nbytes

    def test_no_memory_of_the_device_is_no_failure(self, monkeypatch, caplog):
        spec = FAMILIES["gqa"]
        copies = ResidentSpans(torch.device("cpu"), range(spec.layers), 1 << 20)

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
