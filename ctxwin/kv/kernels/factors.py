"""A patch, cut to some tokens and heads, that is added to one layer after the other."""

from __future__ import annotations

from functools import lru_cache

import torch

from ctxwin.kv.kernels.turning import Turn
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.patch import Patch


class Factors:
    """What a patch adds, in the canonical frame; products and sums in the dtype of the arithmetic.

    Values that are served in the dtype of the factors need no sum in another one: product, sum and the one rounding are
    a single operator (see `rounds_once`). Keys do, for they turn before they are rounded.

    Args:
        patch: its factors may lie on another device.
        spec: layout of the whole model.
        tokens: rows of the span that are served.
        heads: first and last-plus-one KV head that is served.
        compute: dtype of the arithmetic.
        device: where the sums lie.
        turn: turns the keys of rows, of one angle for all tokens, before they are added; None leaves them in the
            canonical frame. Not for a dense patch.
    """

    def __init__(
        self,
        patch: Patch,
        spec: KVSpec,
        tokens: slice,
        heads: tuple[int, int],
        compute: torch.dtype,
        device: torch.device,
        turn: Turn | None = None,
    ) -> None:
        self.layers = frozenset(patch.layers)
        self._patch, self._tokens, self._turn = patch, tokens, turn
        self._shape = (-1, heads[1] - heads[0], spec.k_dim)
        self._device, self._dtype = device, compute
        values = spec.heads * spec.k_dim
        self._keys = slice(heads[0] * spec.k_dim, heads[1] * spec.k_dim)
        self._values = slice(values + heads[0] * spec.v_dim, values + heads[1] * spec.v_dim)
        # One left side for all layers, where the layout has one; else it goes with its layer.
        shared = not patch.dense and patch.left.ndim == 2
        self._left = self._moved(patch.left[tokens]) if shared else None
        self._stored_left = patch.left[tokens].to(device) if shared else None

    def add_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Adds to ``keys [T, heads * k_dim]``. Cost: one ``[T, m] @ [m, heads * k_dim]``."""
        if self._patch.dense:
            keys.add_(self._dense(layer, self._keys).to(keys))
            return
        left, right = self._sides(layer, self._keys)
        keys.addmm_(left, right if self._turn is None else self._turned(right))

    def put_keys(self, layer: int, keys: torch.Tensor) -> None:
        """Writes what is added to ``keys [T, heads * k_dim]``, contiguous, instead of adding it."""
        if self._patch.dense:
            keys.copy_(self._dense(layer, self._keys))
            return
        torch.mm(*self._sides(layer, self._keys), out=keys)

    def add_values(self, layer: int, values: torch.Tensor) -> None:
        """Adds to ``values [T, heads * v_dim]``. Cost: one ``[T, m] @ [m, heads * v_dim]``."""
        if self._patch.dense:
            values.add_(self._dense(layer, self._values).to(values))
            return
        values.addmm_(*self._sides(layer, self._values))

    def sums(self, values: torch.Tensor) -> bool:
        """Whether `sum_values` takes values of this dtype and device."""
        patch = self._patch
        own = not patch.dense and patch.rank > 0 and {patch.dtype, patch.factors_dtype} == {values.dtype}
        return own and values.device == self._device and rounds_once(values.dtype, values.device.type)

    def sum_values(self, layer: int, values: torch.Tensor, out: torch.Tensor) -> None:
        """Writes ``values [T, heads * v_dim]`` and what is added to them to ``out``, contiguous, rounded once."""
        sides = self._patch.factors(layer)
        assert sides is not None
        left = sides[0][self._tokens].to(self._device) if self._stored_left is None else self._stored_left
        torch.addmm(values, left, sides[1][:, self._values].to(self._device), out=out)

    def _dense(self, layer: int, columns: slice) -> torch.Tensor:
        return self._patch.left[self._patch.layers.index(layer), self._tokens, columns]

    def _turned(self, right: torch.Tensor) -> torch.Tensor:
        assert self._turn is not None
        rows = right.reshape(self._shape).clone(memory_format=torch.contiguous_format)  # it is written over
        out, scratch = torch.empty_like(rows), torch.empty_like(rows)
        self._turn(rows, out, scratch)
        return out.flatten(1)

    def _sides(self, layer: int, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Both factors of a layer, the right one cut to some columns."""
        sides = self._patch.factors(layer)
        assert sides is not None
        left = self._left if self._left is not None else self._moved(sides[0][self._tokens])
        return left, self._moved(sides[1][:, columns])

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(device=self._device, dtype=self._dtype)


@lru_cache(maxsize=16)
def rounds_once(dtype: torch.dtype, device: str) -> bool:
    """Whether ``addmm`` of a 16-bit dtype on a CPU is fast, and rounds the sum alone, not the product before it.

    Fast it is where oneDNN has it; torch's own takes twenty times as long. It rounds once wherever it was looked at, but
    nothing says that it must; hence it is tried, with as many rows as matrices have that oneDNN treats differently.
    Cost: 2 ms, once a process.
    """
    if device != "cpu" or not _in_onednn(dtype):
        return False
    noise = torch.Generator().manual_seed(0)
    for rows, rank in ((1, 8), (5, 21), (64, 32), (600, 32)):
        total, left, right = (
            torch.randn(*shape, generator=noise).to(dtype) for shape in ((rows, 128), (rows, rank), (rank, 128))
        )
        exact = total.double() + left.double() @ right.double()
        away = (torch.addmm(total, left, right).double() - exact).abs()
        # Half a unit in the last place, and what float32's own sums may be away.
        if bool((away > torch.finfo(dtype).eps / 2 * exact.abs() + 2e-5).any()):
            return False
    return True


def _in_onednn(dtype: torch.dtype) -> bool:
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in names or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # No public name says so; a torch without this one does without the short cut.
    asked = getattr(torch.ops.mkldnn, names[dtype], None)
    return asked is not None and bool(asked())
