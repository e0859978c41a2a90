"""Exact windows on released weights: random edits on both engines, held against plain transformers over the whole prompt.

The folders are built by ``make released``; without them the tests are skipped by name. Gemma's windows are longer than its
sliding window of 512 tokens. ``CTXWIN_RELEASED_STEPS`` sets how many edits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from ctxwin import Chunk, Fidelity, Window, open_engine
from tools.released_models import RELEASES, default_cache

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("CTXWIN_RELEASED_STEPS", "12"))
CLOSE = 5e-3
"""Of log-probabilities in float32: the engines sum in other orders, over up to thirty layers."""
ANSWER = 6
SIZES = {"smollm2": (40, 120), "gemma3": (120, 220)}  # tokens of a chunk, about
QUESTIONS = ("\nIn short, this is about", "\nThe most important word above is")


@pytest.fixture(scope="module", params=list(RELEASES))
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = default_cache() / request.param
    if not found.is_dir():
        pytest.skip(f"{request.param} is not in {default_cache()}: run make released")
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[list[int]], tuple[list[int], torch.Tensor]]:
    """Transformers' greedy answer to a whole prompt, and the log-probabilities of each of its tokens."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(ids: list[int]) -> tuple[list[int], torch.Tensor]:
        prompt = torch.tensor([ids])
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        return made.sequences[0, len(ids) :].tolist(), torch.cat(made.logits).log_softmax(-1)

    return answer


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    options = {"max_model_len": 4096, "kv_cache_memory_bytes": 1 << 29} if request.param == "vllm" else {}
    with open_engine(str(folder), engine=request.param, dtype="float32", **options) as opened:
        yield opened


def edit(window: Window, rng: random.Random, fresh: Callable[[], Chunk]) -> str:
    """Apply one random edit and return its name."""
    ids = window.ids
    op = rng.choice(
        ["append", "insert", "evict", "forget", "slide", "recall", "look_back", "reorder", "toggle", "undo"]
    )
    if op in ("recall", "look_back") and window.evicted:
        gone = rng.choice(window.evicted)
        _ = window.recall(gone, rng.randint(0, len(ids))) if op == "recall" else window.look_back(gone)
    elif op == "undo" and window.version > len(ids):
        window.undo()
    elif op == "insert" or len(ids) < 3:
        window.insert(rng.randint(0, len(ids)), fresh())
    elif op in ("evict", "forget"):
        window.evict(rng.choice(ids), forget=op == "forget")
    elif op == "slide":
        window.slide(1)
    elif op == "reorder":
        window.reorder(rng.sample(ids, len(ids)))
    elif op == "toggle":  # and back: a chunk that is served clean has no counterpart in a whole prompt
        placement = rng.choice(ids)
        window.toggle(placement, conditioned=False)
        window.toggle(placement, conditioned=True)
    else:
        window.append(fresh())
    return op


def test_exact_answers_are_those_of_transformers(
    engine: Any, folder: Path, plain: Callable[[list[int]], tuple[list[int], torch.Tensor]]
) -> None:
    rng, names = random.Random(1), sorted(topics)
    least, most = SIZES[folder.name]

    def fresh() -> Chunk:
        words = topics[rng.choice(names)].split()
        start = rng.randrange(max(1, len(words) - most))
        return Chunk.text("\n" + " ".join(words[start : start + rng.randint(least, most)]))

    reused = 0
    with Window(engine, "You read a manual.", 3500, Fidelity("exact")) as window:
        window.extend([fresh() for _ in range(4)])
        trace = ["extend"]
        for step in range(STEPS):
            question = rng.choice(QUESTIONS)
            answer = window.ask(question, ANSWER, logprobs=8)
            encoded = [engine.encode_system_prompt(window.system_prompt)]
            encoded += [engine.encode(placed.chunk) for placed in window.snapshot().placed]
            ids = [i for e in [*encoded, engine.encode_query(question)] for i in e.token_ids]
            wanted, logprobs = plain(ids)
            assert answer.usage.exact and answer.usage.prompt_tokens == len(ids)
            for token, value in answer.first_token_logprobs.items():
                assert value == pytest.approx(float(logprobs[0, token]), abs=CLOSE), (step, trace)
            for at, (ours, theirs) in enumerate(zip(answer.token_ids, wanted, strict=False)):
                if ours != theirs:  # equally likely, as far as float32 tells; what follows has another prefix
                    assert float(logprobs[at, theirs] - logprobs[at, ours]) < CLOSE, (step, at, trace)
                    break
            reused += answer.usage.prompt_tokens - answer.usage.computed_tokens
            trace.append(edit(window, rng, fresh))
    assert reused > 0, "nothing was served from stored KV, so nothing was shown"
