"""The decoders whose shapes are measured, and random KV of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ctxwin.kv.config import kv_spec_from_config
from ctxwin.kv.kernels.parts import SpanSlice
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch


@dataclass(frozen=True)
class Decoder:
    """A decoder by the arguments of its transformers configuration; the vocabulary is cut, KV does not depend on it."""

    name: str
    config: str
    sizes: dict[str, Any]

    @property
    def layers(self) -> int:
        """Layers of the released model."""
        return int(self.sizes["num_hidden_layers"])

    def make_config(self, layers: int | None = None) -> Any:
        """The configuration, with all layers or the first ``layers``."""
        import transformers

        cut = {"num_hidden_layers": min(layers, self.layers)} if layers else {}
        common = {"vocab_size": 1024, "tie_word_embeddings": False, "max_position_embeddings": 65_536}
        return getattr(transformers, self.config)(**common | self.sizes | cut)

    def spec(self, dtype: str) -> KVSpec:
        """The layout of its KV, as every engine of ctxwin reads it from the configuration."""
        return kv_spec_from_config(self.make_config(), self.name, dtype, "hf")

    def smaller(self) -> Decoder:
        """The same architecture in a few megabytes, for machines without a GPU."""
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 32}
        if "num_experts" in self.sizes:
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        if "linear_num_key_heads" in self.sizes:
            sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_hidden_layers": 4}
        return replace(self, sizes=self.sizes | sizes)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


DECODERS = (
    Decoder(
        "7B (Qwen2.5)",
        "Qwen2Config",
        {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4}
        | _rope(1e6),
    ),
    Decoder(
        "8B (Llama 3)",
        "LlamaConfig",
        {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | _rope(5e5),
    ),
    Decoder(
        "30B-A3B (Qwen3)",
        "Qwen3MoeConfig",
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
        | _rope(1e6),
    ),
)

HYBRID = Decoder(
    "9B (Qwen3.5)",
    "Qwen3_5TextConfig",
    {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
)
"""Three layers of Gated DeltaNet before each attention layer."""


def random_part(spec: KVSpec, tokens: int, rank: int, device: torch.device, start: int = 1000) -> SpanSlice:
    """A span of random KV on ``device`` that moves to ``start``, with a joint patch over all layers unless ``rank`` is 0."""
    dtype: torch.dtype = getattr(torch, spec.dtype)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    k = noise(spec.layers, tokens, spec.heads, spec.k_dim)
    v = noise(spec.layers, tokens, spec.heads, spec.v_dim)
    span = SpanKV(k, v, torch.arange(tokens).expand(3, -1), 32)
    if not rank:
        return SpanSlice(span, start)
    left_factor, right_factor = noise(tokens, rank), noise(spec.layers, rank, spec.heads * (spec.k_dim + spec.v_dim))
    patch = Patch.of(
        spec, layout="joint", layers=tuple(range(spec.layers)), rank=rank, left=left_factor, right=right_factor
    )
    return SpanSlice(span, start, patch)
