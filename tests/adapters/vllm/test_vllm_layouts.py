"""Layouts of vLLM's cache: read as they are, or refused. No engine is started here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.kernels import CacheStrides, LoadPlan, SpanSlice
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin_vllm.paged import PagedKV


def spec() -> KVSpec:
    from transformers import Qwen2Config

    from ctxwin.kv.config import kv_spec_from_config

    config = Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return kv_spec_from_config(config, "a-model", "float32", "vllm")


class Backend:
    """An attention backend of the test's own: ``[blocks, heads, size, 2 * dim]``, keys beside values."""

    size = 16

    def put(self, cache: torch.Tensor, block: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        cache[block, :, at] = torch.cat([k, v], dim=-1)

    def do_kv_cache_update(self, layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
        for i, slot in enumerate(slots.tolist()):
            self.put(cache, slot // self.size, slot % self.size, k[i], v[i])


class LosesKeys(Backend):
    def put(self, cache: torch.Tensor, block: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        super().put(cache, block, at, v, v)


class PacksOddBlocksOtherwise(Backend):
    def put(self, cache: torch.Tensor, block: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        super().put(cache, block, at, *((v, k) if block % 2 else (k, v)))


class Rounds(Backend):
    """Holds whole numbers exactly, as a scaled integer cache may."""

    def put(self, cache: torch.Tensor, block: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        super().put(cache, block, at, k.round(decimals=2), v.round(decimals=2))


class TransposesKeys(Backend):
    """Keys as ``[dim, size]``, then values as ``[size, dim]``: constant strides."""

    def put(self, cache: torch.Tensor, block: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = cache[block].flatten(1).chunk(2, dim=1)
        keys.unflatten(1, (-1, self.size))[:, :, at] = k
        values.unflatten(1, (self.size, -1))[:, at] = v


class InPairs(Backend):
    """Tokens interleaved two by two: no constant strides."""

    def put(self, cache: torch.Tensor, block: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        cache[block].unflatten(1, (-1, 2)).flatten(2)[:, at // 2, at % 2 :: 2] = torch.cat([k, v], dim=-1)


def layers_on(backend: Backend, kv: KVSpec, count: int = 2, **attributes: Any) -> dict[str, Any]:
    shape = (3, kv.heads, backend.size, kv.k_dim + kv.v_dim)
    dtype = attributes.pop("dtype", torch.float32)
    return {
        f"model.layers.{i}.self_attn.attn": SimpleNamespace(
            **{"kv_cache": torch.zeros(shape, dtype=dtype), "impl": backend, "kv_cache_dtype": "auto", **attributes}
        )
        for i in range(count)
    }


class TestLayouts:
    def test_a_layout_that_nobody_named_is_read(self) -> None:
        kv = spec()
        layers = layers_on(Backend(), kv)
        paged = PagedKV(layers, kv, Backend.size)
        k, v = torch.randn(2, 5, kv.heads, kv.k_dim), torch.randn(2, 5, kv.heads, kv.v_dim)
        here = SpanKV(k, v, torch.zeros(3, 5, dtype=torch.int64), 0)
        paged.write(LoadPlan([SpanSlice(here, 0)], kv, dtype=torch.float32), paged.slots([2, 1], 14, 19))
        got_k, got_v = paged.read([2, 1], 14, 19)
        assert torch.equal(got_k, k) and torch.equal(got_v, v)

    @pytest.mark.parametrize(("backend", "constant"), [(Backend(), True), (TransposesKeys(), True), (InPairs(), False)])
    def test_strided_views_read_what_the_permutation_does(
        self, backend: Backend, constant: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kv = spec()
        layers = layers_on(backend, kv)
        paged = PagedKV(layers, kv, backend.size)
        monkeypatch.setattr(CacheStrides, "find", lambda *_: None)
        permuted = PagedKV(layers, kv, backend.size)
        k, v = torch.randn(2, 2, 37, kv.heads, kv.k_dim)
        for i, layer in enumerate(layers.values()):
            backend.do_kv_cache_update(layer, k[i], v[i], layer.kv_cache, paged.slots([2, 0, 1], 5, 42))
        if constant:
            paged._gathers.clear()
        for begin, end in ((5, 42), (16, 32), (20, 23), (31, 42)):
            want = k[:, begin - 5 : end - 5], v[:, begin - 5 : end - 5]
            for reader in (paged, permuted):
                for got, expected in zip(reader.read([2, 0, 1], begin, end), want, strict=True):
                    assert torch.equal(got, expected) and got.is_contiguous()

    @pytest.mark.parametrize(
        ("backend", "said"),
        [
            (LosesKeys(), "cache packing of attention backend LosesKeys is not a permutation"),
            (PacksOddBlocksOtherwise(), "PacksOddBlocksOtherwise is not a permutation within a block"),
            (Rounds(), "Rounds does not return the KV that was written"),
        ],
    )
    def test_a_wrong_layout_is_refused(self, backend: Backend, said: str) -> None:
        kv = spec()
        with pytest.raises(UnsupportedModel, match=said):
            PagedKV(layers_on(backend, kv), kv, backend.size)

    @pytest.mark.parametrize(
        ("attributes", "size", "said"),
        [
            ({}, 32, "a cache block must hold 32 tokens"),
            ({"count": 1}, 16, r"one attention layer per decoder layer \(2\), got 1"),
            (
                {"dtype": torch.bfloat16},
                16,
                r"must be the model's own dtype \(float32\) or fp8.*got 'auto' \(torch.bfloat16\)",
            ),
            ({"kv_cache_dtype": "fp8"}, 16, "must be the model's own dtype .*'fp8'"),
        ],
    )
    def test_a_cache_of_another_kind_is_refused(self, attributes: dict[str, Any], size: int, said: str) -> None:
        kv = spec()
        with pytest.raises(UnsupportedModel, match=said):
            PagedKV(layers_on(Backend(), kv, **attributes), kv, size)
