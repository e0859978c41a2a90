"""The load kernel on torch operators with buffers of one part and layer, so that its work stays in cache.

Whole-span operators write tens of megabytes of float32 temporaries, and most of their time goes into fresh pages; here
nothing larger than a layer is written, and nothing large is allocated between layers. It runs on whatever device torch
does; only the CPU is tested. Spans cross to another device in the dtype that they are stored in: torch converts a blocking
copy on the processor, before twice the bytes cross.
"""

from collections.abc import Sequence

import torch

from ctxwin.kv.kernels.parts import Heads, SpanSlice, columns_of, compute_dtype
from ctxwin.kv.layout import KVSpec, RopeSpec
from ctxwin.kv.rope import rotation_table


class CpuKernel:
    """Keys and values of a run of parts, layer by layer; arguments are checked by `LoadPlan`."""

    def __init__(
        self, parts: Sequence[SpanSlice], spec: KVSpec, *, dtype: torch.dtype, device: torch.device, heads: Heads
    ) -> None:
        count, compute = heads[1] - heads[0], compute_dtype(parts)
        shapes = [(sum(part.tokens for part in parts), count, dim) for dim in (spec.k_dim, spec.v_dim)]
        # Two layers: one may still be read while the next one is computed.
        self._outs = [[torch.empty(shape, dtype=dtype, device=device) for shape in shapes] for _ in range(2)]
        size = max(part.tokens for part in parts) * count * max(spec.k_dim, spec.v_dim)
        self._buffers = torch.empty(3, size, dtype=compute, device=device)
        self._views = [_PartView(part, spec, heads, self._buffers, len(parts) == 1) for part in parts]

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        self._outs.reverse()
        k, v = self._outs[0]
        tokens = [len(view.k[i]) for view in self._views]
        outs = zip(self._views, torch.split(k, tokens), torch.split(v, tokens), strict=True)
        parts = [(view.put_keys(i, keys), view.put_values(i, values)) for view, keys, values in outs]
        return (k, v) if len(parts) > 1 else parts[0]


class _PartView:
    """One part, cut to its tokens and heads: every layer. Products and sums are in the dtype of the arithmetic.

    Args:
        part: the part; its patch may lie on another device.
        spec: layout of the whole model.
        heads: first and last-plus-one KV head that is served.
        buffers: three, each large enough for its keys or values, where they are computed.
        alone: whether what can be served as it lies need not be copied.
    """

    def __init__(self, part: SpanSlice, spec: KVSpec, heads: Heads, buffers: torch.Tensor, alone: bool) -> None:
        self._alone = alone
        self._tokens = slice(part.begin, part.stop)
        self.k = part.span.k[:, self._tokens, slice(*heads)].unbind(0)
        self.v = part.span.v[:, self._tokens, slice(*heads)].unbind(0)
        self._buffers, self._columns = buffers, columns_of(spec, heads)
        self._away = buffers.device.type != "cpu"  # pageable memory may be freed as soon as the copy returns
        self._kind_of = {layer: at for at, kind in enumerate(spec.alike) for layer in kind.layers}
        self._moved = part.start != part.span.start
        self._turns = self._rotations(part, spec, heads, frame=False) if self._moved else []
        patch = part.patch
        self._patch = patch if patch is not None and (patch.dense or patch.rank) else None
        # A patch of keys outside the canonical frame: what is added turns to that frame first.
        framed = self._patch is not None and part.span.start != 0
        self._frames = self._rotations(part, spec, heads, frame=True) if framed else []

    def _rotations(self, part: SpanSlice, spec: KVSpec, heads: Heads, *, frame: bool) -> "list[Rotation]":
        """What the keys of each kind of layers turn by; see `SpanSlice.shift`."""
        rotations = []
        for kind in spec.alike:
            table = rotation_table(kind.rope, [part.shift(frame)], self._buffers.dtype, self._buffers.device)
            dim = kind.head_dim or spec.k_dim
            rotations.append(Rotation(kind.rope, dim, table, heads=(heads[1] - heads[0]) * spec.k_dim // dim))
        return rotations

    def _patched(self, layer: int) -> bool:
        return self._patch is not None and layer in self._patch.layers

    def put_values(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        """Write the values of a layer, rounded once, to ``out [T, H, v_dim]``."""
        stored = self.v[layer]
        if self._patched(layer):
            stored = self._buffer(0, out).copy_(stored, non_blocking=self._away)
            self._add(layer, self._columns[1], stored)
        return self._put(stored, out, self._patched(layer))

    def put_keys(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        """Write the keys of a layer, rounded once, to ``out [T, H, k_dim]``. Cost: with a patch one ``[T, m] @ [m, W]``."""
        stored, kind = self.k[layer], self._kind_of[layer]
        if self._moved or self._patched(layer):
            stored = self._buffer(0, out).copy_(stored, non_blocking=self._away)
        if self._patched(layer) and self._frames:
            added = self._buffer(1, out).zero_()
            self._add(layer, self._columns[0], added)
            stored.add_(self._frames[kind](added, self._buffers[2]))
        elif self._patched(layer):
            self._add(layer, self._columns[0], stored)
        if self._moved:
            self._turns[kind](stored, self._buffers[2])
        return self._put(stored, out, self._moved or self._patched(layer))

    def _put(self, stored: torch.Tensor, out: torch.Tensor, computed: bool) -> torch.Tensor:
        same = stored.dtype == out.dtype and stored.device == out.device and stored.is_contiguous()
        return stored if self._alone and same and not computed else out.copy_(stored, non_blocking=self._away)

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
