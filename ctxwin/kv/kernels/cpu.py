"""The load kernel on torch operators with buffers of one part and layer, so that its work stays in cache.

Whole-span operators write tens of megabytes of float32 temporaries, and most of their time goes into fresh pages; here
nothing larger than a layer is written, and nothing large is allocated between layers. It runs on whatever device torch
does; only the CPU is tested. Spans cross to another device in the dtype that they are stored in: torch converts a blocking
copy on the processor, before twice the bytes cross.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        count, compute = heads[1] - heads[0], compute_dtype(parts)
        shapes = [(sum(part.tokens for part in parts), count, dim) for dim in (spec.k_dim, spec.v_dim)]
        # Two layers: one may still be read while the next one is computed.
        self._outs = [[torch.empty(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2)]
        size = max(part.tokens for part in parts) * count * max(spec.k_dim, spec.v_dim)
        self._buffers = torch.empty(3, size, dtype=compute, device=device)
        self._views = [_PartView(part, spec, heads, self._buffers) for part in parts]

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        self._outs.reverse()
        k, v = self._outs[0]
        view = self._views[0]
        if len(self._views) == 1 and not view.patched(i):
            if view.moved:
                view.put_keys(i, k)
            else:
                k = _copy_if_needed(view.k[i], k)
            return k, _copy_if_needed(view.v[i], v)
        at = 0
        for view in self._views:
            rows = slice(at, at + len(view.k[i]))
            view.put_keys(i, k[rows])
            view.put_values(i, v[rows])
            at = rows.stop
        return k, v


class _PartView:
    """One part, cut to its tokens and heads: every layer. Products and sums are in the dtype of the arithmetic.

    Args:
        part: the part; its patch may lie on another device.
        spec: layout of the whole model.
        heads: first and last-plus-one KV head that is served.
        buffers: three, each large enough for its keys or values, where they are computed.
    """

    def __init__(self, part: SpanSlice, spec: KVSpec, heads: tuple[int, int], buffers: torch.Tensor) -> None:
        self._tokens = slice(part.begin, part.stop)
        self.k = part.span.k[:, self._tokens, slice(*heads)].unbind(0)
        self.v = part.span.v[:, self._tokens, slice(*heads)].unbind(0)
        self._buffers, self._columns = buffers, columns_of(spec, heads)
        self._away = buffers.device.type != "cpu"  # pageable memory may be freed as soon as the copy returns
        self._kind_of = {layer: at for at, kind in enumerate(spec.alike) for layer in kind.layers}
        self.moved = part.start != part.span.start
        self._turns = self._rotations(part, spec, heads, frame=False) if self.moved else []
        patch = part.patch
        self._patch = patch if patch is not None and (patch.dense or patch.rank) else None
        # A patch of keys outside the canonical frame: what is added turns to that frame first.
        framed = self._patch is not None and part.span.start != 0
        self._frames = self._rotations(part, spec, heads, frame=True) if framed else []

    def _rotations(self, part: SpanSlice, spec: KVSpec, heads: tuple[int, int], *, frame: bool) -> list[Rotation]:
        """What the keys of each kind of layers turn by; see `SpanSlice.shift`."""
        rotations = []
        for kind in spec.alike:
            table = rotation_table(kind.rope, [part.shift(frame)], self._buffers.dtype, self._buffers.device)
            dim = kind.head_dim or spec.k_dim
            rotations.append(Rotation(kind.rope, dim, table, heads=(heads[1] - heads[0]) * spec.k_dim // dim))
        return rotations

    def patched(self, layer: int) -> bool:
        """Return True if its patch covers ``layer``."""
        return self._patch is not None and layer in self._patch.layers

    def put_values(self, layer: int, out: torch.Tensor) -> None:
        """Write the values of a layer, rounded once, to ``out [T, H, v_dim]``."""
        stored = self.v[layer]
        if self.patched(layer):
            stored = self._buffer(0, out).copy_(stored, non_blocking=self._away)
            self._add(layer, self._columns[1], stored)
        out.copy_(stored, non_blocking=self._away)

    def put_keys(self, layer: int, out: torch.Tensor) -> None:
        """Write the keys of a layer, rounded once, to ``out [T, H, k_dim]``. Cost: with a patch one ``[T, m] @ [m, W]``."""
        stored, kind = self.k[layer], self._kind_of[layer]
        if self.moved or self.patched(layer):
            stored = self._buffer(0, out).copy_(stored, non_blocking=self._away)
        if self.patched(layer) and self._frames:
            added = self._buffer(1, out).zero_()
            self._add(layer, self._columns[0], added)
            stored.add_(self._frames[kind](added, self._buffers[2]))
        elif self.patched(layer):
            self._add(layer, self._columns[0], stored)
        if self.moved:
            self._turns[kind](stored, self._buffers[2])
        out.copy_(stored, non_blocking=self._away)

    def _buffer(self, number: int, like: torch.Tensor) -> torch.Tensor:
        return self._buffers[number, : like.numel()].view(like.shape)

    def _add(self, layer: int, columns: slice, total: torch.Tensor) -> None:
        """Add some columns of the patch to ``total [T, H, dim]``."""
        patch = self._patch
        assert patch is not None
        if patch.dense:
            total.flatten(1).add_(patch.left[patch.layers.index(layer), self._tokens, columns].to(total))
            return
        sides = patch.factors(layer)
        assert sides is not None
        total.flatten(1).addmm_(sides[0][self._tokens].to(total), sides[1][:, columns].to(total))


def _copy_if_needed(stored: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return ``stored`` where it can be served as it is, else ``buffer`` with its numbers."""
    same = stored.dtype == buffer.dtype and stored.device == buffer.device and stored.is_contiguous()
    return stored if same else buffer.copy_(stored)


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
        self._shape, half = (len(table), heads, k_dim), rope.rotary_dim // 2
        self._cos, self._sin = (side.expand(-1, heads, half).contiguous() for side in (table[:, :1], table[:, 1:]))
        if rope.pairing == "half":
            self._first, self._second = slice(0, half), slice(half, rope.rotary_dim)
        else:
            self._first, self._second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)

    def __call__(self, keys: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Turn ``keys``, in the dtype of the arithmetic, in place, and return them; ``scratch`` is written over."""
        turned = keys.view(self._shape)
        x, y = turned[..., self._first], turned[..., self._second]
        old = scratch[: x.numel()].view(x.shape).copy_(x)
        x.mul_(self._cos).addcmul_(y, self._sin, value=-1)
        y.mul_(self._cos).addcmul_(old, self._sin)
        return keys
