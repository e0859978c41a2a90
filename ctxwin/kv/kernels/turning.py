"""The rotation of one layer's keys, prepared once for all layers."""

from __future__ import annotations

import torch

from ctxwin.kv.layout import KVSpec


class Turn:
    """Turns ``[T, H, k_dim]`` keys by the same angles, layer after layer; the rest of a partial rotary key passes.

    Tables stand at the width of the keys: a product that broadcasts over the heads costs half as much again.

    Args:
        spec: layout of the model.
        delta: float64 ``[T, rotary_dim / 2]``, new angles minus old, on the device of the keys.
        heads: how many heads turn.
        compute: dtype of the arithmetic.
    """

    def __init__(self, spec: KVSpec, delta: torch.Tensor, *, heads: int, compute: torch.dtype) -> None:
        self.rotary, half = spec.rope.rotary_dim, spec.rope.rotary_dim // 2
        cos, sin = delta.cos().to(compute).unsqueeze(1), delta.sin().to(compute).unsqueeze(1)
        # Neighbouring pairs are complex numbers as they lie, where every key starts at an even number.
        self._complex = spec.rope.pairing == "interleaved" and spec.k_dim % 2 == 0
        if self._complex:
            self._unit = torch.complex(cos, sin).expand(-1, heads, half).contiguous()
            return
        if spec.rope.pairing == "half":
            self._first, self._second = slice(0, half), slice(half, self.rotary)
        else:
            self._first, self._second = slice(0, self.rotary, 2), slice(1, self.rotary, 2)
        self._sin = sin.expand(-1, heads, half).contiguous()
        self._cos = torch.empty(len(delta), heads, self.rotary, dtype=compute, device=delta.device)
        self._cos[..., self._first] = cos
        self._cos[..., self._second] = cos

    def __call__(self, keys: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """Writes the turned ``keys`` to ``out``, rounded once, to its dtype.

        Args:
            keys: ``[T, H, k_dim]`` in the dtype of the arithmetic, each token's keys contiguous; written over.
            out: ``[T, H, k_dim]``, other memory than ``keys``.
            scratch: ``[T, H, rotary_dim]`` in the dtype of the arithmetic; not used where ``out`` has that dtype.
        """
        turning = keys[..., : self.rotary]
        if self._complex:
            torch.view_as_complex(turning.view(*turning.shape[:-1], self.rotary // 2, 2)).mul_(self._unit)
            out.copy_(keys)
            return
        turned = out[..., : self.rotary] if out.dtype == keys.dtype else scratch
        torch.mul(turning, self._cos, out=turned)
        turned[..., self._first].addcmul_(keys[..., self._second], self._sin, value=-1)
        turned[..., self._second].addcmul_(keys[..., self._first], self._sin)
        if turned is scratch:
            out[..., : self.rotary].copy_(turned)
        if self.rotary < keys.shape[-1]:
            out[..., self.rotary :].copy_(keys[..., self.rotary :])

    def add(self, keys: torch.Tensor, total: torch.Tensor) -> None:
        """Adds the turned ``keys`` to ``total``.

        Args:
            keys: as for a call; written over where pairs are neighbours.
            total: ``[T, H, k_dim]`` in the dtype of the arithmetic, other memory than ``keys``.
        """
        if self._complex:
            turning = keys[..., : self.rotary]
            torch.view_as_complex(turning.view(*turning.shape[:-1], self.rotary // 2, 2)).mul_(self._unit)
            total.add_(keys)
            return
        total[..., : self.rotary].addcmul_(keys[..., : self.rotary], self._cos)
        total[..., self._first].addcmul_(keys[..., self._second], self._sin, value=-1)
        total[..., self._second].addcmul_(keys[..., self._first], self._sin)
        if self.rotary < keys.shape[-1]:
            total[..., self.rotary :].add_(keys[..., self.rotary :])
