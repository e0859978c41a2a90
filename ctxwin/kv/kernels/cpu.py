"""The load kernel on torch operators with buffers of one layer, so that the work of a layer stays in cache.

Whole-span operators write tens of megabytes of float32 temporaries, and most of their time goes into fresh pages; here
nothing larger than a layer is written, and nothing large is allocated between layers. Keys and values are summed in
buffers of their own: contiguous operands are worth more than one product for both. It runs on whatever device torch
does; only the CPU is tested. Spans cross to another device in the dtype that they are stored in: torch converts a blocking
copy on the processor, before twice the bytes cross.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ctxwin.kv.kernels.parts import SpanSlice, columns_of, compute_dtype
from ctxwin.kv.layout import KVSpec, RopeSpec
from ctxwin.kv.rope import rotation_table


class CpuKernel:
    """Keys and values of a run of parts, layer by layer; arguments are checked by `LoadPlan`."""

    def __init__(
        self,
        parts: Sequence[SpanSlice],
        spec: KVSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        heads: tuple[int, int],
    ) -> None:
        compute, count = compute_dtype(parts), heads[1] - heads[0]
        tokens = sum(part.tokens for part in parts)
        rotary = max(kind.rope.rotary_dim * (spec.k_dim // (kind.head_dim or spec.k_dim)) for kind in spec.alike)
        # Two layers: one may still be read while the next one is computed.
        self._outs = [
            (
                torch.empty(tokens, count, spec.k_dim, dtype=dtype, device=device),
                torch.empty(tokens, count, spec.v_dim, dtype=dtype, device=device),
            )
            for _ in range(2)
        ]
        self._k, self._v = self._outs[0]
        self._sum_k = torch.empty(tokens, count, spec.k_dim, dtype=compute, device=device)
        # Values are done with before keys turn, so one buffer serves both.
        scratch = torch.empty(tokens * count * max(spec.v_dim, rotary), dtype=compute, device=device)
        self._sum_v = scratch[: self._v.numel()].view(self._v.shape)
        self._scratch = scratch[: tokens * count * rotary].view(tokens, count, rotary)
        self._away = device.type != "cpu"  # pageable memory may be freed as soon as the copy returns
        self._views = []
        at = 0
        for part in parts:
            rows = slice(at, at + part.tokens)
            self._views.append(SliceViews(part, spec, rows, heads, (self._sum_k, self._sum_v), dtype))
            at = rows.stop
        self._alone = self._views[0] if len(self._views) == 1 else None
        self._kind_of = {layer: at for at, kind in enumerate(spec.alike) for layer in kind.layers}
        self._rotations = self._runs(spec, [view for view in self._views if view.moved], frame=False)
        # Patches of keys outside the canonical frame: what is added turns to that frame first.
        framed = [view for view in self._views if view.framed]
        self._frames = self._runs(spec, framed, frame=True)
        self._added = torch.empty_like(self._sum_k) if framed else self._sum_k

    def _runs(self, spec: KVSpec, views: Sequence[SliceViews], *, frame: bool) -> list[_Run]:
        """Neighbours among ``views`` with what their keys turn by: to where they are served, or from the origin to where
        they are stored."""
        device, compute, heads = self._sum_k.device, self._sum_k.dtype, self._sum_k.shape[1]
        runs = []
        for rows in _merge_neighbours(view.rows for view in views):
            inside = tuple(view for view in views if rows.start <= view.rows.start < rows.stop)
            rotations = []
            for kind in spec.alike:
                table = rotation_table(kind.rope, [view.part.shift(frame) for view in inside], compute, device)
                dim = kind.head_dim or spec.k_dim
                many = heads * spec.k_dim // dim
                rotations.append(Rotation(kind.rope, dim, table, heads=many))
            runs.append(_Run(rows, inside, tuple(rotations)))
        return runs

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        self._outs.reverse()
        self._k, self._v = self._outs[0]
        values = self._values(i)
        return self._keys(i), values

    def _values(self, i: int) -> torch.Tensor:
        if self._alone is not None and not self._alone.patched(i):
            return _copy_if_needed(self._alone.v[i], self._v)
        rows = []
        for view in self._views:
            if view.patched(i) and view.sums:
                view.sum_values(i, self._v[view.rows])
            elif view.patched(i):
                view.sum_v.copy_(view.v[i], non_blocking=self._away)
                view.add(i, keys=False)
                rows.append(view.rows)
            else:
                self._v[view.rows].copy_(view.v[i], non_blocking=self._away)
        for run in _merge_neighbours(rows):
            self._v[run].copy_(self._sum_v[run])
        return self._v

    def _keys(self, i: int) -> torch.Tensor:
        if self._alone is not None and not self._alone.moved and not self._alone.patched(i):
            return _copy_if_needed(self._alone.k[i], self._k)
        still = []
        for view in self._views:
            patched = view.patched(i)
            target = view.sum_k if patched or view.moved else self._k[view.rows]
            target.copy_(view.k[i], non_blocking=self._away)
            if patched and not view.framed:
                view.add(i, keys=True)
            if patched and not view.moved:
                still.append(view.rows)
        self._add_framed(i)
        for rows in _merge_neighbours(still):
            self._k[rows].copy_(self._sum_k[rows])
        for run in self._rotations:
            rotation = run.rotations[self._kind_of[i]]
            rotation(self._sum_k[run.rows], self._k[run.rows], self._scratch[run.rows])
        return self._k

    def _add_framed(self, i: int) -> None:
        for run in self._frames:
            if not any(view.patched(i) for view in run.views):
                continue
            for view in run.views:
                added = self._added[view.rows]
                if view.patched(i):
                    view.put_keys(i, added)
                else:
                    added.zero_()
            run.rotations[self._kind_of[i]].add(self._added[run.rows], self._sum_k[run.rows])


class SliceViews:
    """Views of one slice, cut to its tokens and heads: every layer, and its rows in the buffers.

    Products and sums are in the dtype of the arithmetic. Values that are served in the dtype of the factors need no sum in
    another one: product, sum and the one rounding are a single operator (see `rounds_once`). Keys do, for they turn before
    they are rounded.

    Args:
        part: the part; its patch may lie on another device.
        spec: layout of the whole model.
        rows: where its tokens stand in the run.
        heads: first and last-plus-one KV head that is served.
        sums: the keys and values of all parts, as they are summed.
        served: dtype of the result.

    Attributes:
        framed: whether its keys lie outside the canonical frame, so that what is added to them turns there first.
        sums: whether `sum_values` may be used.
    """

    def __init__(
        self,
        part: SpanSlice,
        spec: KVSpec,
        rows: slice,
        heads: tuple[int, int],
        sums: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.part, self.rows = part, rows
        self.moved = part.start != part.span.start
        self._tokens = slice(part.begin, part.stop)
        self.k = part.span.k[:, self._tokens, slice(*heads)].unbind(0)
        self.v = part.span.v[:, self._tokens, slice(*heads)].unbind(0)
        self.sum_k, self.sum_v = sums[0][rows], sums[1][rows]
        self.framed, self.sums = False, False
        patch = part.patch
        self._patch = patch if patch is not None and (patch.dense or patch.rank) else None
        if patch is None or self._patch is None:
            return
        self._layers = frozenset(patch.layers)
        self.framed = part.span.start != 0
        self._keys, self._values = columns_of(spec, heads)
        # One left side for all layers, where the layout has one; else it goes with its layer.
        shared = not patch.dense and patch.left.ndim == 2
        self._left = patch.left[self._tokens].to(self.sum_k) if shared else None
        self._stored_left = patch.left[self._tokens].to(self.sum_k.device) if shared else None
        v = part.span.v
        alike = {patch.dtype, patch.factors_dtype, dtype} == {v.dtype} and v.device == self.sum_v.device
        self.sums = alike and not patch.dense and rounds_once(v.dtype, v.device.type)

    def patched(self, layer: int) -> bool:
        """Return True if its patch covers ``layer``."""
        return self._patch is not None and layer in self._layers

    def add(self, layer: int, *, keys: bool) -> None:
        """Add the patch to the summed keys, or values. Cost: one ``[T, m] @ [m, heads * dim]``."""
        columns, total = (self._keys, self.sum_k.flatten(1)) if keys else (self._values, self.sum_v.flatten(1))
        if self._dense:
            total.add_(self._delta(layer, columns).to(total))
        else:
            total.addmm_(*self._sides(layer, columns))

    def put_keys(self, layer: int, added: torch.Tensor) -> None:
        """Write the addition of the patch to the keys, in the canonical frame, to ``added [T, H, k_dim]``."""
        if self._dense:
            added.flatten(1).copy_(self._delta(layer, self._keys))
        else:
            torch.mm(*self._sides(layer, self._keys), out=added.flatten(1))

    def sum_values(self, layer: int, out: torch.Tensor) -> None:
        """Write values and patch to ``out [T, H, v_dim]``, in the dtype that is served, rounded once."""
        left_factor, right = self._factors(layer)
        stored = left_factor[self._tokens].to(self.sum_v.device) if self._stored_left is None else self._stored_left
        right = right[:, self._values].to(self.sum_v.device)
        torch.addmm(self.v[layer].flatten(1), stored, right, out=out.flatten(1))

    @property
    def _dense(self) -> bool:
        return self._patch is not None and self._patch.dense

    def _delta(self, layer: int, columns: slice) -> torch.Tensor:
        assert self._patch is not None
        return self._patch.left[self._patch.layers.index(layer), self._tokens, columns]

    def _factors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        sides = None if self._patch is None else self._patch.factors(layer)
        assert sides is not None
        return sides

    def _sides(self, layer: int, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Both factors of a layer, the right one cut to some columns."""
        left_factor, right = self._factors(layer)
        left_factor = left_factor[self._tokens].to(self.sum_k) if self._left is None else self._left
        return left_factor, right[:, columns].to(self.sum_k)


