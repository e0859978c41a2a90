"""The study of a clock in the system prompt, on a random model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxwin.chunk import Chunk
from evals.studies.clock import measure, summarise

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


def test_what_is_reused_differs_and_the_same_arithmetic_does_not(engine: HFEngine) -> None:
    """With the engine itself in place of one of another arithmetic, the floor is nothing."""
    items = [[Chunk.text(f"the number {i + k} is blue") for i in range(6)] for k in range(2)]
    rows = []
    for index, chunks in enumerate(items):
        queries = {"color": engine.encode_query("what color is the number 3?")}
        rows += [{"item": index, **row} for row in measure(engine, engine, (chunks, queries), 7)]
        assert not list(engine.store.list("span/")), "an item finds no KV of another"
    assert [row["way"] for row in rows] == ["tick", "turns", "floor"] * 2
    figures = {row["way"]: row for row in summarise(rows)}
    assert all(figures[way]["kl"] > 1e-6 and figures[way]["n"] == 2 for way in ("tick", "turns"))
    assert figures["floor"]["kl"] < 1e-9 and figures["floor"]["changed"] == 0
