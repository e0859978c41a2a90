"""The load kernel on a CPU's vectors: `simd`'s pass over all parts of many layers, on as many threads as torch takes.

Torch operators take a dozen passes over a layer and as many calls a part; here each number is read once and written once, in
place of its paged slot where the cache's layout is known (`CacheStrides`). Rows of the table are handed to the threads a few
at a time, so that a thread without a core of its own delays nobody.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from ctxwin.kv.kernels import simd
from ctxwin.kv.kernels.parts import Heads, SpanSlice
from ctxwin.kv.kernels.strides import CacheStrides
from ctxwin.kv.kernels.vectors import LINE
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.patch import Patch
from ctxwin.kv.rope import Shift, rotation_table

TASKS = 4
"""Shares in which each of several threads takes the rows of a table."""
TOKENS_AT_ONCE = 512
"""Tokens of a part that are written in all layers before those that follow, so that their tables stay in the processor's
cache."""
PAST_BYTES = 4 << 20
"""Bytes from which on a load is written past the cache: more would be out of it before they are read."""
_AT = {name: i for i, name in enumerate(simd.FIELDS)}
_Task = tuple[Callable[..., None], tuple[int, ...], Any]  # with memory that it works in


@dataclass(frozen=True)
class _Rows:
    """Rows ``[runs of tiles, layers, FIELDS]``, each run's part, and what they hold addresses of."""

    table: np.ndarray
    part: np.ndarray
    used: tuple[np.ndarray, ...]


