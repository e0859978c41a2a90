"""States of recurrent layers, and chunks as maps on them.

Gated DeltaNet goes from token to token by ``S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T`` (arXiv 2412.06464). Over a
chunk that is linear: ``S_end = M S_start + N``, with ``M`` the product of its transitions and ``N`` the state behind it from
nothing. The layers have no positions, so a chunk's map is the same wherever it stands, and the state of a window is composed of
its chunks' maps by small matrix products. The convolution in front of the rule reaches back a few tokens: what stood there when
a chunk was computed stays in its map.

Composed states are exact to rounding behind the same antecedents, and an approximation behind others: what a chunk absorbed lies
in its ``N``. The transition is never inverted to take a chunk out; its condition grows to 1e4 within tens of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

States = Mapping[str, "torch.Tensor"]
"""Of recurrent layers, behind a span's last token: ``LAYER.conv`` (last inputs, ``[channels, kernel]``) and ``LAYER.recurrent``
(``[heads, k, v]``). Where its map is kept, also ``LAYER.map`` (M, ``[heads, k, k]``) and ``LAYER.own`` (N, ``[heads, k, v]``).
vLLM's are as its kernels lay them out."""


_PREFIX: Final = "state."


def named(states: States) -> dict[str, torch.Tensor]:
    """States as tensors of a record, beside others."""
    return {_PREFIX + name: state for name, state in states.items()}


def states_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The states among a record's tensors, see `named`."""
    return {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}


def has_maps(states: States) -> bool:
    """Whether a span's maps are kept beside the states behind it."""
    return any(name.endswith(".map") for name in states)


def composed(front: States, chunk: States) -> dict[str, torch.Tensor]:
    """The states behind a chunk that stands behind ``front``, from its map; nothing in front is zeros. Cost: a product each."""
    made = {}
    for name, state in chunk.items():
        layer, _, kind = name.partition(".")
        if kind == "conv":
            made[name] = state
        elif kind == "recurrent":
            own, before = chunk[f"{layer}.own"], front.get(name)
            made[name] = own if before is None else chunk[f"{layer}.map"].to(before) @ before + own.to(before)
    return made
