"""Tiny random models of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.models.parts import CHATML, build_tokenizer, randomise, save_model, text_fields

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def write_text_model(folder: Path, chat_template: str | None = CHATML) -> Path:
    """A random text-only Qwen2."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer(chat_template)
    torch.manual_seed(0)
    config = Qwen2Config(**text_fields(len(tokenizer)), rope_parameters=dict(DEFAULT_ROPE))
    model = Qwen2ForCausalLM(config)
    randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_decoder(folder: Path, kind: str, **fields: Any) -> Path:
    """A random text model of another family of transformers: ``kind`` as in its classes' names, ``Llama`` for one."""
    import torch
    import transformers

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    rope = {"rope_parameters": dict(DEFAULT_ROPE)}
    model = getattr(transformers, f"{kind}ForCausalLM")
    if fields.get("hidden_size_per_layer_input"):
        fields = {**fields, "vocab_size_per_layer_input": len(tokenizer)}
    save_model(model(model.config_class(**(text_fields(len(tokenizer)) | rope | fields))), folder)
    tokenizer.save_pretrained(folder)
    return folder


SHARP: dict[str, Any] = {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 1.0, "initializer_range": 0.1}
"""Logits of attention that are large for random weights, and capped far below."""
GEMMA3: dict[str, Any] = {
    "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
"""Two kinds of layers as in Gemma 3's larger models: those that slide turn by a base of their own."""


GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
    "num_key_value_heads": 2, "head_dim": 32, "num_global_key_value_heads": 1, "global_head_dim": 64,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "rope_parameters": None,
}  # fmt: skip
"""As Gemma 4's larger models: layers that do not slide have fewer, larger heads, a quarter of which turns, and values that are
their keys before the turn."""
GEMMA4_SHARING = GEMMA4 | {
    "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "num_key_value_heads": 1, "num_global_key_value_heads": None, "attention_k_eq_v": False, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True, "initializer_range": 0.1,
}  # fmt: skip
"""As Gemma 4's smaller models: the last layers read the KV of earlier ones, each layer is fed an embedding of its own."""


LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
"""Llama 3's scaled frequencies, over a context so short that heads of 16 have frequencies on both sides and between."""


def write_llama(folder: Path, kv_heads: int, rope: Mapping[str, Any] = DEFAULT_ROPE) -> Path:
    """A random Llama with two heads of 32: grouped (``kv_heads=1``) or multi-head attention (2)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    fields = text_fields(len(tokenizer)) | {"num_attention_heads": 2, "num_key_value_heads": kv_heads}
    LlamaForCausalLM(LlamaConfig(**fields, rope_parameters=dict(rope))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def hybrid_fields(vocab: int) -> dict[str, Any]:
    """Three Gated DeltaNet layers in front of each of two attention layers, a quarter of whose heads turns."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    return text_fields(vocab) | dict(
        num_hidden_layers=8, head_dim=32, linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_conv_kernel_dim=4, rope_parameters=rope,
    )  # fmt: skip


EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
)


def write_hybrid(folder: Path, kind: str = "Qwen3_5Text", **changes: object) -> Path:
    """A random text hybrid: Qwen3.5 (``Qwen3_5Text``, ``Qwen3_5MoeText``) or ``Qwen3Next``; ``changes`` to its config."""
    import torch
    import transformers

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    fields = hybrid_fields(len(tokenizer)) | EXPERTS
    if kind == "Qwen3Next":  # vLLM does not tie its words
        fields["tie_word_embeddings"] = False
        fields["rope_parameters"] = {n: v for n, v in fields["rope_parameters"].items() if n != "mrope_section"}
    config = getattr(transformers, f"{kind}Config")(**fields | changes)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    randomise(model)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def mla_fields(vocab: int) -> dict[str, Any]:
    return dict(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=32, n_group=1, topk_group=1, max_position_embeddings=1024, initializer_range=0.15,
        bos_token_id=0, eos_token_id=2, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip


def write_mla_model(folder: Path, kind: str = "DeepseekV2", **fields: Any) -> Path:
    """A random DeepSeek-V2 or -V3 with latent attention; the last of three layers is a mixture of experts."""
    import torch
    import transformers

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(mla_fields(len(tokenizer)) | fields))
    save_model(getattr(transformers, f"{kind}ForCausalLM")(config), folder)
    tokenizer.save_pretrained(folder)
    return folder
