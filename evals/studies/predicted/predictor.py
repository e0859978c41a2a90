"""A predictor of what chunks absorb from neighbours that they were never seen with.

What a chunk absorbs depends on which of its tokens match which tokens in front, so no summary of the neighbours says it. One
attention step does: a token's query against the neighbours' keys reads what the layer would have read, and what the
next layers' KV lacks is nearly linear in that. So layers are read in order. Each reading is mapped, by ridge regression, to the
deficits of the layers up to the next reading, which are added before that one: a forward of attention alone, without the
layers' own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ctxwin.kv.layout import KVSpec
from ctxwin.kv.lowrank import Weight

from .contexts import Contexts, readouts

Queries = Literal["none", "pooled", "keys", "from_keys", "from_kv"]
"""With what a token reads. ``none``: nothing is read, its own canonical decides; ``pooled``: nothing either, but means of the
KV in front are known; ``keys``: its own keys stand in for queries; ``from_keys`` and ``from_kv``: queries fitted linearly to the
layer's own keys, or keys and values, so that nothing but canonicals is stored."""

_TINY = 1e-6


@dataclass(frozen=True)
class Recipe:
    """How deficits are predicted.

    Attributes:
        queries: see `Queries`.
        layers: those that are read, ascending; none where nothing is read.
        directions: of the deficits that one reading predicts.
        penalty: of the ridge regression, in units of the standardised features' variance.
    """

    queries: Queries = "from_kv"
    layers: tuple[int, ...] = (0, 1)
    directions: int = 32
    penalty: float = 1e-3

    def __post_init__(self) -> None:
        if (self.queries in ("none", "pooled")) == bool(self.layers):
            raise ValueError(f"layers must be given where something is read, got {self.layers} for {self.queries!r}")


