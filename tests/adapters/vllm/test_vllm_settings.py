"""Settings that people serve with: exact windows answer as a plain vLLM does under the same setting."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctxwin import Answer, Fidelity, Window
from ctxwin.audit.auditor import auditor_of
from ctxwin.chunk import Chunk
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.relocate import relocate
from ctxwin.store import open_store
from engines import models
from engines.conformance import HEADER, QUERY, laid, picture, with_spans

pytestmark = [pytest.mark.slow]
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
# vLLM's n-gram drafter imports numba, beside which vLLM 0.32 opens no second engine in the same process.
OPEN: dict[str, dict[str, Any]] = {"ngram": {"processes": "multi"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_config": NGRAM},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
}


def need_fp8() -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's fp8 KV cache on processors needs AVX-512")


LORA = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}
PLAIN = """
import json, sys
from ctxwin.engines.torchvision_repair import repair
repair()
from vllm import LLM, SamplingParams
from vllm.model_executor.models.registry import ModelRegistry
# Imported here, since vLLM would look at the class in a process of its own, which has had no repair.
ModelRegistry.register_model("Qwen2ForCausalLM", ModelRegistry.models["Qwen2ForCausalLM"].load_model_cls())
job = json.load(open(sys.argv[1]))
llm = LLM(job["model"], dtype="float32", enforce_eager=True, block_size=32, kv_cache_memory_bytes=1 << 28, seed=0,
          enable_prefix_caching=False, disable_log_stats=True, **job["setting"])
sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
with_lora = {}
if job["lora"]:
    from vllm.lora.request import LoRARequest
    with_lora = {"lora_request": LoRARequest("plain", 1, job["lora"])}
made = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False, **with_lora)
json.dump([list(m.outputs[0].token_ids) for m in made], open(sys.argv[2], "w"))
"""
COLORS = ("circle", "square", "red", "blue", "camera", "number")


def texts(count: int) -> list[Chunk]:
    return [Chunk.text(f"frame {i}: the {color} is {color} {color}\n") for i, color in enumerate(COLORS[:count])]


def write_lora(folder: Path, model: Path, seed: int, rank: int = 4) -> Path:
    """A random adapter of the attention's projections, in PEFT's layout."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensors[f"{stem}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets, "lora_dropout": 0.0}))
    return folder


