"""Truncated singular value decomposition, and the weights that a truncation may be measured with."""

from dataclasses import dataclass
from typing import Self

import torch

from ctxwin.kv.layout import KVSpec, SpanKV


def truncated_svd(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Best rank-``rank`` factors: ``left [R, m]`` with the singular values in it, and orthonormal ``right [m, C]``.

    Raises:
        ValueError: a rank outside ``[0, min(R, C)]``.
    """
    if not 0 <= rank <= min(matrix.shape):
        raise ValueError(f"rank must be in [0, {min(matrix.shape)}], got {rank}")
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank], vh[:rank]


@dataclass(frozen=True)
class Weight:
    """How the error of a truncation is measured: ``|| (deficit - patch) S ||`` instead of the plain norm.

    ``k`` and ``v`` hold S: positive scales ``[L, H, D]``, invertible matrices ``[L, H, D, D]`` (the Cholesky factor of
    the query covariance for K, of ``W_O W_O^T`` for V: what the output sees), or None for the identity.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None

    @classmethod
    def balanced(cls, span: SpanKV) -> Self:
        """Scales that count K and V alike in every layer: one over the RMS of ``span`` per layer and channel group."""
        return cls(k=_inverse_rms(span.k), v=_inverse_rms(span.v))

    def validate(self, spec: KVSpec) -> None:
        """Raises ValueError where a weight does not fit ``spec``."""
        for name, weight, dim in (("k", self.k, spec.k_dim), ("v", self.v, spec.v_dim)):
            if weight is None:
                continue
            scales = (spec.layers, spec.heads, dim)
            if tuple(weight.shape) not in (scales, (*scales, dim)):
                raise ValueError(f"weight.{name} must be {scales} or {(*scales, dim)}, got {tuple(weight.shape)}")

    def apply(self, rows: torch.Tensor, layer: int, heads: int, k_dim: int, *, inverse: bool = False) -> torch.Tensor:
        """``rows @ S`` or ``rows @ S^-1`` for one layer; ``rows [R, heads * (k_dim + v_dim)]`` has K columns first."""
        parts = [rows[:, : heads * k_dim], rows[:, heads * k_dim :]]
        out = [
            part if weight is None else _scaled(part, weight[layer].to(part), inverse)
            for part, weight in zip(parts, (self.k, self.v), strict=True)
        ]
        return torch.cat(out, dim=1)


def _inverse_rms(x: torch.Tensor) -> torch.Tensor:
    rms = x.float().pow(2).mean(dim=(1, 2, 3), keepdim=True).sqrt()
    return (1.0 / rms.clamp_min(torch.finfo(torch.float32).tiny ** 0.5))[:, 0].expand(-1, x.shape[2], x.shape[3])


def _scaled(rows: torch.Tensor, weight: torch.Tensor, inverse: bool) -> torch.Tensor:
    by_head = rows.view(rows.shape[0], weight.shape[0], -1)
    if weight.ndim == 2:
        return (by_head / weight if inverse else by_head * weight).reshape(rows.shape)
    columns = by_head.permute(1, 0, 2)
    solved = torch.linalg.solve(weight, columns, left=False) if inverse else columns @ weight
    return solved.permute(1, 0, 2).reshape(rows.shape)
