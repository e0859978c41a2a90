"""What tiny random checkpoints are made of: a tokenizer, sizes, weights."""

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


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
"""What `text_fields` has of width and heads."""


def text_fields(vocab: int) -> dict[str, Any]:
    """Fields of a text config."""
    return dict(
        vocab_size=vocab, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=1024,
        initializer_range=0.15, tie_word_embeddings=True, bos_token_id=0, eos_token_id=2, pad_token_id=0, **SIZES,
    )  # fmt: skip


def randomise(model: Any) -> None:
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


def media_ids(tokenizer: Any) -> dict[str, int]:
    ids = tokenizer.convert_tokens_to_ids
    return dict(
        image_token_id=ids("<|image_pad|>"), video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"), vision_end_token_id=ids("<|vision_end|>"),
    )  # fmt: skip


def save_model(model: Any, folder: Path) -> None:
    randomise(model)
    model.save_pretrained(folder)


def wide(write: Callable[[Path], Path], folder: Path, **fields: Any) -> Path:
    """One of the models above with heads of 32, the smallest that vLLM's CPU attention takes."""
    with mock.patch.dict(SIZES, num_attention_heads=2, num_key_value_heads=1):
        write(folder)
    if fields:
        edit_config(folder, **fields)
    return folder


def lay_out_as_published(folder: Path) -> None:
    """Lays fused expert weights out as published checkpoints do, which is not how transformers 5.19 writes them."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    turned = {
        name: weight.transpose(1, 2).contiguous() if ".mlp.experts." in name else weight
        for name, weight in weights.items()
    }
    save_file(turned, path, metadata={"format": "pt"})


def rename_weights(folder: Path, prefixes: dict[str, str]) -> None:
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
