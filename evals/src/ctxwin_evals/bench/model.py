"""A random vision-language model of half a billion parameters, so that a benchmark needs no download.

Its architecture is the bundled model's, its decoder's sizes are Qwen2-0.5B's. Its answers are noise; its cost is that of a
trained model of the same size, including the vocabulary's share of the last step.
"""

import fcntl
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from ctxwin.hashing import digest

FORMAT = 2
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
    max_tokens: int = 9216
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
    """A generated model's folder, which may not exist yet; without ``where`` below ``ctxwin/bench`` in the cache folder."""
    name = f"qwen2.5-vl-random-{sizes.layers}x{sizes.hidden}-{digest('bench', FORMAT, asdict(sizes), seed)[:8]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (cache / "ctxwin" / "bench" if where is None else where) / name


def ensure_model(sizes: Sizes, seed: int, where: Path | None = None) -> tuple[Path, bool]:
    """A generated model's folder, which appears as a whole or not at all, and whether it had to be written.

    Processes take turns, and what a killed one left behind is cleared away. Cost: 10-20 s and 1 GB of disk, once.
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
    typer.echo(f"model: random Qwen2.5-VL in {model_folder(sizes, seed, where)} (written once)", err=True)
    return str(ensure_model(sizes, seed, where)[0])


def write_model(folder: Path, sizes: Sizes, seed: int) -> None:
    """Write random bf16 weights, config, tokenizer and processor in transformers layout. One picture token is 28 px."""
    from ctxwin.engines.torchvision_repair import repair
    from ctxwin.tiny import checkpoint_dir

    repair()
    import transformers as library

    bundled, edge = checkpoint_dir(), 28 * 28
    config, processor = library.AutoConfig.from_pretrained(bundled), library.AutoProcessor.from_pretrained(bundled)
    half = sizes.head_dim // 2
    decoder = {
        "vocab_size": max(sizes.vocabulary, len(processor.tokenizer)),
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "layer_types": ["full_attention"] * sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_tokens,
    }
    # A quarter of the frequencies for time and three eighths each for height and width, as in the released ones.
    sections = [half // 4, (half - half // 4) // 2, (half - half // 4) // 2]
    config.text_config.update(decoder)
    config.text_config.rope_parameters["mrope_section"] = sections
    width, layers = sizes.vision_width, list(range(sizes.vision_depth))
    tower = {"depth": len(layers), "fullatt_block_indexes": layers, "num_heads": sizes.vision_heads}
    tower |= {"hidden_size": width, "intermediate_size": 4 * width, "out_hidden_size": sizes.hidden}
    config.vision_config.update(tower)
    _random(library, config, seed).save_pretrained(folder)
    for part in (processor.image_processor, processor.video_processor):
        part.size = {"shortest_edge": edge, "longest_edge": edge * sizes.max_tokens}
    processor.save_pretrained(folder)


def _random(library: Any, config: Any, seed: int) -> Any:
    """The model with weights drawn in bf16, on a GPU if there is one; transformers' own initialisation is slow."""
    import torch

    with torch.device("meta"):
        model = library.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
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
