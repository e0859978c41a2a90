"""Small hybrids of the same world in Qwen3.5's architecture: Gated DeltaNet layers before an attention layer, or after one.

The forward is transformers' own, layer by layer, except that the questions of a context go through the recurrent layers side
by side: each continues from the state after the context, which no other question has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ctxwin.tiny.sprites import GRID
from train_tiny.forward import PATCHES, encode_pictures, patchify
from train_tiny.model import HIDDEN, shared_config
from train_tiny.tokenizer import transformers

READS_KV = (*("linear_attention",) * 3, "full_attention")
READS_STATES = ("full_attention", *("linear_attention",) * 2)
"""Layers whose questions read what chunks absorbed from the last one's KV, or from its states.

Keys and values of a first layer do not depend on preceding tokens: after it, only states can hold bindings.
"""
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
STATES, STATE_WIDTH = 2, 128
"""Heads of a recurrent layer; each keeps 128 x 128 numbers, as released models' do."""
STEP, DECAY = 0.01, 0.1
"""Initial step and rate of forgetting: a state still holds two thirds of what it read 500 tokens ago."""
SHARPNESS = 15.0
"""Length of a recurrent layer's queries and keys where a look-up is scored as if it were attention's."""


def build_hybrid(tokenizer: Any, seed: int, layers: Sequence[str] = READS_KV) -> Any:
    """A freshly initialised `Qwen3_5ForConditionalGeneration`, float32, on the CPU.

    Queries and keys start equal in all layers, and the convolutions pass their own token: associations are there to be used
    from the first step on.
    """
    library = transformers()
    text, vision, tokens = shared_config(tokenizer)
    config = library.Qwen3_5Config(
        text_config=text
        | {
            "num_hidden_layers": len(layers),
            "layer_types": list(layers),
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "linear_num_key_heads": STATES,
            "linear_num_value_heads": STATES,
            "linear_key_head_dim": STATE_WIDTH,
            "linear_value_head_dim": STATE_WIDTH,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
        vision_config=vision | {"num_position_embeddings": (2 * GRID) ** 2},
        **tokens,
    )
    torch.manual_seed(seed)
    model = library.Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            if hasattr(layer, "linear_attn"):
                recurrent = layer.linear_attn
                recurrent.A_log.fill_(math.log(DECAY))
                recurrent.dt_bias.fill_(math.log(math.expm1(STEP)))
                width = STATES * STATE_WIDTH
                recurrent.in_proj_qkv.weight[:width] = recurrent.in_proj_qkv.weight[width : 2 * width]
                recurrent.conv1d.weight.mul_(0.1)[:, :, -1] += 1
            else:
                attention = layer.self_attn
                shared = attention.k_proj.weight.view(KV_HEADS, 1, HEAD_DIM, HIDDEN)
                both = attention.q_proj.weight.view(KV_HEADS, HEADS // KV_HEADS, 2, HEAD_DIM, HIDDEN)  # query, gate
                both[:, :, 0] = shared
    return model


def pictures_of(model: Any, pixels: Tensor) -> Tensor:
    """The vision tower of either model: RGB uint8 [N, 224, 224, 3] to embeddings [N, 64, hidden]."""
    visual = model.model.visual
    if model.config.model_type != "qwen3_5":
        return encode_pictures(visual, pixels)
    patches = patchify(pixels).reshape(-1, 3, 1, 14 * 14).expand(-1, -1, 2, -1).reshape(len(pixels) * PATCHES, -1)
    grid = torch.tensor([[1, 2 * GRID, 2 * GRID]], device=pixels.device).expand(len(pixels), -1)
    merged: Tensor = visual(patches, grid_thw=grid).pooler_output
    return merged.view(len(pixels), GRID * GRID, -1)


def _recur(
    layer: Any, h: Tensor, valid: Tensor | None, front: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """One recurrent layer; `valid` [B, T] leaves out the padding at the end.

    Returns its output, its tail and state, and its queries and keys of length `SHARPNESS`, [B, T, heads, width].
    """
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    mixed = layer.in_proj_qkv(h)
    reach = layer.conv_kernel_size - 1
    previous_tail = mixed.new_zeros(len(h), reach, mixed.shape[-1]) if front is None else front[0]
    mixed = torch.cat([previous_tail, mixed], 1)
    passed = functional.silu(
        functional.conv1d(mixed.transpose(1, 2), layer.conv1d.weight, groups=layer.conv_dim).transpose(1, 2)
    )
    q, k, v = torch.split(passed, [layer.key_dim, layer.key_dim, layer.value_dim], -1)
    beta = layer.in_proj_b(h).sigmoid()
    decay = -layer.A_log.exp() * functional.softplus(layer.in_proj_a(h) + layer.dt_bias)
    length = torch.full((len(h),), h.shape[1], device=h.device) if valid is None else valid.sum(1)
    if valid is not None:
        beta, decay = beta * valid[..., None], decay * valid[..., None]
    q, k, v = (t.reshape(*t.shape[:2], STATES, STATE_WIDTH) for t in (q, k, v))
    read, state = torch_chunk_gated_delta_rule(
        q,
        k,
        v,
        decay,
        beta,
        chunk_size=64 if h.shape[1] > 32 else h.shape[1],
        initial_state=None if front is None else front[1],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    rows = length[:, None] + torch.arange(reach, device=h.device)
    tail = mixed.gather(1, rows[..., None].expand(-1, -1, mixed.shape[-1]))
    z = layer.in_proj_z(h).unflatten(-1, (STATES, STATE_WIDTH))
    looked = functional.normalize(q, dim=-1) * SHARPNESS, functional.normalize(k, dim=-1) * SHARPNESS
    return layer.out_proj(layer.norm(read, z).flatten(-2)), (tail, state), looked


def _attend(layer: Any, h: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, probe: Callable[..., None]) -> Tensor:
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    q, gate = layer.q_proj(h).unflatten(-1, (HEADS, 2, HEAD_DIM)).unbind(-2)
    q = layer.q_norm(q).transpose(1, 2)
    k = layer.k_norm(layer.k_proj(h).unflatten(-1, (KV_HEADS, HEAD_DIM))).transpose(1, 2)
    v = layer.v_proj(h).unflatten(-1, (KV_HEADS, HEAD_DIM)).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *turns)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    probe(q, k)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    out: Tensor = layer.o_proj((mixed * gate.sigmoid()).flatten(-2))
    return out


def decode_questions(
    text: Any,
    x: Tensor,
    positions: Tensor,
    mask: Tensor,
    real: Tensor,
    length: int,
    probe: Callable[[int, Tensor, Tensor], None],
) -> Tensor:
    """The language model over contexts and their questions.

    Args:
        text: the transformers text model.
        x: input embeddings [B, T, hidden]: a context, then questions of `length` tokens each.
        positions: M-RoPE positions [B, 3, T].
        mask: additive, [B, 1, T, T].
        real: which tokens of the contexts are no padding, [B, tokens of the longest context].
        length: tokens of a question and its answer.
        probe: called in every layer with its index, queries and keys, one for each query head (rotated where there is RoPE).

    Returns:
        Final hidden states [B, T, hidden].
    """
    turns = text.rotary_emb(x, positions.transpose(0, 1))
    width = real.shape[1]
    question_count = (x.shape[1] - width) // length
    for index, layer in enumerate(text.layers):
        h = layer.input_layernorm(x)
        if hasattr(layer, "linear_attn"):
            context, states, context_probe = _recur(layer.linear_attn, h[:, :width], real, None)
            front = tuple(t.repeat_interleave(question_count, 0) for t in states)
            questions, _, question_probe = _recur(
                layer.linear_attn, h[:, width:].reshape(-1, length, h.shape[-1]), None, (front[0], front[1])
            )
            both = (
                torch.cat([c, t.reshape(len(x), -1, *t.shape[2:])], 1)
                for c, t in zip(context_probe, question_probe, strict=True)
            )
            probe(index, *(t.transpose(1, 2) for t in both))
            x = x + torch.cat([context, questions.reshape(len(x), -1, x.shape[-1])], 1)
        else:
            x = x + _attend(layer.self_attn, h, turns, mask, lambda q, k, index=index: probe(index, q, k))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    out: Tensor = text.norm(x)
    return out
