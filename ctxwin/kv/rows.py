"""Layers that differ in their heads (Gemma 4), laid out as rows of one width, and back.

A row holds whole heads, so that it turns as one; the last row of a layer is filled up with zeros, which no rotation changes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ctxwin.kv.layout import KVSpec, LayerKind

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


def row_width(shapes: Sequence[tuple[int, int]]) -> int:
    """The width of rows that wastes least over layers of ``(heads, head_dim)``, the largest of several."""
    step = math.lcm(*{dim for _, dim in shapes})
    widths = [heads * dim for heads, dim in shapes]
    every = range(step, max(step, *widths) + 1, step)
    return min(every, key=lambda width: (sum(-(-w // width) * width for w in widths), -width))


def rows_of(kind: LayerKind, width: int) -> int:
    """Rows that a layer of a kind takes."""
    return -(-kind.heads * kind.head_dim // width)


def layer_kinds(spec: KVSpec) -> list[LayerKind]:
    """The kind of each layer that keeps KV, in their order, of a model in rows."""
    kind_of = {row: kind for kind in spec.kinds for row in kind.layers}
    kinds, row = [], 0
    while row < spec.layers:
        kinds.append(kind_of[row])
        row += rows_of(kind_of[row], spec.k_dim)
    return kinds


def to_rows(spec: KVSpec, pairs: Iterable[Pair]) -> Pair:
    """Keys and values of each layer, ``[T, heads, dim]``, as ``[layers, T, heads, k_dim]`` and ``[..., v_dim]`` of ``spec``."""
    sides: list[torch.Tensor] = []
    at = 0
    for pair in pairs:
        rows = [_split(spec, tensor) for tensor in pair]
        sides = sides or [parts[0].new_empty(spec.layers, *parts[0].shape) for parts in rows]
        for side, parts in zip(sides, rows, strict=True):
            for i, part in enumerate(parts, at):
                side[i] = part
        at += len(rows[0])
    if at != spec.layers:
        raise ValueError(f"layers must fill {spec.layers} rows, got {at}")
    return sides[0], sides[1]


def _split(spec: KVSpec, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if not spec.in_rows:
        return [tensor]
    flat = tensor.flatten(1)
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % spec.k_dim)).unsqueeze(1)
    return torch.split(padded, spec.k_dim, dim=2)


def from_rows(spec: KVSpec, row: Callable[[int], Pair]) -> Iterator[Pair]:
    """Keys and values of each layer, ``[T, heads, dim]``; ``row`` gives one row, and is asked for them in their order."""
    if not spec.in_rows:
        yield from (row(i) for i in range(spec.layers))
        return
    at = 0
    for kind in layer_kinds(spec):
        count = rows_of(kind, spec.k_dim)
        # A kernel reuses its buffers.
        pairs = [tuple(x.flatten(1).clone() for x in row(i)) for i in range(at, at + count)]
        sides = [torch.cat(list(side), dim=1) for side in zip(*pairs, strict=True)]
        k, v = (x[:, : kind.heads * kind.head_dim].reshape(len(x), kind.heads, kind.head_dim) for x in sides)
        yield k, v
        at += count