@dataclass(frozen=True)
class _Run:
    """Neighbouring parts whose keys turn together, each token by its own angles, each kind of layers by its own."""

    rows: slice
    views: tuple[SliceViews, ...]
    rotations: tuple[Rotation, ...]


def _copy_if_needed(stored: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return ``stored`` where it can be served as it is, else ``buffer`` with its numbers."""
    same = stored.dtype == buffer.dtype and stored.device == buffer.device and stored.is_contiguous()
    return stored if same else buffer.copy_(stored)


def _merge_neighbours(rows: Iterable[slice]) -> list[slice]:
    """Merge adjacent slices, so that many small parts take no more calls than a large one; ``rows`` ascend."""
    runs: list[slice] = []
    for row in rows:
        if runs and runs[-1].stop == row.start:
            runs[-1] = slice(runs[-1].start, row.stop)
        else:
            runs.append(row)
    return runs


class Rotation:
    """Turns ``[T, H, k_dim]`` keys by the same angles, layer after layer; the rest of a partial rotary key passes.

    Tables stand at the width of the keys: a product that broadcasts over the heads costs half as much again.

    Args:
        rope: pairing and rotary width.
        k_dim: of a key.
        table: of `rotation_table`, in the dtype of the arithmetic, on the device of the keys.
        heads: how many heads turn.
    """

    def __init__(self, rope: RopeSpec, k_dim: int, table: torch.Tensor, *, heads: int) -> None:
        self._heads, self._k_dim = heads, k_dim
        self.rotary, half = rope.rotary_dim, rope.rotary_dim // 2
        cos, sin = table[:, :1], table[:, 1:]
        # Neighbouring pairs are complex numbers as they lie, where every key starts at an even number.
        self._complex = rope.pairing == "interleaved" and k_dim % 2 == 0
        if self._complex:
            self._unit = torch.complex(cos, sin).expand(-1, heads, half).contiguous()
            return
        if rope.pairing == "half":
            self._first, self._second = slice(0, half), slice(half, self.rotary)
        else:
            self._first, self._second = slice(0, self.rotary, 2), slice(1, self.rotary, 2)
        self._sin = sin.expand(-1, heads, half).contiguous()
        self._cos = torch.empty(len(table), heads, self.rotary, dtype=table.dtype, device=table.device)
        self._cos[..., self._first] = cos
        self._cos[..., self._second] = cos

    def __call__(self, keys: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write the turned ``keys`` to ``out``, rounded once, to its dtype; ``keys`` are written over, and ``scratch``.

        ``keys``, in the dtype of the arithmetic, and ``out`` are ``[T, H, k_dim]``, contiguous, in memory of their own.
        """
        shape = (len(keys), self._heads, self._k_dim)
        keys, out = keys.view(shape), out.view(shape)
        turning = keys[..., : self.rotary]
        if self._complex:
            self._turn_complex(turning)
            out.copy_(keys)
            return
        narrow = scratch.flatten(1)[:, : self._heads * self.rotary]
        scratch = torch.unflatten(narrow, 1, (self._heads, self.rotary))
        turned = out[..., : self.rotary] if out.dtype == keys.dtype else scratch
        torch.mul(turning, self._cos, out=turned)
        turned[..., self._first].addcmul_(keys[..., self._second], self._sin, value=-1)
        turned[..., self._second].addcmul_(keys[..., self._first], self._sin)
        if turned is scratch:
            out[..., : self.rotary].copy_(turned)
        if self.rotary < keys.shape[-1]:
            out[..., self.rotary :].copy_(keys[..., self.rotary :])

    def add(self, keys: torch.Tensor, total: torch.Tensor) -> None:
        """Add the turned ``keys`` to ``total``, in the dtype of the arithmetic; otherwise as a call."""
        shape = (len(keys), self._heads, self._k_dim)
        keys, total = keys.view(shape), total.view(shape)
        if self._complex:
            self._turn_complex(keys[..., : self.rotary])
            total.add_(keys)
            return
        total[..., : self.rotary].addcmul_(keys[..., : self.rotary], self._cos)
        total[..., self._first].addcmul_(keys[..., self._second], self._sin, value=-1)
        total[..., self._second].addcmul_(keys[..., self._first], self._sin)
        if self.rotary < keys.shape[-1]:
            total[..., self.rotary :].add_(keys[..., self.rotary :])

    def _turn_complex(self, keys: torch.Tensor) -> None:
        torch.view_as_complex(keys.view(*keys.shape[:-1], self.rotary // 2, 2)).mul_(self._unit)


@lru_cache(maxsize=16)
def rounds_once(dtype: torch.dtype, device: str) -> bool:
    """Return True if 16-bit ``addmm`` on a CPU is fast and rounds only the sum, not the product before it.

    It is fast where oneDNN has it; torch's own takes twenty times as long. It has rounded once on every processor tested,
    but nothing guarantees that, so it is tried, with the numbers of rows that oneDNN treats differently.
    Cost: 2 ms, once a process.
    """
    if device != "cpu" or not _in_onednn(dtype):
        return False
    noise = torch.Generator().manual_seed(0)
    for rows, rank in ((1, 8), (5, 21), (64, 32), (600, 32)):
        total, left_side, right = (
            torch.randn(*shape, generator=noise).to(dtype) for shape in ((rows, 128), (rows, rank), (rank, 128))
        )
        exact = total.double() + left_side.double() @ right.double()
        away = (torch.addmm(total, left_side, right).double() - exact).abs()
        # Half a unit in the last place, and what float32's own sums may be away.
        if bool((away > torch.finfo(dtype).eps / 2 * exact.abs() + 2e-5).any()):
            return False
    return True


def _in_onednn(dtype: torch.dtype) -> bool:
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in names or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # No public name says so; a torch without this one does without the short cut.
    requested = getattr(torch.ops.mkldnn, names[dtype], None)
    return requested is not None and bool(requested())
