"""Speculative drafters that keep KV: answers equal a plain vLLM's, and drafts are as good as they are there.

The drafters of `drafters` are right wherever they have the KV of the prompt, so that how many drafts are accepted says whether
it was carried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.vllm import drafters, faults
from ctxwin import Answer, Fidelity, Window
from ctxwin.chunk import Chunk
from ctxwin.engines.sampling import Sampling
from ctxwin.errors import UnsupportedModel
from ctxwin.store import open_store
from engines import models
from engines.conformance import HEADER, QUERY, laid, picture, with_spans

pytestmark = [pytest.mark.slow]
PLAIN = """
import json, sys
from ctxwin.engines.torchvision_repair import repair
repair()
from vllm import LLM, SamplingParams
from vllm.model_executor.models.registry import ModelRegistry
job = json.load(open(sys.argv[1]))
for name in job["classes"]:  # vLLM would look at them in a process of its own, which has had no repair
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
llm = LLM(job["model"], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 28, seed=0, disable_log_stats=False,
          enable_prefix_caching=False, speculative_config=job["setting"], **job["options"])
sampling = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
said = []
for prompt in job["prompts"]:
    (made,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    said.append(list(made.outputs[0].token_ids))
drafts = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode") and hasattr(m, "value")}
json.dump([said, drafts], open(sys.argv[2], "w"))
"""
MLA = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def texts(count: int) -> list[Chunk]:
    colors = ("circle", "square", "red", "blue", "camera", "number")
    return [Chunk.text(f"frame {i}: the {color} is {color} {color}\n" * 3) for i, color in enumerate(colors[:count])]


def eagle(path: Path) -> tuple[Path, dict[str, Any]]:
    target = drafters.write_target(path / "model")
    head = drafters.write_eagle(path / "head", target)
    return target, {"method": "eagle", "model": str(head), "num_speculative_tokens": 1}


def eagle3(path: Path) -> tuple[Path, dict[str, Any]]:
    target = models.wide(models.write_text_model, path / "model")
    head = drafters.write_eagle3(path / "head", target)
    return target, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}


def mtp(path: Path) -> tuple[Path, dict[str, Any]]:
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's latent attention on processors with AMX takes no heads as narrow as this model's")
    return drafters.write_mtp(path / "model"), {"method": "mtp", "num_speculative_tokens": 1}


def itself(path: Path) -> tuple[Path, dict[str, Any]]:
    target = models.wide(models.write_text_model, path / "model")
    return target, {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3}


def opened(target: Path, setting: dict[str, Any] | None, **options: Any) -> Any:
    from ctxwin_vllm.engine import VLLMEngine

    options = {"store": open_store("memory:"), "dtype": "float32", "disable_log_stats": False} | options
    return VLLMEngine(target, speculative_config=setting, **options)


def counts(engine: Any) -> tuple[int, int]:
    """Drafts made and accepted so far."""
    found = {m.name: getattr(m, "value", 0) for m in engine.core.driver.llm.get_metrics()}
    return found["vllm:spec_decode_num_draft_tokens"], found["vllm:spec_decode_num_accepted_tokens"]


def accepted(engine: Any, ask: Callable[[], Any]) -> float:
    """The share of drafts that are accepted while ``ask`` runs."""
    before = counts(engine)
    ask()
    drafted, right = (now - then for now, then in zip(counts(engine), before, strict=True))
    assert drafted > 5
    return right / drafted


@pytest.mark.parametrize(
    ("write", "processes"),
    [(eagle, "multi"), (eagle3, "single"), (mtp, "single"), (itself, "single")],
    ids=["eagle, between processes", "eagle3", "mtp", "a model"],
)
def test_exact_windows_answer_as_plain_vllm(write: Any, processes: str, tmp_path: Path) -> None:
    """A vLLM that never heard of ctxwin computes each prompt whole; its drafts are no better."""
    target, setting = write(tmp_path)
    engine = opened(target, setting, processes=processes)
    config = engine.core.driver.config
    prompts: list[list[int]] = []
    answers: list[Answer] = []
    with engine, Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
        chunks = {window.append(chunk): chunk for chunk in texts(6)}

        def ask() -> None:
            parts = [engine.encode_system_prompt(HEADER), *(engine.encode(chunks[i]) for i in window.ids)]
            prompts.append([i for part in [*parts, engine.encode_query(QUERY)] for i in part.token_ids])
            answers.append(window.ask(QUERY, 24))

        share = [accepted(engine, ask)]
        window.reorder([*reversed(window.ids)])
        ask()
        window.evict(window.ids[0])
        ask()
        window.recall(window.evicted[0])
        ask()  # behind two edits in turn, KV is stored by the first answer that no edit made compute it anew
        for _ in range(3):
            engine.core.driver.reset_prefix_cache()
            share.append(accepted(engine, ask))
            assert answers[-1].usage.bytes_loaded > 0 and answers[-1].usage.computed_tokens < len(prompts[-1]) / 2
        assert all(answer.usage.exact for answer in answers)
    job, told = tmp_path / "job.json", tmp_path / "told.json"
    classes = [
        name
        for kind in (config.model_config, config.speculative_config.draft_model_config)
        for name in kind.architectures
    ]
    options = MLA if write is mtp else {"block_size": 32}
    said = {"model": str(target), "prompts": prompts, "setting": setting, "classes": classes, "options": options}
    job.write_text(json.dumps(said))
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PLAIN, str(job), str(told)],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    plain, drafts = json.loads(told.read_text())
    assert [list(answer.token_ids) for answer in answers] == [ids[:-1] if len(ids) < 24 else ids for ids in plain]
    theirs = drafts["vllm:spec_decode_num_accepted_tokens"] / drafts["vllm:spec_decode_num_draft_tokens"]
    print(
        f"accepted by plain vLLM {theirs:.2f}, computed {share[0]:.2f}, loaded {', '.join(f'{s:.2f}' for s in share[1:])}"
    )
    if write is not eagle3:  # random, so that hardly a draft of it is right
        assert theirs > 0.8 and min(share) > 0.8


def test_a_span_without_the_drafters_kv(tmp_path: Path) -> None:
    """Spans of an engine that drafts nothing are served: answers stay, drafts are bad."""
    target, setting = itself(tmp_path)
    store = open_store("memory:")

    def asked(engine: Any) -> Answer:
        with Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
            window.extend(texts(4))
            return window.ask(QUERY, 24)

    with opened(target, None, store=store) as bare:
        right = asked(bare)
    found: list[Answer] = []
    with opened(target, setting, store=store) as engine:
        share = accepted(engine, lambda: found.append(asked(engine)))
        assert found[0].token_ids == right.token_ids and found[0].usage.bytes_loaded > 0 and share < 0.5
        assert engine.spec.identity == bare.spec.identity, "the model's KV is the same"
    with opened(target, setting) as engine:
        assert accepted(engine, lambda: asked(engine)) == 1.0


def test_pictures(tmp_path: Path) -> None:
    """A drafter of text with positions on one axis, behind a model that sees pictures on three."""
    target = models.wide(lambda f: models.write_vision_model(f, "qwen3_vl"), tmp_path / "model")
    head = drafters.write_eagle3(tmp_path / "head", target)
    found = []
    for setting in ({"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}, None):
        with opened(target, setting) as engine, Window(engine, HEADER, fidelity=Fidelity("exact")) as window:
            window.extend([Chunk.image(picture(0)), *texts(2), Chunk.image(picture(1)), *texts(1)])
            said = [window.ask(QUERY, 16, remember=True)]
            window.reorder([*window.ids[2:], *window.ids[:2]])
            said += [window.ask(QUERY, 16, remember=True), window.ask(QUERY, 16)]
            engine.core.driver.reset_prefix_cache()
            said.append(window.ask(QUERY, 16))
            assert said[-1].usage.exact and said[-1].usage.bytes_loaded > 0
            found.append([answer.token_ids for answer in said])
    assert found[0] == found[1]


def test_a_preempted_request(tmp_path: Path) -> None:
    """Requests lose their blocks, and load their KV and the drafter's anew."""
    from adapters.vllm.test_vllm_failures import preemptions

    target, setting = itself(tmp_path)
    with opened(target, setting, num_gpu_blocks_override=34) as engine:
        faults.endless(engine)
        query, long = engine.encode_query(QUERY), Sampling(max_tokens=300)
        layouts, right = [], []
        for seed in range(3):
            parts = [engine.encode_system_prompt(HEADER), *(engine.encode(chunk) for chunk in texts(seed + 2))]
            first = engine.generate(laid(parts, capture=True), query, long, salt=f"computed {seed}")
            layouts.append(with_spans(laid(parts), first.captured))
            right.append(first.token_ids)
        before = preemptions()

        def ask() -> None:
            with ThreadPoolExecutor(3) as threads:
                made = threads.map(lambda i: engine.generate(layouts[i], query, long, salt=f"at once {i}"), range(3))
                assert [m.token_ids for m in made] == right

        assert accepted(engine, ask) > 0.95
        assert preemptions() > before


def test_ranks(tmp_path: Path) -> None:
    """Each of two ranks has its share of a drafter's heads; spans are whole in the store, and either engine's serve the other."""
    target = models.wide(models.write_text_model, tmp_path / "model", num_attention_heads=2)
    head = drafters.write_eagle3(tmp_path / "head", target)
    setting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    made, answers = [], []
    with opened(target, setting) as one, opened(target, setting, tensor_parallel_size=2) as two:
        for engine in (one, two):
            parts = [engine.encode_system_prompt(HEADER), *(engine.encode(chunk) for chunk in texts(3))]
            query, sampling = engine.encode_query(QUERY), Sampling(max_tokens=16)
            made.append(engine.generate(laid(parts, capture=True), query, sampling, salt="computed"))
            for theirs in made:
                loaded = with_spans(laid(parts), theirs.captured)
                answers.append(engine.generate(loaded, query, sampling, salt=f"loaded {len(answers)}"))
                assert answers[-1].computed_tokens == query.tokens and answers[-1].fallbacks == 0
        assert all(m.token_ids == made[0].token_ids for m in (*made, *answers))
        for i, span in made[0].captured.items():
            other = made[1].captured[i]
            assert span.outputs.keys() == other.outputs.keys() and len(span.outputs) == 2
            for name, rows in span.outputs.items():
                assert rows.shape == (span.tokens, 1, 2, 32)
                last = slice(None, -1)  # whose KV depends on what follows it
                torch.testing.assert_close(other.outputs[name][last], rows[last], atol=1e-4, rtol=0)


def test_what_is_refused(tmp_path: Path) -> None:
    from ctxwin_vllm.refusals import check_config

    target, setting = itself(tmp_path)
    with pytest.raises(UnsupportedModel, match="outputs=True needs a vLLM whose drafter keeps no KV"):
        opened(target, setting, outputs=True)
    with opened(target, setting) as engine:
        config = engine.core.driver.config
        check_config(config)
        drafter = config.speculative_config
        for changed, match in (
            ({"method": "medusa"}, "speculative_config must be unset.*got 'medusa'"),
            ({"method": "dflash"}, "speculative_config must be unset.*got 'dflash'"),
            ({"parallel_drafting": True}, "parallel_drafting must be False"),
        ):
            other = SimpleNamespace(**{**vars(drafter), **changed})
            with pytest.raises(UnsupportedModel, match=match):
                check_config(SimpleNamespace(**{**vars(config), "speculative_config": other}))
