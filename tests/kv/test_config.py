from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.config import attention_layers, kv_spec_from_config, rope_spec_from_config, sliding_window

SMALL = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=50)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=1024)
LONG = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8, factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip


def refused(config) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        kv_spec_from_config(config, "id", "bfloat16")
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "prop"),
    [
        (tf.LlamaConfig(**SMALL, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "dynamic NTK"),
        (tf.Phi3Config(**SMALL, pad_token_id=0, rope_parameters=LONG), "LongRoPE"),
        (tf.BloomConfig(hidden_size=64, n_head=4, n_layer=2), "ALiBi"),
        (tf.MptConfig(d_model=64, n_heads=4, n_layers=2), "ALiBi"),
        (tf.FalconConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, alibi=True), "ALiBi"),
        (tf.GPT2Config(n_embd=64, n_head=4, n_layer=2), "learned absolute"),
        (tf.OPTConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2), "learned absolute"),
        (tf.MambaConfig(hidden_size=64, num_hidden_layers=2), "state space"),
        (tf.JambaConfig(**SMALL), "state space"),
        (tf.RwkvConfig(hidden_size=64, num_hidden_layers=2), "state space"),
        (tf.Lfm2Config(**SMALL), "state space"),
        (tf.Gemma4UnifiedTextConfig(**SMALL), "layers of different shapes"),
        (tf.MiMoV2FlashConfig(**SMALL), "layers of different shapes"),
        (tf.Gemma3nTextConfig(**SMALL, num_kv_shared_layers=1), "reuse the KV of others"),
        (tf.Gemma3nTextConfig(**SMALL, num_kv_shared_layers=0), "inputs to every layer"),
        (tf.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True), "bidirectional attention"),
        (tf.Cohere2Config(**SMALL), "without rotary"),
        (tf.Llama4TextConfig(**SMALL), "chunked attention"),
        (tf.SmolLM3Config(**SMALL, pad_token_id=0, no_rope_layers=[1, 0]), "without rotary"),
        (tf.T5Config(d_model=64), "cross attention"),
        (SimpleNamespace(model_type="new", hidden_size=64, num_attention_heads=4), "no rotary positions"),
        (
            SimpleNamespace(
                model_type="new", hidden_size=64, num_attention_heads=4, rope_theta=1e4,
                rope_scaling={"type": "default", "mrope_section": [2, 3, 3]},
            ),
            "M-RoPE layout",
        ),
        (
            SimpleNamespace(
                model_type="new", hidden_size=64, num_attention_heads=4, rope_theta=1e4,
                rope_scaling={"rope_type": "spiral"},
            ),
            "'spiral'",
        ),
        (
            SimpleNamespace(
                model_type="new", hidden_size=64, num_attention_heads=4,
                layer_types=["full_attention", "linear_attention"],
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            "linear attention",
        ),
        (
            SimpleNamespace(
                model_type="new", hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
                layer_types=["full_attention", "sliding_attention"],
                rope_parameters={"full_attention": {"rope_theta": 1e4}, "other": {"rope_theta": 1e6}},
            ),
            "no rotary positions in layers of type 'sliding_attention'",
        ),
    ],
    ids=lambda x: getattr(x, "model_type", None) or str(x),
)  # fmt: skip
def test_refusals_name_the_property(config, prop):
    assert prop in refused(config)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (tf.Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=128, max_window_layers=1), None),
        (tf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=128, max_window_layers=28), None),
        (tf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=128, max_window_layers=1), 128),
        (tf.MistralConfig(**SMALL, sliding_window=None), None),
        (tf.MistralConfig(**SMALL, sliding_window=4096, max_position_embeddings=4096), None),
        (tf.MistralConfig(**SMALL, sliding_window=128), 128),
        (tf.FalconConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, alibi=False), None),
    ],
    ids=[
        "qwen2-off",
        "qwen2-all-full",
        "qwen2-on",
        "mistral-none",
        "mistral-never-in-effect",
        "mistral",
        "falcon-rope",
    ],
)
def test_sliding_windows_in_effect(config, window):
    assert kv_spec_from_config(config, "id", "bfloat16").layers == 2
    assert sliding_window(config) == window


