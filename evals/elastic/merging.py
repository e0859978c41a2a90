"""Which KV to keep, and averaging the rest into it: pure tensor maths over slots (Elastic Cache, section 3).

Everything is per layer and item: which slots are anchors differs between them, how many does not, so batches stay
rectangular. `Attended` holds the importance of slots, I_n of section 3.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctxwin.evals.decoder import Memory


def budget_slots(share: float, tokens: int) -> int:
    """Slots that a budget allows for so many tokens: ``share * tokens``, rounded up as algorithm 1 rounds deletions down."""
    return min(tokens, math.ceil(share * tokens - 1e-9))


class Attended:
    """Attention that slots got, summed over all queries so far and averaged over the heads of a layer.

    This is the layer-wise sum of section 3.3, ``I_n^i = 1/K sum_j sum_m A_mn^ij``. `watch` takes the weights of passes.

    Args:
        sums: float32 ``[L, B, S]`` to start from; copied.

    Attributes:
        sums: float32 ``[L, B, S]``.
    """

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums.clone()

    def watch(self, layer: int, weights: Tensor) -> None:
        """Adds attention weights ``[B, heads, T, S]`` of one layer; slots that are new start at nothing."""
        got = weights.float().sum(2).mean(1)
        self.widen(int(got.shape[1]))
        self.sums[layer, :, : got.shape[1]] += got

    def widen(self, slots: int) -> None:
        """Makes room for slots up to ``slots``."""
        new = slots - self.sums.shape[2]
        if new > 0:
            self.sums = torch.nn.functional.pad(self.sums, (0, new))

    def keep(self, slots: Tensor) -> None:
        """Follows a memory of which only ``slots [L, B, n]`` are left."""
        self.sums = self.sums.gather(2, slots)


def most_important(sums: Tensor, count: int, protected: tuple[int, ...] = ()) -> Tensor:
    """The ``count`` slots of the highest sums, ascending, int64 ``[L, B, count]``; ``protected`` ones come first.

    At equal importance the earlier slot is taken. ``protected`` are indices, negative ones from the end.
    Raises ValueError where ``count`` exceeds the slots or does not hold the protected ones.
    """
    slots = int(sums.shape[-1])
    held = {p % slots for p in protected} if slots else set()
    if not len(held) <= count <= slots:
        raise ValueError(f"count must be {len(held)}..{slots}, got {count}")
    ranked = sums.clone()
    ranked[..., sorted(held)] = torch.inf
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def bucket_of(anchors: Tensor, slots: int) -> Tensor:
    """The bucket of every slot, int64 ``[..., slots]``: Elastic Cache, equation 2.

    Buckets part at ``floor((t_k + t_k+1) / 2)``, which belongs to the earlier one, so that a slot as near to two anchors
    joins the first. As printed the last bucket begins on that midpoint, too, while all others begin behind it; here every
    slot is in exactly one bucket, and every bucket holds its anchor.

    Args:
        anchors: int64 ``[..., n]``, ascending and distinct, n >= 1.
        slots: number of slots.
    """
    parts = (anchors[..., :-1] + anchors[..., 1:]) // 2
    every = torch.arange(slots, device=anchors.device).expand(*anchors.shape[:-1], slots)
    return torch.searchsorted(parts.contiguous(), every.contiguous())


def merged(memory: Memory, anchors: Tensor) -> Memory:
    """KV averaged over the bucket of each anchor, head by head: Elastic Cache, equation 3.

    Keys are averaged as they lie in the cache, rotated in place, as the paper's algorithm 1 does; an averaged key thus
    stands at no position of its own, and cannot be rotated to another place. For MLA, latents and rope keys are averaged.
    Sums are taken in float32 at least, so a bucket of one slot keeps its KV bit for bit.

    Args:
        memory: of S slots.
        anchors: int64 ``[L, B, n]``, ascending.
    """
    buckets = bucket_of(anchors, memory.slots)
    count = int(anchors.shape[-1])
    sizes = torch.zeros_like(anchors, dtype=torch.float32)
    sizes.scatter_add_(2, buckets, torch.ones_like(buckets, dtype=torch.float32))

    def mean(held: Tensor) -> Tensor:
        layers, batch, heads, _, width = held.shape
        into = buckets[:, :, None, :, None].expand(-1, -1, heads, -1, width)
        wide = torch.promote_types(held.dtype, torch.float32)
        total = torch.zeros(layers, batch, heads, count, width, dtype=wide, device=held.device)
        total.scatter_add_(3, into, held.to(wide))
        return (total / sizes[:, :, None, :, None]).to(held.dtype)

    return Memory(mean(memory.k), mean(memory.v))
