"""Layers that differ in their heads, as rows of one width: there and back, turned and patched as the layers would be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
from operator_oracle import make_spec, oracle_rotate, plain_rope, worst

from ctxwin.kv.config import attention_layers, kv_spec_from_config
from ctxwin.kv.kernels import LoadPlan, SpanSlice
from ctxwin.kv.layout import KVSpec, LayerKind, SpanKV
from ctxwin.kv.patch import apply_patch, form_patch
from ctxwin.kv.relocate import relocate
from ctxwin.kv.rows import Pair, from_rows, layer_kinds, row_width, to_rows

SLIDING, FULL = plain_rope(16), plain_rope(32, 1e6)
# Three heads of 16 take a row and a half; one head of 32 a row. Layers: sliding, full, sliding.
SPEC = replace(
    make_spec(layers=5, heads=1, k_dim=32, v_dim=32, rope=SLIDING),
    kinds=(LayerKind((0, 1, 3, 4), SLIDING, 3, 16), LayerKind((2,), FULL, 1, 32)),
)


def layers(tokens: int, seed: int) -> list[Pair]:
    noise = torch.Generator().manual_seed(seed)
    shapes = [(kind.heads, kind.head_dim) for kind in layer_kinds(SPEC)]
    return [
        tuple(torch.randn(tokens, *shape, generator=noise, dtype=torch.float64) for _ in range(2)) for shape in shapes
    ]


def at(pairs: list[Pair], start: int) -> SpanKV:
    """As an engine would compute it: each layer's own heads turned by its own frequencies."""
    positions = torch.arange(len(pairs[0][0])).expand(3, -1)
    turned = []
    for kind, (k, v) in zip(layer_kinds(SPEC), pairs, strict=True):
        turned.append((torch.from_numpy(oracle_rotate(kind.rope, k.numpy(), (positions + start).numpy())), v))
    return SpanKV(*to_rows(SPEC, turned), positions, start)


def back(spec: KVSpec, span: SpanKV) -> list[Pair]:
    return list(from_rows(spec, lambda i: (span.k[i], span.v[i])))


def test_there_and_back() -> None:
    pairs = layers(7, 1)
    span = at(pairs, 0)
    span.validate(SPEC)
    assert SPEC.in_rows and span.k.shape == (5, 7, 1, 32)
    assert not span.k[1, :, :, 16:].any() and span.k[1, :, :, :16].any()
    for (_, v), (_, found) in zip(pairs, back(SPEC, span), strict=True):
        assert torch.equal(v, found)
    plain = make_spec(layers=2, heads=2, k_dim=4, v_dim=4)
    both = [(torch.rand(3, 2, 4), torch.rand(3, 2, 4)) for _ in range(2)]
    k, v = to_rows(plain, both)
    assert k.shape == (2, 3, 2, 4) and torch.equal(k[1], both[1][0]) and torch.equal(v[0], both[0][1])
    with pytest.raises(ValueError, match="layers must fill 2 rows, got 1"):
        to_rows(plain, both[:1])


def test_rows_move_as_their_layers_do() -> None:
    pairs = layers(9, 2)
    want = at(pairs, 4000)
    moved = relocate(at(pairs, 0), SPEC, 4000)
    assert worst(moved.k, want.k) < 1e-12 and torch.equal(moved.v, want.v)
    assert worst(relocate(at(pairs, 55), SPEC, 4000).k, want.k) < 1e-12


@pytest.mark.parametrize("frame", [0, 31])
def test_patched_rows_are_the_conditioned_layers(frame: int) -> None:
    """Also by the load kernel, whose buffers are used again while the rows of a layer are put together."""
    base, conditioned = layers(9, 3), layers(9, 4)
    patch = form_patch(at(conditioned, 700), at(base, 0), SPEC, rank=None, dtype=torch.float64)
    served = at(base, frame)
    want = at(conditioned, 250)
    assert worst(apply_patch(served, patch, SPEC, 250).k, want.k) < 1e-10
    plan = LoadPlan([SpanSlice(served, 250, patch), SpanSlice(at(base, 0), 77)], SPEC, dtype=torch.float64)
    assert plan.kernel == "cpu"
    behind = back(SPEC, at(base, 77))
    for (k, v), first, second in zip(from_rows(SPEC, plan.layer), back(SPEC, want), behind, strict=True):
        assert worst(k, torch.cat([first[0], second[0]])) < 1e-10
        assert worst(v, torch.cat([first[1], second[1]])) < 1e-10


def test_row_width_wastes_least() -> None:
    """Of Gemma 4's sizes: rows of whole layers, of parts of them, and filled up."""
    assert row_width([(16, 256)] * 5 + [(4, 512)]) == 2048
    assert row_width([(2, 256)] * 5 + [(2, 512)]) == 512
    assert row_width([(1, 256)] * 5 + [(1, 512)]) == 512


def test_layouts_of_gemma_4() -> None:
    small = dict(
        num_hidden_layers=6, num_attention_heads=4, hidden_size=64, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip
    config = tf.Gemma4TextConfig(
        **small, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1
    )
    spec = kv_spec_from_config(config, "id", "float32")
    assert [(k.layers, k.heads, k.head_dim) for k in spec.kinds] == [((0, 2, 4), 2, 16), ((1, 3, 5), 1, 32)]
    assert (spec.layers, spec.heads, spec.k_dim, spec.v_dim) == (6, 1, 32, 32)
    own = tf.models.gemma4.modeling_gemma4.Gemma4TextRotaryEmbedding(config)
    for kind, name in zip(spec.kinds, small["layer_types"], strict=False):
        assert kind.rope.inv_freq == tuple(getattr(own, f"{name}_inv_freq").tolist())
    sharing = tf.Gemma4TextConfig(**small, num_kv_shared_layers=2)
    assert attention_layers(sharing) == (0, 1, 2, 3)
    # A layer of two heads of 32 takes two rows of 32.
    assert [k.layers for k in kv_spec_from_config(sharing, "id", "float32").kinds] == [(0, 3), (1, 2, 4, 5)]
