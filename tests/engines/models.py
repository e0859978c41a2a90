"""Tiny random checkpoints in transformers layout, so that engine tests need no trained weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ("system user assistant what color is the shape of a frame camera number now red blue circle square " * 8,)


def build_tokenizer(chat_template: str | None = CHATML, **extra: str) -> Any:
    """A tokenizer whose ``extra`` special tokens have names, as InternVL's processor wants them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*SPECIAL, *extra.values()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=special, extra_special_tokens=extra, chat_template=chat_template,
    )  # fmt: skip


def _text_fields(vocab: int) -> dict[str, Any]:
    return dict(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.15, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def _randomise(model: Any) -> None:
    """Biases that are not zero, so that no test passes because a term vanishes."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            # Gemma 4's attention has no other scale; as it is made it would see one token only.
            if name.endswith("q_norm.weight") and model.config.get_text_config().model_type == "gemma4_text":
                parameter.mul_(0.2)
            if name.endswith("A_log"):  # states that last, as trained ones do: so that nothing passes because they fade
                parameter.copy_((torch.rand(parameter.shape, generator=generator) * 0.1 + 0.005).log())


def write_text_model(folder: Path, chat_template: str | None = CHATML) -> Path:
    """A random text-only Qwen2."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer(chat_template)
    torch.manual_seed(0)
    config = Qwen2Config(**_text_fields(len(tokenizer)), rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    model = Qwen2ForCausalLM(config)
    _randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_decoder(folder: Path, kind: str, **fields: Any) -> Path:
    """A random text model of another family of transformers: ``kind`` as in its classes' names, ``Llama`` for one."""
    import torch
    import transformers

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = getattr(transformers, f"{kind}ForCausalLM")
    if fields.get("hidden_size_per_layer_input"):
        fields = {**fields, "vocab_size_per_layer_input": len(tokenizer)}
    _save(model(model.config_class(**(_text_fields(len(tokenizer)) | rope | fields))), folder)
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


def write_llama(folder: Path, kv_heads: int) -> Path:
    """A random Llama with two heads of 32: grouped (``kv_heads=1``) or multi-head attention (2)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    fields = _text_fields(len(tokenizer)) | {"num_attention_heads": 2, "num_key_value_heads": kv_heads}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    LlamaForCausalLM(LlamaConfig(**fields, rope_parameters=rope)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_vision_model(folder: Path, kind: str = "qwen2_5_vl") -> Path:
    """A random Qwen2-VL, Qwen2.5-VL or Qwen3-VL (dense or MoE): 28 px a token, 84x84 pictures become 9 tokens."""
    import torch
    import transformers

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision: dict[str, Any] = dict(depth=2, hidden_size=32, num_heads=2, patch_size=14)
    text = _text_fields(len(tokenizer))
    if kind == "qwen2_5_vl":
        vision |= dict(
            intermediate_size=48, out_hidden_size=64, fullatt_block_indexes=[1], window_size=112, tokens_per_second=4,
            initializer_range=0.15,
        )  # fmt: skip
        name = "Qwen2_5_VL"
    elif kind.startswith("qwen3_5"):
        vision |= dict(intermediate_size=48, out_hidden_size=64, num_position_embeddings=36, initializer_range=0.15)
        text = _hybrid_fields(len(tokenizer))
        rope, name = text.pop("rope_parameters"), "Qwen3_5"
        if kind == "qwen3_5_moe":
            text |= EXPERTS
            name = "Qwen3_5Moe"
    elif kind.startswith("qwen3_vl"):
        vision |= dict(
            intermediate_size=48, out_hidden_size=64, num_position_embeddings=36, deepstack_visual_indexes=[0, 1],
            initializer_range=0.15,
        )  # fmt: skip
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
        rope |= {"mrope_section": [text["head_dim"] // n for n in (4, 8, 8)], "mrope_interleaved": True}
        name = "Qwen3VL"
        if kind == "qwen3_vl_moe":
            text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True)
            name = "Qwen3VLMoe"
    else:
        vision |= dict(embed_dim=32, hidden_size=64, mlp_ratio=2)
        name = "Qwen2VL"
    config = getattr(transformers, f"{name}Config")(
        text_config=text | {"rope_parameters": rope}, vision_config=vision, tie_word_embeddings=True,
        **_media_ids(tokenizer),
    )  # fmt: skip
    _save(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
    if kind == "qwen3_vl_moe":
        _as_published(folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    newest = kind.startswith("qwen3")
    # Qwen3-VL's processor counts the pixels of all frames together.
    video_size = size | {"longest_edge": 84 * 84 * 8} if newest else size
    processor = getattr(transformers, "Qwen3VLProcessor" if newest else f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, patch_size=14, merge_size=2),
        video_processor=getattr(transformers, "Qwen3VLVideoProcessor" if newest else "Qwen2VLVideoProcessor")(
            size=video_size, patch_size=14, merge_size=2, do_sample_frames=False, cap_pixels_per_frame=False
        ),
        tokenizer=tokenizer,
        chat_template=CHATML,
    )
    processor.save_pretrained(folder)
    return folder


def _hybrid_fields(vocab: int) -> dict[str, Any]:
    """Three Gated DeltaNet layers in front of each of two attention layers, a quarter of whose heads turns."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    return _text_fields(vocab) | dict(
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
    fields = _hybrid_fields(len(tokenizer)) | EXPERTS
    if kind == "Qwen3Next":  # vLLM does not tie its words
        fields["tie_word_embeddings"] = False
        fields["rope_parameters"] = {n: v for n, v in fields["rope_parameters"].items() if n != "mrope_section"}
    config = getattr(transformers, f"{kind}Config")(**fields | changes)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    _randomise(model)
    _save(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_internvl(folder: Path, qianfan: bool = False) -> Path:
    """A random InternVL or Qianfan-OCR: tiles of 56 px make 4 tokens each; 84x84 pictures have 4 tiles and a thumbnail."""
    import torch
    import transformers

    template = CHATML.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<image>\n" if qianfan else "<IMG_CONTEXT>\n"
    )
    tokenizer = build_tokenizer(
        template, start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )  # fmt: skip
    torch.manual_seed(0)
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=[56, 56],
        patch_size=[14, 14], initializer_range=0.15,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4}
    name = "QianfanOCR" if qianfan else "InternVL"
    text = {"model_type": "qwen3", "head_dim": 16} if qianfan else {"model_type": "qwen2"}
    config = getattr(transformers, f"{name}Config")(
        text_config={**_text_fields(len(tokenizer)), **text, "rope_parameters": rope},
        vision_config=vision, image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"), image_seq_length=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    _save(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
    parts: dict[str, Any] = {
        "image_processor": transformers.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    }
    if not qianfan:  # which takes no videos
        parts["video_processor"] = transformers.InternVLVideoProcessor(size={"height": 56, "width": 56})
    processor = getattr(transformers, f"{name}Processor")(
        **parts, tokenizer=tokenizer, image_seq_length=4, chat_template=template
    )
    processor.save_pretrained(folder)
    return folder


def _mla_fields(vocab: int) -> dict[str, Any]:
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
    config = getattr(transformers, f"{kind}Config")(**(_mla_fields(len(tokenizer)) | fields))
    _save(getattr(transformers, f"{kind}ForCausalLM")(config), folder)
    tokenizer.save_pretrained(folder)
    return folder


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
        text_config={**_mla_fields(len(tokenizer)), "q_lora_rank": 16, "model_type": decoder, **fields}, vision_config=vision,
        projection_hidden_size=32, tie_word_embeddings=False, **_media_ids(tokenizer),
    )  # fmt: skip
    _save(transformers.Kimi_K25ForConditionalGeneration(config), folder)
    size = {"max_height": 512, "max_width": 512}
    processor = transformers.Kimi_K25Processor(
        image_processor=transformers.Kimi_K25ImageProcessor(size=size, max_patches=36),
        video_processor=transformers.Kimi_K25VideoProcessor(size=size), tokenizer=tokenizer, chat_template=template,
    )  # fmt: skip
    processor.save_pretrained(folder)
    # The Hub has vLLM's name of the class, and the settings of its processor instead of transformers'.
    (folder / "processor_config.json").unlink()
    _renamed(folder, {
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


def write_glm4v(folder: Path, experts: bool = False, ocr: bool = False) -> Path:
    """A random GLM-4.1V, GLM-4.5V (``experts``) or GLM-OCR: 28 px a token, 84x84 pictures become 9 tokens."""
    import torch
    import transformers

    names = dict(
        image_start_token="<|begin_of_image|>", image_end_token="<|end_of_image|>", image_token="<|image|>",
        video_start_token="<|begin_of_video|>", video_end_token="<|end_of_video|>", video_token="<|video|>",
    )  # fmt: skip
    template = CHATML.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>"
    )
    tokenizer = build_tokenizer(template, **names)
    torch.manual_seed(0)
    text = _text_fields(len(tokenizer))
    head = text["hidden_size"] // text["num_attention_heads"]
    # Half of each head turns, as in the released models; its sections fill that half.
    text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "mrope_section": [head // 16, head // 16, head // 8],
    }  # fmt: skip
    text["attention_bias"] = not ocr  # as in released configs; transformers computes so anyway
    if ocr:  # vLLM takes the tower's last size from the decoder, where it is the same in the released model
        text["intermediate_size"] = 3 * text["hidden_size"]
    if experts:
        text |= dict(
            head_dim=head, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
            first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, use_qk_norm=False,
            tie_word_embeddings=False,
        )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=64, image_size=84, patch_size=14,
        initializer_range=0.15,
    )  # fmt: skip
    name = "Glm4vMoe" if experts else "GlmOcr" if ocr else "Glm4v"
    ids = {f"{field}_id": tokenizer.convert_tokens_to_ids(token) for field, token in names.items()}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=not experts, **ids
    )  # fmt: skip
    _save(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84 * 2}
    kind = "Glm46V" if ocr else "Glm4v"
    processor = getattr(transformers, f"{kind}Processor")(
        image_processor=getattr(transformers, f"{kind}ImageProcessor")(size=size), tokenizer=tokenizer,
        video_processor=getattr(transformers, f"{kind}VideoProcessor")(size=size), chat_template=template,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


PADDLE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' }}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}"
    "{% for content in message['content'] %}{% if content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}"
    "{{ '\n' }}{% else %}{{ 'Assistant: ' if message['role'] == 'assistant' else '' }}"
    "{% for content in message['content'] %}{{ content['text'] }}{% endfor %}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""PaddleOCR-VL's own but for its first token and the names of its marks: pictures in front of a message's text."""


def write_paddleocr(folder: Path) -> Path:
    """A random PaddleOCR-VL: 28 px a token, 84x84 pictures become 9 tokens."""
    import torch
    import transformers

    tokenizer = build_tokenizer(PADDLE, image_token="<|image_pad|>")
    torch.manual_seed(0)
    text = _text_fields(len(tokenizer))
    text["head_dim"] = head = text["hidden_size"] // text["num_attention_heads"]
    sections = [head // 8, head // 8, head // 4]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=84, patch_size=14,
    )  # fmt: skip
    config = transformers.PaddleOCRVLConfig(text_config=text, vision_config=vision, **_media_ids(tokenizer))
    _save(transformers.PaddleOCRVLForConditionalGeneration(config), folder)
    processor = transformers.PaddleOCRVLProcessor(
        image_processor=transformers.PaddleOCRVLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84}),
        tokenizer=tokenizer, chat_template=PADDLE,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


