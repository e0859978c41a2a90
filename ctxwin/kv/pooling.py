"""Fitting a shared basis to many deficits, and projecting one deficit on it (Kamera, section 4)."""

from collections.abc import Iterable
from typing import Literal

import torch

from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.deficit import Deficit
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.lowrank import Weight, truncated_svd
from ctxwin.kv.patch import Layers, Patch, captured_energy, select_layers, weigh


def fit_basis(
    deficits: Iterable[Deficit],
    spec: KVSpec,
    rank: int,
    *,
    layers: Layers = "all",
    layout: Literal["joint", "per_layer"] = "joint",
    weight: Weight | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> SharedBasis:
    """The directions that hold most of many deficits' energy.

    Deficits are folded one at a time into a running sketch of ``4 * rank`` directions, so any number of them fits in
    memory; as long as their ranks add up to no more than that, the result is the SVD of all of them stacked.

    Args:
        deficits: from `deficit`, of one model; may be a generator.
        spec: layout of the model.
        rank: directions to keep; capped at the width.
        layers, layout, weight, dtype: as in `compress`.

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
        scale = energy**-0.5 if energy > 0 else 1.0  # every deficit counts alike
        rows = [weigh(lost.matrix(layer) * scale, layer, spec, weight) for layer in covered]
        blocks = [torch.cat(rows, dim=1)] if layout == "joint" else rows
        sketches = [_fold(sketches[i] if sketches else None, block, 4 * rank) for i, block in enumerate(blocks)]
    if not sketches:
        raise ValueError("deficits must hold at least one, got none")
    rank_kept = min(rank, *(min(x.shape) for x in sketches))
    tops = [truncated_svd(x, rank_kept)[1] for x in sketches]
    rights = list(tops[0].view(rank_kept, len(covered), width).unbind(1)) if layout == "joint" else tops
    back = [weigh(x, layer, spec, weight, inverse=True) for x, layer in zip(rights, covered, strict=True)]
    right, meta = torch.stack(back).to(dtype).contiguous(), {"deficits": count, "weighted": weight is not None}
    return SharedBasis(spec.identity, layout, covered, spec.heads, spec.k_dim, spec.v_dim, right, meta)


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
        left_factor = _coefficients(torch.cat(rows, dim=1), torch.cat(rights, dim=1))
    else:
        left_factor = torch.stack([_coefficients(a, r) for a, r in zip(rows, rights, strict=True)])
    patch = Patch.of(
        spec,
        layout="shared",
        layers=basis.layers,
        rank=basis.rank,
        left=left_factor.to(dtype or basis.right.dtype),
        right=None,
        basis=basis,
        meta={"method": "projection", "weighted": weight is not None, "dropped": []},
    )
    patch.meta.update(captured_energy(lost, patch))
    return patch


def _fold(sketch: torch.Tensor | None, rows: torch.Tensor, keep: int) -> torch.Tensor:
    """Rows with the same Gram matrix as ``[sketch; rows]``, at most ``keep`` of them (the largest)."""
    stacked = rows if sketch is None else torch.cat([sketch, rows])
    if stacked.shape[0] <= keep:
        return stacked
    _, s, vh = torch.linalg.svd(stacked, full_matrices=False)
    folded: torch.Tensor = s[:keep, None] * vh[:keep]
    return folded


def _coefficients(rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Least-squares ``L`` in ``rows ~= L @ right``; float64, because rounded directions are not quite orthonormal."""
    a, r = rows.double(), right.double()
    solution: torch.Tensor = torch.linalg.lstsq(r.T, a.T).solution
    return solution.T.to(rows.dtype)
