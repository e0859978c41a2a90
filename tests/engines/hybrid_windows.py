"""Windows on hybrids on transformers, and what they are held against."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from engines.conformance import ALL, QUERY, laid
from engines.hybrids import edited, gap

CLOSE = 1e-4
"""Log-probabilities in float32; the kernel sums in blocks of 64 tokens from wherever a forward begins."""


def opened(folder: Path, **options: object) -> HFEngine:
    return HFEngine(folder, dtype="float32", **options)  # type: ignore[arg-type]


TEXTS = ("frame {} is red", "a camera sees {} squares", "now {}", "the number is {} and the shape is a circle")


def window_on(engine: Engine, fidelity: Fidelity | None = None) -> Window:
    return Window(engine, "watch a camera", fidelity=fidelity)


def chunk(i: int) -> Chunk:
    return Chunk.text(TEXTS[i % len(TEXTS)].format(i) + "\n")


def reprefill(engine: Engine, window: Window) -> dict[int, float]:
    encoded = [engine.encode_system_prompt(window.system_prompt), *(engine.encode(window.chunk(i)) for i in window.ids)]
    return engine.generate(laid(encoded), engine.encode_query(QUERY), ALL, salt="reference").logprobs


def assert_computes_what_is_new(engine: Engine, window: Window, one: Chunk, two: Chunk) -> None:
    """Appends compute what is new; forks, earlier versions, and a recall behind the same neighbours compute nothing."""
    query = engine.encode_query(QUERY).tokens
    first = window.append(one)
    window.ask(QUERY)
    second = window.append(two)
    assert window.ask(QUERY).usage.computed_tokens == window.chunks[1].tokens + query
    assert window.fork().ask(QUERY).usage.computed_tokens == query
    version = window.version
    window.evict(first)
    window.evict(second)
    assert window.at(version).ask(QUERY).usage.computed_tokens == query
    window.recall(first)
    assert window.ask(QUERY).usage.computed_tokens == query, "only the system prompt is in front"
    window.recall(second)
    assert window.ask(QUERY).usage.computed_tokens == query, "behind the same neighbours"


def program(engine: Engine, seed: int) -> None:
    """Random edits, each followed by an ask that is held against a re-prefill of what is placed."""
    rng = np.random.default_rng(seed)
    windows = [window_on(engine)]
    windows[0].extend([chunk(i) for i in range(3)])
    for step in range(8):
        window = edited(rng, windows, chunk)
        answer = window.ask(QUERY, max_tokens=2, logprobs=-1, remember=bool(rng.integers(5) == 0))
        assert answer.usage.exact
        if answer.remembered is None:
            assert gap(answer.first_token_logprobs, reprefill(engine, window)) < CLOSE, (seed, step)
            assert window.ask(QUERY, max_tokens=1).usage.computed_tokens == engine.encode_query(QUERY).tokens
        window.check()
