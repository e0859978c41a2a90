"""An independent float64 oracle (complex numbers, numpy), makers of specs and spans. Shares no helper with the code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from ctxwin.kv.layout import KVSpec, LayerKind, RopeSpec, SpanKV


def plain_rope(dim: int, theta: float = 10000.0, **fields) -> RopeSpec:
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    return RopeSpec(inv_freq=tuple(inv_freq.tolist()), rotary_dim=dim, **fields)


def make_spec(
    layers: int = 3, heads: int = 2, k_dim: int = 8, v_dim: int = 6, rope: RopeSpec | None = None, family: str = "gqa"
) -> KVSpec:
    return KVSpec(
        identity="test-model", family=family, layers=layers, heads=heads, k_dim=k_dim, v_dim=v_dim,
        rope=rope or plain_rope(k_dim), dtype="float32",
    )  # fmt: skip


def with_kinds(spec: KVSpec, theta: float = 1e6) -> KVSpec:
    """The layout with every other layer turning by another base, as in Gemma 3."""
    inv_freq = tuple(theta ** (-2 * i / spec.rope.rotary_dim) for i in range(len(spec.rope.inv_freq)))
    other = replace(spec.rope, inv_freq=tuple(torch.tensor(inv_freq, dtype=torch.float).tolist()))
    even, odd = (tuple(range(i, spec.layers, 2)) for i in (0, 1))
    return replace(spec, kinds=(LayerKind(even, spec.rope), LayerKind(odd, other)))


def random_positions(tokens: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.cumsum(rng.integers(0, 3, (3, tokens)), axis=1).astype(np.int64))


def random_span(
    spec: KVSpec, tokens: int, seed: int, start: int = 0, dtype=torch.float64, positions: torch.Tensor | None = None
) -> SpanKV:
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(spec.layers, tokens, spec.heads, spec.k_dim, generator=g, dtype=torch.float64)
    v = torch.randn(spec.layers, tokens, spec.heads, spec.v_dim, generator=g, dtype=torch.float64)
    if positions is None:
        positions = torch.arange(tokens).expand(3, -1).clone()
    return SpanKV(k.to(dtype), v.to(dtype), positions, start)


def oracle_axes(rope: RopeSpec) -> list[int]:
    count = len(rope.inv_freq)
    if rope.sections is None:
        return [0] * count
    if rope.mrope_interleaved:
        h, w = rope.sections[1], rope.sections[2]
        return [1 if i % 3 == 1 and i // 3 < h else 2 if i % 3 == 2 and i // 3 < w else 0 for i in range(count)]
    return [i % 3 for i, size in enumerate(rope.sections) for _ in range(size)]


def oracle_rotate(rope: RopeSpec, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotates never-rotated keys ``[..., T, H, D]`` to ``positions [3, T]`` in float64, by float32-rounded angles."""
    out = k.astype(np.float64).copy()
    for i, (freq, row) in enumerate(zip(rope.inv_freq, oracle_axes(rope), strict=True)):
        angle = (np.float32(freq) * positions[row].astype(np.float32)).astype(np.float64)
        a, b = (i, i + rope.rotary_dim // 2) if rope.pairing == "half" else (2 * i, 2 * i + 1)
        turned = (k[..., a] + 1j * k[..., b]) * np.exp(1j * angle)[:, None]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def placed(spec: KVSpec, raw: SpanKV, start: int) -> SpanKV:
    """A span whose ``k`` never turned, as the engine would have computed it at ``start``."""
    k = raw.k.double().numpy().copy()
    for kind in spec.alike:
        layers = list(kind.layers)
        held = k[layers] if not kind.head_dim else k[layers].reshape(len(layers), raw.tokens, -1, kind.head_dim)
        k[layers] = oracle_rotate(kind.rope, held, (raw.positions + start).numpy()).reshape(k[layers].shape)
    return replace(raw, k=torch.from_numpy(k).to(raw.k.dtype), start=start)


def pair(spec: KVSpec, tokens: int, seed: int, p1: int, skip: Sequence[int] = ()) -> tuple[SpanKV, SpanKV, SpanKV]:
    """Base at the origin, conditioned at p1, both as the engine would have computed them, and the latter's raw KV.

    ``skip``: equal layers.
    """
    positions = random_positions(tokens, seed)
    raw_base = random_span(spec, tokens, seed, positions=positions)
    raw_cond = random_span(spec, tokens, seed + 1, positions=positions)
    for layer in skip:
        raw_cond.k[layer], raw_cond.v[layer] = raw_base.k[layer], raw_base.v[layer]
    return placed(spec, raw_base, 0), placed(spec, raw_cond, p1), raw_cond


@st.composite
def ropes(draw, max_half: int = 8) -> RopeSpec:
    """Plain, blocked and interleaved M-RoPE, both pairings, several bases."""
    kind = draw(st.sampled_from(["plain", "blocked", "cycling"]))
    theta = draw(st.sampled_from([1e2, 1e4, 1e6]))
    pairing = draw(st.sampled_from(["half", "interleaved"]))
    if kind == "plain":
        return plain_rope(2 * draw(st.integers(1, max_half)), theta, pairing=pairing)
    if kind == "blocked":
        sections = tuple(draw(st.lists(st.integers(1, max_half // 2), min_size=3, max_size=3)))
        return plain_rope(2 * sum(sections), theta, pairing=pairing, sections=sections)
    side = draw(st.integers(1, max_half // 3))
    sections = (side + draw(st.integers(0, 3)), side, side)
    return plain_rope(2 * sum(sections), theta, pairing=pairing, sections=sections, mrope_interleaved=True)


@st.composite
def specs(draw) -> KVSpec:
    """Layouts with partial rotary widths, key and value widths that differ, one or more heads, one or two kinds of layers."""
    rope = draw(ropes())
    spec = make_spec(
        layers=draw(st.integers(1, 4)), heads=draw(st.integers(1, 3)),
        k_dim=rope.rotary_dim + draw(st.sampled_from([0, 0, 1, 4])), v_dim=draw(st.integers(1, 9)), rope=rope,
        family=draw(st.sampled_from(["gqa", "mha", "mla"])),
    )  # fmt: skip
    return with_kinds(spec) if draw(st.booleans()) else spec


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest value of ``b``."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-300))
