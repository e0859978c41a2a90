"""The whole model: LLaVA's layout around a pretrained language model, put together from what was trained and what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from train_seeing.vocabulary import IMAGE, NEW_TOKENS, tokenizer_of
from train_tiny.tokenizer import transformers

WEIGHTS = Path(__file__).parent / "seeing.safetensors"
"""What was trained, in bfloat16: tower, projector, and the rows of the new tokens."""
SIDE, PATCH, WIDTH, LAYERS = 224, 14, 192, 4
"""Of the tower: a picture's side and a patch's in pixels, numbers a patch, layers. LLaVA reads the last layer but one."""
NEW_ROWS = "new_rows"


def config_of(folder: Path, tokenizer: Any) -> Any:
    """Return LLaVA's configuration around that of a language model."""
    library = transformers()
    text = library.AutoConfig.from_pretrained(folder, local_files_only=True)
    text.vocab_size += len(NEW_TOKENS)
    text.eos_token_id = tokenizer.eos_token_id
    vision = library.CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=3,
        image_size=SIDE, patch_size=PATCH, projection_dim=WIDTH,
    )  # fmt: skip
    return library.LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        projector_hidden_act="gelu",
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=True,
    )


def processor_of(tokenizer: Any) -> Any:
    """Return LLaVA's processor: a picture of 224 x 224 pixels keeps its size."""
    library = transformers()
    return library.LlavaProcessor(
        image_processor=library.CLIPImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )


def assemble(language_model: Path, out: Path, weights: Path = WEIGHTS) -> None:
    """Write the folder of the model that sees, in float32: ``language_model``'s weights unchanged, and what was trained."""
    library = transformers()
    tokenizer = tokenizer_of(language_model)
    model = library.LlavaForConditionalGeneration(config_of(language_model, tokenizer)).float()
    language = library.AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32, local_files_only=True)
    trained: dict[str, Tensor] = {name: tensor.float() for name, tensor in load_file(weights).items()}
    state = {f"model.language_model.{k}": v for k, v in language.model.state_dict().items()}
    embeddings = "model.language_model.embed_tokens.weight"
    state[embeddings] = torch.cat([state[embeddings], trained.pop(NEW_ROWS)])
    state["lm_head.weight"] = state[embeddings]
    model.load_state_dict({**state, **trained})
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out)
    name_as_published(out / "model.safetensors")
    processor_of(tokenizer).save_pretrained(out)


def name_as_published(path: Path) -> None:
    """Give the tower's weights the names that checkpoints on the Hub have, and vLLM reads; transformers reads both."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    weights = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
