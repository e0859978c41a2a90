"""The losses of the decoder's training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ctxwin.tiny.sprites import COLORS, GREY, N_SHAPES
from train_tiny.data import Batch, Vocabulary
from train_tiny.forward import decode
from train_tiny.hybrid import decode_questions, pictures_of
from train_tiny.recipe import Recipe


def _lookup_loss(queries: Tensor, keys: Tensor, mask: Tensor, at: Tensor, things: Tensor) -> Tensor:
    """Minus the log of the attention that tokens `at` give the things asked about, averaged over heads inside the log."""
    batch, heads, length, width = queries.shape
    columns, matches = at.view(batch, -1) % length, things.view(batch, 1, -1, 1) % length
    rows = torch.arange(batch, device=at.device)[:, None]
    scores = queries[rows, :, columns].transpose(1, 2) @ keys.transpose(2, 3) / math.sqrt(width)
    scores = scores + mask[rows, 0, columns][:, None]
    attention = scores.log_softmax(-1).gather(-1, matches.expand(-1, heads, -1, -1))
    return math.log(heads) - attention.logsumexp(1).mean()


def decoder_losses(
    model: Any, vocabulary: Vocabulary, batch: Batch, recipe: Recipe, stage: int
) -> tuple[Tensor, dict[str, float]]:
    """Loss and figures of one step of stage 2 or 3."""
    text = model.model.language_model
    words = text.embed_tokens.weight
    with torch.no_grad():
        pictures = pictures_of(model, batch.pixels)
    x = functional.embedding(batch.ids, words)
    x = x.masked_scatter((batch.ids == vocabulary.image)[..., None], pictures)
    mask = torch.zeros(batch.mask.shape, device=x.device).masked_fill_(~batch.mask, float("-inf"))
    lookups: list[Tensor] = []
    chains, last = recipe.palettes == "agree", len(text.layers) - 1
    looking = [last] if recipe.hybrid else [last - 1, last] if stage == 3 else []

    def watch(layer: int, queries: Tensor, keys: Tensor) -> None:
        if chains and layer == 0:
            lookups.append(_lookup_loss(queries, keys, mask, batch.numbers, batch.things))
        elif not chains and layer in looking:
            lookups.extend(_lookup_loss(queries, keys, mask, at, batch.things) for at in (batch.numbers, batch.last))

    if recipe.hybrid:
        every = decode_questions(text, x, batch.positions, mask, batch.real, batch.length, watch)
    else:
        every = decode(text, x, batch.positions, mask, probe=watch)[0]
    hidden = every.flatten(0, 1)

    answers = torch.tensor(vocabulary.colors + vocabulary.shapes, device=x.device)
    is_color = batch.targets[:, : len(COLORS)].sum(-1, keepdim=True)
    color, shape = is_color.expand(-1, len(COLORS)) / len(COLORS), (1 - is_color).expand(-1, N_SHAPES) / N_SHAPES
    even = torch.cat([color, shape], -1)
    targets = (1 - recipe.smoothing) * batch.targets + recipe.smoothing * even

    def scored(at: Tensor, columns: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden[at] @ words.t()
        loss = -(goal * logits.log_softmax(-1)[:, columns]).sum(-1).mean()
        return loss, logits.argmax(-1) == columns[goal.argmax(-1)]

    answer, right = scored(batch.last, answers, targets)
    number, _ = scored(batch.numbers, answers, targets)
    end = functional.cross_entropy(hidden[batch.last + 1] @ words.t(), torch.full_like(batch.last, vocabulary.end))
    loss = answer + 0.5 * number + 0.1 * end
    figures = {"answer": answer.item(), "right": float(right.float().mean())}
    if lookups:
        lookup = torch.stack(lookups).mean()
        loss = loss + recipe.lookup_weight * lookup
        figures["lookup"] = lookup.item()
    if bool(batch.bound.any()):
        figures["bound_right"] = float(right[batch.bound].float().mean())
    if len(batch.scenes) and not chains:
        dense, dense_right = scored(batch.scenes, answers[: len(COLORS)], batch.scene_colors)
        certain = batch.scene_colors[:, :GREY].amax(-1) == 1
        loss = loss + dense
        figures["dense"] = dense.item()
        if bool(certain.any()):
            figures["dense_right"] = float(dense_right[certain].float().mean())
    return loss, figures
