"""Importance of slots by the attention that they get, added up pass by pass: Elastic Cache, sections 3.2 and 3.3, and table 3."""

import torch
from torch import Tensor


class Attended:
    """Attention that slots got, summed over all queries so far and averaged over the heads of a layer.

    This is the layer-wise sum of section 3.3, ``I_n^i = 1/K sum_j sum_m A_mn^ij``. `watch` takes the weights of passes.

    Args:
        sums: float32 ``[L, B, S]`` to start from; copied. The attribute of this name holds what was added since.
    """

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums.clone()

    def watch(self, layer: int, weights: Tensor) -> None:
        """Add attention weights ``[B, heads, T, S]`` of one layer; new slots start at zero."""
        self.widen(int(weights.shape[3]))
        self.add(self.sums[layer, ..., : weights.shape[3]], weights.float())

    def add(self, sums: Tensor, weights: Tensor) -> None:
        """Add weights to the sums of their layer."""
        sums += weights.sum(2).mean(1)

    def widen(self, slots: int) -> None:
        """Make room for slots up to ``slots``."""
        new = slots - self.sums.shape[-1]
        if new > 0:
            self.sums = torch.nn.functional.pad(self.sums, (0, new))

    def keep(self, slots: Tensor) -> None:
        """Follow a memory of which only ``slots [L, B, n]`` are left."""
        self.sums = self.sums.gather(-1, slots)


class AttendedMost(Attended):
    """The most attention that slots got from any query."""

    def add(self, sums: Tensor, weights: Tensor) -> None:
        torch.maximum(sums, weights.amax(2).mean(1), out=sums)


class AttendedByHead(Attended):
    """Summed for each KV head: ``[L, B, H, S]``."""

    def add(self, sums: Tensor, weights: Tensor) -> None:
        sums += weights.sum(2).reshape(*sums.shape[:2], -1, sums.shape[2]).mean(2)
