"""Tiny random models that see, over latent attention."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.models.parts import CHATML, build_tokenizer, media_ids, rename_weights, save_model
from engines.models.text import mla_fields, write_mla_model


def write_kimi(folder: Path, decoder: str = "deepseek_v3", **fields: Any) -> Path:
    """A random Kimi K2.5: a vision tower over a decoder with latent attention; 84x84 pictures become 9 tokens."""
    import torch
    import transformers

    written = "<|vision_start|>image<|vision_pad|><|image_pad|><|vision_end|>"
    template = CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", written)
    tokenizer = build_tokenizer(template, image_token="<|image_pad|>", video_token="<|video_pad|>")
    torch.manual_seed(0)
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, pos_emb_height=6,
        pos_emb_width=6, patch_size=14,
    )  # fmt: skip
    config = transformers.Kimi_K25Config(
        # With compressed queries, as Kimi's own: transformers 5.19 saves a decoder's q_proj as if it were the tower's.
        text_config={**mla_fields(len(tokenizer)), "q_lora_rank": 16, "model_type": decoder, **fields}, vision_config=vision,
        projection_hidden_size=32, tie_word_embeddings=False, **media_ids(tokenizer),
    )  # fmt: skip
    save_model(transformers.Kimi_K25ForConditionalGeneration(config), folder)
    size = {"max_height": 512, "max_width": 512}
    processor = transformers.Kimi_K25Processor(
        image_processor=transformers.Kimi_K25ImageProcessor(size=size, max_patches=36),
        video_processor=transformers.Kimi_K25VideoProcessor(size=size), tokenizer=tokenizer, chat_template=template,
    )  # fmt: skip
    processor.save_pretrained(folder)
    # The Hub has vLLM's name of the class, and the settings of its processor instead of transformers'.
    (folder / "processor_config.json").unlink()
    rename_weights(folder, {
        "language_model.model.blocks.": "language_model.model.layers.", "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    })  # fmt: skip
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["KimiK25ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    settings = dict(
        in_patch_limit=36, patch_size=14, image_mean=[0.5] * 3, image_std=[0.5] * 3, merge_kernel_size=2,
        fixed_output_tokens=None, patch_limit_on_one_side=512, in_patch_limit_each_frame=36, in_patch_limit_video=None,
        sample_fps=2.0, max_num_frames_each_video=None, temporal_merge_kernel_size=4, timestamp_mode="hh:mm:ss.fff",
    )  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": settings}))
    return folder


KIMI_VL = (
    "{%- for message in messages -%}{%- if loop.first and messages[0]['role'] != 'system' -%}"
    "{{'<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>'}}{%- endif -%}"
    "{{- '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' -}}{%- if message['content'] is string -%}"
    "{{- message['content'] + '<|im_end|>' -}}{%- else -%}{%- for content in message['content'] -%}"
    "{%- if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}"
    "{{'<|media_start|>image<|media_content|><|media_pad|><|media_end|>'}}{%- else -%}{{content['text']}}{%- endif -%}"
    "{%- endfor -%}{{'<|im_end|>'}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<|im_assistant|>assistant<|im_middle|>'}}{%- endif -%}"
)


def write_kimi_vl(folder: Path, **fields: Any) -> Path:
    """A random Kimi-VL in vLLM's layout, since transformers has none; 84x84 pictures become 9 tokens."""
    turns = {n: f"<|{n}|>" for n in ("im_system", "im_user", "im_assistant", "im_middle")}
    marks = {n: f"<|{n}|>" for n in ("media_start", "media_content", "media_pad", "media_end")}
    tokenizer = build_tokenizer(KIMI_VL, **turns, **marks)
    width, inner, patch, side = 32, 48, 14, 6
    tower, joint = "vision_tower", "multi_modal_projector"
    layers = {f"{joint}.linear_1": (4 * width, 4 * width), f"{joint}.linear_2": (64, 4 * width)}
    norms = {f"{tower}.encoder.final_layernorm": width, f"{joint}.pre_norm": width}
    for block in (f"{tower}.encoder.blocks.{i}" for i in range(2)):
        norms |= {f"{block}.norm0": width, f"{block}.norm1": width}
        layers |= {f"{block}.wqkv": (3 * width, width), f"{block}.wo": (width, width)}
        layers |= {f"{block}.mlp.fc0": (inner, width), f"{block}.mlp.fc1": (width, inner)}
    layers[f"{tower}.patch_embed.proj"] = (width, 3, patch, patch)
    parameters = {f"{tower}.patch_embed.pos_emb.weight": (side, side, width)}
    fields = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", **fields}
    text = _write_over_mla(folder, tokenizer, "language_model", layers, norms, parameters, "DeepseekV3", **fields)
    vision = dict(
        model_type="moonvit", patch_size=patch, init_pos_emb_height=side, init_pos_emb_width=side, num_attention_heads=2,
        num_hidden_layers=2, hidden_size=width, intermediate_size=inner, merge_kernel_size=[2, 2],
    )  # fmt: skip
    ids = {"media_placeholder_token_id": tokenizer.convert_tokens_to_ids("<|media_pad|>"), "pad_token_id": 0}
    whole = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "vision_config": vision,
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    classes = {"AutoImageProcessor": "KimiVLImageProcessor", "AutoProcessor": "KimiVLProcessor"}
    settings = {
        "image_processor_type": "KimiVLImageProcessor", "processor_class": "KimiVLProcessor", "in_token_limit": 36,
        "patch_size": patch, "auto_map": {k: f"kimi_vl_processing.{v}" for k, v in classes.items()},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    shutil.copy(Path(__file__).with_name("kimi_vl_processing.py"), folder)
    return folder


def write_deepseek_vl2(folder: Path, tiny: bool = False, **fields: Any) -> Path:
    """A random DeepSeek-VL2 in vLLM's layout, since transformers has none, over `small_siglip`; a picture has 13 tokens.

    ``tiny``: without latent attention, as DeepSeek-VL2-tiny.
    """
    names = ("image_token", "ref", "ref_end", "det", "det_end", "grounding", "user", "assistant")
    marks = ("<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", "<|User|>", "<|Assistant|>")
    template = CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")  # the published one has none
    tokenizer = build_tokenizer(template, **dict(zip(names, marks, strict=True)))
    tokenizer.bos_token = "<|endoftext|>"
    shapes = {f"vision.{n}": tuple(p.shape) for n, p in small_siglip().named_parameters()}
    shapes |= {"image_newline": (64,), "view_seperator": (64,)}
    layers = {"projector.layers.0": (64, 4 * 32), "projector.layers.2": (64, 64)}
    text = _write_over_mla(folder, tokenizer, "language", layers, {}, shapes, "DeepseekV2", **fields)
    if tiny:
        text |= _without_latent_attention(folder)
    whole = {
        "architectures": ["DeepseekVLV2ForCausalLM"], "model_type": "deepseek_vl_v2", "tile_tag": "2D", "global_view_pos": "head",
        "candidate_resolutions": [[56, 56], [112, 56]], "vision_config": {"image_size": 56, "patch_size": 14, "width": 32},
        "projector_config": {"input_dim": 32, "n_embed": 64, "depth": 2, "mlp_ratio": 1, "downsample_ratio": 2},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole | {"language_config": text}))
    settings = {
        "processor_class": "DeepseekVLV2Processor", "candidate_resolutions": whole["candidate_resolutions"], "patch_size": 14,
        "downsample_ratio": 2, "image_token": "<image>", "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def _without_latent_attention(folder: Path) -> dict[str, Any]:
    """Replace the attention of a written DeepSeek-V2 by that of DeepSeek's first model; return the fields that say so."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    layers = sorted({name.partition(".self_attn.")[0] for name in weights if ".self_attn." in name})
    weights = {name: weight for name, weight in weights.items() if ".self_attn." not in name}
    generator = torch.Generator().manual_seed(2)
    for name in (f"{layer}.self_attn.{part}_proj.weight" for layer in layers for part in "qkvo"):
        weights[name] = 0.15 * torch.randn(64, 64, generator=generator)
    save_file(weights, folder / "model.safetensors")
    sizes = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "qk_head_dim"), 0)
    return {**sizes, "kv_lora_rank": None, "q_lora_rank": None}


def small_siglip(*_: Any, **options: Any) -> Any:
    """A vision tower of timm's, in place of the only one that vLLM makes."""
    from timm.models.vision_transformer import VisionTransformer

    options.pop("pretrained", None)
    sizes = dict(img_size=56, patch_size=14, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, class_token=False)
    return VisionTransformer(**{"num_classes": 0, **sizes, **options}, global_pool="map")


def _write_over_mla(
    folder: Path, tokenizer: Any, prefix: str, layers: Mapping[str, tuple[int, ...]], norms: Mapping[str, int],
    parameters: Mapping[str, tuple[int, ...]], kind: str, **fields: Any,
) -> dict[str, Any]:  # fmt: skip
    """Write a random decoder with latent attention under a prefix beside weights of the shapes given; return its config."""
    import torch
    from safetensors.torch import load_file, save_file

    write_mla_model(folder, kind, vocab_size=len(tokenizer), **fields)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(0)
    shapes = {**parameters, **{f"{n}.weight": shape for n, shape in layers.items()}}
    shapes |= {f"{n}.bias": shape[:1] for n, shape in layers.items()} | {
        f"{n}.bias": (size,) for n, size in norms.items()
    }
    weights = {n: 0.15 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    weights |= {f"{norm}.weight": torch.ones(size) for norm, size in norms.items()}
    text = load_file(folder / "model.safetensors")
    save_file(weights | {f"{prefix}.{n}": w for n, w in text.items()}, folder / "model.safetensors")
    (folder / "chat_template.jinja").unlink()  # of the decoder's own tokenizer
    tokenizer.save_pretrained(folder)
    return config
