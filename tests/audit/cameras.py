"""Streams of the bundled model's world, and questions about them."""

from __future__ import annotations

import numpy as np

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.tiny.world import Frame, make_stream, questions_for, render

SYSTEM = "You watch a camera."
LONG = 60.0


def stream(count: int, seed: int = 0) -> list[Frame]:
    return make_stream(np.random.default_rng(seed), count, window=6)


def question(frames: list[Frame], seed: int = 0) -> str:
    return questions_for(frames, 8, np.random.default_rng(seed), ("multi_hop", "single_hop"))[0].text


def filled(engine: HFEngine, fidelity: Fidelity, frames: list[Frame]) -> Window:
    window = Window(engine, SYSTEM, fidelity=fidelity)
    window.extend([Chunk.image(render(frame)) for frame in frames])
    return window
