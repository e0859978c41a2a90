"""A basis shared by all patches of a model: the directions belong to the model, only the coefficients to a chunk.

Kamera, section 4: "a fixed per-layer basis pooled over (A, B) pairs recovers a held-out deficit as well as that
item's own SVD".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import torch

from ctxwin.hashing import digest


@dataclass(frozen=True)
class SharedBasis:
    """Directions ``right [n, m, W]`` (K columns first) that deficits of one model are projected on.

    Attributes:
        identity: `KVSpec.identity` of the model.
        layout: ``joint``: one coefficient row per token serves all layers; ``per_layer``: one per token and layer.
        layers: covered layers, ascending.
        heads, k_dim, v_dim: shape of one layer.
        right: the directions.
        meta: JSON-able; ``deficits``: how many it was fitted on.
    """

    identity: str
    layout: Literal["joint", "per_layer"]
    layers: tuple[int, ...]
    heads: int
    k_dim: int
    v_dim: int
    right: torch.Tensor
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """How many directions there are."""
        return int(self.right.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the basis, paid once for all the patches on it."""
        return self.right.numel() * self.right.element_size()

    @cached_property
    def id(self) -> str:
        """Digest of the directions and of what they are directions of. Cost: one hash over `nbytes`, once."""
        raw = self.right.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        shape = [self.heads, self.k_dim, self.v_dim, *self.right.shape]
        return digest("basis", self.identity, self.layout, list(self.layers), shape, str(self.right.dtype), raw)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, for a codec."""
        return {"right": self.right}

    def describe(self) -> dict[str, Any]:
        """Everything but the tensors, JSON-able; `from_tensors` takes it back."""
        plain = {name: getattr(self, name) for name in ("id", "identity", "layout", "heads", "k_dim", "v_dim")}
        return {**plain, "layers": list(self.layers), "meta": dict(self.meta)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> Self:
        """The basis that `tensors` and `describe` came from; ValueError where its digest differs."""
        plain = {name: meta[name] for name in ("identity", "layout", "heads", "k_dim", "v_dim")}
        basis = cls(**plain, layers=tuple(meta["layers"]), right=tensors["right"], meta=dict(meta["meta"]))
        if basis.id != meta["id"]:
            raise ValueError(f"basis must have the digest {meta['id']}, got {basis.id}")
        return basis
