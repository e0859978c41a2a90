"""Latency and KV bytes of long answers under a thinned-out cache, against the full one (Elastic Cache, section 4.3, table 2).

Both run the same code on the same model, one after the other in every repetition, so that their ratio is of one machine
in one state. Prompts are random tokens: nothing about quality is meant.
"""

from __future__ import annotations

import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ctxwin.engines.base import Encoded
from ctxwin.evals.decoder import Decoder, Memory
from ctxwin.evals.elastic import METHODS, Policy
from ctxwin.evals.generation import Reading

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

FULL = "full"
_FIGURES = ("prompt_s", "generate_s", "total_s", "cpu_s")


@dataclass(frozen=True)
class Shape:
    """A batch of prompts of one length that are answered with so many tokens each."""

    batch: int
    prompt: int
    new: int

    def __post_init__(self) -> None:
        if min(self.batch, self.prompt) < 1 or self.new < 2:
            raise ValueError(f"a shape must have batch and prompt >= 1 and 2 or more new tokens, got {self}")

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt}+{self.new}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``BATCHxPROMPT+NEW``, for example ``8x1024+512``; ValueError for anything else."""
        match = re.fullmatch(r"\s*(\d+)x(\d+)\+(\d+)\s*", text)
        if match is None:
            raise ValueError(f"a shape must be BATCHxPROMPT+NEW such as 8x1024+512, got {text!r}")
        return cls(*map(int, match.groups()))


@dataclass(frozen=True)
class SpeedSettings:
    """What is timed.

    Attributes:
        shapes: one after the other.
        method, budget: what is held against the full cache.
        repeats: runs of each, after one that is not counted.
        seed: of the prompts.
    """

    shapes: tuple[Shape, ...]
    method: str = "elastic"
    budget: float = 0.2
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be of {', '.join(METHODS)}, got {self.method!r}")
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must be above 0 and at most 1, got {self.budget}")
        if not self.shapes or self.repeats < 1:
            raise ValueError(f"there must be shapes and repeats >= 1, got {len(self.shapes)} and {self.repeats}")


def random_engine(layers: int = 8, dtype: str = "float32", device: str = "cpu", hidden: int = 1024) -> HFEngine:
    """A text model of random weights with a key-value head for each of 16 heads, as the paper's models have.

    About ``12 * hidden ** 2`` parameters a layer; it has the bundled model's tokenizer. Nothing stays on disk.
    """
    from ctxwin.engines.torchvision_repair import repair

    repair()
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from ctxwin.engines.hf.engine import HFEngine
    from ctxwin.tiny import checkpoint_dir

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(checkpoint_dir() / name, folder)
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(AutoTokenizer.from_pretrained(folder)),
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=1 << 16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        return HFEngine(folder, device=device, dtype=dtype)


def measure_speed(
    engine: HFEngine, settings: SpeedSettings, progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Times every shape.

    Returns ``{"config", "shapes": {shape: {"full" | method: figures, "ratio": figures}}}``. Figures are medians over the
    repetitions: seconds until the prompt is encoded (and thinned out), to generate the rest, both together, and of the
    processor while generating; ``kv_peak_bytes`` and ``kv_end_bytes`` count the slots held while generating, ``tokens_s``
    new tokens over the total. A ratio is the median of the repetitions' ratios, method over full, with the least and the
    most of them. ``progress`` is called with the number of runs that are done.

    The pass over the prompt is eager for methods that look at attention, and holds the whole prompt's KV for both.
    """
    decoder = Decoder(engine)
    shapes: dict[str, Any] = {}
    for shape in settings.shapes:
        rows = _prompts(engine, shape, settings.seed)
        runs: dict[str, list[dict[str, float]]] = {FULL: [], settings.method: []}
        for repeat in range(settings.repeats + 1):
            for name, found in runs.items():
                figures = _run(decoder, rows, shape, _policy(decoder, name, shape, settings.budget))
                progress(1)
                if repeat:  # the first one warms up
                    found.append(figures)
        shapes[str(shape)] = {name: _medians(found, shape) for name, found in runs.items()}
        shapes[str(shape)]["ratio"] = _ratios(runs[settings.method], runs[FULL])
    config = asdict(settings) | {"shapes": [str(s) for s in settings.shapes], "threads": torch.get_num_threads()}
    return {"config": config | {"model": engine.spec.model, "kv": engine.spec.kv.dtype}, "shapes": shapes}


def _prompts(engine: HFEngine, shape: Shape, seed: int) -> list[Encoded]:
    rng = np.random.default_rng((0x73706564, seed))
    vocab = int(engine.text_model.config.vocab_size)
    positions = np.broadcast_to(np.arange(shape.prompt, dtype=np.int64), (3, shape.prompt)).copy()
    ids = rng.integers(vocab // 2, vocab, (shape.batch, shape.prompt))  # behind special tokens
    return [Encoded("", tuple(int(i) for i in row), positions, shape.prompt) for row in ids]


def _policy(decoder: Decoder, name: str, shape: Shape, budget: float) -> Policy | None:
    if name == FULL:
        return None
    return METHODS[name](budget, torch.zeros(decoder.layers, shape.batch, 0, device=_device(decoder)))


def _run(decoder: Decoder, rows: Sequence[Encoded], shape: Shape, policy: Policy | None) -> dict[str, float]:
    spec, device = decoder.spec, _device(decoder)
    dtype = next(decoder.engine.text_model.parameters()).dtype
    size = (spec.layers, shape.batch, spec.heads, 0)
    empty = Memory(*(torch.zeros(*size, d, dtype=dtype, device=device) for d in (spec.k_dim, spec.v_dim)))
    begun = _now(device)
    reading = Reading(decoder, empty, policy)
    reading.ask(rows, 0)
    tokens = reading.logits().argmax(-1).tolist()
    prompted, cpu = _now(device), time.process_time()
    most = reading.held.slots
    for _ in range(shape.new - 1):
        reading.feed(tokens)
        tokens = reading.logits().argmax(-1).tolist()
        most = max(most, reading.held.slots)
    ended = _now(device)
    return {
        "prompt_s": prompted - begun,
        "generate_s": ended - prompted,
        "total_s": ended - begun,
        "cpu_s": time.process_time() - cpu,
        "kv_peak_bytes": most * reading.held.slot_bytes,
        "kv_end_bytes": reading.held.slots * reading.held.slot_bytes,
    }


def _medians(runs: Sequence[dict[str, float]], shape: Shape) -> dict[str, float]:
    made = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return made | {"tokens_s": shape.batch * shape.new / made["total_s"]}


def _ratios(ours: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Any]:
    made: dict[str, Any] = {
        name: ours[0][name] / full[0][name] for name in ("kv_peak_bytes", "kv_end_bytes")
    }  # the same in every run
    for name in _FIGURES:
        ratios = [a[name] / b[name] for a, b in zip(ours, full, strict=True)]
        made[name] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return made


def _device(decoder: Decoder) -> torch.device:
    device: torch.device = next(decoder.engine.text_model.parameters()).device
    return device


def _now(device: torch.device) -> float:
    """The clock, once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
