# mypy: disable-error-code="import-untyped,import-not-found"
"""The load kernel on Triton: a launch patches, rotates, rounds and writes all parts of many layers, keys and values.

Torch operators take a dozen passes over a layer and as many launches a part; here each number is read once and written
once, in place of its paged slot where the cache's layout is known (`CacheStrides`). Layers are staged and launched together,
up to `STAGED_BYTES` of them: small loads are bound by the launches, large ones by the copy from the host. Parts whose span is
resident on the device are read where they lie.

Tested under Triton's interpreter and compared with float64 by `make gpu-check`; `choice.choose` compares it with the reference
on the very device before it is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from ctxwin.kv.kernels import fused
from ctxwin.kv.kernels.parts import Heads, ResidentKV, SpanSlice, columns_of, compute_dtype
from ctxwin.kv.kernels.staging import Field, Staging, to_device
from ctxwin.kv.kernels.strides import CacheStrides, Shape
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.rope import rotation_table
from ctxwin.kv.rows import Pair

BLOCK_TOKENS = 16
"""Tokens of a program. With 16 ranks and 64 values at a time a thread needs 164 registers on compute capability 9.0; 32 of
each would spill."""
BLOCK_RANK = 16
BLOCK_VALUES = 64
STAGED_BYTES = 32 << 20
"""Bytes of KV and patches that are staged at once, of one layer at least. A load holds two such buffers of page-locked memory,
and one of the device's."""
_LEAST = 16  # what Triton's products need in each direction, in every version
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


