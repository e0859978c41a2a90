"""A pretrained language model that sees: exact windows of pictures on both engines, held against plain transformers.

The folder is built by ``make released``; without it the tests are skipped by name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.tiny.world import Frame, all_questions, render, sample_frames
from tools.released_models import SEEING, default_cache

pytestmark = pytest.mark.slow

CLOSE = 5e-3
"""Of log-probabilities in float32: the engines sum in other orders, over thirty layers."""
STEPS = 6


@pytest.fixture(scope="module")
def folder() -> Path:
    found: Path = default_cache() / SEEING
    if not found.is_dir():
        pytest.skip(f"{SEEING} is not in {default_cache()}: run make released")
    return found


@pytest.fixture(scope="module", params=["hf", "vllm"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    options = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 29} if request.param == "vllm" else {}
    with open_engine(str(folder), engine=request.param, dtype="float32", **options) as opened:
        yield opened


def test_answers_are_those_of_transformers_and_mostly_right(engine: Any, folder: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    plain: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = AutoProcessor.from_pretrained(folder)
    rng, frames, right, reused = random.Random(3), dict[str, Frame](), 0, 0
    stream = iter(sample_frames(np.random.default_rng(5), ["legend", "scene"] * STEPS, marks_per_frame=8))
    with Window(engine, "You watch a camera.", 1900, Fidelity("exact")) as window:

        def append() -> None:
            frame = next(stream)
            frames[window.append(Chunk.image(render(frame)))] = frame

        append()
        append()
        for step in range(STEPS):
            placed = [frames[placement] for placement in window.ids]
            question = rng.choice([q for q in all_questions(placed) if q.kind == "single_hop"])
            answer = window.ask(question.text, 3, logprobs=4)
            parts = [{"type": "image"} for _ in placed] + [{"type": "text", "text": question.text}]
            turns = [{"role": "system", "content": window.system_prompt}, {"role": "user", "content": parts}]
            text = processor.apply_chat_template(turns, add_generation_prompt=True)
            inputs = processor(text=text, images=[Image.fromarray(render(f)) for f in placed], return_tensors="pt")
            with torch.inference_mode():
                expected = plain(**inputs).logits[0, -1].log_softmax(-1)
            assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]
            for token, value in answer.first_token_logprobs.items():
                assert value == pytest.approx(float(expected[token]), abs=CLOSE), step
            right += answer.text.strip() == question.answer
            reused += answer.usage.prompt_tokens - answer.usage.computed_tokens
            match rng.choice(["slide", "reorder", "evict", "look back"]):
                case "slide":
                    window.slide(1)
                case "reorder":
                    window.reorder(rng.sample(window.ids, len(window.ids)))
                case "evict":
                    window.evict(rng.choice(window.ids))
                case _ if window.evicted:
                    window.look_back(rng.choice(window.evicted))
            while len(window.ids) < 2:
                append()
    assert reused > 0, "nothing was served from stored KV, so nothing was shown"
    assert right >= STEPS - 1