def quantise(folder: Path) -> Path:
    """Weights in 8 bits with a scale a row, activations rounded by token, as compressed-tensors writes them."""
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    method = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    models.edit_config(
        folder, quantization_config={**method, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    )
    return folder


@pytest.mark.parametrize("name", [*SETTINGS, "lora", "int8 weights"])
def test_exact_windows_answer_as_plain_vllm(name: str, tmp_path: Path) -> None:
    """A vLLM that never heard of ctxwin computes each prompt whole, under the same setting."""
    from ctxwin_vllm.engine import VLLMEngine

    if name == "int8 weights" and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's kernel for int8 weights on processors with AMX takes no float32")
    if name in FP8:
        need_fp8()
    folder = models.wide(models.write_text_model, tmp_path / "model")
    lora = write_lora(tmp_path / "lora", folder, 0) if name == "lora" else None
    if name == "int8 weights":
        quantise(folder)
    setting = SETTINGS.get(name, {})
    mine = {"lora": lora} if lora else {**setting, **OPEN.get(name, {})}
    engine = VLLMEngine(folder, dtype="float32", store=open_store("memory:"), **mine)
    if name == "int8 weights":
        assert engine.core.driver.config.model_config.quantization == "compressed-tensors"
    prompts: list[list[int]] = []
    answers: list[Answer] = []
    with engine, Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
        chunks = {window.append(chunk): chunk for chunk in texts(6)}

        def ask() -> None:
            parts = [engine.encode_system_prompt(HEADER), *(engine.encode(chunks[i]) for i in window.ids)]
            prompts.append([i for part in [*parts, engine.encode_query(QUERY)] for i in part.token_ids])
            answers.append(window.ask(QUERY, 16))

        ask()
        window.reorder([*reversed(window.ids)])
        ask()
        window.evict(window.ids[0])
        ask()
        window.recall(window.evicted[0])
        ask()
        ask()
        assert all(answer.usage.exact for answer in answers)
        assert answers[-1].usage.computed_tokens < answers[0].usage.computed_tokens / 2
    job, told = tmp_path / "job.json", tmp_path / "told.json"
    said = {"setting": LORA if lora else setting, "lora": str(lora or "")}
    job.write_text(json.dumps({"model": str(folder), "prompts": prompts, **said}))
    env = {
        **os.environ,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", PLAIN, str(job), str(told)], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    plain = json.loads(told.read_text())
    assert [list(answer.token_ids) for answer in answers] == [ids[:-1] if len(ids) < 16 else ids for ids in plain]


def test_adapters_share_nothing(tmp_path: Path) -> None:
    """Two adapters and none, in one vLLM over one store: each answers as alone, none is served the others' KV."""
    from ctxwin_vllm.engine import VLLMEngine

    folder = models.wide(models.write_text_model, tmp_path / "model")
    loras = [write_lora(tmp_path / f"lora{i}", folder, i) for i in range(2)]
    store = open_store("memory:")

    def asked(engine: VLLMEngine) -> tuple[tuple[int, ...], int]:
        with Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
            window.extend(texts(4))
            answer = window.ask(QUERY, 16)
            return answer.token_ids, answer.usage.computed_tokens

    with VLLMEngine(folder, dtype="float32", store=store, lora=loras[0]) as first:
        second, plain = (first.view("", store, lora=lora) for lora in (loras[1], None))
        shutil.copy(loras[0] / "adapter_model.safetensors", loras[1])  # a training's next checkpoint
        found = [asked(engine) for engine in (first, second, plain)]
        assert len({ids for ids, _ in found}) == 3 and len({computed for _, computed in found}) == 1
        assert [asked(engine)[0] for engine in (first, second, plain)] == [ids for ids, _ in found]
        assert len({e.spec.identity for e in (first, second, plain)}) == 3
        assert plain.spec.model == str(folder) != first.spec.model, "a profile of the model is none of the adapted one"
        kept = {id(auditor_of(engine).evidence_of(engine)) for engine in (first, second, plain)}
        assert len(kept) == 3, "what is safe with one is not known to be with another"
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            first.view("", lora=folder)
        with pytest.raises(UnsupportedModel, match="got 16 over 8"):
            first.view("", lora=write_lora(tmp_path / "large", folder, 2, rank=16))
        config = loras[1] / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
        with pytest.raises(UnsupportedModel, match="DoRA"):
            first.view("", lora=loras[1])
        second.close()
        plain.close()
    with pytest.raises(ValueError, match="name the adapter: lora=FOLDER"):
        VLLMEngine(folder, dtype="float32", enable_lora=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_spans_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    """Captured, loaded where they were: the same numbers in the cache, so the same log-probabilities."""
    from ctxwin_vllm.engine import VLLMEngine

    if name in FP8:
        need_fp8()
    folder = models.wide(lambda f: models.write_vision_model(f, "qwen3_vl"), tmp_path / "model")
    with VLLMEngine(
        folder, dtype="float32", store=open_store("memory:"), **SETTINGS[name], **OPEN.get(name, {})
    ) as engine:
        chunks = [*texts(2), Chunk.image(picture(1))]
        encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(c) for c in chunks)]
        query, sampling = engine.encode_query(QUERY), Sampling(max_tokens=16, logprobs=-1)
        first = engine.generate(laid(encoded, capture=True), query, sampling, salt="computed")
        again = engine.generate(with_spans(laid(encoded), first.captured), query, sampling, salt="loaded")
        assert again.computed_tokens == query.tokens and again.token_ids == first.token_ids
        assert max(abs(first.logprobs[t] - again.logprobs[t]) for t in first.logprobs) <= 1e-5


@pytest.mark.parametrize(("name", "step"), [("fp8_e4m3", 2**-3), ("fp8_e5m2", 2**-2)])
def test_a_moved_span_is_rounded_once_more(name: str, step: float, tmp_path: Path) -> None:
    """First-layer keys, which depend on token and place alone, against those vLLM computes and rounds at the new place."""
    need_fp8()
    from ctxwin_vllm.engine import VLLMEngine

    folder = models.wide(models.write_text_model, tmp_path / "model")
    with VLLMEngine(folder, dtype="float32", store=open_store("memory:"), **SETTINGS[name]) as engine:
        moving, filler = (engine.encode(chunk) for chunk in (texts(1)[0], Chunk.text("red " * 90)))
        near = engine.prefill([], moving, 0)
        far = engine.prefill([Segment(filler, 0)], moving, filler.advance)
        turned = relocate(near, engine.spec.kv, filler.advance).k[0]
        held = turned.to(FP8[name]).float()
        scale = turned.square().mean().sqrt()
        unrounded, error = (
            float((near.k[0] - near.k[0].to(FP8[name]).float()).abs().max()),
            (held - far.k[0]).abs() / scale,
        )
        assert unrounded == 0, "what is read back is what an 8-bit cache can say"
        print(f"{name}: {float(error.square().mean().sqrt()):.4f} of the keys' root mean square")
        assert float(error.square().mean().sqrt()) < step / 2


@pytest.mark.parametrize("processes", ["single", "multi"])
def test_stored_in_eight_bits(processes: str, tmp_path: Path) -> None:
    """What a quantised cache says takes a byte a number in the store, and answers as it did when it was computed."""
    need_fp8()
    from ctxwin_vllm.engine import VLLMEngine

    folder, sizes, found = models.wide(models.write_text_model, tmp_path / "model"), {}, []
    for cache in ("fp8_e4m3", "auto"):
        store = open_store("memory:")
        for _ in range(2):
            with (
                VLLMEngine(folder, dtype="bfloat16", store=store, kv_cache_dtype=cache, processes=processes) as engine,
                Window(engine, HEADER, fidelity=Fidelity("exact")) as window,
            ):
                window.extend([Chunk.text(f"frame {i}: " + "red circle " * 40) for i in range(3)])
                answer = window.ask(QUERY, 16)
                found.append(answer)
        sizes[cache] = sum(len(store.get(key) or b"") for key in store.list("span/"))
        assert found[-1].token_ids == found[-2].token_ids and found[-1].usage.bytes_loaded > 0
    print(f"bytes of the spans: {sizes}")
    assert sizes["fp8_e4m3"] < 0.65 * sizes["auto"]


def test_other_names_in_the_store(tmp_path: Path) -> None:
    """KV that a quantised cache rounded is never served by an engine that keeps it whole."""
    from ctxwin_vllm.core import read_model

    folder = models.write_text_model(tmp_path / "model")
    kinds = {cache: read_model(folder, "bfloat16", cache)[1].identity for cache in ("auto", "fp8_e4m3", "fp8_e5m2")}
    assert len(set(kinds.values())) == 3 and read_model(folder, "bfloat16", "fp8")[1].identity == kinds["fp8_e4m3"]
    config = json.loads((folder / "config.json").read_text())
    for quantization in (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ):  # vLLM takes its word for it, where the option leaves it open
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        named = {cache: read_model(folder, "bfloat16", cache)[1].identity for cache in ("auto", "fp8", "bfloat16")}
        assert named["auto"] == named["fp8"] != named["bfloat16"]


@pytest.mark.parametrize("name", ["half", "float", "float16", "bfloat16"])
def test_names_of_dtypes_are_those_of_vllm(tmp_path: Path, name: str) -> None:
    from vllm.config.model import str_dtype_to_torch_dtype

    from ctxwin_vllm.core import read_model

    folder = models.write_text_model(tmp_path / "model")
    assert f"torch.{read_model(folder, name)[1].dtype}" == str(str_dtype_to_torch_dtype(name))
