"""Truncated singular value decomposition, exact and randomised, and the weights a truncation may be measured with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ctxwin.kv.layout import KVSpec, SpanKV

Method = Literal["exact", "randomized"]

OVERSAMPLING = 8


def truncated_svd(
    matrix: torch.Tensor, rank: int, method: Method = "exact", seed: int = 0, power_iterations: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best rank-``rank`` factors: ``left [R, m]`` with the singular values in it, and orthonormal ``right [m, C]``.

    ``randomized`` sketches ``rank + 8`` directions with a seeded generator and ``power_iterations`` passes (Halko,
    Martinsson, Tropp 2011, algorithm 4.4): O(R C m) instead of O(R C min(R, C)).

    Raises:
        ValueError: a rank outside ``[0, min(R, C)]`` or an unknown method.
    """
    rows, columns = matrix.shape
    if not 0 <= rank <= min(rows, columns):
        raise ValueError(f"rank must be in [0, {min(rows, columns)}], got {rank}")
    if method == "exact":
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    elif method == "randomized":
        generator = torch.Generator(device="cpu").manual_seed(seed)
        width = min(rank + OVERSAMPLING, rows, columns)
        # Drawn on the CPU so that a seed means the same factors on every device.
        probe = torch.randn(columns, width, generator=generator, dtype=matrix.dtype).to(matrix.device)
        q = torch.linalg.qr(matrix @ probe).Q
        for _ in range(power_iterations):
            q = torch.linalg.qr(matrix.T @ q).Q
            q = torch.linalg.qr(matrix @ q).Q
        u, s, vh = torch.linalg.svd(q.T @ matrix, full_matrices=False)
        u = q @ u
    else:
        raise ValueError(f"method must be exact or randomized, got {method!r}")
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
    def balanced(cls, span: SpanKV) -> Weight:
        """Scales that count K and V alike in every layer: one over the RMS of ``span`` per layer and channel group."""
        return cls(k=_inverse_rms(span.k), v=_inverse_rms(span.v))

    @classmethod
    def from_covariance(cls, k: torch.Tensor | None, v: torch.Tensor | None, ridge: float = 1e-3) -> Weight:
        """The weight under which an error counts by what the output sees of it (Kamera, section 4, "functional rank").

        Args:
            k: covariance of the queries that read each KV head, in the canonical frame: ``[L, H, k_dim, k_dim]``.
            v: ``W_O W_O^T`` of the same heads, ``[L, H, v_dim, v_dim]``.
            ridge: added to the diagonal, as a share of its mean, so that no direction becomes free.

        Raises:
            ValueError: a ridge <= 0, or matrices that are not square. Cost: one Cholesky factor per head.
        """
        if not ridge > 0:
            raise ValueError(f"ridge must be > 0, got {ridge}")
        return cls(k=_factor(k, ridge), v=_factor(v, ridge))

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


def _factor(covariance: torch.Tensor | None, ridge: float) -> torch.Tensor | None:
    if covariance is None:
        return None
    if covariance.ndim != 4 or covariance.shape[-1] != covariance.shape[-2]:
        raise ValueError(f"covariance must be [L, H, D, D], got {list(covariance.shape)}")
    matrix = covariance.to(torch.float64)
    level = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float32).tiny) * ridge
    factor: torch.Tensor = torch.linalg.cholesky(matrix + torch.diag_embed(level[..., None].expand(matrix.shape[:-1])))
    return factor


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
