"""Small recorded runs for the tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ctxwin import Chunk, Fidelity, Window
from ctxwin.view.trace import Trace
from window.fake import FakeEngine

DESK, PHONE = (1440, 1000), (360, 780)


def frame(second: int, text: str = "") -> Chunk:
    pixels = np.full((60, 80, 3), (20 + 23 * second) % 256, np.uint8)
    pixels[20:40, 20:60] = (255 - 11 * second) % 256
    return Chunk.image(pixels, text=text or f"t={second} s")


@contextmanager
def watched(engine: FakeEngine, path: Path, budget: int = 120) -> Iterator[tuple[Trace, Window]]:
    fidelity = Fidelity("patched", rank=2)
    with Trace(path) as trace, Window(engine, "You watch.", budget=budget, fidelity=fidelity) as window:
        trace.watch(window)
        yield trace, window


def everything_once(engine: FakeEngine, path: Path) -> None:
    """Arrivals, a slide, a recall, a reorder, a branch that is adopted, a toggle, a pin, an exchange, a test."""
    with watched(engine, path) as (trace, window):
        ids = [window.append(frame(i)) for i in range(3)]  # t=0 t=1 t=2
        answer = window.ask("first?", max_tokens=3)
        trace.note({"prefix cache": 40, "trimming": 30}, truth=answer.text, answers={"re-prefill": answer.text})
        ids.append(window.append(frame(3)))
        window.slide(1)  # t=0 leaves: t=1 t=2 t=3
        window.ask("second?", max_tokens=3)
        trace.note(
            {"prefix cache": 50}, truth="something else", answers={"re-prefill": "something else"}, idle_tokens=5
        )
        window.recall(ids[0])  # t=0 t=1 t=2 t=3
        window.ask("third?", max_tokens=3)
        window.reorder([ids[1], ids[2], ids[0], ids[3]])  # t=0 goes behind t=2
        window.ask("fourth?", max_tokens=3)
        with window.fork() as branch:
            branch.evict(ids[2])
            branch.ask("in the branch?", max_tokens=3)
            window.adopt(branch)  # t=1 t=0 t=3
        window.toggle(ids[3], conditioned=False)
        window.pin(ids[1])
        window.ask("fifth?", max_tokens=3, remember=True)
        window.disposable(ids[0], "sixth?", max_tokens=3)
