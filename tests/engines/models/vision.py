"""Tiny random models that see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.models.parts import CHATML, build_tokenizer, lay_out_as_published, media_ids, save_model, text_fields
from engines.models.text import EXPERTS, hybrid_fields


def write_vision_model(folder: Path, kind: str = "qwen2_5_vl") -> Path:
    """A random Qwen2-VL, Qwen2.5-VL or Qwen3-VL (dense or MoE): 28 px a token, 84x84 pictures become 9 tokens."""
    import torch
    import transformers

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision: dict[str, Any] = dict(depth=2, hidden_size=32, num_heads=2, patch_size=14)
    text = text_fields(len(tokenizer))
    if kind == "qwen2_5_vl":
        vision |= dict(
            intermediate_size=48, out_hidden_size=64, fullatt_block_indexes=[1], window_size=112, tokens_per_second=4,
            initializer_range=0.15,
        )  # fmt: skip
        name = "Qwen2_5_VL"
    elif kind.startswith("qwen3_5"):
        vision |= dict(intermediate_size=48, out_hidden_size=64, num_position_embeddings=36, initializer_range=0.15)
        text = hybrid_fields(len(tokenizer))
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
        **media_ids(tokenizer),
    )  # fmt: skip
    save_model(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
    if kind == "qwen3_vl_moe":
        lay_out_as_published(folder)
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
        text_config={**text_fields(len(tokenizer)), **text, "rope_parameters": rope},
        vision_config=vision, image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"), image_seq_length=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    save_model(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
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
    text = text_fields(len(tokenizer))
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
    save_model(getattr(transformers, f"{name}ForConditionalGeneration")(config), folder)
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
    text = text_fields(len(tokenizer))
    text["head_dim"] = head = text["hidden_size"] // text["num_attention_heads"]
    sections = [head // 8, head // 8, head // 4]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=84, patch_size=14,
    )  # fmt: skip
    config = transformers.PaddleOCRVLConfig(text_config=text, vision_config=vision, **media_ids(tokenizer))
    save_model(transformers.PaddleOCRVLForConditionalGeneration(config), folder)
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
    text = text_fields(len(tokenizer)) | dict(
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
    save_model(transformers.DeepseekOcr2ForConditionalGeneration(config), folder)
    images = transformers.DeepseekOcr2ImageProcessor()
    transformers.DeepseekOcr2Processor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


DEEPSEEK = (
    "{% set seps = ['\n\n', '<|im_end|>'] %}You are a helpful language and vision assistant. \n\n{% for message in messages %}"
    "{% if message['role']|lower == 'user' %}User: {% elif message['role']|lower == 'assistant' %}Assistant:"
    "{% if not (loop.last and not add_generation_prompt and message['content'][0]['type']=='text' and "
    "message['content'][0]['text']=='') %} {% endif %}{% else %}{{ message['role'].capitalize() }}: {% endif %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<image_placeholder>"
    "{% elif content['type'] == 'text' %}{% set text = content['text'] %}{% if loop.first %}{% set text = text.lstrip() %}"
    "{% endif %}{% if loop.last %}{% set text = text.rstrip() %}{% endif %}"
    "{% if not loop.first and message['content'][loop.index0-1]['type'] == 'text' %}{{ ' ' + text }}{% else %}{{ text }}"
    "{% endif %}{% endif %}{% endfor %}{% if not loop.last or add_generation_prompt %}"
    "{% if message['role']|lower == 'user' %}{{ seps[0] }}{% else %}{{ seps[1] }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""DeepSeek-VL's own, but for the end of a turn and most of its first words: texts are trimmed, contents are lists."""


def write_deepseek_vl(folder: Path, hybrid: bool = False) -> Path:
    """A random DeepSeek-VL: every picture is scaled to 56 px, and to 96 px (``hybrid``) for a second tower; 16 tokens."""
    import torch
    import transformers

    tokenizer = build_tokenizer(DEEPSEEK, image_token="<image_placeholder>")
    torch.manual_seed(0)
    text = text_fields(len(tokenizer)) | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.15)
    vision = small | dict(intermediate_size=48, image_size=56, patch_size=14, vision_use_head=False)
    more: dict[str, Any] = {}
    sizes: dict[str, Any] = {"size": {"height": 56, "width": 56}}
    if hybrid:
        sam = dict(image_size=96, patch_size=16, output_channels=8, mlp_dim=64, global_attn_indexes=[1], window_size=3)
        more["high_res_vision_config"] = small | sam
        sizes["high_res_size"] = {"height": 96, "width": 96}
    name = f"DeepseekVL{'Hybrid' * hybrid}"
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, **more, image_token_id=tokenizer.convert_tokens_to_ids("<image_placeholder>")
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    if hybrid:
        model.model.high_res_vision_alpha.data.fill_(0.5)  # zero before it is trained
    save_model(model, folder)
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=getattr(transformers, f"{name}ImageProcessor")(**sizes), tokenizer=tokenizer, num_image_tokens=16,
        chat_template=DEEPSEEK,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


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


def write_mistral3(folder: Path, text: str = "mistral", pixtral: bool = False) -> Path:
    """A random Mistral Small 3.x, or Ministral 3 (``ministral3``): 28 px a token, a break behind each row; Pixtral: 14 px."""
    import torch
    import transformers

    names = dict(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    turns = {n: f"[{n}]" for n in ("INST", "/INST", "SYSTEM_PROMPT", "/SYSTEM_PROMPT")}
    tokenizer = build_tokenizer(MISTRAL, **names, **turns)
    tokenizer.bos_token = "<|endoftext|>"
    torch.manual_seed(0)
    fields = text_fields(len(tokenizer))
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
    save_model(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)
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
    fields = text_fields(len(tokenizer)) | {"model_type": "llama", "pad_token_id": 0}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = getattr(transformers, f"{kind}Config")(
        text_config=fields, vision_config=vision, scale_factor=2, tie_word_embeddings=True, pad_token_id=0,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    save_model(getattr(transformers, f"{kind}ForConditionalGeneration")(config), folder)
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
