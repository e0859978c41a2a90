"""Random models of the families that the transformers engine is tested on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ctxwin.engines.hf.engine import HFEngine
from ctxwin.store import Store
from engines.models import (
    GEMMA3,
    GEMMA4,
    GEMMA4_SHARING,
    LLAMA3,
    write_decoder,
    write_deepseek_vl,
    write_gemma3,
    write_gemma4,
    write_gemma4_sharing,
    write_glm4v,
    write_internvl,
    write_kimi,
    write_llava,
    write_mistral3,
    write_mla_model,
    write_paddleocr,
    write_smolvlm,
    write_vision_model,
)

GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=48)
WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": lambda folder: write_vision_model(folder, "qwen3_vl"),
    "qwen3_vl_moe": lambda folder: write_vision_model(folder, "qwen3_vl_moe"),
    "internvl": write_internvl,
    "qianfan_ocr": lambda folder: write_internvl(folder, qianfan=True),
    "kimi": write_kimi,
    "kimi_over_v2": lambda folder: write_kimi(folder, "deepseek_v2"),
    "glm4v": write_glm4v,
    "glm4v_moe": lambda folder: write_glm4v(folder, experts=True),
    "glm_ocr": lambda folder: write_glm4v(folder, ocr=True),
    "paddleocr": write_paddleocr,
    "mistral3": write_mistral3,
    "ministral3": lambda folder: write_mistral3(folder, "ministral3"),
    "pixtral": lambda folder: write_mistral3(folder, pixtral=True),
    "smolvlm": write_smolvlm,
    "idefics3": lambda folder: write_smolvlm(folder, "Idefics3"),
    "llava_onevision": write_llava,
    "llava": lambda folder: write_llava(folder, "Llava"),
    "llava_next": lambda folder: write_llava(folder, "LlavaNext"),
    "llava_next_video": lambda folder: write_llava(folder, "LlavaNextVideo"),
    "gemma2": lambda folder: write_decoder(folder, "Gemma2", **DECODERS["Gemma2"]),
    "gemma3": write_gemma3,
    "gemma4": write_gemma4,
    "gemma4_causal": write_gemma4_sharing,
    "gemma4_experts": lambda folder: write_decoder(folder, "Gemma4", **(GEMMA4 | GEMMA4_EXPERTS)),
    "gemma4_text": lambda folder: write_decoder(folder, "Gemma4", **GEMMA4),
    "gemma4_sharing": lambda folder: write_decoder(folder, "Gemma4", **GEMMA4_SHARING),
    "gemma3_text": lambda folder: write_decoder(folder, "Gemma3", **GEMMA3),
    "llama_gqa": lambda folder: write_decoder(folder, "Llama", rope_parameters=LLAMA3),
    "llama_mha": lambda folder: write_decoder(folder, "Llama", num_key_value_heads=4),
    "deepseek_vl": write_deepseek_vl,
    "deepseek_vl_hybrid": lambda folder: write_deepseek_vl(folder, hybrid=True),
    "deepseek_v2": write_mla_model,
    "deepseek_v3": lambda folder: write_mla_model(folder, "DeepseekV3"),
}


def opened(folder: Path, store: Store | None = None) -> HFEngine:
    return HFEngine(folder, dtype="float32", store=store)


HUNYUAN = dict(head_dim=16, pad_token_id=0)


def rescale(file: Path, ending: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    noise = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if name.endswith(ending):
            weights[name] = weight * (0.5 + torch.rand(weight.shape, generator=noise))
    save_file(weights, file, metadata={"format": "pt"})


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=48)
HEADS = dict(head_dim=16)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=16.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
    truncate=False,
)  # fmt: skip
DECODERS: dict[str, dict[str, object]] = {
    "Apertus": {}, "Cohere": {}, "Ernie4_5": HEADS, "Exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "Gemma": HEADS, "Glm4": HEADS, "Granite": {}, "GraniteMoe": dict(num_local_experts=4),
    "Gemma2": HEADS | dict(sliding_window=8, final_logit_softcapping=30.0), "Gemma3": GEMMA3, "Gemma4": GEMMA4,
    "GptOss": HEADS | dict(sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN),
    "Ministral": HEADS | dict(sliding_window=8), "Starcoder2": dict(sliding_window=8),
    "Mistral": {"sliding_window": None}, "Mixtral": dict(num_local_experts=4), "Nemotron": {}, "Olmo2": {},
    "Olmoe": EXPERTS, "Phi": {}, "Phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Qwen2Moe": EXPERTS, "Qwen3": HEADS, "Qwen3Moe": EXPERTS | HEADS, "StableLm": {},
}  # fmt: skip
