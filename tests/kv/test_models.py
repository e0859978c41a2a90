"""The operator against transformers: its rotary modules, and the caches of tiny random models of every family."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers as tf
from operator_oracle import random_positions, worst
from transformers import DynamicCache

from ctxwin.kv.config import kv_spec_from_config, rope_spec_from_config
from ctxwin.kv.deficit import deficit
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import apply_patch, form_patch
from ctxwin.kv.relocate import relocate, relocation_error
from ctxwin.kv.rope import shift_angles, turn

SMALL = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, intermediate_size=96, vocab_size=80)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=512, mscale=0.7)
MLA = dict(
    SMALL, kv_lora_rank=24, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=12, v_head_dim=10,
    first_k_dense_replace=3, rope_parameters=dict(YARN), max_position_embeddings=4096,
)  # fmt: skip


def llama(**kwargs):
    return tf.LlamaModel(tf.LlamaConfig(**SMALL, max_position_embeddings=8192, **kwargs))


def qwen2():
    return tf.Qwen2Model(tf.Qwen2Config(**SMALL, num_key_value_heads=2, max_position_embeddings=8192))


def qwen2_5_vl():
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3])
    config = tf.Qwen2_5_VLConfig(text_config=dict(SMALL, num_key_value_heads=2, rope_parameters=rope))
    return Qwen2_5_VLTextModel(config.text_config)


def qwen3_vl():
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 2, 2], mrope_interleaved=True)
    text = dict(SMALL, num_key_value_heads=2, head_dim=16, rope_parameters=rope)
    return Qwen3VLTextModel(tf.Qwen3VLConfig(text_config=text).text_config)


def gpt_neox():
    rope = dict(rope_type="default", rope_theta=1e4)
    return tf.GPTNeoXModel(tf.GPTNeoXConfig(**SMALL, rope_parameters=rope, rotary_pct=0.25))


def glm():
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    return tf.GlmModel(tf.GlmConfig(**SMALL, num_key_value_heads=2, head_dim=16, rope_parameters=rope, pad_token_id=0))


MODELS = {
    "mha-llama3": lambda: llama(rope_parameters=dict(LLAMA3)),
    "mha-linear": lambda: llama(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
    "mha-partial": gpt_neox,
    "gqa-qwen2": qwen2,
    "gqa-mrope-blocked": qwen2_5_vl,
    "gqa-mrope-cycling": qwen3_vl,
    "gqa-partial-interleaved": glm,
    "mla-v2-yarn": lambda: tf.DeepseekV2Model(tf.DeepseekV2Config(**MLA)),
    "mla-v3-yarn": lambda: tf.DeepseekV3Model(tf.DeepseekV3Config(**MLA)),
}


class Tiny:
    """A tiny random model that prefills with the positions it is told."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name]().to(dtype).eval()
        for p in self.model.parameters():
            # Larger than the library's initialisation, so that antecedents leave a visible mark.
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.15)
        self.spec: KVSpec = kv_spec_from_config(self.model.config, name, str(dtype))
        self.mrope = self.spec.rope.sections is not None

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor, positions: torch.Tensor, begin: int, origin: int) -> SpanKV:
        """KV of tokens ``begin:`` of one forward; ``positions [3, T]`` absolute, ``origin`` those tokens' start."""
        cache = DynamicCache()
        rows = positions[:, None] if self.mrope else positions[:1]
        # Equal positions within one image read as packed sequences to the mask; one sequence is all there is here.
        mask = torch.ones(1, ids.numel(), dtype=torch.int64)
        self.model(input_ids=ids[None], position_ids=rows, past_key_values=cache, use_cache=True, attention_mask=mask)
        keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])[:, begin:]
        values = torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])[:, begin:]
        if self.spec.family == "mla":
            keys, values = values, keys  # transformers 5 caches (c_KV, k_pe)
        span = SpanKV(keys, values, positions[:, begin:] - origin, origin)
        span.validate(self.spec)
        return span


@pytest.fixture(scope="module", params=list(MODELS))
def tiny(request) -> Tiny:
    return Tiny(request.param, torch.float64)


def chunk(tokens: int, seed: int, mrope: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 80, (tokens,), generator=torch.Generator().manual_seed(seed))
    return ids, random_positions(tokens, seed) if mrope else torch.arange(tokens).expand(3, -1)


# Float64 models still take cosine and sine in float32, so the attention itself differs by that much between two places.
TABLES = 3e-6


