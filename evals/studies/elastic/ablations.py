"""Elastic Cache's ablations (its table 3 and figure 3): each replaces one part of the method and leaves the others.

What the paper leaves open: the weight of its moving average (here a query counts nine tenths of the one behind it), and where
cluster centers stand (here in front, so that a fixed point drops them last).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ctxwin.evals.decoder import Held, Memory
from ctxwin.evals.elastic import H2O, Attended, Elastic, Local, Policy
from ctxwin.kv.merge import most_important

CENTERS = 10
ROUNDS = 10
DECAY = 0.9


class Evicted(Elastic):
    """(b) What is no anchor is dropped."""

    def reduced(self, memory: Memory, kept: Tensor) -> Memory:
        return memory.kept(kept)


class Clustered(Elastic):
    """(b) What is no anchor goes into ten centers, by k-means over the keys of all heads, layer by layer."""

    def reduced(self, memory: Memory, kept: Tensor) -> Memory:
        count = int(kept.shape[-1])
        centers = min(CENTERS, memory.slots - count, count - 2)
        if centers < 1:
            return memory.kept(kept)
        # Ten anchors fewer, the last of those that were chosen in between: the budget holds the centers, too.
        kept = torch.cat([kept[..., : count - 1 - centers], kept[..., -1:]], -1)
        held = memory.kept(kept)
        used = torch.zeros(*kept.shape[:2], memory.slots, dtype=torch.bool).scatter_(2, kept, True)
        keys = memory.k.permute(0, 1, 3, 2, 4).flatten(3).float()  # [L, B, S, H * D]
        k, v = (x.new_empty(*x.shape[:3], centers, x.shape[4]) for x in (memory.k, memory.v))
        for layer in range(keys.shape[0]):
            for item in range(keys.shape[1]):
                rest = (~used[layer, item]).nonzero()[:, 0]
                of = _clusters(keys[layer, item, rest], centers)
                for center in range(centers):
                    mine = rest[of == center]
                    k[layer, item, :, center] = memory.k[layer, item, :, mine].mean(1)
                    v[layer, item, :, center] = memory.v[layer, item, :, mine].mean(1)
        return Memory(torch.cat([k, held.k], 3), torch.cat([v, held.v], 3))


def _clusters(rows: Tensor, count: int) -> Tensor:
    """The cluster of each row, none of them empty: Lloyd's rounds from evenly spaced rows."""
    centers = rows[torch.linspace(0, len(rows) - 1, count).long()]
    for _ in range(ROUNDS):
        of = torch.cdist(rows, centers).argmin(1)
        for center in range(count):
            if not bool((of == center).any()):  # the row that is worst served begins it anew
                of[(rows - centers[of]).norm(dim=1).argmax()] = center
        centers = torch.stack([rows[of == center].mean(0) for center in range(count)])
    return of


class Oldest(Elastic):
    """(a) While generating, the oldest slot is dropped."""

    drop = Local.drop


class Frequency(Elastic):
    """(a) While generating, the least attended slot is dropped."""

    watched = "everything"
    drop = H2O.drop


class Mean(Elastic):
    """(d) Attention averaged over the queries that could see a slot."""

    def chosen(self, sums: Tensor, count: int) -> Tensor:
        queries = torch.arange(sums.shape[-1], 0, -1, device=sums.device)
        return most_important(sums / queries, count, (0, -1) if count else ())


class _MovingAverage(Attended):
    def watch(self, layer: int, weights: Tensor) -> None:
        rows = weights.float().mean(1)  # [B, T, S]
        self.widen(int(rows.shape[2]))
        count = int(rows.shape[1])
        ages = torch.arange(count - 1, -1, -1, device=rows.device)
        fresh = (rows * ((1 - DECAY) * DECAY**ages)[:, None]).sum(1)
        self.sums[layer] *= DECAY**count
        self.sums[layer, :, : fresh.shape[1]] += fresh


class MovingAverage(Elastic):
    """(d) An average over queries in which later ones count more."""

    attention: ClassVar[type[Attended]] = _MovingAverage


def at_distance(distance: int) -> type[Policy]:
    """Figure 3: the fixed point so many slots behind the newest."""

    class FixedPoint(Elastic):
        def drop(self, held: Held, attended: Attended, head: int) -> None:
            held.drop(min(max(held.slots - 1 - distance, head, 1), held.slots - 1))

    return FixedPoint


ABLATIONS: dict[str, type[Policy]] = {
    "evicted": Evicted,
    "clustered": Clustered,
    "oldest": Oldest,
    "frequency": Frequency,
    "mean": Mean,
    "moving-average": MovingAverage,
    **{f"point-{distance}": at_distance(distance) for distance in (1, 5, 50, 75, 100)},
}
"""Beside ``elastic`` itself: eviction or clustering for merging, what is dropped while generating, how attention is added up, and
where the fixed point stands (25 in ``elastic``)."""
