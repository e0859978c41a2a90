"""The deficit: what a chunk's KV absorbs from its antecedents (Kamera, section 2, eq. 2)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.relocate import canonicalise
from ctxwin.kv.states import States, state_deficit

# Relative size (to the layer's own KV) under which a deficit is arithmetic noise: what is left of equal KV that went
# through one rotation and one rounding at two places, with room for GEMM reordering.
_NOISE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Deficit:
    """``KV(B|A) - KV(B|0)`` in the canonical frame, so that it holds wherever the chunk is served.

    Attributes:
        k: ``[L, T, H, k_dim]`` float32 or float64.
        v: ``[L, T, H, v_dim]``.
        reference: per layer, the energy (sum of squares) of the base KV: float64 ``[L]``.
        noise: relative norm under which a layer's deficit is arithmetic noise.
        states: of a hybrid's recurrent layers, see `ctxwin.kv.states.state_deficit`.
    """

    k: torch.Tensor
    v: torch.Tensor
    reference: torch.Tensor
    noise: float
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return int(self.k.shape[1])

    @property
    def energy(self) -> torch.Tensor:
        """Sum of squares per layer, float64 ``[L]``."""
        return _energy(self.k) + _energy(self.v)

    @property
    def relative(self) -> torch.Tensor:
        """Norm per layer relative to the base KV, float64 ``[L]`` (Kamera, section 4, "Deep")."""
        return (self.energy / self.reference.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()

    def matrix(self, layer: int) -> torch.Tensor:
        """One layer as ``[T, heads * (k_dim + v_dim)]``, K columns first."""
        return torch.cat([self.k[layer].flatten(1), self.v[layer].flatten(1)], dim=1)

    def covered(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of ``layers`` whose deficit is more than arithmetic noise; layer 0 usually is not one of them."""
        relative = self.relative.tolist()
        return tuple(layer for layer in layers if relative[layer] > self.noise)


def deficit(conditioned: SpanKV, base: SpanKV, spec: KVSpec, front: States | None = None) -> Deficit:
    """Return the difference of ``conditioned`` from ``base``, both in the canonical frame.

    For addition ``base`` is the canonical span; for removal ``conditioned`` is the re-prefill without the antecedent
    that left and ``base`` the survivor.

    Args:
        conditioned: the wanted KV, in any frame.
        base: the KV at hand, in any frame.
        spec: layout of both.
        front: of a hybrid, the states in front of both; without them only the KV's deficit is taken.

    Returns:
        The deficit, in float64 where both are float64, else float32. Cost: two rotations and one subtraction.

    Raises:
        ValueError: spans that do not fit ``spec`` or do not cover the same tokens.
    """
    conditioned.validate(spec)
    base.validate(spec)
    if conditioned.tokens != base.tokens:
        raise ValueError(f"both spans must cover the same tokens, got {conditioned.tokens} and {base.tokens}")
    if not torch.equal(conditioned.positions.to(base.positions), base.positions):
        raise ValueError("both spans must have the same positions relative to their origin, got different ones")
    noise = max(_NOISE.get(x.dtype, _NOISE[torch.bfloat16]) for x in (conditioned.k, base.k))
    exact = all(x.dtype == torch.float64 for x in (conditioned.k, conditioned.v, base.k, base.v))
    compute = torch.float64 if exact else torch.float32
    wide = (SpanKV(span.k.to(compute), span.v.to(compute), span.positions, span.start) for span in (conditioned, base))
    want, have = (canonicalise(span, spec) for span in wide)
    return Deficit(
        k=want.k - have.k.to(want.k.device),
        v=want.v - have.v.to(want.v.device),
        reference=_energy(have.k) + _energy(have.v),
        noise=noise,
        states=state_deficit(conditioned.states, front, base.states) if front is not None and spec.maps else {},
    )


def _energy(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).to(torch.float64).pow(2).sum(dim=1).cpu()
