"""What a run streams and reports while windows work: custom events, heartbeats, ledgers and observers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeTimeoutError
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, TimeoutPolicy, interrupt

from ctxwin import Chunk
from ctxwin.baselines.ledger import Ledger
from ctxwin.window.ask import Question
from ctxwin.window.events import Event
from langchain_ctxwin.langgraph import WindowContext, merge_windows, open_window

Picture = Callable[[int], Chunk]
CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    window: Annotated[dict[str, Any], merge_windows]
    answer: str


def compiled(node: Any, **options: Any) -> Any:
    graph = StateGraph(State, context_schema=WindowContext)
    graph.add_node("look", node, **options)
    graph.add_edge(START, "look")
    graph.add_edge("look", END)
    return graph.compile(checkpointer=InMemorySaver())


def everything(picture: Picture) -> Any:
    """A node that does each operation once."""

    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd", budget=400) as window:
            a, b = window.extend([picture(1), picture(2)])
            window.insert(0, Chunk.text("note"))
            window.ask("what?", max_tokens=3, remember=True)
            list(window.stream("what?", max_tokens=3))
            window.evict(a)
            window.recall(a)
            window.reorder(list(window.ids)[::-1])
            window.toggle(b, conditioned=False)
            window.pin(b)
            window.maintenance.touch(b)
            window.slide(1)
            window.look_back(window.evicted[0])
            with window.fork() as branch:
                branch.append(Chunk.text("more"))
                window.adopt(branch)
            interrupt("wait")
            return {"window": window.ref(), "answer": "done"}

    return look


def test_every_operation_is_streamed(engine: Any, picture: Picture) -> None:
    app = compiled(everything(picture))
    told = list(app.stream({}, CONFIG, context=WindowContext(engine), stream_mode="custom"))
    assert [t["op"] for t in told] == [
        "append", "insert", "ask", "ask", "evict", "recall", "reorder", "toggle", "pin", "touch", "slide", "look_back",
        "fork", "append", "adopt",
    ]  # fmt: skip
    for event in told:
        assert event["type"] == "window" and len(json.dumps(event)) < 1000
        assert {"window", "version", "ids", "tokens", "placed", "evicted", "key"} <= event.keys()
    asked = told[2]
    assert sum(asked["lanes"].values()) + 7 == asked["prompt_tokens"] <= asked["computed_tokens"]
    assert asked["query"] == "what?" and asked["answer"] and asked["vision_encodes"] == 2
    keys = [t["key"] for t in told]
    assert len(set(keys)) == len(keys)
    branch = told[13]
    assert branch["window"] == told[12]["other"] and branch["parent"] == told[0]["window"]

    again = list(app.stream(Command(resume=1), CONFIG, context=WindowContext(engine), stream_mode="custom"))
    assert [t["key"] for t in again] == keys, "the same operations say the same keys"
    assert [t["ids"] for t in again] == [t["ids"] for t in told]
    assert again[2]["note"] == again[3]["note"] == "again" and again[2]["computed_tokens"] == 0
    assert engine.asked == 2


def test_async_nodes_stream_from_their_threads(engine: Any, picture: Picture) -> None:
    async def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd") as window:
            window.append(picture(1))
            await window.aask("what?", max_tokens=3)
            async for _ in window.astream("what else?", max_tokens=3):
                pass
            return {"window": window.ref()}

    async def run() -> list[Any]:
        stream = compiled(look).astream({}, CONFIG, context=WindowContext(engine), stream_mode="custom")
        return [event["op"] async for event in stream]

    assert asyncio.run(run()) == ["append", "ask", "ask"]


def test_every_token_is_a_heartbeat(engine: Any, picture: Picture) -> None:
    beats: list[int] = []
    runtime: Runtime[WindowContext] = Runtime(context=WindowContext(engine), heartbeat=lambda: beats.append(1))
    with open_window(None, runtime, system_prompt="hd") as window:
        window.append(picture(1))
        before = len(beats)
        assert before >= 2
        heard: list[int] = []
        question = Question.of("what?", 3)
        answer = window.answer(question, on_token=lambda token, text: bool(heard.append(token)) or True)
        assert len(beats) == before + 2 + len(answer.token_ids) and tuple(heard) == answer.token_ids
        before = len(beats)
        assert len(list(window.stream("what?", max_tokens=3))) <= len(beats) - before


@pytest.mark.parametrize("refresh_on", ["heartbeat", "auto"])
def test_long_answers_do_not_count_as_idle(engine: Any, picture: Picture, refresh_on: Any) -> None:
    engine.delay = 0.1  # a token; three of them and their overhead take longer than a node may be idle

    async def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd") as window:
            window.append(picture(1))
            for _ in range(3):
                await window.aask("what?", max_tokens=3)
            return {"answer": "done"}

    async def idle(state: State, runtime: Runtime[WindowContext]) -> State:
        await asyncio.sleep(5)
        return {"answer": "done"}

    policy = TimeoutPolicy(idle_timeout=timedelta(seconds=0.8), refresh_on=refresh_on)
    out = asyncio.run(compiled(look, timeout=policy).ainvoke({}, CONFIG, context=WindowContext(engine)))
    assert out["answer"] == "done"
    if refresh_on == "auto":
        with pytest.raises(NodeTimeoutError):
            asyncio.run(compiled(idle, timeout=policy).ainvoke({}, CONFIG, context=WindowContext(engine)))


def test_observers_hear_of_what_was_done_not_of_what_was_kept(engine: Any, picture: Picture) -> None:
    heard: list[Event] = []
    app = compiled(everything(picture))
    ledger = Ledger(engine)
    context = WindowContext(engine, ledger=ledger, observer=heard.append)
    app.invoke({}, CONFIG, context=context)
    asked = [e for e in heard if e.op == "ask"]
    assert len(asked) == len(ledger.rows) == 2
    assert {e.parent for e in heard if e.op == "append"} == {None, asked[0].window}, "forks are heard, too"
    app.invoke(Command(resume=1), CONFIG, context=context)
    assert len([e for e in heard if e.op == "ask"]) == len(ledger.rows) == 2
