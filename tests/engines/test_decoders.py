"""Text decoders on the transformers engine, against transformers' own path; those that are refused by measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ctxwin.chunk import Chunk
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.sampling import Sampling
from ctxwin.errors import UnsupportedModel
from engines.conformance import HEADER, QUERY, laid, with_spans
from engines.families import DECODERS, HEADS, HUNYUAN, opened, rescale
from engines.models import SHARP, write_decoder
from engines.oracle import assert_answers, real_answer


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "gemma4_sharing", "gemma4_experts"])
def test_text_against_the_real_model_path(name: str, folders: Callable[[str], Path]) -> None:
    engine = opened(folders(name))
    assert engine.spec.kv.family == ("gqa" if name.startswith("gemma") else "mla")
    encoded = [
        engine.encode_system_prompt(HEADER),
        *(engine.encode(Chunk.text(f"frame {i} is red\n")) for i in range(3)),
    ]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert_answers(engine, encoded, real_answer(folders(name), ids))


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "nanochat": ("NanoChat", {}, "do not turn as its config says"),
    "hunyuan_v1_dense": ("HunYuanDenseV1", HUNYUAN, "do not turn as its config says"),
    "hunyuan_v1_moe": ("HunYuanMoEV1", HUNYUAN | {"num_experts": 2, "moe_topk": 1}, "do not turn as its config says"),
    "falcon": ("Falcon", {"alibi": False, "new_decoder_architecture": False}, "not laid out as its config says"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_is_refused_by_measurement(kind: str, tmp_path: Path) -> None:
    """Their configs show nothing that stands in the way: keys are normalised behind the turn, or laid out differently."""
    name, fields, why = REFUSED[kind]
    write_decoder(tmp_path, name, **fields)
    weights = list(tmp_path.glob("*.safetensors"))
    if kind.startswith("hunyuan"):  # a trained norm is no constant
        rescale(weights[0], "key_layernorm.weight")
    with pytest.raises(UnsupportedModel, match=why):
        opened(tmp_path)


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_against_the_real_model_path(kind: str, tmp_path: Path) -> None:
    write_decoder(tmp_path, kind, **DECODERS[kind])
    engine = opened(tmp_path)
    assert engine.counters == type(engine.counters)(), "the measurement is nobody's work"
    encoded = [engine.encode_system_prompt(HEADER), engine.encode(Chunk.text("frame 1 is red\n"))]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert_answers(engine, encoded, real_answer(tmp_path, ids, "eager" if kind == "Gemma2" else None))


ASKING_MORE: dict[str, dict[str, object]] = {
    "Gemma2": HEADS | SHARP | dict(sliding_window=8), "VaultGemma": HEADS | SHARP | dict(sliding_window=8),
    "GptOss": DECODERS["GptOss"], "GraniteSWA": dict(sliding_window=8),
    "GraniteMoeSWA": dict(sliding_window=8, num_local_experts=4),
}  # fmt: skip
"""Families whose attention is capped or has sinks, which torch's fused attention leaves out."""


@pytest.mark.parametrize("kind", ASKING_MORE)
def test_attention_is_what_the_config_says(kind: str, tmp_path: Path) -> None:
    write_decoder(tmp_path, kind, **ASKING_MORE[kind])
    engine = opened(tmp_path)
    encoded = [
        engine.encode_system_prompt(HEADER),
        *(engine.encode(Chunk.text(f"frame {i} is red\n")) for i in range(4)),
    ]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    want = real_answer(tmp_path, ids, "eager")
    assert_answers(engine, encoded, want)
    try:
        fused = real_answer(tmp_path, ids, "sdpa")
    except ValueError as error:  # newer versions of transformers refuse to fuse what has caps, too
        assert "scaled_dot_product_attention" in str(error)
    else:
        assert float((fused[1] - want[1]).abs().max()) > 1e-3, "what is left out would be seen here"
    query = engine.encode_query(QUERY)
    made = engine.generate(laid(encoded, capture=True), query, Sampling(max_tokens=1, logprobs=-1))
    loaded = engine.generate(with_spans(laid(encoded), made.captured), query, Sampling(max_tokens=1, logprobs=-1))
    assert loaded.computed_tokens == query.tokens
    assert max(abs(made.logprobs[t] - loaded.logprobs[t]) for t in made.logprobs) < 1e-5


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Phi3", "Gemma"])
def test_others_stay_fused(kind: str, tmp_path: Path) -> None:
    engine = opened(write_decoder(tmp_path, kind, **DECODERS[kind]))
    assert engine.text_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3", "Gemma4", "GptOss", "Ministral", "Starcoder2"])
def test_sliding_layers_do_not_see_all(kind: str, tmp_path: Path) -> None:
    engine = opened(write_decoder(tmp_path, kind, **DECODERS[kind]))
    encoded, query = [engine.encode_system_prompt(HEADER)], engine.encode_query(QUERY)
    slid = engine.logits(laid(encoded), query)
    engine.decoder.window = 1000
    assert float((engine.logits(laid(encoded), query) - slid).abs().max()) > 1e-3
    with pytest.raises(UnsupportedModel, match="sliding layers"):
        engine.attended(laid(encoded), query, encoded[0].advance)


@pytest.mark.parametrize("kind", ["Mistral", "Cohere", "Granite", "Qwen3"])
def test_decoders_turn_in_half_precision(kind: str, tmp_path: Path) -> None:
    with HFEngine(write_decoder(tmp_path, kind, **DECODERS[kind]), dtype="bfloat16") as engine:
        assert engine.spec.kv.dtype == "bfloat16"
