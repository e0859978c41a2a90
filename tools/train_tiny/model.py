"""The bundled model: its configuration, its initial weights, and saving it in transformers layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ctxwin.tiny.sprites import FRAME, N_MARKS
from train_tiny.tokenizer import SPECIAL_TOKENS, transformers

HIDDEN = 128
VISION_HIDDEN = 96
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = HIDDEN // HEADS
QK_GAIN = 2.0
"""Initial scale of query and key projections, relative to the rest: equal contents stand out from the first step on."""


def shared_config(tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the shared parts of all models of the world: of the text config, of the vision config, and of the model config."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text = {
        "vocab_size": (len(tokenizer) + 7) // 8 * 8,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "initializer_range": 0.05,
    }
    vision = {
        "depth": 2,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "num_heads": 3,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.05,
    }
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
    }
    return text, vision, tokens


def build_model(tokenizer: Any, seed: int) -> Any:
    """A freshly initialised `Qwen2_5_VLForConditionalGeneration` of 1.2 million parameters, float32, on the CPU.

    Query and key projections start equal within each group of heads that shares a key, so attention starts out
    comparing contents; without this the look-up of marks is learned much later.
    """
    library = transformers()
    text, vision, tokens = shared_config(tokenizer)
    config = library.Qwen2_5_VLConfig(
        text_config=text
        | {
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "type": "default",
                "mrope_section": [4, 6, 6],
                "rope_theta": 1_000_000.0,
            },
        },
        vision_config=vision | {"window_size": 112, "fullatt_block_indexes": [0, 1]},
        **tokens,
    )
    torch.manual_seed(seed)
    model = library.Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            attention = layer.self_attn
            attention.k_proj.weight.mul_(QK_GAIN)
            shared = attention.k_proj.weight.view(KV_HEADS, 1, HEAD_DIM, HIDDEN)
            queries = shared.expand(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, HIDDEN)
            attention.q_proj.weight.copy_(queries.reshape(HIDDEN, HIDDEN))
    return model


def keep_marks_whole(model: Any, tokenizer: Any) -> None:
    """Make each mark a token that no tokenizer splits: transformers reads every Qwen3.5 with one that splits all digits.

    Both are changed in place; the new tokens have the rows of those that the model was trained on.
    """
    marks = [f" {mark:02d}" for mark in range(N_MARKS)]
    mark_ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in marks]
    rows = model.get_input_embeddings().weight.detach()[torch.tensor(mark_ids)[:, 0]].clone()
    tokenizer.add_tokens(marks)
    model.resize_token_embeddings((len(tokenizer) + 7) // 8 * 8, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(marks)] = rows


def save_model(model: Any, tokenizer: Any, out: Path) -> None:
    """Write weights (bfloat16 safetensors), configuration, tokenizer and processor.

    The processor leaves a picture of 224 x 224 pixels at that size.

    The model itself is rounded to bfloat16 values and stays float32.
    """
    library = transformers()
    out.mkdir(parents=True, exist_ok=True)
    newer = model.config.model_type == "qwen3_5"
    if newer:
        keep_marks_whole(model, tokenizer)
    model.to(torch.bfloat16).save_pretrained(out)
    model.to(torch.float32)
    model.config.dtype = torch.float32
    image_processor = library.Qwen2VLImageProcessor(
        patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=4 * 28 * 28, max_pixels=FRAME * FRAME
    )
    video_processor = getattr(library, "Qwen3VLVideoProcessor" if newer else "Qwen2VLVideoProcessor")(
        patch_size=14, merge_size=2, temporal_patch_size=2, cap_pixels_per_frame=False,
        image_mean=image_processor.image_mean, image_std=image_processor.image_std,
    )  # fmt: skip
    getattr(library, "Qwen3VLProcessor" if newer else "Qwen2_5_VLProcessor")(
        image_processor=image_processor,
        tokenizer=tokenizer,
        video_processor=video_processor,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(out)
