"""The Triton load kernel writes a paged cache in place."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import canonical, stack
from operator_oracle import worst
from triton_cases import BF16, F32, FAMILIES, PACKAGE, exact, patch_of

from ctxwin.kv.kernels import CacheStrides, LoadPlan, SpanSlice, choice
from ctxwin.kv.layout import KVSpec
from ctxwin_vllm.paged import STREAMS
from ctxwin_vllm.resident import RESIDENT_BYTES
from interpreted import LateLoads

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned", "kernel")


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
    assert plan.stores and not LoadPlan(parts, spec, dtype=F32, kernel="cpu").stores
    with pytest.raises(ValueError, match=r"must hold torch.float32 and there must be 4 slots .* and 3 on cpu"):
        plan.store(0, [cache], lines, torch.arange(3))
    with pytest.raises(ValueError, match=r"got torch.bfloat16 on cpu"):
        plan.store(0, [cache.to(BF16)], lines, torch.arange(4))
    with pytest.raises(IndexError, match=r"\[0, 2\)"):
        plan.store(1, [cache, cache], lines, torch.arange(4))


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
