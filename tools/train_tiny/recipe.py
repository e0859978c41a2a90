"""Recipe of a training run, and the curriculum of its draws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ctxwin.tiny.sprites import N_MARKS
from train_tiny.draws import BatchSpec

MARKS = ((0.0, 2), (0.06, 3), (0.12, 5), (0.19, 8), (0.27, 12), (0.36, 16), (0.46, 25), (0.56, 64))
"""Marks a frame from each share of stage 2 on, as far as 100 marks go round."""
FRAMES = (
    (0.0, {1: 0.3, 2: 0.4, 3: 0.3}),
    (0.06, {1: 0.05, 2: 0.35, 3: 0.35, 4: 0.25}),
    (0.19, {1: 0.04, 2: 0.2, 3: 0.2, 4: 0.2, 5: 0.15, 6: 0.17, 7: 0.02, 8: 0.02}),
)
"""Weights of the number of frames from each share of stage 2 on."""
FINISH_FRAMES = {1: 0.03, 2: 0.08, 3: 0.12, 4: 0.2, 5: 0.24, 6: 0.29, 7: 0.02, 8: 0.02}
"""The same for stage 3: long contexts, in which the look-up of bound colours is learned last; there the last two layers'
attention from the question to the thing asked about is trained too."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a run; the defaults produced the bundled weights.

    The learning rate of stage 2 and its curriculum are laid out over `horizon` steps, of which `steps` are taken.

    With palettes that `agree` the model is to look at the legend when it is asked (to chain at query time), not while
    a scene is prefilled: the legends of a context do not contradict each other (see `BatchSpec`), no loss asks scene
    tokens for their colour, and the look-up loss acts in both stages, but on the first layer only. There the question's
    number token finds the mark; later layers are left for the way from the shape to the legend.

    Attributes:
        palettes: Relation of the legends of a context; "conflict" produces a model that binds at prefill.
        most_frames: Longest context.
        apart: Share of the decoder's steps in which every frame sees the header and itself only.
        init: Folder of weights whose vision tower and word embeddings are reused, so that stage 1 is skipped.
        init_decoder: Reuse the layers of that model's decoder, too.
        hybrid: Train a model of Qwen3.5's architecture, with recurrent layers and attention. Its last layer is trained to look
            things up in stage 2 already.
        states: A hybrid's attention comes before its recurrent layers, so that questions must read from states.
    """

    seed: int = 0
    vision_steps: int = 200
    vision_frames: int = 24
    steps: int = 2800
    horizon: int = 4000
    finish_steps: int = 1300
    frames_per_step: int = 56
    finish_frames: int = 44
    learning_rate: float = 2e-3
    finish_rate: float = 8e-4
    warmup: int = 40
    smoothing: float = 0.02
    lookup_weight: float = 0.3
    checkpoint_every: int = 200
    palettes: Literal["conflict", "agree"] = "conflict"
    most_frames: int = 8
    apart: float = 0.0
    init: Path | None = None
    init_decoder: bool = False
    hybrid: bool = False
    states: bool = False


def batch_spec(recipe: Recipe, stage: int, step: int, rng: np.random.Generator) -> BatchSpec:
    """The curriculum of stage 2 (fewer marks and frames early on) and the full world of stage 3."""
    share = step / recipe.horizon if stage == 2 else 1.0
    weights = next(w for start, w in reversed(FRAMES) if share >= start) if stage == 2 else FINISH_FRAMES
    if max(weights) > recipe.most_frames:
        allowed = {n: w for n, w in weights.items() if n <= recipe.most_frames}
        weights = {n: w / sum(allowed.values()) for n, w in allowed.items()}
    frames = int(rng.choice(list(weights), p=list(weights.values())))
    marks = min(next(m for start, m in reversed(MARKS) if share >= start), 64, N_MARKS // frames)
    questions = max(6, (5 if stage == 3 else 3 if share > 0.15 else 6) * frames)
    contexts = max(1, (recipe.finish_frames if stage == 3 else recipe.frames_per_step) // frames)
    apart = recipe.apart > 0 and rng.random() < recipe.apart
    return BatchSpec(contexts, frames, marks, questions, agree=recipe.palettes == "agree", apart=apart)
