"""The load kernel on a CPU's vectors: `simd`'s pass over all parts of many layers, on as many threads as torch takes.

Torch operators take a dozen passes over a layer and as many calls a part; here each number is read once and written once, in
place of its paged slot where the cache's layout is known (`CacheStrides`). Rows of the table are handed to the threads a few
at a time, so that a thread without a core of its own delays nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
import torch

from ctxwin.kv.kernels import simd
from ctxwin.kv.kernels.parts import SpanSlice
from ctxwin.kv.kernels.strides import CacheStrides
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.rope import Shift, rotation_table

TASKS = 4
"""Shares in which each thread takes the layers of neighbouring parts."""
TILES_AT_ONCE = 16
"""Tiles that are written in all layers before those that follow, so that their tables stay in the processor's cache."""
_AT = {name: i for i, name in enumerate(simd.FIELDS)}
_Task = tuple[Callable[..., None], tuple[int, ...]]


class LlvmKernel:
    """Keys and values of a run of parts. Same arguments as `CpuKernel`; see `fits`."""

    def __init__(
        self,
        parts: Sequence[SpanSlice],
        spec: KVSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        heads: tuple[int, int],
    ) -> None:
        if not fits(parts, spec, dtype, device):
            raise ValueError(
                f"kernel llvm must serve 16-bit or 32-bit numbers of layers that turn alike on a CPU, got {dtype} on "
                f"{device}; use kernel cpu"
            )
        self._spec, self._dtype, self._heads = spec, dtype, heads
        self._tokens = [part.tokens for part in parts]
        self._shapes = [(sum(self._tokens), heads[1] - heads[0], dim) for dim in (spec.k_dim, spec.v_dim)]
        self._kind_of = {layer: at for at, kind in enumerate(spec.alike) for layer in kind.layers}
        self._used: list[torch.Tensor] = []  # what the tables hold addresses of
        self._factors: list[str] = []
        if any(part.patch is not None or part.start != part.span.start for part in parts):
            self._turns = self._rotations([part.shift(frame=False) for part in parts])
        if any(part.patch is not None for part in parts):
            self._frames = self._rotations([(part.shift(frame=True)[0], 0, part.start) for part in parts])
        begins = accumulate(self._tokens, initial=0)
        self._tables = [self._table(part, first) for part, first in zip(parts, begins, strict=False)]
        self._stored = [_name(part.span.k.dtype) for part in parts]
        self._outs: list[tuple[torch.Tensor, torch.Tensor]] = []  # two: one may be read while the next one is computed

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        while len(self._outs) < 2:
            k, v = (torch.empty(shape, dtype=self._dtype) for shape in self._shapes)
            self._outs.append((k, v))
        self._outs.reverse()
        k, v = self._outs[0]
        strides = CacheStrides.of_rows(k.shape, v.shape)
        self._write(i, [k.data_ptr()], [v.data_ptr()], strides, np.arange(len(k)))
        return k, v

    def store(self, first: int, caches: Sequence[torch.Tensor], strides: CacheStrides, slots: torch.Tensor) -> None:
        """Writes layers ``first`` and following into slots of their paged caches; arguments as `LoadPlan.store`.

        Raises ValueError for a layout in which neither the numbers of a key nor those of a block's tokens stand side by side.
        """
        if strides.v[4] != 1 or 1 not in (strides.k[4], strides.k[2]):
            raise ValueError(f"strides must have the numbers of a key or its tokens side by side, got {strides}")
        size = self._dtype.itemsize
        keys, values = ([c.data_ptr() + size * side[0] for c in caches] for side in (strides.k, strides.v))
        self._write(first, keys, values, strides, slots.numpy())

    def _write(
        self, first: int, keys: Sequence[int], values: Sequence[int], strides: CacheStrides, slots: np.ndarray
    ) -> None:
        transposed = strides.k[4] != 1
        block, offset = np.divmod(slots, strides.block_size)
        places = [block * side[1] + offset * side[2] for side in (strides.k, strides.v)]
        steps = strides.k[3], strides.v[3], strides.k[4]
        tables: list[np.ndarray] = []
        buffers: list[np.ndarray] = []
        at = 0
        for table, tokens in zip(self._tables, self._tokens, strict=True):
            mine = slice(at, at + tokens)
            begins = np.arange(0, tokens, simd.TILE)
            if transposed:
                breaks = np.diff(slots[mine], prepend=-2) != 1
                begins = np.flatnonzero(breaks | (offset[mine] % simd.TILE == 0))
            tiles = np.stack([begins, np.diff(begins, append=tokens)], axis=1)
            rows = table[first : first + len(keys)].copy()
            rows[:, _AT["out_k"]], rows[:, _AT["out_v"]] = keys, values
            for name, place in zip(("k_at", "v_at"), places, strict=True):
                rows[:, _AT[name]] = place[mine].ctypes.data
            buffers.append(tiles)
            begins = np.arange(0, len(tiles), TILES_AT_ONCE)[:, None]
            rows = np.tile(rows, (len(begins), 1, 1))
            rows[:, :, _AT["tiles"]] = tiles.ctypes.data + tiles.strides[0] * begins
            rows[:, :, _AT["count"]] = np.minimum(TILES_AT_ONCE, len(tiles) - begins)
            tables.append(rows.reshape(-1, len(_AT)))
            at = mine.stop
        tasks: list[_Task] = []
        for (stored, factors), run in groupby(zip(self._stored, self._factors, tables, strict=True), itemgetter(0, 1)):
            function = simd.compile_layout(self._layout(stored, factors, transposed))
            rows = np.concatenate([table for _, _, table in run])
            buffers.append(rows)
            size = -(-len(rows) // (TASKS * torch.get_num_threads()))
            for row in range(0, len(rows), size):
                few = rows[row : row + size]
                tasks.append((function, (few.ctypes.data, len(few), *steps)))
        _run(tasks)

    def _layout(self, stored: str, factors: str, transposed: bool) -> simd.Layout:
        spec, rope = self._spec, self._spec.rope
        count = self._heads[1] - self._heads[0]
        pairs = rope.rotary_dim // 2, rope.pairing == "interleaved"
        return simd.Layout(count, spec.k_dim, spec.v_dim, *pairs, stored, factors, _name(self._dtype), transposed)

    def _table(self, part: SpanSlice, begin: int) -> np.ndarray:
        """The rows of a part from token ``begin`` on, ``[layers, FIELDS]``, but for where they are written."""
        spec, first = self._spec, self._heads[0]
        begin *= 4 * spec.rope.rotary_dim  # bytes of the angles of a token
        table = np.zeros((spec.layers, len(_AT)), dtype=np.int64)
        for name, side in (("k", part.span.k), ("v", part.span.v)):
            x = self._keep(side)[:, part.begin :, first:]
            layer, token, head, _ = x.stride()
            table[:, _AT[name]] = x.data_ptr() + x.itemsize * layer * np.arange(spec.layers)
            table[:, _AT[f"{name}_token"]], table[:, _AT[f"{name}_head"]] = token, head
        if part.start != part.span.start:
            table[:, _AT["mode"]] = simd.MODES.index("turn")
            table[:, _AT["turn"]] = self._turns + begin
        self._factors.append("bfloat16" if self._dtype is torch.bfloat16 else "float32")
        patch = part.patch
        if patch is None or not (patch.dense or patch.rank):
            return table
        if self._factors[-1] != _name(patch.dtype) or self._factors[-1] != _name(patch.factors_dtype):
            self._factors[-1] = "float32"
        table[:, _AT["turn"]], table[:, _AT["frame"]] = self._turns + begin, self._frames + begin
        dtype = getattr(torch, self._factors[-1])
        layers, covered = np.array(patch.layers, dtype=np.int64), np.arange(len(patch.layers))
        left_factor = self._keep(patch.left, dtype)
        left_factor = left_factor[..., part.begin :, :]
        right, at = left_factor, covered  # the delta itself
        mode: simd.Mode = "dense"
        if not patch.dense:
            mode = "product"
            if patch.basis is not None:
                at = np.array([patch.basis.layers.index(layer) for layer in patch.layers])
            basis = patch.right if patch.basis is None else patch.basis.right
            assert basis is not None
            right = self._keep(basis, dtype)
            step = left_factor.stride(0) if left_factor.ndim > 2 else 0
            table[layers, _AT["left"]] = left_factor.data_ptr() + left_factor.itemsize * step * covered
            table[layers, _AT["left_token"]] = left_factor.stride(-2)
            table[layers, _AT["rank"]] = right.shape[1] if patch.quantized is None else patch.quantized.ranks
        table[layers, _AT["mode"]] = simd.MODES.index(mode)
        table[layers, _AT["right_row"]] = right.stride(1)
        columns = first * spec.k_dim, spec.heads * spec.k_dim + first * spec.v_dim
        for name, column in zip(("right_k", "right_v"), columns, strict=True):
            table[layers, _AT[name]] = right.data_ptr() + right.itemsize * (right.stride(0) * at + column)
        return table

    def _rotations(self, shifts: Sequence[Shift]) -> np.ndarray:
        """Addresses of the tables of all parts, of each layer."""
        tables = [self._keep(rotation_table(kind.rope, shifts, torch.float32)).data_ptr() for kind in self._spec.alike]
        return np.array([tables[self._kind_of[layer]] for layer in range(self._spec.layers)])

    def _keep(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return ``x`` with the numbers of its last axis side by side, for as long as the kernel lives."""
        x = x if dtype is None or x.dtype is dtype else x.to(dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        self._used.append(x)
        return x


def fits(parts: Sequence[SpanSlice], spec: KVSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernel takes parts of a layout: on the CPU, in 16 or 32 bits, with layers that turn alike."""
    tensors = [x for part in parts for x in (part.span.k, part.span.v, *_factors_of(part))]
    dtypes = {dtype, *(part.span.k.dtype for part in parts)}
    return (
        device.type == "cpu"
        and all(x.device.type == "cpu" and x.dtype is not torch.float64 for x in tensors)
        and all(part.span.k.dtype == part.span.v.dtype for part in parts)
        and all(simd.supports(_name(x)) for x in dtypes)
        and not spec.in_rows
        and len({(kind.rope.rotary_dim, kind.rope.pairing) for kind in spec.alike}) == 1
    )


def _factors_of(part: SpanSlice) -> Iterator[torch.Tensor]:
    patch = part.patch
    if patch is not None:
        right = patch.basis.right if patch.basis is not None else patch.right
        yield from (patch.left,) if right is None else (patch.left, right)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run(tasks: Sequence[_Task]) -> None:
    """Run all tasks, on this thread and as many others as torch would use."""
    waiting = iter(tasks)  # the next task of a list is taken by one thread only

    def work() -> None:
        for function, arguments in waiting:
            function(*arguments)

    helpers = min(torch.get_num_threads(), len(tasks)) - 1
    futures = [_threads(helpers).submit(work) for _ in range(helpers)]
    work()
    for future in futures:
        future.cancel()  # it has not begun, and all is done
    for future in futures:
        if not future.cancelled():
            future.result()


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "ctxwin-load")
