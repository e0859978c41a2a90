"""Tiny drafters of speculative decoding whose drafts are right only where they have the KV of the prompt.

A target of one layer whose words have unit length, and a drafter with that same layer: behind the word that comes next it
computes what the target computes one step later, from its own KV of all that stands in front.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engines import models

_ONE = {"num_hidden_layers": 1, "head_dim": 32, "tie_word_embeddings": False}


def write_target(folder: Path) -> Path:
    """A Llama of one layer."""
    models.write_decoder(folder, "Llama", **_ONE, num_attention_heads=2, num_key_value_heads=1)
    _even(folder)
    return folder


def write_eagle(folder: Path, target: Path) -> Path:
    """An EAGLE head that computes what the target does."""
    weights = load_file(target / "model.safetensors")
    layer = {
        n.removeprefix("model."): w for n, w in weights.items() if ".layers.0." in n and "input_layernorm" not in n
    }
    width = weights["model.norm.weight"].shape[0]
    layer["fc.weight"] = torch.cat(
        [torch.eye(width), torch.zeros(width, width)], dim=1
    )  # the word, not the state before it
    return _write(folder, target, layer, architectures=["LlamaForCausalLM"])


def write_eagle3(folder: Path, target: Path, width: int = 64, **fields: Any) -> Path:
    """A random EAGLE3 head with heads and frequencies of its own."""
    made = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made) * 0.15

    config = json.loads((target / "config.json").read_text())
    vocab = int(config.get("text_config", config)["vocab_size"])
    layer = {f"self_attn.{n}_proj": random(64, 2 * width) for n in "qkv"} | {"self_attn.o_proj": random(width, 64)}
    layer |= {"mlp.gate_proj": random(96, width), "mlp.up_proj": random(96, width), "mlp.down_proj": random(width, 96)}
    layer |= dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), torch.ones(width))
    weights = {f"midlayer.{name}.weight": weight.clone() for name, weight in layer.items()}
    weights |= {
        "fc.weight": random(width, 3 * width),
        "norm.weight": torch.ones(width),
        "lm_head.weight": random(vocab, width),
    }
    shape = {"hidden_size": width, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    own = shape | {"head_dim": 32, "rope_theta": 5e5, "draft_vocab_size": vocab, "vocab_size": vocab} | fields
    return _write(folder, None, weights, architectures=["LlamaForCausalLMEagle3"], model_type="llama", **own)


def write_mtp(folder: Path) -> Path:
    """A DeepSeek-V3 of one layer with an MTP layer that computes what that one does."""
    models.write_mla_model(
        folder,
        "DeepseekV3",
        num_hidden_layers=1,
        first_k_dense_replace=2,
        num_nextn_predict_layers=1,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    _even(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    head = weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    width = weights["model.norm.weight"].shape[0]
    own = {n.replace(".layers.0.", ".layers.1."): w.clone() for n, w in weights.items() if ".layers.0." in n}
    own |= {f"model.layers.1.{n}.weight": torch.ones(width) for n in ("enorm", "hnorm", "shared_head.norm")}
    own["model.layers.1.eh_proj.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    own["model.layers.1.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    own["model.layers.1.shared_head.head.weight"] = head.clone()
    save_file(weights | own, path, metadata={"format": "pt"})
    return folder


def _even(folder: Path) -> None:
    """Words of unit length, so that a norm over them changes nothing."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    words = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = words / words.square().mean(1, keepdim=True).sqrt()
    save_file(weights, path, metadata={"format": "pt"})


def _write(folder: Path, base: Path | None, weights: dict[str, torch.Tensor], **fields: Any) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {} if base is None else json.loads((base / "config.json").read_text())
    usual = {"num_hidden_layers": 1, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(usual | {"hidden_act": "silu"} | config | fields))
    return folder
