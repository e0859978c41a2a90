"""The conditioning patch: the low-rank half of the operator (Kamera, section 3, eq. 1, second term; appendix A).

The paper's listing adds the factors after the rotation, which is right only at the position they were formed at. Here the
deficit is taken in the canonical frame, the factors are added there, and every served key is rotated once, so a patch
formed at one position is right at every position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch

from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.lowrank import Weight, truncated_svd
from ctxwin.kv.quantize import QuantizedFactors, quantize
from ctxwin.kv.rope import Move
from ctxwin.kv.states import States, factors, named, recondition_states, states_in

Layout = Literal["joint", "per_layer", "quantized", "shared"]
Layers = Literal["all", "deep"] | tuple[float, float] | Sequence[int]

_PLAIN = ("identity", "layout", "heads", "k_dim", "v_dim", "rank", "dense")
# Budgets are shares of a chunk's KV in bf16, whatever dtype the patch has.
_KV_ITEMSIZE = 2


@dataclass(frozen=True)
class Patch:
    """Factors that recondition one canonical span; valid at every position.

    With ``W = heads * (k_dim + v_dim)`` (K columns first), ``n`` covered layers and rank ``m``:

    | layout      | ``left``    | ``right``                             |
    |-------------|-------------|---------------------------------------|
    | joint       | ``[T, m]``  | ``[n, m, W]``                         |
    | per_layer   | ``[n, T, m]``| ``[n, m, W]``                        |
    | quantized   | the same, of ``quantized``; zero where a layer has fewer directions | |
    | shared      | as its basis' layout | None: it is ``basis.right``  |
    | any, dense  | ``[n, T, W]``, the deficit itself | None             |

    Attributes:
        identity: `KVSpec.identity` of the model it was formed on.
        layout: how the factors are shared between layers.
        layers: the layers it covers, ascending; others have no deficit or were not selected.
        heads, k_dim, v_dim: shape of one layer.
        rank: directions kept (the full rank where dense).
        dense: the deficit itself is stored, because factors of this rank would be no smaller.
        basis: the shared basis that ``left`` are coefficients of.
        quantized: the factors in few bits, of which ``left`` and ``right`` are the numbers.
        states: for a hybrid, the patch of its chunk's map (`ctxwin.kv.states.factors`); empty for other models.
        meta: JSON-able: ``energy`` (of the whole deficit), ``captured`` (share of it the patch restores, after
            rounding), ``dropped`` (selected layers without a deficit), ``method``, ``weighted``.
    """

    identity: str
    layout: Layout
    layers: tuple[int, ...]
    heads: int
    k_dim: int
    v_dim: int
    rank: int
    left: torch.Tensor
    right: torch.Tensor | None
    dense: bool = False
    basis: SharedBasis | None = None
    quantized: QuantizedFactors | None = field(default=None, repr=False, compare=False)
    states: States = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: KVSpec, **rest: Any) -> Self:
        """Create a patch with the model and layer shape of ``spec``."""
        return cls(identity=spec.identity, heads=spec.heads, k_dim=spec.k_dim, v_dim=spec.v_dim, **rest)

    @property
    def tokens(self) -> int:
        """Number of tokens of its chunk."""
        return int(self.left.shape[-2])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored factors."""
        return self.left.dtype

    @property
    def factors_dtype(self) -> torch.dtype:
        """Dtype of the right factors; that of ``left`` where there are none."""
        right = self.basis.right if self.basis is not None else self.right
        return self.dtype if right is None else right.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its own tensors; a shared basis is counted in `SharedBasis.nbytes`, once for all its patches."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    @property
    def unpacked_nbytes(self) -> int:
        """Bytes that its factors take in memory beside `nbytes`: those of few bits, unpacked; 0 for others."""
        return 0 if self.quantized is None or self.right is None else self.left.nbytes + self.right.nbytes

    def factors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ``(left [T, m], right [m, W])`` of one layer, K columns first; None where it is dense or not covered.

        m is the layer's own number of directions for quantized factors, the patch's `rank` for others.
        """
        if self.dense or layer not in self.layers:
            return None
        i = self.layers.index(layer)
        if self.basis is not None:
            right = self.basis.right[self.basis.layers.index(layer)]
        else:
            assert self.right is not None
            right = self.right[i]
        if self.quantized is not None:
            rank = self.quantized.ranks[i]
            return self.left[i, :, :rank], right[:rank]
        return (self.left if self.left.ndim == 2 else self.left[i]), right

    def delta(self, layer: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the addition to one layer in the canonical frame, ``(k [T, H, k_dim], v [T, H, v_dim])``, or None.

        Cost: one ``[T, m] @ [m, W]`` product.
        """
        if layer not in self.layers:
            return None
        if self.dense:
            both = self.left[self.layers.index(layer)].to(dtype)
        else:
            factors = self.factors(layer)
            assert factors is not None
            both = factors[0].to(dtype) @ factors[1].to(dtype)
        k, v = both[:, : self.heads * self.k_dim], both[:, self.heads * self.k_dim :]
        return k.view(-1, self.heads, self.k_dim), v.view(-1, self.heads, self.v_dim)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its tensors by name, for a codec."""
        if self.quantized is not None:
            return self.quantized.tensors() | named(self.states)
        factors = {"left": self.left} if self.right is None else {"left": self.left, "right": self.right}
        return factors | named(self.states)

    def describe(self) -> dict[str, Any]:
        """Return everything but the tensors, JSON-able; the ``meta`` of `from_tensors`."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        named = None if self.basis is None else self.basis.id
        dtype = str(self.dtype).removeprefix("torch.")
        shape = {} if self.quantized is None else {"tokens": self.tokens, "dtype": dtype}
        return {**plain, **shape, "layers": list(self.layers), "basis": named, "meta": dict(self.meta)}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], basis: SharedBasis | None = None
    ) -> Self:
        """Rebuild a patch from its `tensors` and `describe`.

        Args:
            tensors: ``left`` and, where it has one, ``right``, or those of `QuantizedFactors`; those of its states.
            meta: what `describe` returned.
            basis: the shared basis named in ``meta["basis"]``.

        Raises:
            ValueError: missing tensors, shapes that do not fit, or another basis than the patch was projected on.
        """
        over = meta["basis"]
        if over != (None if basis is None else basis.id):
            raise ValueError(f"basis must be {over}, got {None if basis is None else basis.id}")
        quantized: QuantizedFactors | None = None
        right: torch.Tensor | None
        if meta["layout"] == "quantized" and "tokens" in meta:
            quantized = QuantizedFactors.from_tensors(tensors)
            width = meta["heads"] * (meta["k_dim"] + meta["v_dim"])
            left, right = quantized.factors(meta["tokens"], width, getattr(torch, meta["dtype"]))
        elif "left" not in tensors:
            raise ValueError(f"tensors must hold 'left', got {sorted(tensors)}")
        else:
            left, right = tensors["left"], tensors.get("right")
        patch = cls(
            **{name: meta[name] for name in _PLAIN},
            layers=tuple(meta["layers"]),
            left=left,
            right=right,
            basis=basis,
            quantized=quantized,
            states=states_in(tensors),
            meta=dict(meta["meta"]),
        )
        patch.validate()
        return patch

    def validate(self) -> None:
        """Raise ValueError where the tensors do not fit the description; O(1)."""
        n, width, t = len(self.layers), self.heads * (self.k_dim + self.v_dim), self.tokens
        joint = self.layout == "joint" or (self.basis is not None and self.basis.layout == "joint")
        expected_left = (n, t, width) if self.dense else (t, self.rank) if joint else (n, t, self.rank)
        right = None if self.dense or self.layout == "shared" else (n, self.rank, width)
        if tuple(self.left.shape) != expected_left:
            raise ValueError(f"left must be {expected_left}, got {tuple(self.left.shape)}")
        if (None if self.right is None else tuple(self.right.shape)) != right:
            raise ValueError(f"right must be {right}, got {None if self.right is None else tuple(self.right.shape)}")

    def check_fits(self, base: SpanKV, spec: KVSpec) -> None:
        """Raise ValueError where it was formed on another model or number of tokens than ``base``; O(1)."""
        if self.identity != spec.identity:
            raise ValueError(f"patch must be formed on model {spec.identity}, got {self.identity}; form it again")
        if self.tokens != base.tokens:
            raise ValueError(f"patch must cover {base.tokens} tokens, got {self.tokens}; form it again")
        for layer in {name.partition(".")[0] for name in self.states}:
            left_shape, right, conv = (_shape(self.states, f"{layer}.{part}") for part in ("left", "right", "conv"))
            map_shape, tail = (_shape(base.states, f"{layer}.{part}") for part in ("own", "conv"))
            if (*right[:1], *left_shape[:1], *right[2:]) != map_shape or right[1:2] != left_shape[1:] or conv != tail:
                raise ValueError(f"patch must fit the map {map_shape} of layer {layer} of its base; form it again")