@dataclass(frozen=True)
class Ridge:
    """A linear map of standardised features ``[n, F]``."""

    mean: Tensor
    scale: Tensor
    weights: Tensor
    bias: Tensor

    @classmethod
    def fit(cls, x: Tensor, y: Tensor, penalty: float) -> Ridge:
        """Cost: the Gram matrix of the features, and one solve."""
        mean, scale, bias = x.mean(0), x.std(0).clamp_min(1e-4), y.mean(0)
        z = (x - mean) / scale
        gram = (z.T @ z).double() + penalty * len(z) * torch.eye(z.shape[1], dtype=torch.float64)
        return cls(mean, scale, torch.linalg.solve(gram, (z.T @ (y - bias)).double()).float(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.scale) @ self.weights + self.bias


class Space:
    """Principal directions of some layers' deficits, as the output sees them (`Weight`)."""

    def __init__(self, spec: KVSpec, weight: Weight, layers: Sequence[int]) -> None:
        self.spec, self.weight, self.layers = spec, weight, tuple(layers)
        self.directions = torch.empty(0)

    def rows(self, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """Deficits ``[B, L, S, H, D]`` of tokens ``at`` (bool ``[S]``), weighted: ``[B * n, layers * W]``."""
        spec = self.spec
        parts = [torch.cat([k[:, i, at].flatten(2), v[:, i, at].flatten(2)], -1).flatten(0, 1) for i in self.layers]
        weighted = zip(parts, self.layers, strict=True)
        return torch.cat([self.weight.apply(part, i, spec.heads, spec.k_dim) for part, i in weighted], 1)

    def fit(self, rows: Tensor, directions: int) -> Tensor:
        """Takes the first ``directions``, and returns the rows' coefficients."""
        vectors = torch.linalg.eigh((rows.T @ rows).double()).eigenvectors
        self.directions = vectors[:, -directions:].flip(1).T.float()
        return rows @ self.directions.T

    def put(self, coefficients: Tensor, k: Tensor, v: Tensor, at: Tensor) -> None:
        """Writes the deficits of these coefficients ``[B * n, directions]`` into ``k`` and ``v``."""
        spec, rows = self.spec, coefficients @ self.directions
        width = rows.shape[1] // len(self.layers)
        for i, layer in enumerate(self.layers):
            part = rows[:, i * width : (i + 1) * width]
            part = self.weight.apply(part, layer, spec.heads, spec.k_dim, inverse=True).view(len(k), -1, width)
            keys = spec.heads * spec.k_dim
            k[:, layer, at] = part[..., :keys].reshape(len(k), -1, spec.heads, spec.k_dim)
            v[:, layer, at] = part[..., keys:].reshape(len(v), -1, spec.heads, spec.v_dim)


@dataclass
class _Step:
    """Reads a layer (None: reads nothing) and predicts the deficits of ``space``."""

    layer: int | None
    space: Space
    ridge: Ridge


@dataclass(frozen=True)
class Prediction:
    """What chunks lack, ``[B, L, S, H, D]`` and not rotated, and how far off that is expected to be.

    ``residual`` is a share ``[B, S]``: the expected squared error over the mean squared deficit of a token.
    """

    k: Tensor
    v: Tensor
    residual: Tensor


class Predictor:
    """Fitted by `fit`; a few hundred kilobytes of numbers a model."""

    def __init__(self, recipe: Recipe, weight: Weight) -> None:
        self.recipe, self.weight = recipe, weight
        self._steps: list[_Step] = []
        self._queries: dict[int, Ridge] = {}
        self._residual: Ridge | None = None
        self._size = 1.0
        self.explained = 0.0
        """Share of the squared deficits of contexts that it was not fitted on that it predicts."""

    def fit(self, contexts: Sequence[Contexts], held: Sequence[Contexts]) -> None:
        """Fits on batches of contexts, and how far off it is on others.

        Cost: a Gram matrix of a few hundred features over all tokens for each reading; seconds.
        """
        recipe, spec = self.recipe, contexts[0].spec
        for read in recipe.layers if recipe.queries in ("from_keys", "from_kv") else ():
            x = torch.cat([self._known(c.k[:, read], c.v[:, read]).flatten(0, 1) for c in contexts])
            y = torch.cat([c.taught_queries[:, read].flatten(2).flatten(0, 1) for c in contexts])
            self._queries[read] = Ridge.fit(x, y, 1e-6)
        layers: tuple[int | None, ...] = recipe.layers or (None,)
        ends = [*(1 + layer for layer in recipe.layers[1:]), spec.layers]
        state = [_Running(c) for c in contexts]
        for layer, end in zip(layers, ends, strict=True):
            space = Space(spec, self.weight, range(1 if layer is None else layer + 1, end))
            x = torch.cat([self._features(one, layer, space) for one in state])
            y = torch.cat([space.rows(*c.lost, c.later) for c in contexts])
            step = _Step(layer, space, Ridge.fit(x, space.fit(y, recipe.directions), recipe.penalty))
            self._steps.append(step)
            parts = torch.split(step.ridge(x), [one.tokens for one in state])
            for one, part in zip(state, parts, strict=True):
                one.add(space, part)
        self._judge(held)

    def predict(self, contexts: Contexts) -> Prediction:
        """Cost: the attention of every layer that is read, and a small product for each token."""
        one = _Running(contexts)
        x = torch.empty(0)
        for step in self._steps if one.tokens else ():
            x = self._features(one, step.layer, step.space)
            one.add(step.space, step.ridge(x))
        residual = torch.zeros(len(contexts.k), len(contexts.chunk))
        if one.tokens and self._residual is not None:
            residual[:, contexts.later] = self._residual(x)[:, 0].exp().view(len(residual), -1)
        return Prediction(one.k, one.v, residual)

    def _judge(self, held: Sequence[Contexts]) -> None:
        space = Space(held[0].spec, self.weight, range(1, held[0].spec.layers))
        features, off, size = [], [], []
        for c in held:
            one = _Running(c)
            for step in self._steps:
                x = self._features(one, step.layer, step.space)
                one.add(step.space, step.ridge(x))
            want = space.rows(*c.lost, c.later)
            features.append(x)
            off.append((space.rows(one.k, one.v, c.later) - want).pow(2).sum(1))
            size.append(want.pow(2).sum(1))
        self._size = float(torch.cat(size).mean())
        share = torch.cat(off)[:, None] / self._size
        self._residual = Ridge.fit(torch.cat(features), share.clamp_min(_TINY).log(), 1e-1)
        self.explained = 1 - float(share.mean())

    def _known(self, k: Tensor, v: Tensor) -> Tensor:
        """What queries are fitted to, of one layer."""
        return k.flatten(2) if self.recipe.queries == "from_keys" else torch.cat([k.flatten(2), v.flatten(2)], -1)

    def _features(self, one: _Running, layer: int | None, space: Space) -> Tensor:
        """Of the tokens behind the first chunk ``[B * n, F]``; a layer that is read joins ``one.read``."""
        c = one.contexts
        if layer is None:
            own = torch.cat([c.own(i) for i in range(c.spec.layers)], -1)
            parts = [own, *(_pooled(c, own) if self.recipe.queries == "pooled" else ())]
        else:
            k, v = c.k[:, layer] + one.k[:, layer], c.v[:, layer] + one.v[:, layer]
            fitted = self._queries.get(layer)
            q = k if fitted is None else fitted(self._known(k, v)).view(*k.shape[:2], -1, c.spec.k_dim)
            one.read.append(readouts(c, layer, q, k, v))
            parts = [*(c.own(i) for i in (layer, *space.layers)), *one.read]
        return torch.cat(parts, -1)[:, c.later].flatten(0, 1)

    def work(self, tokens: int, seen: float, alone: float) -> float:
        """Multiply-adds for ``tokens`` that see ``seen`` slots on average, ``alone`` of them without neighbours.

        Readings, the maps to queries and to coefficients, and their directions. Adding the patch is not counted, as it is not for
        patches that are stored.
        """
        total = 0.0
        for step in self._steps:
            total += step.ridge.weights.numel() + step.space.directions.numel()
            if step.layer is not None:
                spec, queries = step.space.spec, self._queries.get(step.layer)
                total += 0 if queries is None else queries.weights.numel()
                heads = spec.heads if queries is None else queries.weights.shape[1] // spec.k_dim
                total += heads * (seen * (spec.k_dim + spec.v_dim) + alone * spec.v_dim)
        return tokens * total


class _Running:
    """Contexts while they are read: deficits so far, and what was read."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self.k, self.v = torch.zeros_like(contexts.k), torch.zeros_like(contexts.v)
        self.read: list[Tensor] = []
        self.tokens = int(contexts.later.sum()) * len(contexts.k)

    def add(self, space: Space, coefficients: Tensor) -> None:
        space.put(coefficients, self.k, self.v, self.contexts.later)


def _pooled(contexts: Contexts, own: Tensor) -> tuple[Tensor, Tensor]:
    """Means of the KV of the chunk right in front, and of all in front, for every token: ``[B, S, F]`` each."""
    count = int(contexts.chunk.max()) + 1
    means = torch.stack([own[:, contexts.chunk == i].mean(1) for i in range(count)], 1)
    near = torch.stack([means[:, max(i - 1, 0)] for i in range(count)], 1)
    front = torch.stack([means[:, : max(i, 1)].mean(1) for i in range(count)], 1)
    return near[:, contexts.chunk], front[:, contexts.chunk]
