"""Train the bundled model from scratch: `python tools/train_tiny --out DIR --seed 0`.

Three stages. First the vision tower learns to read shape, appearance and mark at every merged token; the rows of those
linear heads become the embeddings of the words. Then, with vision frozen, the decoder learns to answer, under a
curriculum and then on long contexts at a lower rate. Every step draws its data from (seed, stage, step), so a resumed
run repeats an uninterrupted one exactly on the same machine.

`--palettes agree` makes the counterpart, a model that chains at query time; see MODEL_CARD.md, "A second model".
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ctxwin.tiny.sprites import GREY, N_APPEARANCES, N_MARKS, N_SHAPES
from ctxwin.tiny.world import Frame, Role, render, sample_frames
from train_tiny.checkpoint import load_checkpoint, save_checkpoint
from train_tiny.data import Vocabulary, make_batch, through_clip
from train_tiny.hybrid import READS_KV, READS_STATES, build_hybrid, pictures_of
from train_tiny.losses import decoder_losses
from train_tiny.model import HIDDEN, build_model, save_model
from train_tiny.recipe import Recipe, batch_spec
from train_tiny.tokenizer import build_tokenizer

PICTURE_NORM = 6.0
"""Mean norm of picture embeddings when stage 2 starts, a few times a layer's contribution to the residual stream."""


@dataclass
class Run:
    """A run in progress."""

    recipe: Recipe
    out: Path
    device: torch.device
    model: Any
    tokenizer: Any
    stage: int = 1
    step: int = 0
    curves: list[dict[str, float]] = field(default_factory=list)
    heads: nn.ModuleList = field(default_factory=nn.ModuleList)
    clock: float = field(default_factory=time.perf_counter)

    def report(self, step: int, figures: dict[str, float], every: int) -> None:
        """Keep a point of the curves and print it."""
        elapsed, self.clock = time.perf_counter() - self.clock, time.perf_counter()
        point = {"stage": self.stage, "step": step, **{k: round(v, 4) for k, v in figures.items()}}
        self.curves.append({**point, "seconds_per_step": round(elapsed / every, 3)})
        (self.out / "curves.json").write_text(json.dumps(self.curves, indent=0) + "\n")
        print(" ".join(f"{k}={v:g}" for k, v in self.curves[-1].items()), flush=True)


def _rng(run: Run, stage: int, step: int) -> np.random.Generator:
    return np.random.default_rng((run.recipe.seed, stage, step))


def _rate(recipe: Recipe, stage: int, step: int) -> float:
    """Linear warm-up, then a cosine to zero at the end of the stage (stage 2: at its horizon)."""
    peak = recipe.finish_rate if stage == 3 else recipe.learning_rate
    steps = (recipe.vision_steps, recipe.horizon, recipe.finish_steps)[stage - 1]
    return peak * min(1.0, (step + 1) / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)


