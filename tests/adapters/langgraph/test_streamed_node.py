"""`WindowNode` in a run: it streams its tokens as a chat model does, pictures leave the messages, parallel writers are told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.runtime import Runtime

from ctxwin import Chunk
from ctxwin.media import png
from ctxwin.store.memory import MemoryStore
from langchain_ctxwin.chat import ChatCtxwin
from langchain_ctxwin.langgraph import DeltaWindowState, WindowContext, WindowNode, WindowState, open_window
from node_graphs import CONFIG, EXACT, Chatty, content, fresh_answer, graph_of, placed, shown

ROOT = Path(__file__).parents[3]


@pytest.fixture
def engine() -> Iterator[Chatty]:
    with Chatty() as made:
        yield made


def node(**options: Any) -> WindowNode:
    return WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=6, **options)


def test_tokens_come_in_messages_mode_and_the_answer_once(engine: Chatty) -> None:
    app = graph_of(node())
    told = list(
        app.stream({"messages": [shown(1, "q1?")]}, CONFIG, context=WindowContext(engine), stream_mode="messages")
    )
    chunks = [message for message, about in told if about["langgraph_node"] == "window"]
    answer = app.get_state(CONFIG).values["messages"][-1]
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks), "the whole message does not come again"
    texts = [chunk.text for chunk in chunks if chunk.text]
    assert len(texts) > 1 and "".join(texts) == answer.text == fresh_answer([(1, "", "")], "q1?")[: len(answer.text)]
    assert {chunk.id for chunk in chunks} == {answer.id} and chunks[-1].usage_metadata == answer.usage_metadata


def test_traces_name_the_model_as_the_chat_model_does(engine: Chatty) -> None:
    told: list[dict[str, Any]] = []

    class Tracer(BaseCallbackHandler):
        def on_chat_model_start(self, *_: Any, metadata: Any = None, **__: Any) -> None:
            told.append({name: metadata.get(f"ls_{name}") for name in ("provider", "model_name", "max_tokens", "stop")})

    config: Any = {**CONFIG, "callbacks": [Tracer()]}
    app = graph_of(node(stop=["zz"]))
    answer = app.invoke({"messages": [shown(1, "q1?")]}, config, context=WindowContext(engine))["messages"][-1]
    name = ChatCtxwin(engine=engine).model
    assert told == [{"provider": "ctxwin", "model_name": name, "max_tokens": 6, "stop": ["zz"]}]
    assert answer.response_metadata["model_name"] == name


def test_events_of_an_async_run_have_the_tokens_too(engine: Chatty) -> None:
    async def run() -> tuple[list[Any], Any]:
        app = graph_of(node())
        events = app.astream_events(
            {"messages": [shown(1, "q1?")]}, CONFIG, context=WindowContext(engine), version="v2"
        )
        return [e async for e in events], app.get_state(CONFIG).values["messages"][-1]

    events, answer = asyncio.run(run())
    texts = [e["data"]["chunk"].text for e in events if e["event"] == "on_chat_model_stream"]
    assert len(texts) > 1 and "".join(texts) == answer.text
    (ended,) = [e for e in events if e["event"] == "on_chat_model_end"]
    assert ended["data"]["output"].text == answer.text and engine.asked == 1


@pytest.mark.parametrize("schema", [WindowState, DeltaWindowState])
def test_pictures_leave_the_messages_once_they_are_placed(engine: Chatty, schema: Any) -> None:
    kept, swapped = graph_of(node(), InMemorySaver()), graph_of(node(keep_media=False), state=schema)
    turns: list[Any] = []
    other = Chatty()
    for i in range(1, 5):
        asked = shown(i, f"q{i}?", id=str(i))
        state = swapped.invoke({"messages": [asked]}, CONFIG, context=WindowContext(engine))
        same = kept.invoke({"messages": [asked]}, CONFIG, context=WindowContext(other))
        assert state["messages"][-1].text == same["messages"][-1].text
        turns.append((i, f"q{i}?", state["messages"][-1].text))
        assert [m.type for m in state["messages"]] == ["human", "ai"] * i
        assert "base64" not in str(state["messages"]) and placed(engine, state) == content(turns)
    assert engine.counters.vision_encodes == 4
    other.close()
    # An edited history is read again from the names alone.
    edited = HumanMessage([*state["messages"][2].content[:-1], "another?"], id="2")
    state = swapped.invoke({"messages": [edited, HumanMessage("q5?")]}, CONFIG, context=WindowContext(engine))
    turns[1] = (2, "another?", turns[1][2])
    assert state["messages"][-1].text == fresh_answer(turns, "q5?")[: len(state["messages"][-1].text)]
    assert engine.counters.vision_encodes == 4


def test_pictures_given_as_arrays_and_bytes_leave_the_messages_too(engine: Chatty) -> None:
    app, pixels = graph_of(node(keep_media=False)), np.full((4, 6, 3), 7, np.uint8)
    shown_twice: list[Any] = [{"type": "image", "image": pixels}, {"type": "image", "data": png(pixels)}, "q?"]
    app.invoke({"messages": [HumanMessage(shown_twice, id="1")]}, CONFIG, context=WindowContext(engine))
    state = app.invoke({"messages": [HumanMessage("again?")]}, CONFIG, context=WindowContext(engine))
    named = {"type": "image", "chunk": Chunk.image(pixels).media[0].content}
    assert state["messages"][0].content == [named, named, "q?"]


class Full(MemoryStore):
    """Refuses every record, as a full disk does."""

    def put(self, key: str, value: bytes) -> bool:
        return False


@pytest.mark.parametrize("schema", [WindowState, DeltaWindowState])
def test_pictures_that_a_full_store_refused_stay_in_the_messages(schema: Any) -> None:
    """Nobody else has their pixels: the thread goes on from them, on that store and in a process that has another one."""
    saver, turns = InMemorySaver(), []
    with Chatty(Full()) as engine, Chatty() as elsewhere:
        app = graph_of(
            WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=3, keep_media=False), saver, state=schema
        )
        for i, at in enumerate((engine, engine, elsewhere), 1):
            state = app.invoke({"messages": [shown(i, f"q{i}?", id=str(i))]}, CONFIG, context=WindowContext(at))
            answer = state["messages"][-1].text
            assert answer == fresh_answer([*turns, (i, "", "")], f"q{i}?")
            turns.append((i, f"q{i}?", answer))
        assert ["base64" in str(m.content) for m in state["messages"][::2]] == [True, True, False]
        assert placed(elsewhere, state) == content(turns)


class CountingSerializer(JsonPlusSerializer):
    """Counts the messages and the bytes that a saver writes."""

    messages = bytes = 0

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        kind, data = super().dumps_typed(obj)
        values = obj.get("channel_values", {}).get("messages", []) if isinstance(obj, dict) else obj
        self.messages += sum(isinstance(m, BaseMessage) for m in values) if isinstance(values, list) else 0
        self.bytes += len(data)
        return kind, data


@pytest.mark.parametrize("saver", [InMemorySaver, SqliteSaver])
def test_checkpoints_grow_with_the_turns(engine: Chatty, saver: Any) -> None:
    """With deltas a turn of a long thread writes as many messages and bytes as one of a short thread."""
    serde, written = CountingSerializer(), []
    with contextlib.closing(sqlite3.connect(":memory:", check_same_thread=False)) as connection:
        checkpointer = saver(serde=serde) if saver is InMemorySaver else saver(connection, serde=serde)
        app = graph_of(node(keep_media=False, budget=60), checkpointer, state=DeltaWindowState)
        for i in range(1, 61):
            asked = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=WindowContext(engine))
            written.append((serde.messages, serde.bytes))
        state = app.get_state(CONFIG).values
        assert [m.text for m in state["messages"]] == [m.text for m in asked["messages"]]
    assert len(state["messages"]) == 120 and "base64" not in str(state["messages"])
    middle, end = np.subtract(written[19], written[9]), np.subtract(written[59], written[49])
    assert end[0] == middle[0] <= 10 * 4, "a message, what it becomes, and its answer, and again as the run's input"
    assert end[1] <= 1.05 * middle[1]
    assert written[59][1] <= 2.3 * written[29][1], "with the whole list, which one turn of 50 writes"


@pytest.mark.parametrize("saver", [InMemorySaver, SqliteSaver])
def test_snapshots_of_a_long_thread_grow_with_its_length(saver: Any) -> None:
    """In 2,000 steps the lists that checkpoints hold have five times the messages of the thread, not 21,000."""

    class Serializer(JsonPlusSerializer):
        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            value = obj.get("channel_values", {}).get("messages") if isinstance(obj, dict) else obj
            if isinstance(value, _DeltaSnapshot):
                snapshots.append(len(value.value))
            return super().dumps_typed(obj)

    def step(state: Any) -> Any:
        return {"messages": [HumanMessage(str(len(state["messages"])))]}

    snapshots: list[int] = []
    graph = StateGraph(DeltaWindowState)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    graph.add_conditional_edges("step", lambda state: "step" if len(state["messages"]) % 500 else END)
    with contextlib.closing(sqlite3.connect(":memory:", check_same_thread=False)) as connection:
        checkpointer = saver(serde=Serializer()) if saver is InMemorySaver else saver(connection, serde=Serializer())
        app = graph.compile(checkpointer=checkpointer)
        for _ in range(4):
            app.invoke({"messages": []}, {**CONFIG, "recursion_limit": 600})
        state = app.get_state(CONFIG).values
    assert [m.content for m in state["messages"]] == [str(i) for i in range(2000)]
    assert len(snapshots) >= 8 and sum(snapshots) <= 5 * 2000


@pytest.mark.parametrize("schema", [WindowState, DeltaWindowState])
def test_all_messages_can_be_removed(engine: Chatty, schema: Any) -> None:
    """Also where they come back from the writes of earlier checkpoints, and those behind the removal in its list stay."""
    app = graph_of(node(keep_media=False), state=schema)
    for i in (1, 2):
        app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=WindowContext(engine))
    removal = RemoveMessage(REMOVE_ALL_MESSAGES)
    state = app.invoke(
        {"messages": [shown(3, "lost"), removal, shown(4, "q4?")]}, CONFIG, context=WindowContext(engine)
    )
    turns = [(4, "q4?", state["messages"][-1].text)]
    assert [m.type for m in state["messages"]] == ["human", "ai"] and placed(engine, state) == content(turns)
    state = app.invoke({"messages": [shown(5, "q5?")]}, CONFIG, context=WindowContext(engine))
    assert [m.text for m in state["messages"][::2]] == ["q4?", "q5?"]
    assert placed(engine, state) == content([*turns, (5, "q5?", state["messages"][-1].text)])
    app.update_state(CONFIG, {"messages": [removal]})
    assert app.get_state(CONFIG).values["messages"] == []


def test_a_thread_goes_on_with_deltas(engine: Chatty) -> None:
    saver = InMemorySaver()
    for i, schema in enumerate([WindowState, WindowState, DeltaWindowState, DeltaWindowState], 1):
        app = graph_of(node(keep_media=False), saver, state=schema)
        state = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=WindowContext(engine))
    questions, answers = state["messages"][::2], state["messages"][1::2]
    turns = [(i, q.text, a.text) for i, (q, a) in enumerate(zip(questions, answers, strict=True), 1)]
    assert [q for _, q, _ in turns] == [f"q{i}?" for i in range(1, 5)] and placed(engine, state) == content(turns)
    assert engine.counters.vision_encodes == 4


def test_a_name_of_nobody_is_refused(engine: Chatty) -> None:
    named = HumanMessage([{"type": "image", "chunk": "0" * 64}, "q?"])
    with pytest.raises(ValueError, match="must have base64"):
        graph_of(node()).invoke({"messages": [named]}, CONFIG, context=WindowContext(engine))


def parallel(engine: Chatty, thread: str) -> tuple[Any, list[Any]]:
    """Two nodes of one step write the window; a third one sees what was dropped."""

    def writer(text: str) -> Any:
        def write(state: WindowState, runtime: Runtime[WindowContext]) -> WindowState:
            with open_window(state["window"], runtime) as window:
                window.append(Chunk.text(text))
                return {"window": window.ref()}

        return write

    def first(state: WindowState, runtime: Runtime[WindowContext]) -> WindowState:
        with open_window(None, runtime, system_prompt="hd", fidelity=EXACT) as window:
            window.append(Chunk.image(np.full((4, 4, 3), 1, np.uint8)))
            return {"window": window.ref()}

    def join(state: WindowState, runtime: Runtime[WindowContext]) -> WindowState:
        with open_window(state["window"], runtime) as window:
            assert len(window.dropped) == 2
            before = [window.chunk(i).id for i in window.ids]
            window.gather(window.dropped)
            after = [window.chunk(i).id for i in window.ids]
            window.check()
            window.notes["seen"] = [before, after]
            return {"window": window.ref()}

    graph = StateGraph(WindowState, context_schema=WindowContext)
    for name, run in {"first": first, "a": writer("aa"), "b": writer("bb"), "c": writer("cc"), "join": join}.items():
        graph.add_node(name, run)
    graph.add_edge(START, "first")
    for name in "abc":
        graph.add_edge("first", name)
        graph.add_edge(name, "join")
    graph.add_edge("join", END)
    app = graph.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": thread}}
    custom = list(app.stream({"messages": []}, config, context=WindowContext(engine), stream_mode="custom"))
    return app.get_state(config).values["window"], custom


def test_parallel_writers_are_told_and_the_same_one_goes_on(engine: Chatty, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ctxwin"):
        runs = [parallel(engine, str(i)) for i in range(4)]
    assert sum("parallel nodes" in record.message for record in caplog.records) == 2 * len(runs)
    seen = [window["notes"]["seen"] for window, _ in runs]
    assert all(run == seen[0] for run in seen), "which writer goes on does not depend on the run's random ids"
    before, after = seen[0]
    texts = {Chunk.text(text).id for text in ("aa", "bb", "cc")}
    assert len(before) == 2 and len(after) == 4 and texts < set(after)
    for window, custom in runs:
        assert "dropped" not in window, "once a node has written, they are no longer carried along"
        (told,) = [event for event in custom if event["op"] == "dropped"]
        assert len(told["versions"]) == 2


@pytest.mark.slow
def test_a_thread_goes_on_in_another_process(tmp_path: Path) -> None:
    """The example with SqliteSaver and a disk store, twice."""
    command = [sys.executable, str(ROOT / "examples" / "langgraph_restart.py"), str(tmp_path)]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    lines = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=paths)
        lines += done.stdout.splitlines()
    found = [re.fullmatch(r"t=(\d): color of \d\d\? (\w+), (\d+) of (\d+) reused, (\d+) bytes", line) for line in lines]
    assert [int(one[1]) for one in found if one] == list(range(6)), lines
    assert all(one and int(one[5]) < 12_000 for one in found)
    again = found[3]
    assert again and int(again[3]) > int(again[4]) / 2, "the second process finds the first one's KV"


def test_a_thread_goes_on_without_the_pictures_that_its_store_lost(engine: Chatty, caplog: Any) -> None:
    """Messages name pictures that the window has forgotten: the store's pixels are taken, or the message is read without."""
    app, turns, context = graph_of(node(keep_media=False, budget=40)), [], WindowContext(engine)
    for i in range(1, 7):
        state = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=context)
        turns.append(state["messages"][-1].text)
    assert state["window"]["evicted"] > 2

    def invoke_again(question: str, *messages: Any) -> Any:
        everything = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *messages, HumanMessage(question)]
        return app.invoke({"messages": everything}, CONFIG, context=context)

    for key in engine.store.list():
        if "source" not in key:
            engine.store.delete(key)
    first, answer = state["messages"][:2]
    state = invoke_again("q7?", first, answer)
    assert state["messages"][-1].text == fresh_answer([(1, "q1?", turns[0])], "q7?")
    for key in engine.store.list():
        engine.store.delete(key)
    state = invoke_again("q8?", *state["messages"][2:])
    for key in engine.store.list():
        engine.store.delete(key)
    state = invoke_again("q9?", first, answer)
    assert state["messages"][-1].text == fresh_answer([(None, "q1?", turns[0])], "q9?") and "are lost" in caplog.text
    with pytest.raises(ValueError, match="put the picture itself there"):
        app.invoke({"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), first]}, CONFIG, context=context)