def write_deepseek_ocr(folder: Path) -> Path:
    """A random DeepSeek-OCR 2, whose sizes of pictures are fixed: 257 tokens, and 144 for each of two to six tiles of 768 px."""
    import torch
    import transformers

    tokenizer = build_tokenizer(None, image_token="<image>")
    torch.manual_seed(0)
    text = _text_fields(len(tokenizer)) | dict(
        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, max_position_embeddings=4096,
        mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.15)
    vision = dict(
        sam_config=small | dict(output_channels=32, mlp_ratio=2.0, global_attn_indexes=[1], downsample_channels=[32, 32]),
        encoder_config=small | dict(intermediate_size=48, num_key_value_heads=2),
    )  # fmt: skip
    config = transformers.DeepseekOcr2Config(
        text_config=text, vision_config=vision, image_token_id=tokenizer.convert_tokens_to_ids("<image>")
    )
    _save(transformers.DeepseekOcr2ForConditionalGeneration(config), folder)
    images = transformers.DeepseekOcr2ImageProcessor()
    transformers.DeepseekOcr2Processor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def _media_ids(tokenizer: Any) -> dict[str, int]:
    ids = tokenizer.convert_tokens_to_ids
    return dict(
        image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
    )  # fmt: skip


def _save(model: Any, folder: Path) -> None:
    _randomise(model)
    model.save_pretrained(folder)


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type in ['image', 'image_url'] %}[IMG]{% endif %}"
    "{% endfor %}{% endif %}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""As Mistral Small 3.x has it, but for the default system prompt."""
