"""A random vision-language model of half a billion parameters, so that a benchmark needs no download.

Architecture and sizes are Qwen2-VL's around Qwen2-0.5B's decoder, with a small vision tower. Its answers are noise; its
cost is that of a trained model of the same size, including the vocabulary's share of the last step.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from ctxwin.hashing import digest

FORMAT = 1
"""Part of the folder's name; raise it whenever `write_model` writes something else."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the decoder and of the vision tower.

    The defaults are Qwen2-0.5B's: 494 million parameters, 12 KiB of KV a token in bf16. Its vocabulary of 151,936 is kept: the
    tokenizer knows 1,000 of them, but reading the output matrix (272 MB) is a part of every first token.
    """

    hidden: int = 896
    layers: int = 24
    heads: int = 14
    kv_heads: int = 2
    intermediate: int = 4864
    vocabulary: int = 151_936
    max_tokens: int = 4096
    vision_depth: int = 4
    vision_width: int = 256
    vision_heads: int = 4

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.hidden // self.heads


SMALL = Sizes(512, 12, 8, 1, 2816, vocabulary=32_000, vision_depth=2)
"""79 million parameters, for quick runs and for load: a CPU serves several requests a second. Queries per KV head and the
inner width are to one another as in Qwen2-0.5B, so a forward over a token costs about as much beside its KV."""

SEVEN_B = Sizes(3584, 28, 28, 4, 18_944, 32_000, 32_768, 32, 1280, 16)  # Qwen2-VL-7B's but for the vocabulary, 15 GB


def model_folder(sizes: Sizes, seed: int, where: Path | None = None) -> Path:
    """The folder of a generated model, which may not exist yet.

    It is below ``where``; by default below ``ctxwin/bench`` in the user's cache folder.
    """
    name = f"qwen2-vl-random-{sizes.layers}x{sizes.hidden}-{digest('bench', FORMAT, asdict(sizes), seed)[:8]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (cache / "ctxwin" / "bench" if where is None else where) / name


def ensure_model(sizes: Sizes, seed: int, where: Path | None = None) -> tuple[Path, bool]:
    """A generated model's folder, and whether it had to be written.

    It appears as a whole or not at all. Processes take turns, and what a killed one left behind is cleared away.
    Cost: 10-20 s and 1 GB of disk for the default sizes, once. Raises OSError where the folder cannot be written.
    """
    folder = model_folder(sizes, seed, where)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder, False
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            write_model(partial, sizes, seed)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder, True


def check_model(model: str, where: Path | None) -> None:
    """Raise ValueError where both a model and a folder for generated ones are given, or the model is not a folder."""
    if model and where is not None:
        raise ValueError("--model-dir is where a generated model goes; give it or --model, not both")
    if model and not Path(model).expanduser().is_dir():
        raise ValueError(f"--model must be a local model folder, got {model!r}")


def open_model(model: str, sizes: Sizes, seed: int, where: Path | None) -> str:
    """The folder of the model to measure; without ``model`` one is generated, unless it exists already."""
    if model:
        return str(Path(model).expanduser())
    typer.echo(f"model: random Qwen2-VL in {model_folder(sizes, seed, where)} (written once)", err=True)
    return str(ensure_model(sizes, seed, where)[0])


def write_model(folder: Path, sizes: Sizes, seed: int) -> None:
    """Write random bf16 weights, config, tokenizer and processor in transformers layout. One picture token is 28 px."""
    from ctxwin.engines.torchvision_repair import repair
    from ctxwin.tiny import checkpoint_dir

    repair()
    import transformers as library

    tokenizer = library.AutoTokenizer.from_pretrained(checkpoint_dir())
    ids = tokenizer.get_vocab()
    quarter = sizes.head_dim // 8
    config = library.Qwen2VLConfig(
        text_config={
            "vocab_size": max(sizes.vocabulary, len(tokenizer)),
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "max_position_embeddings": sizes.max_tokens,
            "rms_norm_eps": 1e-6,
            # A quarter of the frequencies for time and three eighths each for height and width, as in the released ones.
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [quarter, (sizes.head_dim // 2 - quarter) // 2, (sizes.head_dim // 2 - quarter) // 2],
                "rope_theta": 1_000_000.0,
            },
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": sizes.vision_depth,
            "embed_dim": sizes.vision_width,
            "hidden_size": sizes.hidden,
            "num_heads": sizes.vision_heads,
            "mlp_ratio": 4,
            "patch_size": 14,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    _random(library, config, seed).save_pretrained(folder)
    pixels = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * sizes.max_tokens}
    library.Qwen2VLProcessor(
        image_processor=library.Qwen2VLImageProcessor(size=pixels, patch_size=14, merge_size=2),
        video_processor=library.Qwen2VLVideoProcessor(
            size=pixels, patch_size=14, merge_size=2, do_sample_frames=False, cap_pixels_per_frame=False
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def _random(library: Any, config: Any, seed: int) -> Any:
    """The model with weights drawn in bf16, on a GPU if there is one; transformers' own initialisation is slow."""
    import torch

    with torch.device("meta"):
        model = library.Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    model.tie_weights()
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("weight"):  # norms
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model
