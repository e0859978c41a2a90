"""Tiny random LLaVAs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.models.parts import build_tokenizer, rename_weights, save_model, text_fields

_LLAVA_BODY = (
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "IMAGE{% endfor %}{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}VIDEO{% endfor %}"
    "{# Render all text next #}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "TEXT{% endfor %}"
)
ONEVISION = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    + _LLAVA_BODY.replace("IMAGE", "{{ '<image>' }}").replace("VIDEO", "{{ '<video>' }}")
    .replace("TEXT", "{{ '\n' + content['text'] }}")
    + "{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
VICUNA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    + _LLAVA_BODY.replace("IMAGE", "{{ '<image>\n' }}")
    .replace("VIDEO", "{{ '<video>\n' }}")
    .replace("TEXT", "{{ content['text'] + ' '}}")
    + "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As on the Hub: both put all pictures in front."""


def write_llava(folder: Path, kind: str = "LlavaOnevision") -> Path:
    """A random LLaVA-OneVision (17 tokens a picture), ``Llava`` 1.5 (16), or ``LlavaNext`` and ``LlavaNextVideo`` (tiles
    of 56 px and row ends)."""
    import torch
    import transformers
    from tokenizers.processors import TemplateProcessing

    template = ONEVISION if kind == "LlavaOnevision" else VICUNA
    tokenizer = build_tokenizer(template, image_token="<image>", video_token="<video>")
    if kind != "LlavaOnevision":  # as Llama's tokenizer: the template does not write what it begins with
        begin = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    torch.manual_seed(0)
    fields = text_fields(len(tokenizer)) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    fields["model_type"] = "qwen2" if kind == "LlavaOnevision" else "llama"
    vision: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, image_size=56, patch_size=14,
        model_type="clip_vision_model", initializer_range=0.15, projection_dim=32,
    )  # fmt: skip
    if kind == "LlavaOnevision":
        vision |= dict(model_type="siglip_vision_model", vision_use_head=False)
    pinpoints = [[56, 112], [112, 56], [112, 112]]
    given = {} if kind == "Llava" else {"image_grid_pinpoints": pinpoints}
    config = getattr(transformers, f"{kind}Config")(
        text_config=fields, vision_config=vision, tie_word_embeddings=True, **given,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )  # fmt: skip
    save_model(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)
    rename_weights(folder, {"vision_tower.": "vision_tower.vision_model."})
    size = {"height": 56, "width": 56}
    if kind == "LlavaOnevision":
        processor = transformers.LlavaOnevisionProcessor(
            image_processor=transformers.LlavaOnevisionImageProcessor(size=size, **given), tokenizer=tokenizer,
            video_processor=transformers.LlavaOnevisionVideoProcessor(size=size), num_image_tokens=16,
            vision_feature_select_strategy="full", chat_template=template,
        )  # fmt: skip
    else:
        images = transformers.CLIPImageProcessor if kind == "Llava" else transformers.LlavaNextImageProcessor
        edges: dict[str, Any] = dict(size={"shortest_edge": 56}, crop_size=size)
        clips = (
            {"video_processor": transformers.LlavaNextVideoVideoProcessor(**edges)} if kind == "LlavaNextVideo" else {}
        )
        processor = getattr(transformers, f"{kind}Processor")(
            image_processor=images(**edges, **given), tokenizer=tokenizer, patch_size=14, **clips,
            vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    processor.save_pretrained(folder)
    return folder
