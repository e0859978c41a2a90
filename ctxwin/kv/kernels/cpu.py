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

import torch

from ctxwin.kv.kernels.factors import Factors
from ctxwin.kv.kernels.parts import Part, compute_dtype
from ctxwin.kv.kernels.turning import Turn
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.rope import shift_angles


class CpuKernel:
    """Keys and values of a run of parts, layer by layer; arguments are checked by `Placing`."""

    def __init__(
        self, parts: Sequence[Part], spec: KVSpec, *, dtype: torch.dtype, device: torch.device, heads: tuple[int, int]
    ) -> None:
        compute, count = compute_dtype(parts), heads[1] - heads[0]
        tokens = sum(part.tokens for part in parts)
        rotary = spec.rope.rotary_dim
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
        self._away = device.type != "cpu"  # what comes from pageable memory is safe to let go of after the call
        self._pieces = []
        at = 0
        for part in parts:
            rows = slice(at, at + part.tokens)
            self._pieces.append(_Piece(part, spec, rows, heads, (self._sum_k, self._sum_v), dtype))
            at = rows.stop
        self._alone = self._pieces[0] if len(self._pieces) == 1 else None
        self._turns = self._runs(spec, [piece for piece in self._pieces if piece.moved], frame=False)
        # Patches of keys outside the canonical frame: what is added turns to that frame first.
        framed = [piece for piece in self._pieces if piece.framed]
        self._frames = self._runs(spec, framed, frame=True)
        self._added = torch.empty_like(self._sum_k) if framed else self._sum_k

    def _runs(self, spec: KVSpec, pieces: Sequence[_Piece], *, frame: bool) -> list[_Run]:
        """Neighbours among ``pieces`` with what their keys turn by: to where they are served, or from the origin to where
        they are stored."""
        device, compute, heads = self._sum_k.device, self._sum_k.dtype, self._sum_k.shape[1]
        runs = []
        for rows in _joined(piece.rows for piece in pieces):
            inside = tuple(piece for piece in pieces if rows.start <= piece.rows.start < rows.stop)
            delta = torch.cat([shift_angles(spec.rope, piece.positions, *piece.way(frame)) for piece in inside])
            runs.append(_Run(rows, inside, Turn(spec, delta.to(device), heads=heads, compute=compute)))
        return runs

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``i``."""
        self._outs.reverse()
        self._k, self._v = self._outs[0]
        values = self._values(i)
        return self._keys(i), values

    def _values(self, i: int) -> torch.Tensor:
        if self._alone is not None and not self._alone.patched(i):
            return _served(self._alone.v[i], self._v)
        rows = []
        for piece in self._pieces:
            if piece.patched(i) and piece.sums:
                piece.sum_values(i, self._v[piece.rows])
            elif piece.patched(i):
                piece.sum_v.copy_(piece.v[i], non_blocking=self._away)
                piece.add_values(i)
                rows.append(piece.rows)
            else:
                self._v[piece.rows].copy_(piece.v[i], non_blocking=self._away)
        for run in _joined(rows):
            self._v[run].copy_(self._sum_v[run])
        return self._v

    def _keys(self, i: int) -> torch.Tensor:
        if self._alone is not None and not self._alone.moved and not self._alone.patched(i):
            return _served(self._alone.k[i], self._k)
        still = []
        for piece in self._pieces:
            patched = piece.patched(i)
            target = piece.sum_k if patched or piece.moved else self._k[piece.rows]
            target.copy_(piece.k[i], non_blocking=self._away)
            if patched and not piece.framed:
                piece.add_keys(i)
            if patched and not piece.moved:
                still.append(piece.rows)
        self._add_framed(i)
        for rows in _joined(still):
            self._k[rows].copy_(self._sum_k[rows])
        for run in self._turns:
            run.turn(self._sum_k[run.rows], self._k[run.rows], self._scratch[run.rows])
        return self._k

    def _add_framed(self, i: int) -> None:
        for run in self._frames:
            if not any(piece.patched(i) for piece in run.pieces):
                continue
            for piece in run.pieces:
                added = self._added[piece.rows]
                if piece.patched(i):
                    piece.put_keys(i, added)
                else:
                    added.zero_()
            run.turn.add(self._added[run.rows], self._sum_k[run.rows])


class _Piece:
    """A part, cut to its tokens and heads: views of every layer and of its rows in the buffers, taken once.

    Args:
        part: the part.
        spec: layout of the whole model.
        rows: where its tokens stand in the run.
        heads: first and last-plus-one KV head that is served.
        sums: the keys and values of all parts, as they are summed.
        served: dtype of the result.
    """

    def __init__(
        self,
        part: Part,
        spec: KVSpec,
        rows: slice,
        heads: tuple[int, int],
        sums: tuple[torch.Tensor, torch.Tensor],
        served: torch.dtype,
    ) -> None:
        self.part, self.rows = part, rows
        self.moved = part.start != part.span.start
        tokens = slice(part.begin, part.stop)
        self.positions = part.span.positions[:, tokens].to("cpu")
        self.k = part.span.k[:, tokens, slice(*heads)].unbind(0)
        self.v = part.span.v[:, tokens, slice(*heads)].unbind(0)
        self.sum_k, self.sum_v = sums[0][rows], sums[1][rows]
        self._flat_k, self._flat_v = self.sum_k.flatten(1), self.sum_v.flatten(1)
        # Keys outside the canonical frame: what is added to them turns there first, token by token or before the product.
        self.framed, self.sums = False, False
        self._factors: Factors | None = None
        if part.patch is not None and (part.patch.dense or part.patch.rank):
            turn = None
            if part.span.start != 0:
                if part.patch.dense or not _as_one(self.positions, part.span.start, served):
                    self.framed = True
                else:
                    turn = _one_turn(spec, part, heads[1] - heads[0], self.sum_k)
            self._factors = Factors(part.patch, spec, tokens, heads, self.sum_k.dtype, self.sum_k.device, turn)
            self.sums = self._factors.sums(part.span.v) and part.span.v.dtype == served

    def way(self, frame: bool) -> tuple[int, int]:
        """Frames that its keys turn between: from where they are stored to where they are served, or, for what is added to
        them (``frame``), from the origin to where they are stored."""
        return (0, self.part.span.start) if frame else (self.part.span.start, self.part.start)

    def patched(self, layer: int) -> bool:
        """Whether its patch covers ``layer``."""
        return self._factors is not None and layer in self._factors.layers

    def add_keys(self, layer: int) -> None:
        """Adds the patch to the summed keys."""
        assert self._factors is not None
        self._factors.add_keys(layer, self._flat_k)

    def put_keys(self, layer: int, added: torch.Tensor) -> None:
        """Writes what the patch adds to the keys, in the canonical frame, to ``added [T, H, k_dim]``."""
        assert self._factors is not None
        self._factors.put_keys(layer, added.flatten(1))

    def add_values(self, layer: int) -> None:
        """Adds the patch to the summed values."""
        assert self._factors is not None
        self._factors.add_values(layer, self._flat_v)

    def sum_values(self, layer: int, out: torch.Tensor) -> None:
        """Writes values and patch to ``out [T, H, v_dim]``, in the dtype that is served; where ``sums`` says that this can be."""
        assert self._factors is not None
        self._factors.sum_values(layer, self.v[layer].flatten(1), out.flatten(1))


def _as_one(positions: torch.Tensor, start: int, served: torch.dtype) -> bool:
    """Whether all tokens may turn from the origin to ``start`` by the same angles.

    They do but for the engine's float32 rounding of each angle, so by up to ``position * 2 ** -23``; that must be less than a
    sixteenth of what is rounded off the result.
    """
    last = start + int(positions.max())
    return last * torch.finfo(torch.float32).eps <= torch.finfo(served).eps / 32


def _one_turn(spec: KVSpec, part: Part, heads: int, sums: torch.Tensor) -> Turn:
    """From the origin to the span's frame, for the rows of its patch's right factors."""
    assert part.patch is not None
    origin = torch.zeros(3, part.patch.rank, dtype=torch.int64)
    return Turn(
        spec, shift_angles(spec.rope, origin, 0, part.span.start).to(sums.device), heads=heads, compute=sums.dtype
    )


@dataclass(frozen=True)
class _Run:
    """Neighbouring parts whose keys turn together, each token by its own angles."""

    rows: slice
    pieces: tuple[_Piece, ...]
    turn: Turn


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