def _shape(states: States, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor in ``states``; () where it is absent."""
    return tuple(states[name].shape) if name in states else ()


def form_patch(
    conditioned: SpanKV, base: SpanKV, spec: KVSpec, *, front: States | None = None, **options: Any
) -> Patch:
    """Form the patch that maps ``base`` to ``conditioned`` (Kamera, section 3, "Forming and applying the patch").

    Args:
        conditioned: KV of the chunk after its antecedents, in any frame. For a removal patch: the re-prefill without
            the removed antecedent.
        base: the canonical span, in any frame; for removal, the survivor's KV.
        spec: layout of both.
        front: for a hybrid, the states before both, so that its states are patched as well.
        options: those of `compress`.

    Raises:
        ValueError: as `compress` and `deficit`.

    Cost: two rotations, and `compress`.
    """
    return compress(deficit(conditioned, base, spec, front), spec, **options)


def compress(
    lost: Deficit,
    spec: KVSpec,
    *,
    rank: int | None = None,
    bytes_share: float | None = None,
    layers: Layers = "all",
    layout: Layout = "joint",
    dtype: torch.dtype = torch.bfloat16,
    weight: Weight | None = None,
) -> Patch:
    """Compress a deficit into a patch.

    Args:
        lost: the deficit.
        spec: layout of the model.
        rank: directions to keep, per patch (joint) or per layer (per_layer); capped at min(tokens, width). None with no
            ``bytes_share``: the full rank. A hybrid's states keep as many in each recurrent layer.
        bytes_share: instead of ``rank``: the largest rank whose bytes stay within this share of the chunk's KV in bf16,
            the deficit itself where that fits. Rank 0 where not even one direction fits; see ``meta["captured"]``.
        layers: as `select_layers` takes them. Where the deficit is arithmetic noise a layer is dropped.
        layout: ``joint`` (one left factor for all layers), ``per_layer``, or ``quantized``: factors by layer in few bits
            (`ctxwin.kv.quantize`), within the bytes of ``bytes_share``, or of joint factors of ``rank``. Shared ones come
            from `pooling.project`.
        dtype: dtype of the stored factors.
        weight: norm of the truncation error, by its effect on the output; None is the plain norm.

    Returns:
        A patch; `Patch.dense` where factors of that rank would be no smaller than the deficit itself.

    Raises:
        ValueError: both ``rank`` and ``bytes_share``, or values out of range.

    Cost: the SVD of ``[T, n W]`` (joint) or of n matrices ``[T, W]``; less for quantized ones.
    """
    if layout not in ("joint", "per_layer", "quantized"):
        raise ValueError(
            f"layout must be joint, per_layer or quantized, got {layout!r}; shared patches come from pooling.project"
        )
    if rank is not None and bytes_share is not None:
        raise ValueError("give rank or bytes_share, got both")
    if bytes_share is not None and not bytes_share > 0:
        raise ValueError(f"bytes_share must be > 0, got {bytes_share}")
    if rank is not None and rank < 0:
        raise ValueError(f"rank must be >= 0, got {rank}")
    selected = select_layers(layers, spec.layers)
    covered = lost.covered(selected)
    if weight is not None:
        weight.validate(spec)
    if weight is not None and layout == "quantized":
        raise ValueError("weight must be None for quantized factors, got one")
    joint, n, t, width = layout == "joint", len(covered), lost.tokens, spec.heads * (spec.k_dim + spec.v_dim)
    per_rank = n * (t + width) if layout == "per_layer" else t + n * width
    cap = min(t, width if layout == "per_layer" else n * width)
    dense_size = n * t * width
    rank_kept = cap if rank is None else min(cap, rank)
    budget: float = rank_kept * per_rank  # numbers of the factors' dtype
    if bytes_share is not None:
        budget = bytes_share * spec.span_bytes(t, _KV_ITEMSIZE) / dtype.itemsize
        rank_kept = cap if dense_size <= budget else min(cap, int(budget / per_rank))
    rank_kept = rank_kept if n else 0
    dense = n > 0 and rank_kept * per_rank >= dense_size
    rows = [lost.matrix(layer) for layer in covered]
    right: torch.Tensor | None = None
    quantized: QuantizedFactors | None = None
    if dense:
        left_factor = torch.stack(rows).to(dtype)
    elif layout == "quantized" and n and rank != 0:
        quantized = quantize(rows, int(budget * dtype.itemsize))
        left_factor, right = quantized.factors(t, width, dtype)
        rank_kept = int(left_factor.shape[-1])
    elif not rank_kept:
        left_factor = lost.k.new_zeros((t, 0) if joint else (n, t, 0), dtype=dtype)
        right = lost.k.new_zeros((n, 0, width), dtype=dtype)
    else:
        weighed = [weigh(x, layer, spec, weight) for x, layer in zip(rows, covered, strict=True)]
        if joint:
            left_factor, flat = truncated_svd(torch.cat(weighed, dim=1), rank_kept)
            rights = list(flat.view(rank_kept, n, width).unbind(1))
        else:
            lefts, rights = (list(sides) for sides in zip(*(truncated_svd(x, rank_kept) for x in weighed), strict=True))
            left_factor = torch.stack(lefts)
        back = [weigh(x, layer, spec, weight, inverse=True) for x, layer in zip(rights, covered, strict=True)]
        left_factor, right = left_factor.to(dtype).contiguous(), torch.stack(back).to(dtype)
    patch = Patch.of(
        spec,
        layout=layout,
        layers=covered,
        rank=cap if dense else rank_kept,
        left=left_factor,
        right=right,
        dense=dense,
        quantized=quantized,
        states=factors(lost.states, rank, bytes_share, dtype),
        meta={"method": "exact", "weighted": weight is not None, "dropped": sorted({*selected} - {*covered})},
    )
    patch.meta.update(captured_energy(lost, patch))
    return patch


def apply_patch(base: SpanKV, patch: Patch, spec: KVSpec, start: int) -> SpanKV:
    """Return the reconditioned span at ``start``: ``R(start) (K0 + dK)``, ``V0 + dV`` (Kamera, eq. 1).

    Every served key is rotated once and rounded once: from a canonical base, patch and keys are added first and turn
    together; from a base in another frame each turns by its own angle before they are added.

    Args:
        base: the span that the patch was formed on, in any frame.
        patch: its patch.
        spec: layout of both.
        start: position of the origin (>= 0).

    Returns:
        A new span in the dtype of ``base``; ``positions`` are shared. For a hybrid it holds the map, where the patch has
        states.

    Cost: one rotation and one ``[T, m] @ [m, W]`` per layer.

    Raises:
        ValueError: a patch of another model or of another number of tokens, or shapes that do not fit.
    """
    if start < 0:
        raise ValueError(f"start must be >= 0, got {start}")
    base.validate(spec)
    patch.check_fits(base, spec)
    compute = torch.float64 if base.k.dtype == torch.float64 else torch.float32
    move = Move(spec, base.positions, base.start, start)
    from_origin = Move(spec, base.positions, 0, start)
    k, v = torch.empty_like(base.k), base.v.clone()
    for layer in range(spec.layers):
        keys = base.k[layer]
        delta = patch.delta(layer, compute)
        if delta is None:
            k[layer] = move.layer(layer, keys) if base.start != start else keys
            continue
        dk, dv = (x.to(keys.device) for x in delta)
        if base.start == 0:
            reconditioned = from_origin.layer(layer, keys.to(compute) + dk)
        else:
            reconditioned = move.layer(layer, keys.to(compute)) + from_origin.layer(layer, dk)
        k[layer] = reconditioned.to(k.dtype)
        v[layer] = (base.v[layer].to(compute) + dv).to(v.dtype)
    states = recondition_states(base.states, patch.states) if patch.states else {}
    return SpanKV(k=k, v=v, positions=base.positions, start=start, states=states)


def select_layers(layers: Layers, count: int) -> tuple[int, ...]:
    """Return the layer numbers of ``all``, ``deep`` (the upper half), two floats (shares of the depth, the layers at both ends
    included) or a sequence of numbers. Raises ValueError where one is out of range."""
    if isinstance(layers, str):
        if layers not in ("all", "deep"):
            raise ValueError(f"layers must be all, deep or layer numbers, got {layers!r}")
        return tuple(range(count // 2 if layers == "deep" else 0, count))
    if len(layers) == 2 and all(isinstance(share, float) for share in layers):
        first, last = (round(share * count, 6) for share in layers)
        if not 0 <= first < last <= count:
            raise ValueError(f"layers must be shares 0 <= first < last <= 1 of the depth, got {layers}")
        return tuple(range(math.floor(first), math.ceil(last)))
    chosen = tuple(sorted({int(layer) for layer in layers}))
    if any(not 0 <= layer < count for layer in chosen):
        raise ValueError(f"layers must be in [0, {count}), got {chosen}")
    return chosen


def captured_energy(lost: Deficit, patch: Patch) -> dict[str, float]:
    """Return the ``energy`` of a deficit and ``captured``, the share that ``patch`` restores; 1.0 for mere noise."""
    energy = float(lost.energy.sum())
    if not lost.covered(tuple(range(lost.k.shape[0]))):
        return {"energy": energy, "captured": 1.0}
    left_over = 0.0
    for layer in range(lost.k.shape[0]):
        delta = patch.delta(layer, lost.k.dtype)
        k, v = (lost.k[layer], lost.v[layer]) if delta is None else (lost.k[layer] - delta[0], lost.v[layer] - delta[1])
        left_over += float(k.double().pow(2).sum()) + float(v.double().pow(2).sum())
    return {"energy": energy, "captured": 1.0 - left_over / energy}


def weigh(
    rows: torch.Tensor, layer: int, spec: KVSpec, weight: Weight | None, *, inverse: bool = False
) -> torch.Tensor:
    """Apply ``weight`` to ``rows [R, W]`` of one layer; None leaves them unchanged."""
    return rows if weight is None else weight.apply(rows, layer, spec.heads, spec.k_dim, inverse=inverse)