SMOL = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's own: contents are lists only, and a picture right behind a role has no blank in front."""


GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}"
    "{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}"
    "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}"
    "{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- else -%}{{ raise_exception('Invalid content type') }}"
    "{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
)
"""Gemma 3's own, but that roles need not alternate: the system prompt opens the first user turn."""


def write_gemma3(folder: Path) -> Path:
    """A random Gemma 3 that sees: every picture is scaled to 56 px and has 4 tokens, which see each other both ways."""
    import torch
    import transformers

    names = dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    turns = {name: f"<{name}>" for name in ("start_of_turn", "end_of_turn")}
    tokenizer = build_tokenizer(GEMMA, **names, **turns)
    tokenizer.bos_token, tokenizer.eos_token = "<|endoftext|>", "<end_of_turn>"
    torch.manual_seed(0)
    ids = tokenizer.convert_tokens_to_ids
    text = _text_fields(len(tokenizer) + 4) | GEMMA3 | {"eos_token_id": ids("<end_of_turn>")}
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=56, patch_size=14,
        initializer_range=0.15, vision_use_head=False,
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=True,
        image_token_index=ids("<image_soft_token>"), boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"), architectures=["Gemma3ForConditionalGeneration"],
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(0, 0.15)  # made as zeros
    _save(model, folder)
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    transformers.Gemma3Processor(images, tokenizer, GEMMA, image_seq_length=4).save_pretrained(folder)
    _name_newlines(folder)
    _renamed(folder, {"vision_tower.": "vision_tower.vision_model."})  # as published, and as vLLM reads it
    return folder


