"""The study of edits behind which chunks keep their KV, on a random model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from ctxwin.chunk import Chunk
from evals.studies import released_texts
from evals.studies.clock import PIECES, Item, fact_items, measure, summarise
from evals.studies.released_texts import Texts

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


@pytest.mark.parametrize("edited", [False, True])
def test_what_is_reused_differs_and_the_same_arithmetic_does_not(engine: HFEngine, edited: bool) -> None:
    """With the engine itself in place of one of another arithmetic, the floor is nothing."""
    rows, ways = [], ["edited"] if edited else ["tick", "turns"]
    original = (2, Chunk.text("the number 9 is red")) if edited else None
    for index in range(2):
        chunks = [Chunk.text(f"the number {i + index} is blue") for i in range(6)]
        item = Item(chunks, {"color": engine.encode_query("what color is the number 3?")}, original)
        rows += [{"item": index, **row} for row in measure(engine, engine, item, 7)]
        assert not list(engine.store.list("span/")), "an item finds no KV of another"
    assert [row["way"] for row in rows] == [*ways, "floor"] * 2
    figures = {row["way"]: row for row in summarise(rows)}
    assert all(figures[way]["kl"] > 1e-6 and figures[way]["n"] == 2 for way in ways)
    assert figures["floor"]["kl"] < 1e-9 and figures["floor"]["changed"] == 0


@pytest.mark.parametrize("form", PIECES)
def test_one_fact_was_another_before(engine: HFEngine, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released_texts, "documentation", lambda: iter(["Two boats pass, and all is quiet. " * 20] * 5))
    contexts = Texts(engine, 3).contexts(f"facts-{form}", 3)
    for item, context in zip(fact_items(engine, 3, 3, form), contexts, strict=True):
        assert item.original is not None
        place, original = item.original
        now, then = (np.array(engine.encode(chunk).token_ids) for chunk in (item.chunks[place], original))
        same = min(len(now), len(then))
        begin = int(np.argmin(now[:same] == then[:same]))
        end = int(np.argmin(now[::-1][:same] == then[::-1][:same]))
        assert 0 < max(len(now), len(then)) - begin - end <= 16, "it is small enough for lane edited"
        assert [tuple(engine.encode(chunk).token_ids) for chunk in item.chunks] == list(
            context.chunks[-context.placed :]
        )
        assert item.target == context.target