def _update(optimizer: torch.optim.AdamW, loss: Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    optimizer.step()


def vision_batch(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Pictures uint8 [count, 224, 224, 3], often decoded or noisy, and labels [count, 64, 3].

    A label is shape, appearance and mark (100 for none).
    """
    frames: list[Frame] = []
    for _ in range(count):
        role: Role = "legend" if rng.random() < 0.5 else "scene"
        frames += sample_frames(rng, [role], marks_per_frame=int(rng.integers(20, 65)), faded=0.5)
    pictures = [render(frame) for frame in frames]
    if rng.random() < 0.5:
        pictures = through_clip(pictures, rng)
    pixels = np.stack(pictures)
    if rng.random() < 0.3:
        noise = rng.normal(rng.normal(0, 5), rng.uniform(0, 5), pixels.shape)
        pixels = np.clip(pixels + noise, 0, 255).round().astype(np.uint8)
    marks = [np.where(f.mark < 0, N_MARKS, f.mark) for f in frames]
    labels = [np.stack([f.shape, f.appearance, m], -1).reshape(-1, 3) for f, m in zip(frames, marks, strict=True)]
    return torch.from_numpy(pixels), torch.from_numpy(np.stack(labels))


def train_vision(run: Run, optimizer: torch.optim.AdamW) -> None:
    """Stage 1: the vision tower under linear heads for shape, appearance and mark."""
    recipe = run.recipe
    for step in range(run.step, recipe.vision_steps):
        pixels, labels = (t.to(run.device) for t in vision_batch(_rng(run, 1, step), recipe.vision_frames))
        merged = pictures_of(run.model, pixels).flatten(0, 1)
        scores = [head(merged) for head in run.heads]
        losses = [functional.cross_entropy(s, labels[..., i].flatten()) for i, s in enumerate(scores)]
        _update(optimizer, torch.stack(losses).sum(), _rate(recipe, 1, step))
        run.step = step + 1
        if run.step % 25 == 0 or run.step == recipe.vision_steps:
            right = [(s.argmax(-1) == labels[..., i].flatten()).float().mean() for i, s in enumerate(scores)]
            names = ("shape", "appearance", "mark")
            run.report(run.step, {n: float(r) for n, r in zip(names, right, strict=True)}, 25)


def copy_heads(run: Run, vocabulary: Vocabulary) -> None:
    """Make the head rows of shapes, colours and marks their words' embeddings; bring pictures to a like scale."""
    shape, appearance, mark = list(run.heads.parameters())[::2]  # weights; biases in between
    words = run.model.model.language_model.embed_tokens.weight
    with torch.no_grad():
        words[vocabulary.shapes] = shape
        words[vocabulary.colors] = appearance[: GREY + 1]
        words[vocabulary.numbers] = mark[:N_MARKS]
        pixels, _ = vision_batch(_rng(run, 1, run.recipe.vision_steps), 8)
        scale = PICTURE_NORM / pictures_of(run.model, pixels.to(run.device)).norm(dim=-1).mean()
        last = list(run.model.model.visual.merger.modules())[-1]
        last.weight.mul_(scale)
        last.bias.mul_(scale)


def take_over(run: Run) -> None:
    """Load vision and words, and on request the decoder, from `Recipe.init`.

    Raises:
        ValueError: If the folder holds no weights of this model.
    """
    folder = run.recipe.init
    if folder is None or not (folder / "model.safetensors").is_file():
        raise ValueError(
            f"init must be a folder with model.safetensors, got {folder}; give a weights folder of the trainer"
        )
    source = type(run.model).from_pretrained(folder, dtype=torch.float32, local_files_only=True).model
    target = run.model.model
    target.visual.load_state_dict(source.visual.state_dict())
    if run.recipe.init_decoder:
        target.language_model.load_state_dict(source.language_model.state_dict())
    else:  # a saved hybrid has rows after those of the tokenizer (`keep_marks_whole`)
        words = target.language_model.embed_tokens.weight
        with torch.no_grad():
            words.copy_(source.language_model.embed_tokens.weight[: len(words)])


def train_decoder(run: Run, optimizer: torch.optim.AdamW, vocabulary: Vocabulary) -> None:
    """Stages 2 and 3: the language model on frozen vision."""
    recipe, recent = run.recipe, list[dict[str, float]]()
    for step in range(run.step, recipe.steps if run.stage == 2 else recipe.finish_steps):
        rng = _rng(run, run.stage, step)
        batch = make_batch(vocabulary, rng, batch_spec(recipe, run.stage, step, rng))
        batch = batch.to(run.device)
        loss, figures = decoder_losses(run.model, vocabulary, batch, recipe, run.stage)
        _update(optimizer, loss, _rate(recipe, run.stage, step))
        recent.append({"loss": loss.item(), **figures})
        run.step = step + 1
        if run.step % 20 == 0:
            names = sorted({name for figures in recent for name in figures})
            run.report(run.step, {n: float(np.mean([f[n] for f in recent if n in f])) for n in names}, len(recent))
            recent.clear()
        if run.step % recipe.checkpoint_every == 0:
            _save(run, optimizer)


def _tensors(run: Run) -> dict[str, Tensor]:
    state = {f"model.{k}": v for k, v in run.model.state_dict().items() if k != "lm_head.weight"}
    return {**state, **{f"heads.{k}": v for k, v in run.heads.state_dict().items()}}


def _save(run: Run, optimizer: torch.optim.AdamW) -> None:
    state = {"stage": run.stage, "step": run.step, "curves": run.curves}
    save_checkpoint(run.out, _tensors(run), optimizer, state)


def _parameters(run: Run) -> list[nn.Parameter]:
    if run.stage == 1:
        return [*run.model.model.visual.parameters(), *run.heads.parameters()]
    return list(run.model.model.language_model.parameters())


def train(recipe: Recipe, out: Path, device: str = "cpu", resume: bool = False) -> Run:
    """Run the recipe and save the model to `out / "weights"`, the curves to `out / "curves.json"`.

    Args:
        recipe: What to do.
        out: Folder for the result and the trainer's checkpoint.
        device: "cpu" or a CUDA device.
        resume: Continue from the checkpoint in `out`, if there is one.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    layers = READS_STATES if recipe.states else READS_KV
    model = build_hybrid(tokenizer, recipe.seed, layers) if recipe.hybrid else build_model(tokenizer, recipe.seed)
    run = Run(recipe, out, torch.device(device), model, tokenizer)
    run.heads = nn.ModuleList(nn.Linear(HIDDEN, n) for n in (N_SHAPES, N_APPEARANCES, N_MARKS + 1))
    run.model.to(run.device)
    run.heads.to(run.device)
    saved = load_checkpoint(out, _tensors(run)) if resume else None
    if saved is not None:
        run.stage, run.step, run.curves = saved.state["stage"], saved.state["step"], saved.state["curves"]
    optimizer = _optimizer(_parameters(run))
    if saved is not None:
        saved.restore(optimizer)
    if run.stage == 1:
        if recipe.init is None:
            train_vision(run, optimizer)
            copy_heads(run, vocabulary)
        else:
            take_over(run)
        run.stage, run.step = 2, 0
        optimizer = _optimizer(_parameters(run))
        _save(run, optimizer)
    if run.stage == 2:
        train_decoder(run, optimizer, vocabulary)
        run.stage, run.step = 3, 0
        _save(run, optimizer)
    train_decoder(run, optimizer, vocabulary)
    _save(run, optimizer)
    save_model(run.model, tokenizer, out / "weights")
    return run


def main() -> None:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(prog="python tools/train_tiny", description="Train the bundled model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vision-steps", type=int, default=Recipe.vision_steps)
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="decoder steps with the curriculum")
    parser.add_argument("--horizon", type=int, default=Recipe.horizon, help="steps the curriculum is laid out over")
    parser.add_argument("--finish-steps", type=int, default=Recipe.finish_steps, help="decoder steps after it")
    parser.add_argument("--frames-per-step", type=int, default=Recipe.frames_per_step)
    parser.add_argument("--finish-frames", type=int, default=Recipe.finish_frames, help="frames a step of stage 3")
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--most-frames", type=int, default=Recipe.most_frames, help="longest context")
    parser.add_argument("--palettes", choices=("conflict", "agree"), default=Recipe.palettes)
    parser.add_argument("--apart", type=float, default=Recipe.apart, help="share of steps in which frames stand alone")
    parser.add_argument("--init", type=Path, help="weights whose vision tower and words are taken over")
    parser.add_argument("--init-decoder", action="store_true", help="take over their decoder too")
    parser.add_argument(
        "--hybrid", action="store_true", help="Qwen3.5's architecture: recurrent layers beside attention"
    )
    parser.add_argument("--states", action="store_true", help="a hybrid whose questions must read from states")
    parser.add_argument("--lookup-weight", type=float, default=Recipe.lookup_weight)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    recipe = Recipe(
        seed=options.seed,
        steps=options.steps,
        finish_steps=options.finish_steps,
        vision_steps=options.vision_steps,
        frames_per_step=options.frames_per_step,
        horizon=options.horizon,
        finish_frames=options.finish_frames,
        learning_rate=options.learning_rate,
        palettes=options.palettes,
        most_frames=options.most_frames,
        apart=options.apart,
        init=options.init,
        init_decoder=options.init_decoder,
        hybrid=options.hybrid,
        states=options.states,
        lookup_weight=options.lookup_weight,
    )
    train(recipe, options.out, options.device, options.resume)