def test_alone_and_moved_equals_alone_there(tiny):
    ids, local = chunk(12, 5, tiny.mrope)
    here, there = (tiny.prefill(ids, local + start, 0, start) for start in (7, 190))
    assert relocation_error(here, there, tiny.spec) < 2e-7
    moved = relocate(here, tiny.spec, 190)
    assert worst(moved.k, there.k) < TABLES and worst(moved.v, there.v) < TABLES
    assert worst(here.k, there.k) > 0.05


def test_conditioned_patch_serves_at_another_place(tiny):
    """KV(B|A) formed with A and B at p1, served with A and B at p2, for K and V; full rank and truncated."""
    a_ids, a_local = chunk(10, 1, tiny.mrope)
    b_ids, b_local = chunk(14, 2, tiny.mrope)
    advance = int(a_local.max()) + 1

    def behind(p: int) -> SpanKV:
        positions = torch.cat([a_local + p, b_local + p + advance], dim=1)
        return tiny.prefill(torch.cat([a_ids, b_ids]), positions, 10, p + advance)

    base = relocate(tiny.prefill(b_ids, b_local + 3, 0, 3), tiny.spec, 0)
    formed_at, served_at = behind(20), behind(150)
    full = form_patch(formed_at, base, tiny.spec, dtype=torch.float64)
    lost = deficit(formed_at, base, tiny.spec)
    # The first layer's KV depends on the token alone; only the tables' rounding is left of its deficit.
    assert float(lost.relative[0]) < 2e-6 < 1e-2 < float(lost.relative[-1])
    served = apply_patch(base, full, tiny.spec, 150 + advance)
    assert worst(served.k, served_at.k) < TABLES and worst(served.v, served_at.v) < TABLES

    def miss(patch) -> float:
        got = apply_patch(base, patch, tiny.spec, 150 + advance)
        return float((got.k - served_at.k).pow(2).sum() + (got.v - served_at.v).pow(2).sum())

    misses = [miss(form_patch(formed_at, base, tiny.spec, rank=m, dtype=torch.float64)) for m in (0, 2, 5, 9, 14)]
    assert all(a > b for a, b in pairwise(misses))
    singular = torch.linalg.svdvals(torch.cat([lost.matrix(i) for i in full.layers], dim=1))
    assert misses[2] == pytest.approx(float(singular[5:].pow(2).sum()), rel=1e-3)


def test_first_layer_is_dropped_in_serving_precision():
    tiny = Tiny("gqa-mrope-blocked", torch.float32)
    a_ids, a_local = chunk(10, 1, True)
    b_ids, b_local = chunk(14, 2, True)
    advance = int(a_local.max()) + 1
    positions = torch.cat([a_local, b_local + advance], dim=1)
    behind = tiny.prefill(torch.cat([a_ids, b_ids]), positions, 10, advance)
    patch = form_patch(behind, tiny.prefill(b_ids, b_local, 0, 0), tiny.spec, rank=4)
    assert patch.layers == (1, 2) and patch.meta["dropped"] == [0]


def rotary(name: str):
    """(text config, function from keys ``[T, H, D]`` and positions ``[3, T]`` to the library's rotated keys)."""
    tiny = Tiny(name, torch.float32)
    model, config = tiny.model, tiny.model.config
    module = __import__(type(model).__module__, fromlist=["x"])

    def apply(k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = positions[:, None] if tiny.mrope else positions[:1]
        k = k.transpose(0, 1)[None]
        if name == "mla-v2-yarn":
            return module.apply_rotary_emb(k, k, model.rotary_emb(k, rows))[1][0].transpose(0, 1)
        cos, sin = model.rotary_emb(k, rows)
        function = module.apply_rotary_pos_emb
        if name == "mla-v3-yarn":
            function = module.apply_rotary_pos_emb_interleave
        elif hasattr(module, "apply_multimodal_rotary_pos_emb"):
            function = module.apply_multimodal_rotary_pos_emb
        return function(k, k, cos, sin)[1][0].transpose(0, 1)

    return tiny, config, apply


@pytest.mark.parametrize("name", list(MODELS))
def test_turning_equals_the_librarys_rotary_module(name):
    """Compute-at-place by the library against rotate-after-move by us, in float32, over 8k positions."""
    tiny, config, apply = rotary(name)
    rope = rope_spec_from_config(config)
    local = random_positions(40, 9) if tiny.mrope else torch.arange(40).expand(3, -1)
    k = torch.randn(40, 2, tiny.spec.k_dim, generator=torch.Generator().manual_seed(3))
    here, there = apply(k, local + 5), apply(k, local + 8005)
    assert worst(turn(rope, here, shift_angles(rope, local, 5, 8005)), there) < 2e-6
    assert worst(here, there) > 0.05
