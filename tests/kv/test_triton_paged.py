"""The Triton load kernel writes a paged cache in place."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import canonical, stack
from operator_oracle import make_spec, worst
from triton_cases import BF16, F32, F64, FAMILIES, PACKAGE, exact, patch_of

from ctxwin.kv.kernels import CacheStrides, LoadPlan, SpanSlice, choice
from ctxwin.kv.layout import KVSpec
from ctxwin_vllm.paged import STREAMS
from ctxwin_vllm.resident import RESIDENT_BYTES
from interpreted import LateLoads

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned", "kernel")


SIZE = 16


def caches(
    spec: KVSpec, dtype: torch.dtype, size: int = SIZE, blocks: int = 3
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Empty caches as backends lay them out, with views ``[blocks, size, heads, dim]`` of keys and values."""
    heads, k, v = spec.heads, spec.k_dim, spec.v_dim
    hnd = torch.zeros(blocks, heads, size, k + v, dtype=dtype)
    nhd = torch.zeros(blocks, size, heads, k + v, dtype=dtype).transpose(1, 2)  # the same shape, strided otherwise
    # Another layer's blocks between.
    beside = torch.zeros(blocks, 2, size, heads, k + v, dtype=dtype)[:, 0].transpose(1, 2)
    turned = torch.zeros(blocks, heads, (k + v) * size, dtype=dtype)  # keys as [dim, size], then values as [size, dim]
    keys = turned[..., : k * size].unflatten(2, (k, size)).permute(0, 3, 1, 2)
    values = turned[..., k * size :].unflatten(2, (size, v)).transpose(1, 2)
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
    assert plan.stores and not LoadPlan(parts, spec, dtype=F32, kernel="cpu").stores
    with pytest.raises(ValueError, match=r"must hold torch.float32 and there must be 4 slots .* and 3 on cpu"):
        plan.store(0, [cache], lines, torch.arange(3))
    with pytest.raises(ValueError, match=r"got torch.bfloat16 on cpu"):
        plan.store(0, [cache.to(BF16)], lines, torch.arange(4))
    with pytest.raises(IndexError, match=r"\[0, 2\)"):
        plan.store(1, [cache, cache], lines, torch.arange(4))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_reads_are_torchs_to_the_bit(kernel, data):
    """Of blocks in any order and number, from any token to any other, of every packing and width of numbers, NaN included."""
    size, heads, k_dim, v_dim = (data.draw(st.integers(1, most)) for most in (35, 3, 20, 70))
    dtype = data.draw(st.sampled_from([torch.uint8, BF16, F32, F64]))
    layout = data.draw(st.sampled_from(["HND", "NHD", "strided", "transposed keys"]))
    spec = make_spec(layers=1, heads=heads, k_dim=k_dim, v_dim=v_dim)
    like = caches(spec, F64, size, 6)[layout]
    strides = CacheStrides.find(like[0], places(*like), size, heads, (k_dim, v_dim))
    assert strides is not None
    noise, layers = torch.Generator().manual_seed(data.draw(st.integers(0, 99))), []
    for _ in range(data.draw(st.integers(1, 3))):
        cache, *views = caches(spec, dtype, size, 6)[layout]
        bits = torch.randint(0, 256, (cache.numel() * cache.itemsize,), dtype=torch.uint8, generator=noise)
        layers.append((cache.copy_(bits.view(dtype).view(cache.shape)), views))
    blocks = data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]
    begin = data.draw(st.integers(0, len(blocks) * size - 1))
    end = data.draw(st.integers(begin + 1, len(blocks) * size))
    read = sys.modules[f"{PACKAGE}.triton_kernel"].read_layers
    got = read([cache for cache, _ in layers], strides, (heads, k_dim, v_dim), blocks, begin, end)
    at = torch.arange(begin, end)
    for i, (_, views) in enumerate(layers):
        for side, view in zip(got, views, strict=True):
            want = view[torch.tensor(blocks)[at // size], at % size]
            assert side.is_contiguous() and side[i].shape == want.shape
            assert torch.equal(side[i].view(torch.uint8), want.view(torch.uint8))
    assert got[1].data_ptr() == got[0].data_ptr() + got[0].nbytes, "one copy takes both to the host"


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

    class Scales(Backend):
        """Numbers of 8 bits, by a scale a layer."""

        def do_kv_cache_update(self, layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: Any):
            sides = k / layer._k_scale_float, v / layer._v_scale_float
            k, v = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in sides)
            super().do_kv_cache_update(layer, k, v, cache, slots)

    def paged(self, backend: Any, spec: KVSpec, fp8: torch.dtype | None = None) -> Any:
        from ctxwin_vllm.paged import PagedKV

        shape, dtype = (3, SIZE, spec.heads, spec.k_dim + spec.v_dim), torch.uint8 if fp8 else F32
        options = {
            "impl": backend,
            "kv_cache_dtype": "fp8" if fp8 else "auto",
            "_k_scale_float": 0.5,
            "_v_scale_float": 2.0,
        }
        layers = {
            f"model.layers.{i}.attn": SimpleNamespace(
                kv_cache=torch.zeros(shape, dtype=dtype).transpose(1, 2), **options
            )
            for i in range(2)
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

    def test_a_rank_copies_its_heads_whatever_was_kept_before(self, monkeypatch):
        """What an answer keeps has the rank's heads alone, and may be the first copy there."""
        monkeypatch.setenv(RESIDENT_BYTES, str(1 << 20))
        spec = FAMILIES["gqa"]
        paged = self.paged(self.Backend(), rank_spec := replace(spec, heads=1))
        kept, span = canonical(rank_spec, 5, 0, F32), canonical(spec, 5, 1, F32)
        assert paged.keep(kept.origin, kept.k, kept.v)
        for part, kv, heads in ((kept, rank_spec, None), (span, spec, slice(1, 2))) * 2:
            paged.write(paged.plan([SpanSlice(part, 10)], kv, heads), paged.slots([1], 0, 5))
            want = exact([SpanSlice(part, 10)], kv)
            for got, wanted in zip(paged.read([1], 0, 5), want, strict=True):
                assert worst(got, wanted[:, :, heads or slice(None)]) < 1e-6
        assert paged.resident.copied_bytes == span.nbytes // spec.heads

    @pytest.mark.parametrize("staged_bytes", [0, 1 << 20], ids=["a launch a layer", "one launch"])
    def test_a_layer_is_written_by_what_is_waited_for(self, staged_bytes, monkeypatch):
        """By its own launch alone, where layers take several."""
        monkeypatch.setattr(sys.modules[f"{PACKAGE}.triton_kernel"], "STAGED_BYTES", staged_bytes)
        monkeypatch.setitem(STREAMS, torch.device("cpu"), loads := LateLoads(torch.device("cpu")))
        spec = FAMILIES["gqa"]
        paged = self.paged(self.Backend(), spec)
        span = canonical(spec, 7, 0, F32)
        want = exact([SpanSlice(span, 33)], spec)

        def written() -> list[bool]:
            k, v = paged.read([1], 0, 7)
            return [worst(k[i], want[0][i]) < 1e-6 and worst(v[i], want[1][i]) < 1e-6 for i in range(2)]

        with loads.begin(background=False):
            paged.write(LoadPlan([SpanSlice(span, 33)], spec, dtype=F32, kernel="triton"), paged.slots([1], 0, 7))
        assert written() == [False, False]
        loads.wait("model.layers.0.attn")
        assert written() == [True, bool(staged_bytes)]
        assert not loads.finish() and written() == [True, True]

    @pytest.mark.parametrize("fp8", [None, torch.float8_e4m3fn])
    def test_one_launch_reads_all_layers_as_torchs_operators_do(self, fp8):
        """Numbers of a quantised cache as well: they are read as they lie, and scaled as ever."""
        spec = FAMILIES["mha"]
        paged = self.paged(self.Scales() if fp8 else self.Backend(), spec, fp8)
        assert paged.reads_at_once and paged.direct == (fp8 is None)
        for layer in paged.layers:
            layer.kv_cache.copy_(torch.randn(layer.kv_cache.shape).to(fp8 or F32).view(layer.kv_cache.dtype))
        for blocks, begin, end in (([2, 0, 1], 5, 42), ([1], 0, 16), ([0, 2], 15, 17)):
            got = paged.read(blocks, begin, end)
            paged.reads_at_once = False
            for x, y in zip(got, paged.read(blocks, begin, end), strict=True):
                assert x.dtype == F32 and torch.equal(x, y) and bool(x.any())
            paged.reads_at_once = True

    @pytest.mark.parametrize("wrong", ["numbers", "compiler", "layers"])
    def test_a_read_that_misses_its_slots_is_not_used(self, wrong, monkeypatch, caplog):
        module = sys.modules[f"{PACKAGE}.triton_kernel"]
        right, backend = module.read_layers, self.Backend()

        def read(caches: Any, strides: Any, shape: Any, blocks: Any, begin: int, end: int) -> Any:
            if wrong == "compiler":
                raise RuntimeError("out of registers")
            return right(caches, strides, shape, blocks, begin - 1, end - 1)

        monkeypatch.setattr(choice, "_faults", [])
        if wrong != "layers":
            monkeypatch.setattr(module, "read_layers", read)
        with caplog.at_level(logging.WARNING, "ctxwin.engines"):
            paged = self.paged(backend if wrong != "layers" else self.InPairs(), spec := FAMILIES["gqa"])
        why = {"numbers": "other numbers than lie there", "compiler": "RuntimeError: out of registers"}
        assert len(caplog.records) == len(choice.faults()) == 1 and not paged.reads_at_once
        assert "does not read the paged cache itself on cpu: " + why.get(
            wrong, "its layers are not"
        ) in choice.faults()[0].replace("it reads ", "")
        span = canonical(spec, 7, 0, F32)
        paged.write(LoadPlan([SpanSlice(span, 0)], spec, dtype=F32, kernel="cpu"), paged.slots([2, 1], 9, 16))
        assert torch.equal(paged.read([2, 1], 9, 16)[1], span.v)

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