def _name_newlines(folder: Path) -> None:
    """Gives vLLM the tokens for line breaks that it asks Gemma's vocabulary for; no text of a byte-level one becomes them."""
    path = folder / "tokenizer.json"
    held = json.loads(path.read_text())
    first = max(*held["model"]["vocab"].values(), *(token["id"] for token in held["added_tokens"])) + 1
    held["model"]["vocab"] |= {"\n" * (i + 1): first + i for i in range(4)}
    path.write_text(json.dumps(held))


GEMMA4_TURNS = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<|image|>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<turn|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<|turn>model\n'}}{%- endif -%}"
)
"""Gemma 4's turns, without its thinking and its tools."""


def write_gemma4_sharing(folder: Path) -> Path:
    """As Gemma 4's smaller models, whose pictures are causal."""
    return write_gemma4(folder, use_bidirectional_attention=None, **GEMMA4_SHARING)


def write_gemma4(folder: Path, **fields: Any) -> Path:
    """A random Gemma 4 that sees: pictures are scaled to 64 tokens, in any form."""
    import torch
    import transformers

    names = dict(
        boi_token="<|image>", eoi_token="<image|>", image_token="<|image|>", audio_token="<|audio|>", boa_token="<|audio>",
        eoa_token="<audio|>", video="<|video|>",
    )  # fmt: skip
    turns = {"turn": "<|turn>", "turn_end": "<turn|>"}
    tokenizer = build_tokenizer(GEMMA4_TURNS, **names, **turns)
    tokenizer.bos_token, tokenizer.eos_token = "<|endoftext|>", "<turn|>"
    torch.manual_seed(0)
    ids = tokenizer.convert_tokens_to_ids
    text = _text_fields(len(tokenizer)) | GEMMA4 | {"use_bidirectional_attention": "vision"}
    text |= fields | {"eos_token_id": ids("<turn|>"), "vocab_size_per_layer_input": len(tokenizer)}
    text["max_position_embeddings"] = 4096
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=48,
        patch_size=4, position_embedding_size=64, default_output_length=70, initializer_range=0.15,
    )  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, tie_word_embeddings=True,
        **{f"{n}_token_id": ids(names[f"{n}_token"]) for n in ("image", "audio", "boi", "eoi", "boa")},
        eoa_token_index=ids("<audio|>"), video_token_id=ids("<|video|>"),
        architectures=["Gemma4ForConditionalGeneration"],
    )  # fmt: skip
    model = transformers.Gemma4ForConditionalGeneration(config)
    _save(model, folder)
    size = dict(patch_size=4, max_soft_tokens=70)
    processor = transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4ImageProcessor(**size), tokenizer,
        transformers.Gemma4VideoProcessor(**size), GEMMA4_TURNS,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