@pytest.mark.parametrize(
    "parameters",
    [dict(rope_type="default", rope_theta=1e6), dict(rope_type="linear", rope_theta=1e4, factor=3.0), LLAMA3, YARN],
    ids=lambda p: p["rope_type"],
)
def test_frequencies_are_the_models_own(parameters):
    config = tf.LlamaConfig(**SMALL, rope_parameters=dict(parameters), max_position_embeddings=4096)
    before = dict(config.rope_parameters)
    rope = rope_spec_from_config(config)
    module = tf.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert torch.equal(torch.tensor(rope.inv_freq, dtype=torch.float32), module.inv_freq)
    assert rope.magnitude == pytest.approx(module.attention_scaling)
    assert (rope.rotary_dim, rope.pairing, rope.sections) == (16, "half", None)
    assert config.rope_parameters == before


def test_older_rope_scaling_reads_the_same():
    old = dict(YARN)
    theta = old.pop("rope_theta")
    old["type"] = old.pop("rope_type")
    loose = SimpleNamespace(
        model_type="new", hidden_size=64, num_attention_heads=4, num_hidden_layers=2, rope_theta=theta,
        rope_scaling=old, max_position_embeddings=4096,
    )  # fmt: skip
    new = tf.LlamaConfig(**SMALL, rope_parameters=dict(YARN), max_position_embeddings=4096)
    assert rope_spec_from_config(loose) == rope_spec_from_config(new)


def test_partial_rotary():
    config = tf.GPTNeoXConfig(**SMALL, rope_parameters=dict(rope_type="default", rope_theta=1e4), rotary_pct=0.25)
    spec = kv_spec_from_config(config, "id", "bfloat16")
    assert (spec.k_dim, spec.rope.rotary_dim, len(spec.rope.inv_freq)) == (16, 4, 2)


def test_families():
    mha = kv_spec_from_config(tf.LlamaConfig(**SMALL), "id", "float32")
    assert (mha.family, mha.heads, mha.k_dim, mha.v_dim) == ("mha", 4, 16, 16)
    gqa = kv_spec_from_config(tf.Qwen2Config(**SMALL, num_key_value_heads=2), "id", "float32")
    assert (gqa.family, gqa.heads) == ("gqa", 2)
    for kind, config in (("v2", tf.DeepseekV2Config), ("v3", tf.DeepseekV3Config)):
        small = config(**SMALL, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10)
        mla = kv_spec_from_config(small, "id", "float32")
        assert (mla.family, mla.heads, mla.k_dim, mla.v_dim) == ("mla", 1, 8, 24)
        assert mla.rope.rotary_dim == 8
        # transformers caches V3's keys de-interleaved; vLLM keeps both as the paper of DeepSeek-V2 has them.
        assert mla.rope.pairing == ("interleaved" if kind == "v2" else "half")
        assert kv_spec_from_config(small, "id", "float32", engine="vllm").rope.pairing == "interleaved"


def test_multimodal_configs_give_their_decoders():
    config = tf.Qwen2_5_VLConfig(text_config=dict(**SMALL, num_key_value_heads=2))
    assert rope_spec_from_config(config.text_config).sections == (16, 24, 24)
    spec = kv_spec_from_config(config, "id", "bfloat16")
    assert (spec.family, spec.heads, spec.rope.mrope_interleaved) == ("gqa", 2, False)
    three = tf.Qwen3VLConfig(text_config=dict(**SMALL, head_dim=128))
    spec = kv_spec_from_config(three, "id", "bfloat16")
    assert (spec.rope.sections, spec.rope.mrope_interleaved, spec.k_dim) == ((24, 20, 20), True, 128)


