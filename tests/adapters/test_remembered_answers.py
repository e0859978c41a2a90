"""An answer in which a model writes placeholders of media reaches its caller, and is remembered, through every interface."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from adapters.server.serving import serving
from ctxwin import AsyncWindow, Fidelity, Window
from ctxwin.engines.hf.engine import HFEngine
from ctxwin_client import RemoteWindow
from langchain_ctxwin.langgraph import WindowContext, WindowNode, load
from node_graphs import CONFIG, graph_of

HEADER, QUERY = "You watch a camera.", "what color is the square"
EXACT = Fidelity("exact")


@pytest.fixture(scope="module")
def engine(vision_dir: Path) -> Iterator[HFEngine]:
    with HFEngine(vision_dir, dtype="float32") as opened:
        yield opened


def options(seed: int) -> dict[str, Any]:
    return {"max_tokens": 48, "temperature": 2.0, "seed": seed}


@pytest.fixture(scope="module")
def answers(engine: HFEngine) -> dict[int, tuple[str, str]]:
    """By seed: an answer with placeholders, and the chunk that it becomes in a window in this process."""
    found, media = {}, engine.encoder.checkpoint.media
    assert media is not None
    for seed in range(150):
        with Window(engine, HEADER, fidelity=EXACT) as window:
            answer = window.ask(QUERY, **options(seed), remember=True)
            if {media.image, media.video} & set(answer.token_ids):
                assert answer.remembered is not None and answer.text
                found[seed] = answer.text, window.chunk(answer.remembered).id
        if len(found) == 3:
            break
    assert len(found) == 3
    return found


def test_async_windows(engine: HFEngine, answers: dict[int, tuple[str, str]]) -> None:
    async def ask(seed: int) -> tuple[str, str]:
        async with AsyncWindow(engine, HEADER, fidelity=EXACT) as window:
            answer = await window.ask(QUERY, **options(seed), remember=True)
            assert answer.remembered is not None
            return answer.text, window.window.chunk(answer.remembered).id

    assert {seed: asyncio.run(ask(seed)) for seed in answers} == answers


def test_remote_windows(vision_dir: Path, answers: dict[int, tuple[str, str]]) -> None:
    with serving(make=lambda store: HFEngine(vision_dir, dtype="float32", store=store)) as server:
        for seed, (text, chunk) in answers.items():
            with RemoteWindow(server.client(max_retries=0), HEADER, fidelity=EXACT) as window:
                answer = window.ask(QUERY, **options(seed), remember=True)
                assert answer.text == text and [entry.chunk_id for entry in window.plan().entries] == [chunk]


def test_nodes_of_graphs(engine: HFEngine, answers: dict[int, tuple[str, str]]) -> None:
    for seed, (text, chunk) in answers.items():
        app = graph_of(WindowNode(system_prompt=HEADER, fidelity=EXACT, **options(seed)))
        state = app.invoke({"messages": [HumanMessage(QUERY)]}, CONFIG, context=WindowContext(engine))
        with load(engine, state["window"]) as window:
            assert state["messages"][-1].text == text and [window.chunk(i).id for i in window.ids] == [chunk]