def write_mistral3(folder: Path, text: str = "mistral", pixtral: bool = False) -> Path:
    """A random Mistral Small 3.x, or Ministral 3 (``ministral3``): 28 px a token, a break behind each row; Pixtral: 14 px."""
    import torch
    import transformers

    names = dict(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    turns = {n: f"[{n}]" for n in ("INST", "/INST", "SYSTEM_PROMPT", "/SYSTEM_PROMPT")}
    tokenizer = build_tokenizer(MISTRAL, **names, **turns)
    tokenizer.bos_token = "<|endoftext|>"
    torch.manual_seed(0)
    fields = _text_fields(len(tokenizer))
    fields |= {
        "model_type": text,
        "head_dim": fields["hidden_size"] // fields["num_attention_heads"],
        "sliding_window": None,
    }
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    if text == "ministral3":  # the temperature of queries takes its first step at 1,024
        fields["max_position_embeddings"] = 4096
        fields["rope_parameters"] = dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=1024, beta_fast=32.0,
            beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
        )  # fmt: skip
    vision = dict(
        model_type="pixtral", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, head_dim=16,
        image_size=84, patch_size=14, initializer_range=0.15,
    )  # fmt: skip
    kind = "Llava" if pixtral else "Mistral3"
    own = (
        dict(vision_feature_layer=-1, vision_feature_select_strategy="full") if pixtral else dict(spatial_merge_size=2)
    )
    config = getattr(transformers, f"{kind}Config")(
        text_config=fields, vision_config=vision, tie_word_embeddings=True, **own,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"), architectures=[f"{kind}ForConditionalGeneration"],
    )  # fmt: skip
    _save(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)
    processor = transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(size={"longest_edge": 84}, patch_size=14),
        tokenizer=tokenizer, patch_size=14, spatial_merge_size=2 - pixtral, chat_template=MISTRAL, **names,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