def test_families_over_another_decoder():
    one_axis = tf.InternVLConfig(text_config=dict(**SMALL, num_key_value_heads=2, model_type="qwen2"))
    spec = kv_spec_from_config(one_axis, "id", "bfloat16")
    assert (spec.family, spec.heads, spec.rope.sections) == ("gqa", 2, None)
    latent = dict(**SMALL, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10)
    for kind, pairing in (("deepseek_v3", "half"), ("deepseek_v2", "interleaved")):
        spec = kv_spec_from_config(tf.Kimi_K25Config(text_config=latent | {"model_type": kind}), "id", "bfloat16")
        assert (spec.family, spec.heads, spec.k_dim, spec.v_dim, spec.rope.pairing) == ("mla", 1, 8, 24, pairing)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_deepseek_v2_without_latent_attention(engine):
    """As DeepSeek-VL2-tiny publishes it: vLLM serves it by the attention of DeepSeek's first model, which pairs halves."""
    published = SimpleNamespace(
        model_type="deepseek_v2", hidden_size=1280, num_hidden_layers=12, num_attention_heads=10, num_key_value_heads=10,
        kv_lora_rank=None, q_lora_rank=None, qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0, head_dim=0,
        max_position_embeddings=4096, rope_theta=1e4,
    )  # fmt: skip
    spec = kv_spec_from_config(published, "id", "bfloat16", engine)
    assert (spec.family, spec.layers, spec.heads, spec.k_dim, spec.v_dim) == ("mha", 12, 10, 128, 128)
    assert (spec.rope.pairing, spec.rope.rotary_dim) == ("half", 128)


def test_legacy_mrope_type():
    loose = SimpleNamespace(
        model_type="qwen2_vl_text", hidden_size=512, num_attention_heads=4, num_hidden_layers=2, rope_theta=1e6,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, max_position_embeddings=4096,
    )  # fmt: skip
    rope = rope_spec_from_config(loose)
    assert (rope.sections, rope.rotary_dim) == ((16, 24, 24), 128)


def test_hybrids_keep_kv_in_their_attention_layers_only():
    config = tf.Qwen3_5TextConfig(num_hidden_layers=8)
    spec = kv_spec_from_config(config, "id", "bfloat16")
    assert attention_layers(config) == (3, 7) and spec.layers == 2 and spec.recurrent
    assert spec.rope.sections == (11, 11, 10) and spec.rope.mrope_interleaved and spec.rope.rotary_dim == 64
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    inputs = 2 * config.linear_num_key_heads * key + heads * value
    assert spec.state_bytes == 6 * (4 * heads * key * value + 2 * 4 * inputs)
    on_vllm = kv_spec_from_config(config, "id", "bfloat16", "vllm")
    assert on_vllm.state_bytes == spec.state_bytes - 6 * 2 * inputs, "vLLM keeps three of the convolution's inputs"
    assert attention_layers(tf.LlamaConfig(**SMALL)) == (0, 1)


def test_each_type_of_layers_may_turn_by_its_own_frequencies():
    """Gemma 3's sliding layers have a short base, its others a long one with linear scaling."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 1e4}
    small = SMALL | {"num_hidden_layers": 3, "head_dim": 16, "layer_types": types}
    config = tf.Gemma3TextConfig(**small, rope_parameters={"full_attention": scaled, "sliding_attention": local})
    spec = kv_spec_from_config(config, "id", "float32")
    assert [kind.layers for kind in spec.kinds] == [(0, 2), (1,)] and spec.alike == spec.kinds
    own = tf.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)
    for kind, name in zip(spec.kinds, types, strict=False):
        assert kind.rope.inv_freq == tuple(getattr(own, f"{name}_inv_freq").tolist())
    assert spec.rope == spec.kinds[0].rope
    alike = tf.Gemma3TextConfig(**small, rope_parameters={"full_attention": local, "sliding_attention": local})
    assert kv_spec_from_config(alike, "id", "float32").kinds == ()
