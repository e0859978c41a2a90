"""Tiny random models that see and hear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.models.parts import CHATML, build_tokenizer, save_model, text_fields

OMNI = {
    "qwen2_5_omni": dict(
        image_token="<|IMAGE|>", video_token="<|VIDEO|>", audio_token="<|AUDIO|>", vision_bos_token="<|vision_bos|>",
        vision_eos_token="<|vision_eos|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
    ),
    "qwen3_omni_moe": dict(
        image_token="<|image_pad|>", video_token="<|video_pad|>", audio_token="<|audio_pad|>",
        vision_bos_token="<|vision_start|>", vision_eos_token="<|vision_end|>", audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    ),
}  # fmt: skip
"""The tokens of each as its tokenizer names them."""


def write_omni(folder: Path, kind: str = "qwen2_5_omni") -> Path:
    """A random Qwen2.5-Omni or Qwen3-Omni (``qwen3_omni_moe``) whose folder has nothing that speaks.

    25 or 13 tokens a second of sound, 84x84 pictures become 9 tokens; frames of videos are made large by the processor.
    """
    import torch
    import transformers

    names = OMNI[kind]
    template = CHATML
    for pad in ("image", "video"):
        written = f"{names['vision_bos_token']}{names[f'{pad}_token']}{names['vision_eos_token']}"
        template = template.replace(f"<|vision_start|><|{pad}_pad|><|vision_end|>", written)
    heard = f"{names['audio_bos_token']}{names['audio_token']}{names['audio_eos_token']}"
    template = template.replace("{% else %}{{ part", f"{{% elif part.type == 'audio' %}}{heard}{{% else %}}{{{{ part")
    tokenizer = build_tokenizer(template, **names)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    torch.manual_seed(4)
    text = text_fields(len(tokenizer)) | {"max_position_embeddings": 2048, "tie_word_embeddings": False}
    head = text["hidden_size"] // text["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [head // 4, head // 8, head // 8]}
    vision: dict[str, Any] = dict(
        depth=2, hidden_size=32, num_heads=2, patch_size=14, intermediate_size=48, out_hidden_size=64, initializer_range=0.15,
    )  # fmt: skip
    audio: dict[str, Any] = dict(
        num_mel_bins=16, d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=48, output_dim=64,
        initializer_range=0.15,
    )  # fmt: skip
    if kind == "qwen2_5_omni":
        name, suffix = "Qwen2_5Omni", "index"
        vision |= dict(fullatt_block_indexes=[1], window_size=112)
        special: dict[str, Any] = {}
    else:
        name, suffix = "Qwen3OmniMoe", "id"
        vision |= dict(num_position_embeddings=36, deepstack_visual_indexes=[0, 1])
        vision |= dict(image_size=84, apply_vit_abs_pos_embed=True)  # for vLLM
        audio |= dict(n_window=50, n_window_infer=200, downsample_hidden_size=8)
        special = {"position_id_per_seconds": 13}
        rope |= {"mrope_interleaved": True, "interleaved": True}
        text |= dict(head_dim=head, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    special |= {f"{pad}_token_{suffix}": ids[f"{pad}_token"] for pad in ("image", "video", "audio")}
    thinker = getattr(transformers, f"{name}ThinkerConfig")(
        text_config=text | {"rope_parameters": rope}, vision_config=vision, audio_config=audio, tie_word_embeddings=False,
        vision_start_token_id=ids["vision_bos_token"], vision_end_token_id=ids["vision_eos_token"],
        audio_start_token_id=ids["audio_bos_token"], audio_end_token_id=ids["audio_eos_token"], **special,
    )  # fmt: skip
    config = getattr(transformers, f"{name}Config")(thinker_config=thinker.to_dict(), enable_audio_output=False)
    save_model(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, patch_size=14, merge_size=2),
        video_processor=transformers.Qwen2VLVideoProcessor(
            size=size, patch_size=14, merge_size=2, do_sample_frames=False
        ),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=4),
        tokenizer=tokenizer,
        chat_template=template,
    )
    processor.save_pretrained(folder)
    return folder