def write_smolvlm(folder: Path, kind: str = "SmolVLM") -> Path:
    """A random SmolVLM, or Idefics3: tiles of 56 px make 4 tokens each; 112x112 pictures have 4 tiles and one for all."""
    import torch
    import transformers

    marks = {f"mark_{r}_{c}": f"<row_{r}_col_{c}>" for r in range(1, 3) for c in range(1, 3)}
    names = dict(
        fake_image_token="<fake_token_around_image>", image_token="<image>", global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>", video_token="<video>",
    )  # fmt: skip
    tokenizer = build_tokenizer(SMOL, **names, **marks)
    torch.manual_seed(0)
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=56, patch_size=14,
        initializer_range=0.15,
    )  # fmt: skip
    fields = _text_fields(len(tokenizer)) | {"model_type": "llama", "pad_token_id": 0}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = getattr(transformers, f"{kind}Config")(
        text_config=fields, vision_config=vision, scale_factor=2, tie_word_embeddings=True, pad_token_id=0,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    _save(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)
    size = dict(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    videos = {}
    if kind == "SmolVLM":
        videos["video_processor"] = transformers.SmolVLMVideoProcessor(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 56}
        )
    processor = getattr(transformers, f"{kind}Processor")(
        image_processor=getattr(transformers, f"{kind}ImageProcessor")(**size), tokenizer=tokenizer, image_seq_len=4,
        chat_template=SMOL, **videos,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


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
    .replace("VIDEO", "")
    .replace("TEXT", "{{ content['text'] + ' '}}")
    + "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As on the Hub: both put all pictures in front."""


def write_llava(folder: Path, kind: str = "LlavaOnevision") -> Path:
    """A random LLaVA-OneVision (17 tokens a picture), ``Llava`` 1.5 (16) or ``LlavaNext`` (tiles of 56 px and row ends)."""
    import torch
    import transformers
    from tokenizers.processors import TemplateProcessing

    template = ONEVISION if kind == "LlavaOnevision" else VICUNA
    tokenizer = build_tokenizer(template, image_token="<image>", video_token="<video>")
    if kind != "LlavaOnevision":  # as Llama's tokenizer: the template does not write what it begins with
        begin = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    torch.manual_seed(0)
    fields = _text_fields(len(tokenizer)) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
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
    _save(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)
    _renamed(folder, {"vision_tower.": "vision_tower.vision_model."})
    size = {"height": 56, "width": 56}
    if kind == "LlavaOnevision":
        processor = transformers.LlavaOnevisionProcessor(
            image_processor=transformers.LlavaOnevisionImageProcessor(size=size, **given), tokenizer=tokenizer,
            video_processor=transformers.LlavaOnevisionVideoProcessor(size=size), num_image_tokens=16,
            vision_feature_select_strategy="full", chat_template=template,
        )  # fmt: skip
    else:
        images = transformers.CLIPImageProcessor if kind == "Llava" else transformers.LlavaNextImageProcessor
        processor = getattr(transformers, f"{kind}Processor")(
            image_processor=images(size={"shortest_edge": 56}, crop_size=size, **given), tokenizer=tokenizer, patch_size=14,
            vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


def wide(write: Callable[[Path], Path], folder: Path, **fields: Any) -> Path:
    """One of the models above with heads of 32, the smallest that vLLM's CPU attention takes."""
    text_fields = _text_fields

    def two_heads(vocab: int) -> dict[str, Any]:
        return {**text_fields(vocab), "num_attention_heads": 2, "num_key_value_heads": 1}

    with mock.patch(f"{__name__}._text_fields", two_heads):
        write(folder)
    if fields:
        edit_config(folder, **fields)
    return folder


def _as_published(folder: Path) -> None:
    """Lays fused expert weights out as published checkpoints do, which is not how transformers 5.19 writes them."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    turned = {
        name: weight.transpose(1, 2).contiguous() if ".mlp.experts." in name else weight
        for name, weight in weights.items()
    }
    save_file(turned, path, metadata={"format": "pt"})


def _renamed(folder: Path, prefixes: dict[str, str]) -> None:
    """Gives weights the names of published checkpoints where transformers 5.19 writes others; both are read by it."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    for old, new in prefixes.items():
        weights = {name.replace(old, new, 1) if name.startswith(old) else name: w for name, w in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})


def edit_config(folder: Path, *, whole: bool = False, **fields: Any) -> None:
    """Changes fields of a saved config (of its text part where it has one, or of the ``whole``)."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config if whole else config.get("text_config", config)).update(fields)
    path.write_text(json.dumps(config))


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
    text = _text_fields(len(tokenizer)) | {"max_position_embeddings": 2048, "tie_word_embeddings": False}
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
    _save(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
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
