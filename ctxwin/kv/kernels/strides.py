"""Where the numbers of a token slot lie in a paged cache, for a kernel that writes them itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

Shape = tuple[int, int, int]
"""KV heads of a layer, numbers of a key and of a value."""
Strides = tuple[int, int, int, int, int]
"""Elements from the cache's first one to the first number of block 0, and from one block, token, head and dimension to the
next."""


@dataclass(frozen=True)
class CacheStrides:
    """A layout in which every step, by block, token, head or dimension, has one length.

    Attributes:
        block_size: tokens of a block.
        k, v: where keys and values lie.
    """

    block_size: int
    k: Strides
    v: Strides

    @classmethod
    def of_rows(cls, k: Sequence[int], v: Sequence[int]) -> Self:
        """Contiguous ``[T, H, D]`` tensors of the shapes ``k`` and ``v``: blocks of one token."""
        return cls(1, (0, k[1] * k[2], 0, k[2], 1), (0, v[1] * v[2], 0, v[2], 1))

    @classmethod
    def find(
        cls, cache: torch.Tensor, places: torch.Tensor, size: int, heads: int, dims: tuple[int, int]
    ) -> Self | None:
        """The layout of ``cache``, or None where it is another kind (tiles, or keys interleaved in groups).

        Args:
            cache: ``[blocks, ...]``, strided in any way.
            places: int64 ``[size * heads * (k_dim + v_dim)]``: where each number of a block's keys ``[size, heads,
                k_dim]``, then of its values, lies in ``cache[b].reshape(-1)``.
            size: tokens of a block.
            heads: KV heads.
            dims: ``(k_dim, v_dim)``.

        Cost: a few passes over ``places``, once.
        """
        places = places.to("cpu")
        at = torch.zeros_like(places)
        remaining = places
        for length, stride in zip(reversed(cache.shape[1:]), reversed(cache.stride()[1:]), strict=True):
            at += remaining % length * stride
            remaining = remaining // length
        cut = size * heads * dims[0]
        strides = []
        for numbers, dim in ((at[:cut], dims[0]), (at[cut:], dims[1])):
            line = _strides(numbers.view(size, heads, dim))
            if line is None:
                return None
            strides.append((line[0], cache.stride(0), *line[1:]))
        k, v = strides
        return cls(size, k, v)


def _strides(at: torch.Tensor) -> tuple[int, int, int, int] | None:
    """First offset and the steps along each axis of ``at [tokens, heads, dims]``; None where they are not constant."""
    base = int(at[0, 0, 0])
    steps = [int(at.select(axis, 1).flatten()[0]) - base if at.shape[axis] > 1 else 0 for axis in range(3)]
    want = torch.full_like(at, base)
    for axis, step in enumerate(steps):
        shape = [1, 1, 1]
        shape[axis] = -1
        want += torch.arange(at.shape[axis]).view(shape) * step
    return (base, steps[0], steps[1], steps[2]) if torch.equal(at, want) else None