class TritonKernel:
    """Keys and values of a run of parts, layer by layer. Same arguments as `CpuKernel`.

    Raises ValueError for a device that Triton has no code for, or a dtype it does not know.
    """

    def __init__(
        self, parts: Sequence[SpanSlice], spec: KVSpec, *, dtype: torch.dtype, device: torch.device, heads: Heads
    ) -> None:
        if device.type == "cpu" and not interpreted():
            raise ValueError(
                "kernel triton must run on a GPU, got device cpu; use kernel cpu, or set TRITON_INTERPRET=1 to test"
            )
        compute = compute_dtype(parts)
        for name in (dtype, *(part.span.k.dtype for part in parts)):
            if name not in _DTYPES:
                raise ValueError(f"kernel triton must be given {', '.join(map(str, _DTYPES))}, got {name}")
        self._device, self._heads, count = device, heads, heads[1] - heads[0]
        self._parts = parts
        self._starts = list(accumulate((part.tokens for part in parts), initial=0))
        tokens = self._starts[-1]
        self._width = count * (spec.k_dim + spec.v_dim)
        self._columns = columns_of(spec, heads)
        self._entries, size = self._lay_out()
        self._layers = spec.layers
        self._shapes = (count, spec.k_dim), (count, spec.v_dim)
        stored = _common([x.dtype for part in parts for x in (part.span.k, part.span.v)], compute)
        self._residents = [self._resident(part, stored) for part in parts]
        at = 0
        self._staged_rows: list[int] = []  # where a part begins among those that are staged
        for part, resident in zip(parts, self._residents, strict=True):
            self._staged_rows.append(at)
            at += part.tokens if resident is None else 0
        staged = [(at, *shape) for shape in self._shapes]
        # `layer` gives so many at once, `store` writes so many.
        self._many = self._at_once(tokens * self._width * compute.itemsize)
        self.launched = self._at_once((at * self._width + size) * compute.itemsize)
        self._dtype = dtype
        self._served = range(0)  # layers that `_out` holds
        self._out: Pair
        self._table = torch.tensor(self._entries, dtype=torch.int64)
        factors = _common([part.patch.dtype for part in parts if part.patch is not None], compute)
        self._staging = Staging(
            [
                Field((self.launched, fused.TARGETS), torch.int64),
                Field((self.launched, *self._table.shape), torch.int64),
                Field((self.launched, *staged[0]), stored),
                Field((self.launched, *staged[1]), stored),
                Field((self.launched, max(size, 1)), factors),
            ],
            device,
        )
        blocks = [
            (i, row)
            for i, (begin, end) in enumerate(zip(self._starts, self._starts[1:], strict=False))
            for row in range(begin, end, BLOCK_TOKENS)
        ]
        self._blocks = to_device(torch.tensor(blocks, dtype=torch.int64), device)
        if spec.in_rows or len({(kind.rope.rotary_dim, kind.rope.pairing) for kind in spec.alike}) > 1:
            raise ValueError("kernel triton must be given layers of one shape that turn equally; use kernel cpu")
        self._kind_of = {layer: at for at, kind in enumerate(spec.alike) for layer in kind.layers}

        def tables(frame: bool) -> torch.Tensor:
            shifts = [part.shift(frame) for part in parts]
            return torch.stack([rotation_table(kind.rope, shifts, compute, device) for kind in spec.alike])

        self._turns = tables(frame=False)
        framed = any(part.patch is not None and part.span.start != 0 for part in parts)
        self._frames = tables(frame=True) if framed else self._turns
        half, near = spec.rope.rotary_dim // 2, spec.rope.pairing == "interleaved"
        rest, runs = spec.k_dim - 2 * half, -(-spec.v_dim // _block(spec.v_dim, BLOCK_VALUES))
        self._grid = (len(blocks), count * (1 + runs))
        # The interpreter multiplies numpy's numbers, which has none of bfloat16.
        narrow = factors.itemsize == 2 and compute is torch.float32 and not interpreted()
        shape = {"HEADS": count, "K_DIM": spec.k_dim, "V_DIM": spec.v_dim, "WIDTH": self._width, "TASKS": 1 + runs}
        pairs = {"HALF": half, "STEP": 2 if near else 1, "OFFSET": 1 if near else half, "REST": rest, "FRAMED": framed}
        blocked = {"BLOCK_T": BLOCK_TOKENS, "BLOCK_R": BLOCK_RANK, "BLOCK_V": _block(spec.v_dim, BLOCK_VALUES)}
        blocked |= {"BLOCK_HALF": _block(half), "BLOCK_REST": _block(rest)}
        dtypes = {"COMPUTE": _DTYPES[compute], "STORED": _DTYPES[stored], "OUT": _DTYPES[dtype]}
        self._fixed: dict[str, Any] = {"FIELDS": fused.FIELDS, "TARGETS": fused.TARGETS, "NARROW": narrow}
        self._fixed |= {**shape, **pairs, **blocked, **dtypes}

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``; those that follow are computed with it."""
        if i not in self._served:
            served = range(i, min(i + self._many, self._layers))
            shapes = [(len(served), self._starts[-1], *shape) for shape in self._shapes]
            k, v = (torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes)
            strides, targets = CacheStrides.of_rows(k.shape[1:], v.shape[1:]), list(zip(k, v, strict=True))
            for at in range(0, len(served), self.launched):
                self._launch(i + at, targets[at : at + self.launched], strides, None)
            self._served, self._out = served, (k, v)
        return self._out[0][i - self._served.start], self._out[1][i - self._served.start]

    def store(self, first: int, caches: Sequence[torch.Tensor], strides: CacheStrides, slots: torch.Tensor) -> None:
        """Write layers ``first`` and following into slots of their paged caches; arguments as `LoadPlan.store`."""
        for at in range(0, len(caches), self.launched):
            targets = [(cache, cache) for cache in caches[at : at + self.launched]]
            self._launch(first + at, targets, strides, slots)

    def _launch(self, first: int, targets: Sequence[Pair], strides: CacheStrides, slots: torch.Tensor | None) -> None:
        """Stage layers ``first`` and following, and write their keys and values to ``targets``."""
        layers = range(first, first + len(targets))
        patched = any(part.patch is not None and i in part.patch.layers for part in self._parts for i in layers)
        addresses = [(k.data_ptr(), v.data_ptr()) for k, v in targets]
        entries = [(self._kind_of[i], *pair) for i, pair in zip(layers, addresses, strict=True)]
        staged = self._staging.open()
        staged[0][: len(layers)].copy_(torch.tensor(entries, dtype=torch.int64))
        alignment = self._fill(layers, staged[1:])
        # Only layers that have a patch take its factors along.
        with _on(self._device):
            table_of_targets, table, _, _, factors = self._staging.send(5 if patched else 4)
            tables = (self._blocks, self._turns, self._frames, self._blocks if slots is None else slots)
            sizes = (self._starts[-1], factors.shape[1], self._table.numel())
            launch = {"PATCHED": patched, "PAGED": slots is not None, "BLOCK_SIZE": strides.block_size, "num_warps": 4}
            fused.load_layers[(*self._grid, len(layers))](
                *(factors, table, table_of_targets, *tables, *sizes, *strides.k, *strides.v),
                **self._fixed,
                **launch,
                ALIGNMENT=math.gcd(16, *(address for pair in addresses for address in pair)),
                PART_ALIGNMENT=alignment,
                enable_fp_fusion=True,
            )

    def _fill(self, layers: range, fields: Sequence[torch.Tensor]) -> int:
        """Put layers together on the host; return the alignment of their keys and values on the device, in bytes."""
        table, keys, values, factors = (field[: len(layers)] for field in fields)
        table.copy_(self._table)
        stored = slice(layers.start, layers.stop), slice(*self._heads)
        staged_k, staged_v = self._staging.tensors[2:4]
        alignment = 16
        for j, (part, resident) in enumerate(zip(self._parts, self._residents, strict=True)):
            if resident is None:
                first, row = 0, self._staged_rows[j]
                rows, tokens = slice(row, row + part.tokens), slice(part.begin, part.stop)
                keys[:, rows].copy_(part.span.k[stored[0], tokens, stored[1]])
                values[:, rows].copy_(part.span.v[stored[0], tokens, stored[1]])
                sources = staged_k, staged_v
            else:
                first, row, sources = layers.start - resident.first, part.begin, (resident.k, resident.v)
            for column, source in zip((5, 6), sources, strict=True):
                layer, token = (step * source.itemsize for step in source.stride()[:2])
                address = source.data_ptr() + first * layer + row * token
                table[:, j, column] = torch.arange(address, address + len(layers) * layer, layer) if layer else address
                alignment = math.gcd(alignment, address, layer)
            if part.patch is None:
                table[:, j, 2] = 0
                continue
            for at, i in enumerate(layers):
                table[at, j, 2] = self._fill_factors(factors[at], j, i) if i in part.patch.layers else 0
        return alignment

    def _at_once(self, layer_bytes: int) -> int:
        """How many layers of so many bytes each are staged, launched or computed together."""
        return max(1, min(self._layers, STAGED_BYTES // layer_bytes if layer_bytes else self._layers))

    def _resident(self, part: SpanSlice, stored: torch.dtype) -> ResidentKV | None:
        """The part's KV on the device, where it can be read there; raise ValueError where it is of another shape."""
        resident = part.resident
        if resident is None or resident.k.dtype != stored or resident.v.dtype != stored:
            return None
        for source, shape in zip((resident.k, resident.v), self._shapes, strict=True):
            fits = source.shape[1:] == (part.span.tokens, *shape) and source.is_contiguous()
            if not fits or source.device != self._device:
                raise ValueError(
                    f"resident KV must be contiguous [layers, {part.span.tokens}, {shape[0]}, {shape[1]}] on {self._device}, "
                    f"got {tuple(source.shape)} on {source.device}"
                )
        return resident

    def _fill_factors(self, factors: torch.Tensor, j: int, layer: int) -> int:
        """Put a layer's factors together; return its rank as in `fused.FIELDS`."""
        part, (rank, left_at, right) = self._parts[j], self._entries[j][2:5]
        patch, tokens = part.patch, slice(part.begin, part.stop)
        assert patch is not None
        if patch.dense:
            self._cut(factors, left_at, patch.left[patch.layers.index(layer), tokens])
        elif rank:
            sides = patch.factors(layer)
            assert sides is not None
            rank = sides[0].shape[1]
            factors[left_at : left_at + part.tokens * rank].view(-1, rank).copy_(sides[0][tokens])
            self._cut(factors, right, sides[1])
        return rank

    def _cut(self, factors: torch.Tensor, at: int, rows: torch.Tensor) -> None:
        """Rows over all columns of a layer, cut to the heads that are served, from ``at`` on."""
        both = factors[at : at + len(rows) * self._width].view(len(rows), self._width)
        edge = self._columns[0].stop - self._columns[0].start
        both[:, :edge].copy_(rows[:, self._columns[0]])
        both[:, edge:].copy_(rows[:, self._columns[1]])

    def _lay_out(self) -> tuple[list[list[int]], int]:
        """The table of parts that `fused.load_layers` reads, and how many numbers its factors take; see `fused.FIELDS`."""
        rows, at = [], 0
        for j, part in enumerate(self._parts):
            rank = 0 if part.patch is None else -1 if part.patch.dense else part.patch.rank
            left_at = at
            right = left_at + (part.tokens * rank if rank >= 0 else 0)
            at = right + (rank if rank >= 0 else part.tokens) * self._width
            rows.append([self._starts[j], self._starts[j + 1], rank, left_at, right, 0, 0])
        return rows, at


def read_layers(
    caches: Sequence[torch.Tensor], strides: CacheStrides, shape: Shape, blocks: Sequence[int], begin: int, end: int
) -> Pair:
    """Return keys and values of the tokens ``[begin, end)`` in ``blocks`` of layers of one dtype, each packed by ``strides``.

    Both are ``[layers, T, heads, dim]``, side by side in a new buffer. Cost: a launch, which reads and writes each number once.
    """
    (heads, k_dim, v_dim), tokens, size, device = shape, end - begin, strides.block_size, caches[0].device
    addresses = [cache.data_ptr() for cache in caches]
    table = to_device(torch.tensor([*addresses, *blocks[begin // size : -(-end // size)]]), device)
    cut = len(caches) * tokens * heads * k_dim
    buffer = torch.empty(cut // k_dim * (k_dim + v_dim), dtype=caches[0].dtype, device=device)
    integer = f"int{8 * buffer.itemsize}"
    k, v = (part.view(len(caches), tokens, heads, -1) for part in (buffer[:cut], buffer[cut:]))
    with _on(device):
        fused.read_layers[(-(-tokens // BLOCK_TOKENS), 2 * heads, len(caches))](
            *(x.view(getattr(torch, integer)) for x in (k, v)),
            *(table, begin % size, tokens, *strides.k, *strides.v, len(caches), heads, k_dim, v_dim),
            *(getattr(tl, integer), math.gcd(16, *addresses), size, BLOCK_TOKENS, _block(max(k_dim, v_dim))),
        )
    return k, v


def interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernel, on any device (``TRITON_INTERPRET=1`` when it was imported)."""
    return not isinstance(fused.load_layers, triton.runtime.JITFunction)


def _block(size: int, most: int | None = None) -> int:
    """The power of two that holds ``size``, up to ``most``."""
    least = max(_LEAST, 1 << max(size - 1, 0).bit_length())
    return least if most is None else min(least, most)


def _common(dtypes: Sequence[torch.dtype], compute: torch.dtype) -> torch.dtype:
    """The dtype that tensors cross in: their own where it is one and no wider than the arithmetic's, else that one."""
    part_dtypes = set(dtypes)
    same = part_dtypes.pop() if len(part_dtypes) == 1 else compute
    return same if same in _DTYPES and same.itemsize <= compute.itemsize else compute


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever its tensors' is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
