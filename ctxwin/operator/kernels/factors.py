"""A patch, cut to some tokens and heads, that is added to one layer after the other."""

from __future__ import annotations

import torch

from ctxwin.kv import KVSpec
from ctxwin.operator.patch import Patch


class Factors:
    """What a patch adds, in the canonical frame; products and sums in the dtype of the arithmetic.

    The products stay in float32 although factors are stored in bfloat16: a bfloat16 product takes two thirds of the
    time, but rounds the delta before it is added.

    Args:
        patch: its factors may lie on another device.
        spec: layout of the whole model.
        tokens: rows of the span that are served.
        heads: first and last-plus-one KV head that is served.
        compute: dtype of the arithmetic.
        device: where the sums lie.
    """

    def __init__(
        self,
        patch: Patch,
        spec: KVSpec,
        tokens: slice,
        heads: tuple[int, int],
        compute: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = frozenset(patch.layers)
        self._patch, self._tokens = patch, tokens
        self._device, self._dtype = device, compute
        values = spec.heads * spec.k_dim
        self._keys = slice(heads[0] * spec.k_dim, heads[1] * spec.k_dim)
        self._values = slice(values + heads[0] * spec.v_dim, values + heads[1] * spec.v_dim)
        # One left side for all layers, where the layout has one; else it goes with its layer.
        shared = not patch.dense and patch.left.ndim == 2
        self._left = self._moved(patch.left[tokens]) if shared else None
        self._last: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def add_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Adds to ``keys [T, heads * k_dim]``. Cost: one ``[T, m] @ [m, heads * k_dim]``."""
        self._add(layer, keys, self._keys)

    def put_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Writes what is added to ``keys [T, heads * k_dim]``, contiguous, instead of adding it."""
        if self._patch.dense:
            keys.copy_(self._dense(layer, self._keys))
            return
        left, right = self._sides(layer)
        torch.mm(left, right[:, self._keys], out=keys)

    def add_values(self, layer: int, values: torch.Tensor) -> None:
        """Adds to ``values [T, heads * v_dim]``. Cost: one ``[T, m] @ [m, heads * v_dim]``."""
        self._add(layer, values, self._values)

    def _add(self, layer: int, total: torch.Tensor, columns: slice) -> None:
        if self._patch.dense:
            total.add_(self._dense(layer, columns).to(total))
            return
        left, right = self._sides(layer)
        total.addmm_(left, right[:, columns])

    def _dense(self, layer: int, columns: slice) -> torch.Tensor:
        return self._patch.left[self._patch.layers.index(layer), self._tokens, columns]

    def _sides(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both factors of a layer; values and keys ask for the same ones, one behind the other."""
        if self._last is None or self._last[0] != layer:
            sides = self._patch.factors(layer)
            assert sides is not None
            left = self._left if self._left is not None else self._moved(sides[0][self._tokens])
            self._last = layer, left, self._moved(sides[1])
        return self._last[1], self._last[2]

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(device=self._device, dtype=self._dtype)
