"""Tiny random checkpoints in transformers layout, so that engine tests need no trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def build_tokenizer(chat_template: str | None = CHATML) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL), chat_template=chat_template,
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


def write_vision_model(folder: Path, kind: str = "qwen2_5_vl") -> Path:
    """A random Qwen2.5-VL (or Qwen2-VL): 28 px a token, 84x84 pictures become 9 tokens."""
    import torch
    import transformers

    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    if kind == "qwen2_5_vl":
        vision = dict(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=14, out_hidden_size=64,
            fullatt_block_indexes=[1], window_size=112, tokens_per_second=4, initializer_range=0.15,
        )  # fmt: skip
        names = ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor")
    else:
        vision = dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=14)
        names = ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", "Qwen2VLProcessor")
    config = getattr(transformers, names[0])(
        text_config={**_text_fields(len(tokenizer)), "rope_parameters": rope}, vision_config=vision,
        image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip
    model = getattr(transformers, names[1])(config)
    _randomise(model)
    model.save_pretrained(folder)
    size = {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    processor = getattr(transformers, names[2])(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, patch_size=14, merge_size=2),
        video_processor=transformers.Qwen2VLVideoProcessor(
            size=size, patch_size=14, merge_size=2, do_sample_frames=False, cap_pixels_per_frame=False
        ),
        tokenizer=tokenizer,
        chat_template=CHATML,
    )
    processor.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    """Changes fields of a saved config (of its text part where it has one)."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(fields)
    path.write_text(json.dumps(config))
