"""Parallel branches: forks under `Send`, a join that adopts one, and what the reducer makes of two writers."""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode, ToolRuntime
from langgraph.runtime import Runtime
from langgraph.types import Command, Overwrite, RetryPolicy, Send, interrupt

from ctxwin import Chunk, Fidelity
from langchain_ctxwin.langgraph import WindowContext, load, merge_windows, open_window

Picture = Callable[[int], Chunk]
EXACT = Fidelity("exact")
CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    window: Annotated[dict[str, Any], merge_windows]
    branches: Annotated[dict[str, Any], operator.or_]
    answers: Annotated[dict[str, str], operator.or_]
    answer: str
    page: int


def fan_out(picture: Picture, *, stop: bool = False, asynchronous: bool = False) -> StateGraph[Any, Any]:
    """One fork a page: each looks at its page behind what all share; the join goes on with the branch of page 2."""

    def begin(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(None, runtime, system_prompt="hd", fidelity=EXACT) as window:
            window.append(picture(0))
            window.ask("what?", max_tokens=3)
            return {"window": window.ref()}

    def spread(state: State) -> list[Send]:
        return [Send("look", {"window": state["window"], "page": page}) for page in (1, 2, 3)]

    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        name = str(state["page"])
        with open_window(state["window"], runtime) as window, window.fork() as branch:
            branch.append(picture(state["page"]))
            answer = branch.ask("here?", max_tokens=3, remember=True)
            if stop:
                interrupt(name)
            branch.check()
            return {"branches": {name: branch.ref()}, "answers": {name: answer.text}}

    async def alook(state: State, runtime: Runtime[WindowContext]) -> State:
        name = str(state["page"])
        with open_window(state["window"], runtime) as window, window.fork() as branch:
            branch.append(picture(state["page"]))
            answer = await branch.aask("here?", max_tokens=3, remember=True)
            return {"branches": {name: branch.ref()}, "answers": {name: answer.text}}

    def join(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state["window"], runtime) as window:
            window.adopt(state["branches"]["2"])
            window.append(picture(9))
            window.check()
            return {"window": window.ref(), "answer": window.ask("then?", max_tokens=3).text}

    graph = StateGraph(State, context_schema=WindowContext)
    graph.add_node("begin", begin)
    graph.add_node("look", alook if asynchronous else look)
    graph.add_node("join", join)
    graph.add_edge(START, "begin")
    graph.add_conditional_edges("begin", spread, ["look"])
    graph.add_edge("look", "join")
    graph.add_edge("join", END)
    return graph


def _right(engine: Any, out: Any, picture: Picture, oracle: Callable[..., str]) -> None:
    for page in (1, 2, 3):
        assert out["answers"][str(page)] == oracle([picture(0), picture(page)], "here?")
    with load(engine, out["branches"]["2"]) as branch:
        exchange = branch.chunk(branch.ids[-1])
    assert out["answer"] == oracle([picture(0), picture(2), exchange, picture(9)], "then?")
    assert len({r["window"] for r in out["branches"].values()} | {out["window"]["window"]}) == 4


def test_a_fork_in_each_send(engine: Any, saver: Any, picture: Picture, oracle: Callable[..., str]) -> None:
    app = fan_out(picture).compile(checkpointer=saver)
    out = app.invoke({}, CONFIG, context=WindowContext(engine))
    _right(engine, out, picture, oracle)
    assert engine.counters.vision_encodes == 5, "one for each picture, whatever the branches"


def test_a_fork_in_each_async_send(engine: Any, picture: Picture, oracle: Callable[..., str]) -> None:
    app = fan_out(picture, asynchronous=True).compile(checkpointer=InMemorySaver())
    out = asyncio.run(app.ainvoke({}, CONFIG, context=WindowContext(engine)))
    _right(engine, out, picture, oracle)


def test_branches_that_are_interrupted(engine: Any, saver: Any, picture: Picture, oracle: Callable[..., str]) -> None:
    app = fan_out(picture, stop=True).compile(checkpointer=saver)
    first = app.invoke({}, CONFIG, context=WindowContext(engine))
    waiting = first["__interrupt__"]
    assert sorted(i.value for i in waiting) == ["1", "2", "3"] and engine.asked == 4
    out = app.invoke(Command(resume={i.id: "go" for i in waiting}), CONFIG, context=WindowContext(engine))
    _right(engine, out, picture, oracle)
    assert engine.asked == 5, "only the join asks anything new"


def test_two_branches_that_write_the_same_window(
    engine: Any, saver: Any, picture: Picture, oracle: Callable[..., str]
) -> None:
    """The branch with more edits wins, whichever ends last; with ``adopt`` the other one does."""

    def branch(frames: tuple[int, ...], adopt: bool = False) -> Any:
        def look(state: State, runtime: Runtime[WindowContext]) -> State:
            with open_window(state["window"], runtime) as window:
                for frame in frames:
                    window.append(picture(frame))
                return {"window": window.ref(adopt=adopt)}

        return look

    def begin(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(None, runtime, system_prompt="hd", fidelity=EXACT) as window:
            window.append(picture(0))
            return {"window": window.ref()}

    def answer(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state["window"], runtime) as window:
            return {"answer": window.ask("what?", max_tokens=3).text, "window": window.ref()}

    for adopt, expected in ((False, (0, 1, 2)), (True, (0, 3))):
        for names in (("a", "b"), ("b", "a")):
            graph = StateGraph(State, context_schema=WindowContext)
            graph.add_node("begin", begin)
            graph.add_node(names[0], branch((1, 2)))
            graph.add_node(names[1], branch((3,), adopt))
            graph.add_node("answer", answer)
            graph.add_edge(START, "begin")
            for name in names:
                graph.add_edge("begin", name)
            graph.add_edge(list(names), "answer")
            thread: Any = {"configurable": {"thread_id": f"{adopt}{names}"}}
            out = graph.compile(checkpointer=saver).invoke({}, thread, context=WindowContext(engine))
            assert out["answer"] == oracle([picture(i) for i in expected], "what?")


def test_tools_that_one_message_calls_have_sessions_of_their_own(engine: Any, saver: Any, picture: Picture) -> None:
    tried: list[tuple[str, ...]] = []

    @tool
    def look(page: int, runtime: ToolRuntime[Any, Any]) -> Command[Any]:
        """Look at a page."""
        with open_window(runtime.state.get("window"), runtime, system_prompt="hd", fidelity=EXACT) as window:
            window.append(picture(page))
            said = ToolMessage(window.ask("what?", max_tokens=3).text, tool_call_id=runtime.tool_call_id)
            tried.append(window.ids)
            return Command(update={"window": window.ref(), "messages": [said]})

    def join(state: Any, runtime: Runtime[WindowContext]) -> dict[str, Any]:
        with open_window(state["window"], runtime) as window:
            window.gather(window.dropped)
            return {"window": window.ref()}

    class Called(TypedDict, total=False):
        messages: Annotated[list[Any], operator.add]
        window: Annotated[dict[str, Any], merge_windows]

    def run_tools(state: Any, config: RunnableConfig) -> Any:
        updates = ToolNode([look]).invoke(state, config)
        if len(tried) < 4:
            raise ConnectionError("the tools have answered, the step failed")
        return updates

    graph = StateGraph(Called, context_schema=WindowContext)
    graph.add_node("tools", run_tools, retry_policy=RetryPolicy(initial_interval=0.01, retry_on=ConnectionError))
    graph.add_node("join", join)
    graph.add_edge(START, "tools")
    graph.add_edge("tools", "join")
    calls = [{"name": "look", "args": {"page": page}, "id": f"call-{page}"} for page in (1, 2)]
    app = graph.compile(checkpointer=saver)
    out: Any = app.invoke({"messages": [AIMessage("", tool_calls=calls)]}, CONFIG, context=WindowContext(engine))
    first, again = sorted(tried[:2]), sorted(tried[2:])
    assert first == again and first[0] != first[1], (
        "ids are the same when the tools run again, and each call has its own"
    )
    assert engine.asked == 2, "and no answer is computed twice"
    assert len(out["window"]["placed"]) == 2, "the page that the other call placed is gathered"


def test_the_reducer_does_not_mind_the_order(engine: Any, picture: Picture) -> None:
    runtime: Runtime[WindowContext] = Runtime(context=WindowContext(engine))
    references: list[Any] = []
    with open_window(None, runtime, system_prompt="hd") as window:
        references.append(window.ref())
        window.append(picture(1))
        references.append(window.ref())
        window.ask("what?")  # no new version, but the KV is known
        references += [window.ref(), window.ref(adopt=True)]
        base = window.ref()
    for frame in (2, 3):
        with open_window(base, runtime) as window:
            window.append(picture(frame))
            references.append(window.ref())
    for left, right in itertools.product(references, repeat=2):
        assert merge_windows(left, right) == merge_windows(right, left)
        assert merge_windows(left, left) is left
    for a, b, c in itertools.permutations(references, 3):
        assert merge_windows(merge_windows(a, b), c) == merge_windows(a, merge_windows(b, c))
    assert merge_windows(references[1], references[2]) == references[2]
    assert merge_windows(references[3], references[5]) == references[3]
    for nothing in (None, {}):
        assert merge_windows(nothing, base) == merge_windows(base, nothing) == base
    with open_window(None, runtime, system_prompt="other") as window:
        other = window.ref()
    assert merge_windows(references[3], other) == other, "another window replaces this one"
    with pytest.raises(ValueError, match="a window reference must have"):
        merge_windows(base, {"window": "x"})


def test_only_branches_of_a_window_are_adopted(engine: Any, picture: Picture) -> None:
    runtime: Runtime[WindowContext] = Runtime(context=WindowContext(engine))
    with open_window(None, runtime, system_prompt="hd") as stranger:
        stranger.append(picture(1))
        reference = stranger.ref()
    with open_window(None, runtime, system_prompt="hd") as window:
        with pytest.raises(
            ValueError, match=rf"must be a fork of window {window.id}, got window {reference['window']}"
        ):
            window.adopt(reference)
        assert window.ids == ()
        window.adopt(reference, force=True)
        assert window.ids == stranger.ids and window.id != stranger.id
        with window.fork() as branch:
            branch.append(picture(2))
            moved = branch.ref()
        window.append(picture(3))
        window.adopt(moved)  # a join decides, whether or not the window has moved
        assert len(window.ids) == 2 and window.version > moved["version"]


def test_an_older_window_is_put_back_with_overwrite(engine: Any, saver: Any, picture: Picture) -> None:
    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd") as window:
            window.append(picture(len(window.ids)))
            return {"window": window.ref()}

    graph = StateGraph(State, context_schema=WindowContext)
    graph.add_node("look", look)
    graph.add_edge(START, "look")
    app, context = graph.compile(checkpointer=saver), WindowContext(engine)
    first = app.invoke({}, CONFIG, context=context)["window"]
    second = app.invoke({}, CONFIG, context=context)["window"]
    app.update_state(CONFIG, {"window": first})
    assert app.get_state(CONFIG).values["window"] == second
    app.update_state(CONFIG, {"window": Overwrite(first)})
    assert app.get_state(CONFIG).values["window"] == first
    third = app.invoke({}, CONFIG, context=context)["window"]
    assert len(third["placed"]) == 2 and third["placed"][0] == first["placed"][0]