class LlvmKernel:
    """Keys and values of a run of parts. Same arguments as `CpuKernel`; see `fits`."""

    def __init__(
        self, parts: Sequence[SpanSlice], spec: KVSpec, *, dtype: torch.dtype, device: torch.device, heads: Heads
    ) -> None:
        if not fits(parts, spec, dtype, device):
            raise ValueError(
                f"kernel llvm must serve 16-bit or 32-bit numbers of layers that turn alike on a CPU, got {dtype} on "
                f"{device}; use kernel cpu"
            )
        self._spec, self._dtype, self._heads = spec, dtype, heads
        self._tokens = [part.tokens for part in parts]
        count, rope = heads[1] - heads[0], spec.rope
        self._shapes = [(sum(self._tokens), count, dim) for dim in (spec.k_dim, spec.v_dim)]
        self._layout = (count, spec.k_dim, spec.v_dim, rope.rotary_dim // 2, rope.pairing != "half")
        self._width = count * (spec.k_dim + spec.v_dim)
        self._kind_of = {layer: at for at, kind in enumerate(spec.alike) for layer in kind.layers}
        self._used: list[torch.Tensor] = []  # what the tables hold addresses of
        self._kinds: list[tuple[str, str]] = []  # dtypes of each part's KV and factors
        self._tables = self._build_tables(parts)
        self._rows: _Rows | None = None  # of `layer`
        self._outs: list[tuple[torch.Tensor, torch.Tensor]] = []  # two: one may be read while the next one is computed

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        while len(self._outs) < 2:
            k, v = (torch.empty(shape, dtype=self._dtype) for shape in self._shapes)
            self._outs.append((k, v))
        self._outs.reverse()
        k, v = self._outs[0]
        strides = CacheStrides.of_rows(k.shape, v.shape)
        if self._rows is None:
            self._rows = self._prepare(strides, np.arange(len(k)))
        self._write(i, [k.data_ptr()], [v.data_ptr()], strides, self._rows)
        return k, v

    def store(self, first: int, caches: Sequence[torch.Tensor], strides: CacheStrides, slots: torch.Tensor) -> None:
        """Write layers ``first`` and following into slots of their paged caches; arguments as `LoadPlan.store`.

        Raises ValueError for a layout in which neither the numbers of a key nor those of a block's tokens stand side by side.
        """
        if strides.v[4] != 1 or 1 not in (strides.k[4], strides.k[2]):
            raise ValueError(f"strides must have the numbers of a key or its tokens side by side, got {strides}")
        size = self._dtype.itemsize
        keys, values = ([c.data_ptr() + size * side[0] for c in caches] for side in (strides.k, strides.v))
        self._write(first, keys, values, strides, self._prepare(strides, slots.numpy()))

    def _prepare(self, strides: CacheStrides, slots: np.ndarray) -> _Rows:
        """The table of all layers, but for where a layer's cache lies."""
        tile = simd.tile_of(_name(self._dtype))
        block, offset = np.divmod(slots, strides.block_size)
        places = [block * side[1] + offset * side[2] for side in (strides.k, strides.v)]
        begins = np.cumsum([0, *self._tokens[:-1]])
        part = np.repeat(np.arange(len(begins)), self._tokens)
        number = np.arange(len(slots)) - begins[part]
        if strides.k[4] == 1:
            starts = np.flatnonzero(number % tile == 0)
        else:  # tokens that lie side by side
            starts = np.flatnonzero((np.diff(slots, prepend=-2) != 1) | (offset % tile == 0) | (number == 0))
        tiles = np.stack([number[starts], np.diff(starts, append=len(slots))], axis=1)
        part = part[starts]
        number = np.arange(len(part)) - np.searchsorted(part, part)
        firsts = np.flatnonzero(number % max(1, TOKENS_AT_ONCE // tile) == 0)
        part = part[firsts]
        rows = self._tables[part]
        rows[:, :, _AT["tiles"]] = (tiles.ctypes.data + tiles.strides[0] * firsts)[:, None]
        rows[:, :, _AT["count"]] = np.diff(firsts, append=len(tiles))[:, None]
        for name, place in zip(("k_at", "v_at"), places, strict=True):
            rows[:, :, _AT[name]] = (place.ctypes.data + place.itemsize * begins[part])[:, None]
        return _Rows(rows, part, (tiles, *places))

    def _write(
        self, first: int, keys: Sequence[int], values: Sequence[int], strides: CacheStrides, prepared: _Rows
    ) -> None:
        table = prepared.table[:, first : first + len(keys)].copy()
        table[:, :, _AT["out_k"]], table[:, :, _AT["out_v"]] = keys, values
        size = self._dtype.itemsize
        steps = [size * step for side in (strides.k, strides.v) for step in side[1:] if step != 1]
        past = all(at % LINE == 0 for at in (*keys, *values, *steps))
        past = past and len(keys) * sum(self._tokens) * self._width * size >= PAST_BYTES
        shares = TASKS * torch.get_num_threads() if torch.get_num_threads() > 1 else 1
        tasks: list[_Task] = []
        for kind, run in groupby(zip(prepared.part, table, strict=True), lambda row: self._kinds[row[0]]):
            rows = np.concatenate([row for _, row in run])
            shape = simd.KernelShape(*self._layout, *kind, _name(self._dtype), strides.k[4] != 1)
            function = simd.compile_layout(shape)
            packed = 4 * (int(rows[:, _AT["rank"]].max()) + 1) * self._width
            for few in np.array_split(rows, min(shares, len(rows))):
                panel = np.empty(packed + LINE, dtype=np.uint8)
                line = -(-panel.ctypes.data // LINE) * LINE
                steps = [strides.k[3], strides.v[3], strides.k[4]]
                tasks.append((function, (few.ctypes.data, len(few), *steps, past, line), (few, panel)))
        _run(tasks)

    def _build_tables(self, parts: Sequence[SpanSlice]) -> np.ndarray:
        """The rows of all parts, ``[parts, layers, FIELDS]``, but for their tiles and where they are written."""
        spec, layers = self._spec, np.arange(self._spec.layers)
        fields, steps = ([dict.fromkeys(_AT, 0) for _ in parts] for _ in range(2))
        for part, at, step in zip(parts, fields, steps, strict=True):
            for name, side in (("k", part.span.k), ("v", part.span.v)):
                x = self._keep(side)
                layer, token, head, _ = x.stride()
                at[name] = x.data_ptr() + x.itemsize * (part.begin * token + self._heads[0] * head)
                at[f"{name}_token"], at[f"{name}_head"], step[name] = token, head, x.itemsize * layer
            at["mode"] = simd.MODES.index("copy" if part.start == part.span.start else "turn")
        first, each = (np.array([list(row.values()) for row in rows]) for rows in (fields, steps))
        tables: np.ndarray = first[:, None] + each[:, None] * layers[:, None]
        patches = [part.patch if part.patch and (part.patch.dense or part.patch.rank) else None for part in parts]
        angles = 4 * spec.rope.rotary_dim * np.cumsum([0, *self._tokens[:-1]])[:, None]  # bytes before those of a part
        if any(patches) or bool(first[:, _AT["mode"]].any()):
            tables[:, :, _AT["turn"]] = self._rotations([part.shift(frame=False) for part in parts]) + angles
        if any(patches):
            tables[:, :, _AT["frame"]] = self._rotations([part.shift(frame=True) for part in parts]) + angles
        for part, patch, table in zip(parts, patches, tables, strict=True):
            both = patch is None or patch.dtype is patch.factors_dtype is torch.bfloat16
            dtype = torch.bfloat16 if both else torch.float32
            self._kinds.append((_name(part.span.k.dtype), _name(dtype)))
            if patch is not None:
                self._add_patch(table, patch, part.begin, dtype)
        return tables

    def _add_patch(self, table: np.ndarray, patch: Patch, begin: int, dtype: torch.dtype) -> None:
        """Enter a patch into its part's rows ``[layers, FIELDS]``, from token ``begin`` on."""
        spec, covered = self._spec, np.arange(len(patch.layers))
        left = patch.left if patch.dense or patch.left.shape[-1] % 2 == 0 else pad(patch.left, (0, 1))
        left = self._keep(left, dtype)[..., begin:, :]
        right, at = left, covered  # the delta itself
        rank: int | list[int] = 0
        if not patch.dense:
            basis = patch.right if patch.basis is None else patch.basis.right
            assert basis is not None
            right = self._keep(basis, dtype)
            rank = right.shape[1] if patch.quantized is None else patch.quantized.ranks
            if patch.basis is not None:
                at = np.array([patch.basis.layers.index(layer) for layer in patch.layers])
        left_step = left.itemsize * left.stride(0) if left.ndim > 2 else 0
        columns = self._heads[0] * spec.k_dim, spec.heads * spec.k_dim + self._heads[0] * spec.v_dim
        rights = [right.data_ptr() + right.itemsize * (right.stride(0) * at + column) for column in columns]
        mode = simd.MODES.index("dense" if patch.dense else "product")
        lefts = left.data_ptr() + left_step * covered, left.stride(-2), left.shape[-2]
        fields = np.array(np.broadcast_arrays(mode, *lefts, *rights, right.stride(1), rank))
        adds = patch.dense | (fields[-1] > 0)  # a layer of no directions is served as if there were no patch
        table[np.array(patch.layers)[adds], _AT["mode"] :] = fields.T[adds]

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
    patches = [part.patch for part in parts if part.patch is not None]
    factors = [x for patch in patches for x in (patch.left, patch.right, patch.basis.right if patch.basis else None)]
    tensors = [x for part in parts for x in (part.span.k, part.span.v)] + [x for x in factors if x is not None]
    dtypes = {dtype, *(part.span.k.dtype for part in parts)}
    return (
        device.type == "cpu"
        and all(x.device.type == "cpu" and x.dtype is not torch.float64 for x in tensors)
        and all(part.span.k.dtype == part.span.v.dtype for part in parts)
        and all(simd.supports(_name(x)) for x in dtypes)
        and not spec.in_rows
        and len({(kind.rope.rotary_dim, kind.rope.pairing) for kind in spec.alike}) == 1
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run(tasks: Sequence[_Task]) -> None:
    """Run all tasks, on this thread and as many others as torch would use."""
    waiting = iter(tasks)  # the next task of a list is taken by one thread only

    def work() -> None:
        for function, arguments, _ in waiting:
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
