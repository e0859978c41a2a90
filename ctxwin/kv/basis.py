"""A basis shared by all patches of a model: the directions belong to the model, only the coefficients to a chunk.

Kamera, section 4: "a fixed per-layer basis pooled over (A, B) pairs recovers a held-out deficit as well as that
item's own SVD".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from ctxwin.hashing import digest
from ctxwin.kv.deficit import Deficit
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.lowrank import Weight, truncated_svd
from ctxwin.kv.patch import Layers, Patch, captured_energy, select_layers, weigh


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
        return {
            "id": self.id, "identity": self.identity, "layout": self.layout, "layers": list(self.layers),
            "heads": self.heads, "k_dim": self.k_dim, "v_dim": self.v_dim, "meta": dict(self.meta),
        }  # fmt: skip

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> SharedBasis:
        """The basis that `tensors` and `describe` came from; ValueError where its digest differs."""
        basis = cls(
            identity=meta["identity"], layout=meta["layout"], layers=tuple(meta["layers"]), heads=meta["heads"],
            k_dim=meta["k_dim"], v_dim=meta["v_dim"], right=tensors["right"], meta=dict(meta["meta"]),
        )  # fmt: skip
        if basis.id != meta["id"]:
            raise ValueError(f"basis must have the digest {meta['id']}, got {basis.id}")
        return basis


def fit_basis(
    deficits: Iterable[Deficit],
    spec: KVSpec,
    rank: int,
    *,
    layers: Layers = "all",
    layout: Literal["joint", "per_layer"] = "joint",
    weight: Weight | None = None,
    normalise: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> SharedBasis:
    """The directions that hold most of many deficits' energy.

    Deficits are folded one at a time into a running sketch of ``4 * rank`` directions, so any number of them fits in
    memory; as long as their ranks add up to no more than that, the result is the SVD of all of them stacked.

    Args:
        deficits: from `deficit`, of one model; may be a generator.
        spec: layout of the model.
        rank: directions to keep; capped at the width.
        layers, layout, weight, dtype: as in `form_patch`.
        normalise: count every deficit alike instead of by its energy.

    Raises:
        ValueError: no deficits, a rank < 1, layers out of range. Cost: one small SVD per deficit (and layer).
    """
    if rank < 1:
        raise ValueError(f"rank must be >= 1, got {rank}")
    covered = select_layers(layers, spec.layers)
    if weight is not None:
        weight.validate(spec)
    width = spec.heads * (spec.k_dim + spec.v_dim)
    sketches: list[torch.Tensor] = []
    count = 0
    for lost in deficits:
        count += 1
        energy = float(lost.energy[list(covered)].sum())
        scale = energy**-0.5 if normalise and energy > 0 else 1.0
        rows = [weigh(lost.matrix(layer) * scale, layer, spec, weight) for layer in covered]
        blocks = [torch.cat(rows, dim=1)] if layout == "joint" else rows
        sketches = [_fold(sketches[i] if sketches else None, block, 4 * rank) for i, block in enumerate(blocks)]
    if not sketches:
        raise ValueError("deficits must hold at least one, got none")
    kept = min(rank, *(min(x.shape) for x in sketches))
    tops = [truncated_svd(x, kept)[1] for x in sketches]
    rights = list(tops[0].view(kept, len(covered), width).unbind(1)) if layout == "joint" else tops
    back = [weigh(x, layer, spec, weight, inverse=True) for x, layer in zip(rights, covered, strict=True)]
    return SharedBasis(
        identity=spec.identity, layout=layout, layers=covered, heads=spec.heads, k_dim=spec.k_dim, v_dim=spec.v_dim,
        right=torch.stack(back).to(dtype).contiguous(), meta={"deficits": count, "weighted": weight is not None},
    )  # fmt: skip


def project(
    lost: Deficit, basis: SharedBasis, spec: KVSpec, *, weight: Weight | None = None, dtype: torch.dtype | None = None
) -> Patch:
    """The patch on a shared basis that comes nearest to a deficit (least squares on the stored, rounded directions).

    Args:
        lost: the deficit.
        basis: directions fitted on the same model.
        spec: layout of the model.
        weight: the weight the basis was fitted with.
        dtype: of the coefficients; the basis' own by default.

    Returns:
        A ``shared`` patch that stores coefficients only: ``T * rank`` numbers (times the layers for a per-layer basis).

    Raises:
        ValueError: a basis of another model.
    """
    if basis.identity != spec.identity:
        raise ValueError(f"basis must be fitted on model {spec.identity}, got {basis.identity}")
    rows = [weigh(lost.matrix(layer), layer, spec, weight) for layer in basis.layers]
    rights = [weigh(basis.right[i].to(rows[i]), layer, spec, weight) for i, layer in enumerate(basis.layers)]
    if basis.layout == "joint":
        left = _coefficients(torch.cat(rows, dim=1), torch.cat(rights, dim=1))
    else:
        left = torch.stack([_coefficients(a, r) for a, r in zip(rows, rights, strict=True)])
    patch = Patch(
        identity=spec.identity, layout="shared", layers=basis.layers, heads=spec.heads, k_dim=spec.k_dim,
        v_dim=spec.v_dim, rank=basis.rank, left=left.to(dtype or basis.right.dtype), right=None, basis=basis,
        meta={"method": "projection", "weighted": weight is not None, "dropped": []},
    )  # fmt: skip
    patch.meta.update(captured_energy(lost, patch))
    return patch


def _fold(sketch: torch.Tensor | None, rows: torch.Tensor, keep: int) -> torch.Tensor:
    """Rows with the same Gram matrix as ``[sketch; rows]``, at most ``keep`` of them (the largest)."""
    stacked = rows if sketch is None else torch.cat([sketch, rows])
    if stacked.shape[0] <= keep:
        return stacked
    _, s, vh = torch.linalg.svd(stacked, full_matrices=False)
    kept: torch.Tensor = s[:keep, None] * vh[:keep]
    return kept


def _coefficients(rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Least-squares ``L`` in ``rows ~= L @ right``; float64, because rounded directions are not quite orthonormal."""
    a, r = rows.double(), right.double()
    solution: torch.Tensor = torch.linalg.lstsq(r.T, a.T).solution
    return solution.T.to(rows.dtype)
