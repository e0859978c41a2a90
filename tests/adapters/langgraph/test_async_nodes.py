"""Async nodes: nothing of a window runs on the event loop, and a run that is cancelled stops the answer."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from ctxwin import Chunk, Fidelity
from ctxwin.window.core import open_windows
from langchain_ctxwin.langgraph import (
    WindowContext,
    WindowNode,
    WindowState,
    aopen_window,
    load,
    merge_windows,
    open_window,
)
from window.fake import FakeEngine
from window.guarded import GuardedEngine

CONFIG: Any = {"configurable": {"thread_id": "t"}}
EXACT = Fidelity("exact")
Picture = Callable[[int], Chunk]


class State(TypedDict, total=False):
    turn: int
    window: Annotated[dict[str, Any], merge_windows]
    answers: Annotated[list[str], operator.add]


def watching(picture: Picture, *, asynchronous: bool) -> Any:
    """Three turns of a node, each with a branch that is gathered, and one that is adopted by its reference."""

    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        turn = state.get("turn", 0)
        with open_window(state.get("window"), runtime, system_prompt="hd", fidelity=EXACT, budget=80) as window:
            window.append(picture(turn))
            with window.fork() as branch:
                branch.append(Chunk.text(f"gathered {turn}"))
                window.gather([branch])
                reference = branch.ref()
            if turn == 2:
                window.adopt(reference)
            window.slide(reserve_tokens=20)
            window.notes["turns"] = window.notes.get("turns", 0) + 1
            answers = [window.ask("what?", 3, remember=True).text, "".join(window.stream("so?", 3))]
            return {"turn": turn + 1, "window": window.ref(), "answers": [*answers, str((window.lost, window.notes))]}

    async def alook(state: State, runtime: Runtime[WindowContext]) -> State:
        turn = state.get("turn", 0)
        options: Any = {"system_prompt": "hd", "fidelity": EXACT, "budget": 80}
        async with aopen_window(state.get("window"), runtime, **options) as window:
            await window.append(picture(turn))
            async with window.fork() as branch:
                await branch.append(Chunk.text(f"gathered {turn}"))
                await window.gather([branch])
                reference = await branch.ref()
            if turn == 2:
                await window.adopt(reference)
            await window.slide(reserve_tokens=20)
            window.notes["turns"] = window.notes.get("turns", 0) + 1
            answers = [(await window.ask("what?", 3, remember=True)).text]
            answers.append("".join([text async for text in window.stream("so?", 3)]))
            lost = str((window.lost, window.notes))
            return {"turn": turn + 1, "window": await window.ref(), "answers": [*answers, lost]}

    graph = StateGraph(State, context_schema=WindowContext)
    graph.add_node("look", alook if asynchronous else look)
    graph.add_edge(START, "look")
    graph.add_conditional_edges("look", lambda state: "look" if state["turn"] < 3 else END)
    return graph.compile(checkpointer=InMemorySaver())


def ready() -> Any:
    graph = StateGraph(WindowState, context_schema=WindowContext)
    graph.add_node(WindowNode(max_tokens=3, system_prompt="hd", fidelity=EXACT, budget=60))
    graph.add_edge(START, "window")
    return graph.compile(checkpointer=InMemorySaver())


def test_a_node_of_ones_own_does_the_same_off_the_event_loop(picture: Picture) -> None:
    with FakeEngine() as engine:
        plain = watching(picture, asynchronous=False).invoke({}, CONFIG, context=WindowContext(engine))

    async def run() -> None:
        with GuardedEngine(threading.get_ident()) as engine:
            app = watching(picture, asynchronous=True)
            awaited = await app.ainvoke({}, CONFIG, context=WindowContext(engine))
            assert awaited["answers"] == plain["answers"] and awaited["turn"] == 3
            placed = [[entry["tokens"] for entry in state["window"]["placed"]] for state in (awaited, plain)]
            assert placed[0] == placed[1]
            assert not open_windows(engine.store) and engine.store.stats().leased == 0
            engine.home = None
            with load(engine, awaited["window"]) as window:
                window.check()

    asyncio.run(run())


def test_the_ready_node_does_the_same_off_the_event_loop() -> None:
    turns = [{"messages": [HumanMessage(f"question {i}?")]} for i in range(4)]
    with FakeEngine() as engine:
        app = ready()
        for turn in turns:
            plain = app.invoke(turn, CONFIG, context=WindowContext(engine))

    async def run() -> Any:
        with GuardedEngine(threading.get_ident()) as engine:
            app = ready()
            for turn in turns:
                state = await app.ainvoke(turn, CONFIG, context=WindowContext(engine))
            assert not open_windows(engine.store) and engine.store.stats().leased == 0
            return state

    awaited = asyncio.run(run())
    texts = [[m.text for m in state["messages"] if isinstance(m, AIMessage)] for state in (awaited, plain)]
    assert texts[0] == texts[1] and len(texts[0]) == 4


@pytest.mark.parametrize("gate", ["encode_system_prompt", "generate", "token"])
@pytest.mark.parametrize("node", ["ready", "own"])
def test_cancelling_a_run_stops_the_answer(node: str, gate: str, picture: Picture) -> None:
    async def run() -> None:
        with GuardedEngine(threading.get_ident(), gate) as engine:
            app = ready() if node == "ready" else watching(picture, asynchronous=True)
            begin: Any = {"messages": [HumanMessage("what?")]} if node == "ready" else {}
            task = asyncio.ensure_future(app.ainvoke(begin, CONFIG, context=WindowContext(engine)))
            assert await asyncio.to_thread(engine.entered.wait, 300)
            task.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            engine.go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.tokens < 3, "the engine was stopped"
            assert not open_windows(engine.store) and engine.store.stats().leased == 0

    asyncio.run(run())
