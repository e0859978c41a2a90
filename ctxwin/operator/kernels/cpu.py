"""The load kernel on torch operators with buffers of one layer, so that the work of a layer stays in cache.

Whole-span operators write tens of megabytes of float32 temporaries, and most of their time goes into fresh pages; here
nothing larger than a layer is written, and nothing large is allocated between layers. Keys and values are summed in
buffers of their own: contiguous operands are worth more than one product for both. It runs on whatever device torch
does; only the CPU is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ctxwin.kv import KVSpec
from ctxwin.operator.kernels.factors import Factors
from ctxwin.operator.kernels.parts import Part, compute_dtype
from ctxwin.operator.kernels.turning import Turn
from ctxwin.operator.rope import angles


class CpuKernel:
    """Keys and values of a run of parts, layer by layer; arguments are checked by `Placing`."""

    def __init__(
        self, parts: Sequence[Part], spec: KVSpec, *, dtype: torch.dtype, device: torch.device, heads: tuple[int, int]
    ) -> None:
        compute, count = compute_dtype(parts), heads[1] - heads[0]
        tokens = sum(part.tokens for part in parts)
        rotary = spec.rope.rotary_dim
        self._k = torch.empty(tokens, count, spec.k_dim, dtype=dtype, device=device)
        self._v = torch.empty(tokens, count, spec.v_dim, dtype=dtype, device=device)
        self._sum_k = torch.empty(tokens, count, spec.k_dim, dtype=compute, device=device)
        # Values are done with before keys turn, so one buffer serves both.
        scratch = torch.empty(tokens * count * max(spec.v_dim, rotary), dtype=compute, device=device)
        self._sum_v = scratch[: self._v.numel()].view(self._v.shape)
        self._scratch = scratch[: tokens * count * rotary].view(tokens, count, rotary)
        self._pieces = []
        at = 0
        for part in parts:
            rows = slice(at, at + part.tokens)
            self._pieces.append(_Piece(part, spec, rows, heads, compute, device))
            at = rows.stop
        self._turns = [
            (run, Turn(spec, self._delta(run, spec).to(device), heads=count, compute=compute))
            for run in _joined(piece.rows for piece in self._pieces if piece.moved)
        ]

    def _delta(self, run: slice, spec: KVSpec) -> torch.Tensor:
        """New angles minus old of the tokens of one run: float64 ``[tokens, rotary_dim / 2]``."""
        inside = [piece for piece in self._pieces if run.start <= piece.rows.start < run.stop]
        new = torch.cat([piece.positions + piece.part.start for piece in inside], dim=1)
        old = torch.cat([piece.positions + piece.part.span.start for piece in inside], dim=1)
        return angles(spec.rope, new) - angles(spec.rope, old)

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        values = self._values(i)
        return self._keys(i), values

    def _values(self, i: int) -> torch.Tensor:
        patched = [piece for piece in self._pieces if piece.patched(i)]
        if not patched and len(self._pieces) == 1:
            return _served(self._pieces[0].v[i], self._v)
        for piece in self._pieces:
            if not piece.patched(i):
                self._v[piece.rows].copy_(piece.v[i])
        for piece in patched:
            self._sum_v[piece.rows].copy_(piece.v[i])
            piece.add_values(i, self._sum_v[piece.rows])
        for run in _joined(piece.rows for piece in patched):
            self._v[run].copy_(self._sum_v[run])
        return self._v

    def _keys(self, i: int) -> torch.Tensor:
        if len(self._pieces) == 1 and not self._pieces[0].moved and not self._pieces[0].patched(i):
            return _served(self._pieces[0].k[i], self._k)
        still = []
        for piece in self._pieces:
            patched = piece.patched(i)
            target = self._sum_k if patched or piece.moved else self._k
            target[piece.rows].copy_(piece.k[i])
            if patched:
                piece.add_keys(i, self._sum_k[piece.rows])
                if not piece.moved:
                    still.append(piece.rows)
        for run in _joined(still):
            self._k[run].copy_(self._sum_k[run])
        for run, turn in self._turns:
            turn(self._sum_k[run], self._k[run], self._scratch[run])
        return self._k


class _Piece:
    """A part, cut to its tokens and heads: views of every layer, taken once."""

    def __init__(
        self,
        part: Part,
        spec: KVSpec,
        rows: slice,
        heads: tuple[int, int],
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        self.part, self.rows = part, rows
        self.moved = part.start != part.span.start
        tokens = slice(part.begin, part.stop)
        self.positions = part.span.positions[:, tokens].to("cpu")
        self.k = part.span.k[:, tokens, slice(*heads)].unbind(0)
        self.v = part.span.v[:, tokens, slice(*heads)].unbind(0)
        self._factors = None
        if part.patch is not None:
            self._factors = Factors(part.patch, spec, tokens, heads, compute, device)
        # Keys outside the canonical frame: what is added to them turns there first.
        self._turn = None
        if self._factors is not None and part.span.start != 0:
            delta = angles(spec.rope, self.positions + part.span.start) - angles(spec.rope, self.positions)
            self._turn = Turn(spec, delta.to(device), heads=heads[1] - heads[0], compute=compute)

    def patched(self, layer: int) -> bool:
        """Whether its patch covers ``layer``."""
        return self._factors is not None and layer in self._factors.layers

    def add_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Adds the patch to ``keys [T, H, k_dim]``, which stand in the span's frame."""
        assert self._factors is not None
        if self._turn is None:
            self._factors.add_keys(layer, keys.flatten(1))
            return
        delta = torch.zeros_like(keys)
        self._factors.add_keys(layer, delta.flatten(1))
        turned = torch.empty_like(delta)
        self._turn(delta, turned, turned)
        keys.add_(turned)

    def add_values(self, layer: int, values: torch.Tensor) -> None:
        """Adds the patch to ``values [T, H, v_dim]``."""
        assert self._factors is not None
        self._factors.add_values(layer, values.flatten(1))


def _served(stored: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """``stored`` itself where it can be served as it lies, else ``buffer`` with its numbers."""
    same = stored.dtype == buffer.dtype and stored.device == buffer.device and stored.is_contiguous()
    return stored if same else buffer.copy_(stored)


def _joined(rows: Iterable[slice]) -> list[slice]:
    """Neighbours made one, so that many small parts cost no more calls than a large one; ``rows`` ascend."""
    runs: list[slice] = []
    for row in rows:
        if runs and runs[-1].stop == row.start:
            runs[-1] = slice(runs[-1].start, row.stop)
        else:
            runs.append(row)
    return runs
