"""Tiny random Gemmas that see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines.models.parts import build_tokenizer, rename_weights, save_model, text_fields
from engines.models.text import GEMMA3, GEMMA4, GEMMA4_SHARING

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
    text = text_fields(len(tokenizer) + 4) | GEMMA3 | {"eos_token_id": ids("<end_of_turn>")}
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
    save_model(model, folder)
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    transformers.Gemma3Processor(images, tokenizer, GEMMA, image_seq_length=4).save_pretrained(folder)
    _name_newlines(folder)
    rename_weights(folder, {"vision_tower.": "vision_tower.vision_model."})  # as published, and as vLLM reads it
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
    text = text_fields(len(tokenizer)) | GEMMA4 | {"use_bidirectional_attention": "vision"}
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
    save_model(model, folder)
    size = dict(patch_size=4, max_soft_tokens=70)
    processor = transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4ImageProcessor(**size), tokenizer,
        transformers.Gemma4VideoProcessor(**size), GEMMA4_TURNS,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder
