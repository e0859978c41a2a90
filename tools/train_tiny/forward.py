"""A fast functional forward over the weights of a transformers Qwen2.5-VL, for frames of 224 x 224 pixels.

It computes what the transformers classes compute (float32, to rounding), but batches pictures, takes any attention
mask and any positions, and hands out keys before rotation, which training and the checks of the bundled model need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ctxwin.tiny.sprites import GRID

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
TOKENS = GRID * GRID
PATCHES = 4 * TOKENS

Span = list[tuple[Tensor, Tensor]]
"""Keys (before rotation) and values of a token span: per layer a pair of [B, KV heads, T, head_dim]."""


def patchify(pixels: Tensor) -> Tensor:
    """Normalise RGB uint8 [N, 224, 224, 3] into patches [N, 256, 588], ordered as the image processor orders them."""
    mean, std = (torch.tensor(v, device=pixels.device) for v in (_MEAN, _STD))
    normal = (pixels.float() / 255 - mean) / std
    grid = normal.view(-1, GRID, 2, 14, GRID, 2, 14, 3)
    return grid.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, PATCHES, 588)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@cache
def _vision_angles(head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    row, column, dy, dx = torch.meshgrid(*(torch.arange(n) for n in (GRID, GRID, 2, 2)), indexing="ij")
    frequency = 1.0 / (10000.0 ** (torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2)))
    angles = torch.cat([(2 * row + dy).reshape(-1, 1) * frequency, (2 * column + dx).reshape(-1, 1) * frequency], -1)
    angles = torch.cat([angles, angles], -1).to(device)
    return angles.cos(), angles.sin()


def _norm(x: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def encode_pictures(visual: Any, pixels: Tensor) -> Tensor:
    """The vision tower: RGB uint8 [N, 224, 224, 3] to embeddings [N, 64, hidden]."""
    heads, width = visual.config.num_heads, visual.config.hidden_size
    count = len(pixels)
    # Both temporal patches hold the same picture, so their kernels add up.
    kernel = visual.patch_embed.proj.weight.sum(2).reshape(width, 588)
    x = patchify(pixels) @ kernel.t()
    cos, sin = _vision_angles(width // heads, pixels.device)
    for block in visual.blocks:
        qkv = block.attn.qkv(_norm(x, block.norm1)).view(count, PATCHES, 3, heads, width // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(count, PATCHES, width))
        x = x + block.mlp(_norm(x, block.norm2))
    merged: Tensor = visual.merger.mlp(_norm(x, visual.merger.ln_q).view(count, TOKENS, 4 * width))
    return merged


def rope_angles(text: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [B, 1, T, head_dim], of M-RoPE positions [B, 3, T] (axes t, h, w)."""
    config = text.config
    head_dim = config.hidden_size // config.num_attention_heads
    exponent = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[..., None].float() * (1.0 / config.rope_parameters["rope_theta"] ** exponent)
    sections = angles.split(config.rope_parameters["mrope_section"], -1)
    angles = torch.cat([section[:, axis] for axis, section in enumerate(sections)], -1)
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def rotate_span(text: Any, span: Span, positions: Tensor) -> Span:
    """Turn a span's keys to positions [B, 3, T]; the result can be passed as `past`."""
    cos, sin = rope_angles(text, positions)
    return [(_rotate(k, cos, sin), v) for k, v in span]


def decode(
    text: Any,
    x: Tensor,
    positions: Tensor,
    mask: Tensor,
    past: Span | None = None,
    probe: Callable[[int, Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Span]:
    """The language model.

    Args:
        text: The transformers text model.
        x: Input embeddings [B, T, hidden].
        positions: M-RoPE positions [B, 3, T].
        mask: What each token may attend to, bool or additive float, broadcastable to [B, 1, T, S + T].
        past: Rotated keys and values in front, of S tokens.
        probe: Called in every layer with its index, rotated queries [B, heads, T, head_dim] and keys, one for each query
            head, [B, heads, S + T, head_dim].

    Returns:
        Final hidden states [B, T, hidden] and the span of these T tokens, keys not rotated.
    """
    config = text.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    batch, length, width = x.shape
    cos, sin = rope_angles(text, positions)
    span: Span = []
    for index, layer in enumerate(text.layers):
        attention, h = layer.self_attn, _norm(x, layer.input_layernorm)
        q = attention.q_proj(h).view(batch, length, heads, -1).transpose(1, 2)
        k = attention.k_proj(h).view(batch, length, kv_heads, -1).transpose(1, 2)
        v = attention.v_proj(h).view(batch, length, kv_heads, -1).transpose(1, 2)
        span.append((k, v))
        k = _rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat([past[index][0], k], 2), torch.cat([past[index][1], v], 2)
        group = heads // kv_heads
        q, k, v = _rotate(q, cos, sin), k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if probe is not None:
            probe(index, q, k)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + layer.mlp(_norm(x, layer.post_attention_layernorm))
    return _norm(x, text.norm), span
