"""Orbit patches: one patch for every order of the antecedents (Kamera, section 5, "Reorder").

It restores what the orders have in common. Where the answer depends on the order, no such patch can be right.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch

_RIDGE = 0.3
"""Penalty of a chunk's share of a deficit, where an observation counts 1."""


class OrbitMean:
    """Running mean of the deficits of the orders observed so far, in the canonical frame.

    Memory: one deficit in float32, whatever the number of orders. Not thread-safe.
    """

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.count = 0
        self._mean: Deficit | None = None

    def add(self, conditioned: SpanKV, base: SpanKV) -> None:
        """Add one order: ``conditioned`` is the chunk after its antecedents in that order, in any frame.

        Raises:
            ValueError: spans that do not match the earlier ones.

        Cost: two rotations.
        """
        lost, mean = deficit(conditioned, base, self.spec), self._mean
        if mean is None:
            self.count, self._mean = 1, replace(lost, k=lost.k.clone(), v=lost.v.clone())
            return
        if mean.k.shape != lost.k.shape or mean.v.shape != lost.v.shape:
            raise ValueError(f"deficits must have the shape {list(mean.k.shape)}, got {list(lost.k.shape)}")
        self.count += 1
        for average, new in ((mean.k, lost.k), (mean.v, lost.v)):
            average += (new - average) / self.count

    @property
    def mean(self) -> Deficit:
        """The mean deficit; ValueError before the first order."""
        if self._mean is None:
            raise ValueError("an orbit must have met at least one order, got none")
        return self._mean


def update_mean(mean: Patch | None, count: int, lost: Deficit) -> Deficit:
    """Return the mean deficit over ``count`` + 1 orders: ``mean``, over ``count`` of them, moved towards ``lost``.

    ``mean`` is already truncated to its rank, so truncation errors add up, each with weight 1 / count.
    """
    if mean is None:
        return lost
    k, v = lost.k / (count + 1), lost.v / (count + 1)
    for layer in range(len(k)):
        delta = mean.delta(layer, lost.k.dtype)
        if delta is not None:
            k[layer] += delta[0] * (count / (count + 1))
            v[layer] += delta[1] * (count / (count + 1))
    return replace(lost, k=k, v=v)


def set_weights(sets: Sequence[frozenset[int]], front: frozenset[int]) -> list[float]:
    """Return the weights with which deficits observed behind ``sets`` of antecedents estimate the one behind ``front``.

    Their mean where ``front`` itself was observed. Else each antecedent is taken to add a share of its own, whatever stands
    beside it: the sum over ``front`` of the shares of a ridge regression, which few observations leave stable.
    """
    if count := sets.count(front):
        return [(one == front) / count for one in sets]
    chunks = sorted(front.union(*sets))
    incidence = np.array([[float(chunk in one) for chunk in chunks] for one in sets])
    wanted = np.array([float(chunk in front) for chunk in chunks])
    shares = np.linalg.solve(incidence.T @ incidence + _RIDGE * np.eye(len(chunks)), incidence.T)
    return [float(weight) for weight in wanted @ shares]


def mixture(deficits: Sequence[Deficit], weights: Sequence[float]) -> Deficit:
    """Return the weighted sum of deficits of one chunk."""
    k, v = torch.zeros_like(deficits[0].k), torch.zeros_like(deficits[0].v)
    for lost, weight in zip(deficits, weights, strict=True):
        k += weight * lost.k
        v += weight * lost.v
    return replace(deficits[0], k=k, v=v)
