"""The load kernel on torch operators with buffers of one layer, so that the work of a layer stays in cache.

Measured against the alternatives (2 cores, 2,048 tokens, 24 layers, 2 heads of 64, bf16): see `measure`. Whole-span
operators write tens of megabytes of float32 temporaries; here nothing larger than a layer is written, and nothing is
allocated between layers. It runs on whatever device torch does; only the CPU is tested.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ctxwin.kv import KVSpec
from ctxwin.operator.kernels.parts import Part, compute_dtype
from ctxwin.operator.patch import Patch
from ctxwin.operator.rope import angles


class CpuKernel:
    """Keys and values of a run of parts, layer by layer; arguments are checked by `Placing`."""

    def __init__(
        self, parts: Sequence[Part], spec: KVSpec, *, dtype: torch.dtype, device: torch.device, heads: tuple[int, int]
    ) -> None:
        self._parts, self._spec, self._dtype, self._device = tuple(parts), spec, dtype, device
        self._first, self._last = heads
        self._compute = compute_dtype(parts)
        tokens, count = sum(part.tokens for part in parts), heads[1] - heads[0]
        self._keys, self._width = count * spec.k_dim, count * (spec.k_dim + spec.v_dim)
        self._rows = _rows(self._parts)
        self._runs = _runs(self._parts, self._rows)
        self._patches = [
            None if part.patch is None else _Factors(part, spec, heads, self._compute, device) for part in self._parts
        ]
        # Stored width first: a product of factors writes keys and values of a token at once.
        patched = any(self._patches)
        self._whole = self._empty(tokens, self._width if patched else self._keys)
        self._work_k = self._whole[:, : self._keys].unflatten(1, (count, spec.k_dim))
        self._work_v = self._whole[:, self._keys :].unflatten(1, (count, spec.v_dim)) if patched else None
        self._k = torch.empty(tokens, count, spec.k_dim, dtype=dtype, device=device)
        self._v = torch.empty(tokens, count, spec.v_dim, dtype=dtype, device=device)
        self._turned = self._empty(tokens, count, spec.rope.rotary_dim) if self._runs else None
        self._turns = [(run, Turn(spec, *self._delta(run), heads=count, compute=self._compute)) for run in self._runs]

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._compute, device=self._device)

    def _delta(self, run: slice) -> tuple[torch.Tensor]:
        """Angle differences of the tokens of one run: float64 ``[tokens, rotary_dim / 2]``."""
        inside = [
            (part, row) for part, row in zip(self._parts, self._rows, strict=True) if run.start <= row.start < run.stop
        ]
        positions = torch.cat([part.span.positions[:, part.begin : part.stop] for part, _ in inside], dim=1)
        sizes = torch.tensor([part.tokens for part, _ in inside])
        new = torch.tensor([part.start for part, _ in inside]).repeat_interleave(sizes)
        old = torch.tensor([part.span.start for part, _ in inside]).repeat_interleave(sizes)
        positions = positions.to("cpu")
        delta = angles(self._spec.rope, positions + new) - angles(self._spec.rope, positions + old)
        return (delta.to(self._device),)

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        heads = slice(self._first, self._last)
        if len(self._parts) == 1 and (self._patches[0] is None or not self._patches[0].covers(i)):
            return self._single(i)
        for part, rows, patch in zip(self._parts, self._rows, self._patches, strict=True):
            k = part.span.k[i, part.begin : part.stop, heads]
            v = part.span.v[i, part.begin : part.stop, heads]
            moved = part.start != part.span.start
            if patch is not None and patch.covers(i):
                assert self._work_v is not None
                self._work_k[rows].copy_(k)
                self._work_v[rows].copy_(v)
                patch.add(i, self._whole[rows])
                self._v[rows].copy_(self._work_v[rows])
                if not moved:
                    self._k[rows].copy_(self._work_k[rows])
            else:
                self._v[rows].copy_(v)
                (self._work_k if moved else self._k)[rows].copy_(k)
        self._turn()
        return self._k, self._v

    def _single(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer of one part that no patch covers: what stands still may be returned as it is stored."""
        part, heads = self._parts[0], slice(self._first, self._last)
        k, v = (x[i, part.begin : part.stop, heads] for x in (part.span.k, part.span.v))
        if part.start != part.span.start:
            self._work_k.copy_(k)
            self._turn()
            k = self._k
        return self._as_served(k, self._k), self._as_served(v, self._v)

    def _as_served(self, stored: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        same = stored.dtype == self._dtype and stored.device == buffer.device and stored.is_contiguous()
        return stored if same else buffer.copy_(stored)

    def _turn(self) -> None:
        """Turns the keys of every run, out of the work buffer into the served one."""
        for run, turn in self._turns:
            assert self._turned is not None
            turn(self._work_k[run], self._turned[run], self._k[run])


class Turn:
    """One rotation of many layers' keys: cosines and sines at the width of the keys, so that products are contiguous.

    Args:
        spec: layout of the model.
        delta: float64 ``[T, rotary_dim / 2]``, new angles minus old.
        heads: heads that turn.
        compute: dtype of the arithmetic.
    """

    def __init__(self, spec: KVSpec, delta: torch.Tensor, *, heads: int, compute: torch.dtype) -> None:
        rope, half = spec.rope, spec.rope.rotary_dim // 2
        if rope.pairing == "half":
            self._first, self._second = slice(0, half), slice(half, rope.rotary_dim)
        else:
            self._first, self._second = slice(0, rope.rotary_dim, 2), slice(1, rope.rotary_dim, 2)
        self._dim, self._rotary = spec.k_dim, rope.rotary_dim
        cos, sin = delta.cos().to(compute).unsqueeze(1), delta.sin().to(compute).unsqueeze(1)
        self._sin = sin.expand(-1, heads, half).contiguous()
        self._cos = torch.empty(len(delta), heads, rope.rotary_dim, dtype=compute, device=delta.device)
        self._cos[..., self._first] = cos
        self._cos[..., self._second] = cos

    def __call__(self, keys: torch.Tensor, turned: torch.Tensor, out: torch.Tensor) -> None:
        """Turns ``keys [T, H, k_dim]`` into ``out``; ``turned [T, H, rotary_dim]`` is scratch."""
        torch.mul(keys[..., : self._rotary], self._cos, out=turned)
        turned[..., self._first].addcmul_(keys[..., self._second], self._sin, value=-1)
        turned[..., self._second].addcmul_(keys[..., self._first], self._sin)
        out[..., : self._rotary].copy_(turned)
        if self._rotary < self._dim:
            out[..., self._rotary :].copy_(keys[..., self._rotary :])


class _Factors:
    """A part's patch, cut to its tokens and heads."""

    def __init__(
        self, part: Part, spec: KVSpec, heads: tuple[int, int], compute: torch.dtype, device: torch.device
    ) -> None:
        assert part.patch is not None
        self._patch: Patch = part.patch
        self._rows = slice(part.begin, part.stop)
        keys = slice(heads[0] * spec.k_dim, heads[1] * spec.k_dim)
        at = spec.heads * spec.k_dim
        values = slice(at + heads[0] * spec.v_dim, at + heads[1] * spec.v_dim)
        self._columns = (keys, values)
        self._keys = keys.stop - keys.start
        self._compute, self._device = compute, device
        self._covered = frozenset(part.patch.layers)
        # Keys that do not stand in the canonical frame: what is added to them turns from there first.
        self._turn: Turn | None = None
        if part.span.start != 0:
            positions = part.span.positions[:, self._rows].to("cpu")
            delta = angles(spec.rope, positions + part.span.start) - angles(spec.rope, positions)
            self._turn = Turn(spec, delta.to(device), heads=heads[1] - heads[0], compute=compute)
        self._shape = (heads[1] - heads[0], spec.k_dim)
        self._left: torch.Tensor | None = None

    def covers(self, layer: int) -> bool:
        return layer in self._covered

    def add(self, layer: int, whole: torch.Tensor) -> None:
        """Adds its delta to ``whole [T, W]``, keys first, in the frame of the span."""
        if self._turn is None and not self._patch.dense:
            left, right = self._sides(layer)
            whole.addmm_(left, right)
            return
        both = self._dense(layer) if self._patch.dense else torch.mm(*self._sides(layer))
        if self._turn is not None:
            keys = both[:, : self._keys].unflatten(1, self._shape).contiguous()
            served = torch.empty_like(keys)
            self._turn(keys, torch.empty_like(keys[..., : self._turn._rotary]), served)
            both[:, : self._keys] = served.flatten(1)
        whole.add_(both)

    def _sides(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        sides = self._patch.factors(layer)
        assert sides is not None
        left, right = sides
        if left.ndim == 2 and self._patch.left.ndim == 2:
            if self._left is None:
                self._left = left[self._rows].to(device=self._device, dtype=self._compute)
            left = self._left
        else:
            left = left[self._rows].to(device=self._device, dtype=self._compute)
        return left, self._cut(right)

    def _dense(self, layer: int) -> torch.Tensor:
        return self._cut(self._patch.left[self._patch.layers.index(layer)][self._rows])

    def _cut(self, rows: torch.Tensor) -> torch.Tensor:
        """The columns of its heads, in the dtype of the arithmetic."""
        return torch.cat([rows[:, c] for c in self._columns], dim=1).to(device=self._device, dtype=self._compute)


def _rows(parts: Sequence[Part]) -> list[slice]:
    """Where each part's tokens stand in the run."""
    rows, at = [], 0
    for part in parts:
        rows.append(slice(at, at + part.tokens))
        at += part.tokens
    return rows


def _runs(parts: Sequence[Part], rows: Sequence[slice]) -> list[slice]:
    """Stretches of tokens that turn; neighbours are one, so that many small parts cost no more calls than one."""
    runs: list[slice] = []
    for part, row in zip(parts, rows, strict=True):
        if part.start == part.span.start:
            continue
        if runs and runs[-1].stop == row.start:
            runs[-1] = slice(runs[-1].start, row.stop)
        else:
            runs.append(row)
    return runs
