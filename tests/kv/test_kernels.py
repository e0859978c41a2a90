"""The load kernel against its reference, against float64 and an oracle that shares no code with either."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import LAYOUTS, canonical, patch_of, stack
from operator_oracle import make_spec, placed, plain_rope, random_positions, random_span, specs, with_kinds, worst

from ctxwin.kv import rope
from ctxwin.kv.kernels import LoadPlan, SpanSlice
from ctxwin.kv.layout import KVSpec, LayerKind
from ctxwin.kv.relocate import relocate
from ctxwin.kv.rope import angles, rotation_table
from measure_kernels import main

pytestmark = pytest.mark.usefixtures("poisoned")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
FAMILIES = {
    "gqa": make_spec(heads=2, k_dim=16, v_dim=16),
    "mha": make_spec(heads=6, k_dim=8, v_dim=12, family="mha"),
    "mla": make_spec(heads=1, k_dim=16, v_dim=40, rope=plain_rope(16, pairing="interleaved"), family="mla"),
    "gpt-j": make_spec(heads=3, k_dim=16, v_dim=16, rope=plain_rope(12, pairing="interleaved")),
    "partial": make_spec(heads=2, k_dim=16, v_dim=16, rope=plain_rope(8)),
    "odd": make_spec(heads=2, k_dim=9, v_dim=5, rope=plain_rope(8, pairing="interleaved")),
    "mrope": make_spec(heads=2, k_dim=16, v_dim=16, rope=plain_rope(16, sections=(2, 3, 3))),
    "rows": replace(
        make_spec(heads=1, k_dim=32, v_dim=32, rope=plain_rope(16)),
        kinds=(LayerKind((0, 2), plain_rope(16), 2, 16), LayerKind((1,), plain_rope(32, 1e6), 1, 32)),
    ),
    "two-kinds": with_kinds(make_spec(heads=2, k_dim=16, v_dim=16)),
    "cycling": make_spec(heads=2, k_dim=16, v_dim=16, rope=plain_rope(16, sections=(4, 2, 2), mrope_interleaved=True)),
}


def both(parts: list[SpanSlice], spec: KVSpec, **options) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    return stack(LoadPlan(parts, spec, **options)), stack(LoadPlan(parts, spec, kernel="reference", **options))


def three_parts(spec: KVSpec, dtype: torch.dtype, layout: str) -> list[SpanSlice]:
    """One moved and patched, one moved, one that stays and is patched; the first is cut at both ends."""
    spans = [canonical(spec, tokens, seed, dtype) for seed, tokens in enumerate((13, 7, 6))]
    patches = [patch_of(spec, span, layout, 5, dtype=BF16, layers=(0, 2)) for span in (spans[0], spans[2])]
    return [SpanSlice(spans[0], 3000, patches[0], 2, 11), SpanSlice(spans[1], 77), SpanSlice(spans[2], 0, patches[1])]


@st.composite
def loads(draw) -> tuple[KVSpec, list[SpanSlice], slice | None]:
    """Parts of every kind on any layout: frames, places, cuts, patches, heads."""
    spec = draw(specs())
    parts = []
    for seed in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 9))
        begin = draw(st.integers(0, tokens - 1))
        end = draw(st.sampled_from([None, *range(begin + 1, tokens + 1)]))
        origin = canonical(spec, tokens, seed)
        frame = draw(st.sampled_from([0, 0, 0, 17, 4000]))
        patch = None
        if draw(st.booleans()):
            layers = draw(st.sampled_from(["all", "deep", (0,), ()]))
            patch = patch_of(spec, origin, draw(st.sampled_from(LAYOUTS)), seed, layers=layers)
        span = relocate(origin, spec, frame)
        parts.append(SpanSlice(span, draw(st.sampled_from([0, frame, 3, 2500])), patch, begin, end))
    first = draw(st.integers(0, spec.heads - 1))
    heads = draw(st.sampled_from([None, slice(first, draw(st.integers(first + 1, spec.heads)))]))
    return spec, parts, heads


@settings(max_examples=100, deadline=None)
@given(loads())
def test_every_load_is_the_reference_in_float64(load):
    spec, parts, heads = load
    (k, v), (want_k, want_v) = both(parts, spec, dtype=F64, heads=heads)
    assert k.shape == want_k.shape and v.shape == want_v.shape
    assert worst(k, want_k) < 1e-12
    assert worst(v, want_v) < 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_once(family, dtype, layout):
    """No further from float64 than one rounding to the served dtype and float32's own arithmetic."""
    spec = FAMILIES[family]
    parts = three_parts(spec, dtype, layout)
    wide = [replace(p, span=replace(p.span, k=p.span.k.double(), v=p.span.v.double())) for p in parts]
    want = stack(LoadPlan(wide, spec, dtype=F64, kernel="reference"))
    unit = torch.finfo(dtype).eps / 2
    for kernel in ("cpu", "llvm", "reference"):
        served = stack(LoadPlan(parts, spec, dtype=dtype, kernel=kernel))
        for got, exact in zip(served, want, strict=True):
            assert got.dtype == dtype and got.is_contiguous()
            away = (got.double() - exact).abs()
            assert float((away - unit * exact.abs()).max()) < 2e-6 * float(exact.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_rotation_is_the_oracles(family):
    """Numpy's complex float64 rotation of keys that never turned, at the places where they are served."""
    spec = FAMILIES[family]
    raws = [random_span(spec, 9, seed, positions=random_positions(9, seed)) for seed in (1, 2)]
    parts = [SpanSlice(placed(spec, raws[0], 0), 4000, begin=3), SpanSlice(placed(spec, raws[1], 55), 9)]
    k, v = stack(LoadPlan(parts, spec, dtype=F64))
    want = [placed(spec, raw, p.start).k for raw, p in zip(raws, parts, strict=True)]
    assert worst(k, torch.cat([want[0][:, 3:], want[1]], dim=1)) < 1e-12
    assert torch.equal(v, torch.cat([raws[0].v[:, 3:], raws[1].v], dim=1))


def test_long_context_in_float32():
    spec = make_spec(layers=2, heads=2, k_dim=64, v_dim=8, rope=plain_rope(64, 1e6))
    raw = random_span(spec, 200, 1, dtype=F32)
    k, _ = stack(LoadPlan([SpanSlice(placed(spec, raw, 0), 32000)], spec, dtype=F32))
    assert worst(k, placed(spec, raw, 32000).k) < 2e-6


@pytest.mark.parametrize("stored, served", [(F32, BF16), (BF16, F32), (F64, BF16), (BF16, F64)])
def test_served_in_another_dtype_than_stored(stored, served):
    """Rounded once, from the sum, and not to the stored dtype on the way."""
    spec = FAMILIES["gqa"]
    (k, v), (want_k, want_v) = both(three_parts(spec, stored, "joint"), spec, dtype=served)
    for got, want in ((k, want_k), (v, want_v)):
        assert got.dtype == served
        # Two sums in float32 that differ in their last digit may fall on different sides of a rounding.
        assert float((got.double() - want.double()).abs().max()) <= 2 * float(
            want.abs().max().double() * max(torch.finfo(served).eps / 2, 2.0**-22)
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["mha", "gpt-j"])
def test_ranks_hold_the_whole_together(family, layout):
    spec = FAMILIES[family]
    parts = three_parts(spec, F64, layout)
    k, v = stack(LoadPlan(parts, spec, dtype=F64))
    for cut in (1, 2):
        shares = [stack(LoadPlan(parts, spec, dtype=F64, heads=heads)) for heads in (slice(0, cut), slice(cut, None))]
        assert worst(torch.cat([share[0] for share in shares], dim=2), k) < 1e-13
        assert worst(torch.cat([share[1] for share in shares], dim=2), v) < 1e-13


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_segments_are_the_whole(dtype):
    """A prefix hit that ends anywhere in a span changes nothing about the tokens behind it."""
    spec = FAMILIES["mrope"]
    span = canonical(spec, 12, 3, dtype)
    whole = stack(LoadPlan([SpanSlice(span, 901)], spec, dtype=dtype))
    cuts = [SpanSlice(span, 901, None, a, b) for a, b in ((0, 1), (1, 8), (8, None))]
    for one, many in zip(whole, stack(LoadPlan(cuts, spec, dtype=dtype)), strict=True):
        assert torch.equal(one, many)


def test_what_needs_no_work_is_not_copied():
    spec = FAMILIES["gqa"]
    span = canonical(spec, 6, 0, BF16)
    k, v = LoadPlan([SpanSlice(span, 0, begin=1)], spec, dtype=BF16, kernel="cpu").layer(2)
    assert k.data_ptr() == span.k[2, 1:].data_ptr() and v.data_ptr() == span.v[2, 1:].data_ptr()
    k, v = LoadPlan([SpanSlice(span, 40)], spec, dtype=BF16, kernel="cpu").layer(2)
    assert k.data_ptr() != span.k[2].data_ptr() and v.data_ptr() == span.v[2].data_ptr()
    # Neither a share of the heads nor another dtype can be served as it lies.
    for plan in (
        LoadPlan([SpanSlice(span, 0)], spec, dtype=BF16, heads=slice(1, 2)),
        LoadPlan([SpanSlice(span, 0)], spec, dtype=F32),
    ):
        k, v = plan.layer(2)
        assert k.is_contiguous() and v.is_contiguous()
        assert torch.equal(k.to(BF16), span.k[2][:, -k.shape[1] :]) and torch.equal(
            v.to(BF16), span.v[2][:, -v.shape[1] :]
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("far", [0, 20_000], ids=["near", "far"])
def test_rounds_once_in_frames_behind_a_header(far, family, dtype, layout):
    """What is added to keys outside the canonical frame turns there token by token, as the engine rounds each angle."""
    spec = FAMILIES[family]
    parts, wide = [], []
    for i, (part, frame) in enumerate(zip(three_parts(spec, F64, layout), (50, 50, 31), strict=True)):
        origin = replace(part.span, positions=part.span.positions + (far if i == 0 else 0))
        exact = relocate(origin, spec, frame)
        span = replace(exact, k=exact.k.to(dtype), v=exact.v.to(dtype))
        patch = None if part.patch is None else patch_of(spec, origin, layout, 5, dtype=dtype, layers=(0, 2))
        parts.append(replace(part, span=span, patch=patch))
        wide.append(replace(part, span=replace(span, k=span.k.double(), v=span.v.double()), patch=patch))
    want = stack(LoadPlan(wide, spec, dtype=F64, kernel="reference"))
    unit = torch.finfo(dtype).eps / 2
    for got, exact_values in zip(stack(LoadPlan(parts, spec, dtype=dtype)), want, strict=True):
        away = (got.double() - exact_values).abs()
        assert float((away - unit * exact_values.abs()).max()) < 1e-5 * float(exact_values.abs().max())


@pytest.mark.parametrize("family", ["gqa", "mla"])
@pytest.mark.parametrize("frame", [0, 50])
@pytest.mark.parametrize("served", [F32, BF16])
def test_leaves_what_is_stored_alone(served, family, frame):
    """Also in float32, where summing in place in the stored tensors would be possible."""
    spec = FAMILIES[family]
    origin = canonical(spec, 8, 0, F32)
    span, patch = relocate(origin, spec, frame), patch_of(spec, origin, "joint", 1, dtype=F32, layers=(1,))
    assert patch.right is not None
    stored = [x.clone() for x in (span.k, span.v, span.positions, patch.left, patch.right)]
    for start in (frame, 700):
        stack(LoadPlan([SpanSlice(span, start, patch), SpanSlice(span, start)], spec, dtype=served))
        stack(LoadPlan([SpanSlice(span, start, patch)], spec, dtype=served))
    for before, after in zip(stored, (span.k, span.v, span.positions, patch.left, patch.right), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_order_of_layers(layout):
    spec = FAMILIES["mla"]
    plan = LoadPlan(three_parts(spec, F32, layout), spec, dtype=BF16)
    k, v = stack(plan)
    for i in (2, 0, 0, 1, 2):
        again = plan.layer(i)
        assert torch.equal(again[0], k[i]) and torch.equal(again[1], v[i])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_left_alone_while_the_next_one_is_computed(layout, dtype):
    spec = FAMILIES["gqa"]
    plan = LoadPlan(three_parts(spec, dtype, layout), spec, dtype=dtype)
    for i, j in ((0, 1), (1, 2), (2, 0), (0, 2)):  # neighbours and not
        k, v = plan.layer(i)
        before = k.clone(), v.clone()
        plan.layer(j)
        assert torch.equal(k, before[0]) and torch.equal(v, before[1])


def test_many_small_parts():
    """Moved and resting, patched and plain ones in turn: every border between runs is met."""
    spec = FAMILIES["gqa"]
    parts = []
    for seed in range(24):
        span = canonical(spec, 1 + seed % 3, seed)
        layers = ("all", (0,), (1, 2))[seed % 3]
        patch = patch_of(spec, span, LAYOUTS[seed % 4], seed, layers=layers, rank=1) if seed % 5 < 3 else None
        parts.append(SpanSlice(span, 0 if seed % 7 < 3 else 10 * seed, patch))
    (k, v), (want_k, want_v) = both(parts, spec, dtype=F64)
    assert worst(k, want_k) < 1e-12 and worst(v, want_v) < 1e-12


@pytest.mark.parametrize("name", ["cpu", "llvm", "triton"])
def test_rotations_are_computed_once_for_a_layout(name, monkeypatch, request):
    """The same spans, moved by the same shifts: of other numbers, to another cache, in any number of loads."""
    if name == "triton":
        pytest.importorskip("triton")
        request.getfixturevalue("kernel")
    computed = []
    monkeypatch.setattr(rope, "_tables", OrderedDict())
    monkeypatch.setattr(rope, "angles", lambda spec, positions: computed.append(spec) or angles(spec, positions))
    spec = FAMILIES["two-kinds"]

    def serve(seed: int, start: int, dtype: torch.dtype = F32) -> int:
        """Return how many tables a load of spans in two frames takes, patches included."""
        computed.clear()
        spans = [canonical(spec, tokens, tokens) for tokens in (7, 5)]
        spans = [relocate(span, spec, frame) for span, frame in zip(spans, (0, 40), strict=True)]
        spans = [replace(span, k=(span.k + seed).to(dtype), v=span.v.to(dtype)) for span in spans]
        patches = [patch_of(spec, span, "joint", 5, dtype=dtype) for span in spans]
        parts = [SpanSlice(*pair) for pair in zip(spans, (start, start + 7), patches, strict=True)]
        computed.clear()
        served, count = stack(LoadPlan(parts, spec, dtype=dtype, kernel=name)), len(computed) // 2
        for got, want in zip(served, stack(LoadPlan(parts, spec, dtype=dtype, kernel="reference")), strict=True):
            assert worst(got, want) < 1e-5
        return count

    first = serve(0, 900)
    assert first in (4, 6)  # turns and frames of two kinds of layers; torch's kernel has one of frames for each run
    assert [serve(seed, 900) for seed in (1, 2)] == [0, 0]
    assert serve(0, 901) > 0 and serve(0, 900) == serve(1, 901) == 0
    if name != "llvm":  # which leaves float64 to another
        assert serve(0, 900, F64) == first
    monkeypatch.setattr(rope, "TABLE_BYTES", 0)
    assert serve(0, 902) > 0 and not rope._tables and serve(0, 902) > 0


@pytest.mark.parametrize("name", ["llvm", "triton"])
def test_neighbours_are_written_at_once(name, monkeypatch, request):
    """As many calls of the compiled function for a hundred survivors as for four, whatever shift each has."""
    launches = []
    if name == "triton":
        pytest.importorskip("triton")
        kernel = request.getfixturevalue("kernel")
        launch = kernel._launch
        monkeypatch.setattr(kernel, "_launch", lambda *args: launches.append(args) or launch(*args))
    else:
        llvm = pytest.importorskip("ctxwin.kv.kernels.llvm_kernel")
        monkeypatch.setattr(llvm, "_run", lambda tasks, run=llvm._run: launches.extend(tasks) or run(tasks))
    spec = FAMILIES["gqa"]
    counts = []
    for n in (4, 100):
        parts = [SpanSlice(canonical(spec, 2, i % 3, F32), 50 + 2 * i) for i in range(n)]
        launches.clear()
        k, v = stack(LoadPlan(parts, spec, dtype=F32, kernel=name))
        counts.append(len(launches))
        want_k, want_v = stack(LoadPlan(parts, spec, dtype=F32, kernel="reference"))
        assert worst(k, want_k) < 1e-5 and torch.equal(v, want_v)
    assert counts[0] == counts[1] > 0


def test_kept_rotations_are_bounded_in_bytes_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(rope, "_tables", OrderedDict())
    shifts = [(torch.arange(100).expand(3, -1), 0, start) for start in range(5)]
    size = 100 * 16 * 4 + 3 * 100 * 8
    monkeypatch.setattr(rope, "TABLE_BYTES", 3 * size)
    tables = [rotation_table(plain_rope(16), [shift], F32) for shift in shifts]
    again = [rotation_table(plain_rope(16), [shifts[i]], F32) for i in (2, 4, 3)]
    assert all(x is tables[i] for x, i in zip(again, (2, 4, 3), strict=True))
    rotation_table(plain_rope(16), [shifts[0]], F32)
    assert rotation_table(plain_rope(16), [shifts[4]], F32) is tables[4]
    assert rotation_table(plain_rope(16), [shifts[2]], F32) is not tables[2]
    both = rotation_table(plain_rope(16), shifts[3:], F64)
    assert both.dtype == F64 and torch.equal(both.float(), torch.cat([tables[3], tables[4]]))


def test_counts():
    spec = FAMILIES["gqa"]
    plan = LoadPlan(three_parts(spec, BF16, "joint"), spec, dtype=BF16, heads=slice(0, 1))
    k, v = stack(plan)
    assert (plan.tokens, plan.layers) == (9 + 7 + 6, 3)
    assert plan.nbytes == k.numel() * 2 + v.numel() * 2
    assert k.shape == (3, 22, 1, 16)


def test_refuses_what_does_not_fit():
    spec = FAMILIES["gqa"]
    span = canonical(spec, 6, 0)
    patch = patch_of(spec, span, "joint", 1)

    def place(*parts: SpanSlice, dtype=F64, **options) -> LoadPlan:
        return LoadPlan(parts, spec, dtype=dtype, **options)

    with pytest.raises(ValueError, match="at least one part"):
        place()
    with pytest.raises(ValueError, match="start must be >= 0"):
        place(SpanSlice(span, -1))
    for begin, end in ((3, 3), (-1, 2), (0, 7), (6, None)):
        with pytest.raises(ValueError, match="begin and end must cut at least one token out of 6"):
            place(SpanSlice(span, 0, None, begin, end))
    with pytest.raises(ValueError, match="form it again"):
        place(SpanSlice(canonical(spec, 5, 0), 0, patch))
    with pytest.raises(ValueError, match="form it again"):
        place(SpanSlice(span, 0, replace(patch, identity="another")))
    with pytest.raises(ValueError, match="k must be"):
        place(SpanSlice(replace(span, k=span.k[:1]), 0))
    for heads in (slice(2, 3), slice(0, 0), slice(0, 2, 2)):
        with pytest.raises(ValueError, match="heads must be a slice"):
            place(SpanSlice(span, 0), heads=heads)
    with pytest.raises(ValueError, match="floating-point"):
        place(SpanSlice(span, 0), dtype=torch.int8)
    with pytest.raises(ValueError, match="kernel must be one of cpu, llvm, reference, triton, got 'cuda'"):
        place(SpanSlice(span, 0), kernel="cuda")
    for layer in (-1, 3):
        with pytest.raises(IndexError, match=r"\[0, 3\)"):
            place(SpanSlice(span, 0)).layer(layer)


def test_measuring_command(capsys):
    main(["--tokens", "64", "--layers", "2", "--rank", "4", "--parts", "3", "--rounds", "2", "--json"])
    shown, moves = json.loads(capsys.readouterr().out), ("as stored", "rotate", "rotate, rank 4", "rotate, quantized 4")
    assert [(row["what"], row["kernel"]) for row in shown["rows"]] == [
        ("copy", ""), *((what, kernel) for kernel in ("cpu", "llvm", "reference") for what in moves), ("unpack", "")
    ]  # fmt: skip
    assert all(0 < row["least_ms"] <= row["median_ms"] for row in shown["rows"])
    assert shown["setting"]["parts"] == 3 and shown["rows"][0]["megabytes"] == pytest.approx(64 * 2 * 256 * 2 / 1e6)
    main(["--tokens", "64", "--layers", "2", "--rounds", "1", "--pairing", "interleaved", "--cache", "columns"])
    assert "rotate, rank 32" in capsys.readouterr().out
    with pytest.raises(ValueError, match="tokens >= parts"):
        main(["--tokens", "2", "--parts", "3"])
