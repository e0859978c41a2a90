"""Low priority: a background request with loaded KV gives way to plain ones, and comes back with its KV loaded anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from adapters.vllm.layouts import laid, picture
from ctxwin.engines.sampling import Sampling

BLOCKS, BLOCK = 13, 32
LONG = Sampling(max_tokens=40, logprobs=-1)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Any]:
    """A paged cache that holds one long request, not two."""
    from ctxwin_vllm.engine import VLLMEngine

    token = 3 * 2 * 32 * 4  # 3 layers of one head of 32, K and V, float32
    opened = VLLMEngine(
        model_dir,
        dtype="float32",
        max_model_len=(BLOCKS - 1) * BLOCK,
        kv_cache_memory_bytes=BLOCKS * BLOCK * token,
        max_num_seqs=4,
    )
    yield opened
    opened.close()


@pytest.fixture
def asked(engine: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """What vLLM's scheduler did with each request: times preempted, times it was to be loaded."""
    scheduler = engine._core.driver.llm.llm_engine.engine_core.engine_core.scheduler
    seen: dict[str, Counter[str]] = {"preempted": Counter(), "loaded": Counter()}
    preempt, allocated = scheduler._preempt_request, scheduler.connector.update_state_after_alloc

    def preempted(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen["preempted"][request.request_id] += 1
        return preempt(request, *args, **kwargs)

    def loaded(request: Any, blocks: Any, tokens: int) -> Any:
        seen["loaded"][request.request_id] += tokens > 0
        return allocated(request, blocks, tokens)

    monkeypatch.setattr(scheduler, "_preempt_request", preempted)
    monkeypatch.setattr(scheduler.connector, "update_state_after_alloc", loaded)
    return seen


def plain(engine: Any, seed: int, tokens: int = 200, answer: int = 60, priority: int = 0) -> Any:
    """A request of somebody else, of more than half of the cache unless told otherwise."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    ids = np.random.default_rng(seed).integers(20, 200, tokens).tolist()
    sampling = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
    return engine._core.driver.submit(dict(tokens_input(ids)), sampling, priority)


def drain(ticket: Any) -> Any:
    while True:
        output = ticket.outputs.get(timeout=60)
        if isinstance(output, BaseException):
            raise output
        if output.finished:
            return output


@pytest.mark.parametrize("salt", ["a window's own space", ""], ids=["loaded at once", "loaded in the background"])
def test_a_preempted_background_request(engine: Any, asked: dict[str, Counter[str]], salt: str) -> None:
    from ctxwin_vllm.engine import Ask
    from ctxwin_vllm.requests import StreamGuard

    parts = [engine.encode_system_prompt("watch a camera"), *(engine.encode(picture(seed)) for seed in (1, 2, 3))]
    query = engine.encode_query("what color")
    whole = engine.generate(laid(parts), query, LONG, salt=salt)
    spans = [whole.captured[i] for i in range(4)]
    drain(plain(engine, 1))  # leaves no block of the prompt in vLLM's own prefix cache
    drain(plain(engine, 2))
    others: list[Any] = []
    tokens = sum(part.tokens for part in parts) + query.tokens
    free = (BLOCKS - 1) - -(-(tokens + 10) // BLOCK)  # vLLM keeps one block for itself

    heard: list[int] = []

    def on_token(token: int, text: str) -> bool:
        heard.append(token)
        if len(heard) == 2:  # there is room for its prompt; its answer takes every other block
            prompt = free * BLOCK - 6
            others.append(plain(engine, 3, prompt, (BLOCKS - 1) * BLOCK - prompt))
        return True

    ask = Ask(query, LONG, salt, on_token=StreamGuard(on_token, engine.decode), background=True)
    made, outcome = engine.asks.serve(laid(parts, spans), ask)
    assert drain(others[0]).outputs[0].finish_reason == "length"
    (name,) = [request for request, times in asked["preempted"].items() if times]
    assert name.startswith("ctxwin-") and asked["preempted"][name] == 1
    assert asked["loaded"][name] == 2
    # Its KV is loaded twice; the answer is the undisturbed one.
    assert made.bytes_loaded == 2 * sum(span.nbytes for span in spans) and made.fallbacks == 0
    assert outcome.token_ids == whole.token_ids and len(outcome.token_ids) > 5
    assert heard == list(outcome.token_ids)[: len(heard)] and len(heard) > 5  # each once
    assert max(abs(outcome.logprobs[t] - p) for t, p in whole.logprobs.items()) < 1e-4


def test_submitted_last_and_answered_first(engine: Any) -> None:
    """One runs, and there is no room for a second: of those that wait, the background request is the last."""
    from ctxwin_vllm.requests import BACKGROUND

    outputs: SimpleQueue[Any] = SimpleQueue()  # one for all three: in the order in which vLLM gives them
    names: dict[str, str] = {}

    def submit() -> None:  # on vLLM's thread: they come in together
        for seed, (name, priority) in enumerate({"running": 0, "background": BACKGROUND, "plain": 0}.items()):
            ticket = plain(engine, seed, 200, 60, priority)
            ticket.outputs = outputs
            names[ticket.name] = name

    engine._core.driver.call(submit)
    order: list[str] = []
    while len(order) < len(names):
        output = outputs.get(timeout=60)
        if isinstance(output, BaseException):
            raise output
        if output.finished:
            order.append(names[output.request_id])
    assert order == ["running", "plain", "background"]
