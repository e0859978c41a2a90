"""Nodes that run again: after an interrupt, a failure, a step back in time, a replay. Each gives the right window."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
import torch
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, RetryPolicy, interrupt

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.policies import ByDisposability
from langchain_ctxwin.langgraph import WindowContext, load, merge_windows, open_window

Picture = Callable[[int], Chunk]
EXACT = Fidelity("exact")
CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(TypedDict, total=False):
    window: Annotated[dict[str, Any], merge_windows]
    frame: int
    answer: str
    shown: list[str]


def compiled(node: Any, saver: BaseCheckpointSaver[Any] | None, **options: Any) -> Any:
    graph = StateGraph(State, context_schema=WindowContext)
    graph.add_node("look", node, **options)
    graph.add_edge(START, "look")
    graph.add_edge("look", END)
    return graph.compile(checkpointer=saver)


def test_an_interrupted_node_appends_evicts_and_asks_once(
    engine: Any, saver: Any, picture: Picture, oracle: Callable[..., str]
) -> None:
    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd", budget=300, fidelity=EXACT) as window:
            ids = [window.append(picture(i)) for i in range(4)]
            window.evict(ids[1])
            answer = window.ask("first?", max_tokens=3, remember=True, temperature=0.7)
            chosen = interrupt({"placed": list(window.ids), "evicted": list(window.evicted), "said": answer.text})
            window.recall(chosen)
            window.check()
            second = window.ask("second?", max_tokens=3)
            return {"window": window.ref(), "answer": second.text, "shown": [answer.text, *window.ids]}

    app = compiled(look, saver)
    asked = app.invoke({}, CONFIG, context=WindowContext(engine))["__interrupt__"][0].value
    assert engine.asked == 1
    encodes = engine.counters.vision_encodes
    out = app.invoke(Command(resume=asked["evicted"][0]), CONFIG, context=WindowContext(engine))
    assert engine.asked == 2, "the answer before the interrupt must not be computed again"
    assert engine.counters.vision_encodes == encodes
    said, *ids = out["shown"]
    assert said == asked["said"]
    # The ids a person was shown are those in the window, once each, and what was evicted is back at its place.
    assert ids == [asked["placed"][0], asked["evicted"][0], *asked["placed"][1:]]
    with load(engine, out["window"]) as window:
        assert window.evicted == ()
        exchange = window.chunk(ids[-1])
    frames = [picture(i) for i in range(4)]
    assert out["answer"] == oracle([*frames, exchange], "second?")
    assert said == oracle([frames[0], frames[2], frames[3]], "first?")


async def _resumed(app: Any, engine: Any) -> tuple[Any, Any]:
    first = await app.ainvoke({}, CONFIG, context=WindowContext(engine))
    asked = first["__interrupt__"][0].value
    return asked, await app.ainvoke(Command(resume="go"), CONFIG, context=WindowContext(engine))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_an_interrupted_async_node_asks_once(engine: Any, picture: Picture, kind: str, tmp_path: Path) -> None:
    async def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd") as window:
            window.append(picture(1))
            answer = await window.aask("first?", max_tokens=3, remember=True)
            streamed = "".join([text async for text in window.astream("second?", max_tokens=3)])
            interrupt([answer.text, streamed, *window.ids])
            return {"window": window.ref(), "shown": [answer.text, streamed, *window.ids]}

    async def run() -> tuple[Any, Any]:
        if kind == "memory":
            return await _resumed(compiled(look, InMemorySaver()), engine)
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as saver:
            return await _resumed(compiled(look, saver), engine)

    asked, out = asyncio.run(run())
    assert out["shown"] == asked
    assert engine.asked == 2


def test_a_failing_node_is_tried_again_from_the_same_window(engine: Any, saver: Any, picture: Picture) -> None:
    attempts: list[list[str]] = []

    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd") as window:
            window.append(picture(1))
            window.ask("first?", max_tokens=3, remember=True)
            stream = window.stream("second?", max_tokens=3)
            text = "".join(stream)
            assert stream.answer is not None and stream.answer.text == text
            attempts.append([*window.ids, text])
            if len(attempts) < 3:
                raise ConnectionError("the tool behind it failed")
            return {"window": window.ref(), "shown": attempts[-1]}

    retry = RetryPolicy(initial_interval=0.001, max_attempts=3, jitter=False)
    out = compiled(look, saver, retry_policy=retry).invoke({}, CONFIG, context=WindowContext(engine))
    assert attempts[0] == attempts[1] == attempts[2]
    assert engine.asked == 2
    assert len(out["window"]["placed"]) == 2


def camera(picture: Picture, seen: list[Any] | None = None) -> Any:
    """A node that takes one frame a step, keeps the newest three, and answers."""

    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd", budget=60, fidelity=EXACT) as window:
            window.append(picture(state["frame"]))
            window.slide(max(0, len(window.ids) - 3))
            answer = window.ask("what?", max_tokens=3)
            window.check()
            if seen is not None:
                seen.append((window.ids, answer.text))
            return {"window": window.ref(), "answer": answer.text}

    return look


def test_going_on_from_an_earlier_checkpoint(
    engine: Any, saver: Any, picture: Picture, oracle: Callable[..., str]
) -> None:
    app, context = compiled(camera(picture), saver), WindowContext(engine)
    for frame in range(1, 6):
        out = app.invoke({"frame": frame}, CONFIG, context=context)
    assert out["answer"] == oracle([picture(i) for i in (3, 4, 5)], "what?")
    late = app.get_state(CONFIG)
    earlier = next(s for s in app.get_state_history(CONFIG) if s.values.get("frame") == 3 and not s.next)

    branched = app.invoke({"frame": 9}, earlier.config, context=context)
    assert branched["answer"] == oracle([picture(i) for i in (2, 3, 9)], "what?")
    assert len(load(engine, branched["window"]).evicted) == 1
    # Both lines go on from where they are, however often one changes between them.
    other = app.get_state(CONFIG)
    assert other.config != late.config
    for base, frames in ((late, (4, 5, 7)), (other, (3, 9, 7)), (late, (4, 5, 7))):
        out = app.invoke({"frame": 7}, base.config, context=context)
        assert out["answer"] == oracle([picture(i) for i in frames], "what?")
    with load(engine, out["window"]) as window:
        window.check()
        back = window.evicted[0]
        window.recall(back)
        assert window.ask("what?", max_tokens=3).text == oracle([picture(i) for i in (1, 4, 5, 7)], "what?")


def test_a_replayed_node_gives_the_same_window(
    engine: Any, saver: Any, picture: Picture, oracle: Callable[..., str]
) -> None:
    seen: list[Any] = []
    app, context = compiled(camera(picture, seen), saver), WindowContext(engine)
    for frame in range(1, 5):
        out = app.invoke({"frame": frame}, CONFIG, context=context)
    before = next(s for s in app.get_state_history(CONFIG) if s.values["frame"] == 4 and s.next == ("look",))
    encodes = engine.counters.vision_encodes
    replayed = app.invoke(None, before.config, context=context)
    # LangGraph gives a replay a checkpoint of its own, so the frame is a new placement of the same content.
    assert seen[-1][0][:2] == seen[-2][0][:2]
    assert replayed["window"]["operations"] == out["window"]["operations"]
    assert replayed["answer"] == out["answer"] == oracle([picture(i) for i in (2, 3, 4)], "what?")
    assert engine.counters.vision_encodes == encodes
    with load(engine, replayed["window"]) as window:
        window.check()
        assert len(window.evicted) == 1


def test_an_engine_that_failed_leaves_the_thread_as_it_was(engine: Any, saver: Any, picture: Picture) -> None:
    app, context = compiled(camera(picture), saver), WindowContext(engine)
    before = app.invoke({"frame": 1}, CONFIG, context=context)
    engine.fail = RuntimeError("no memory left")
    with pytest.raises(RuntimeError, match="no memory left"):
        app.invoke({"frame": 2}, CONFIG, context=context)
    engine.fail = None
    assert app.get_state(CONFIG).values["window"] == before["window"]
    out = app.invoke(None, CONFIG, context=context)
    assert len(out["window"]["placed"]) == 2


def test_without_a_checkpointer(engine: Any, picture: Picture, oracle: Callable[..., str]) -> None:
    app, context = compiled(camera(picture), None), WindowContext(engine)
    first = app.invoke({"frame": 1}, context=context)
    out = app.invoke({"frame": 2, "window": first["window"]}, context=context)
    assert out["answer"] == oracle([picture(1), picture(2)], "what?")


def test_sessions_outside_a_graph_are_plain_windows(engine: Any, picture: Picture) -> None:
    runtime: Runtime[WindowContext] = Runtime(context=WindowContext(engine))
    with open_window(None, runtime, system_prompt="hd") as window:
        window.append(picture(1))
        texts = [window.ask("what?", max_tokens=3).text for _ in range(2)]
    assert texts[0] == texts[1] and engine.asked == 2
    assert not any(key.startswith("journal/") for key in engine.store.list())


def test_the_node_says_what_it_needs(engine: Any, picture: Picture) -> None:
    with pytest.raises(TypeError, match="must have an engine, got NoneType; build the graph with"):
        open_window(None, Runtime())
    runtime: Runtime[WindowContext] = Runtime(context=WindowContext(engine))
    with pytest.raises(TypeError, match=r"must be a dict from Session.ref\(\), got Window"):
        open_window(Window(engine), runtime)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must have .*'manifest'.* got \['id'\]"):
        open_window({"id": 1}, runtime)
    with open_window(None, runtime, system_prompt="hd", budget=50) as window:
        reference = window.ref()
    with pytest.raises(ValueError, match=r"system_prompt must be that of window .* 'hd', got 'other'"):
        open_window(reference, runtime, system_prompt="other")
    with pytest.raises(ValueError, match="format 1, got 2"):
        open_window({**reference, "format": 2}, runtime)
    with pytest.raises(ValueError, match="budget must be an int"):
        open_window(reference, runtime, budget=10**9)
    with open_window(reference, runtime, system_prompt="hd", budget=80, fidelity=EXACT) as window:
        assert (window.budget, window.fidelity) == (80, EXACT)


def test_an_answer_with_stage_outputs_has_them_again() -> None:
    """The journal keeps no tensors; an answer without them is computed once."""
    shown: list[Any] = []

    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state.get("window"), runtime, system_prompt="hd") as window:
            window.append(Chunk.text("the camera is blue now"))
            before = engine.counters.prefill_forwards
            plain = window.ask("what?", max_tokens=3, outputs=())
            computed = engine.counters.prefill_forwards > before
            shown.append((window.ask("what?", max_tokens=3), plain, computed))
            interrupt("go on?")
            return {"window": window.ref()}

    app = compiled(look, InMemorySaver())
    with open_engine("tiny:hf", outputs=True) as engine:
        app.invoke({}, CONFIG, context=WindowContext(engine))
        app.invoke(Command(resume="go"), CONFIG, context=WindowContext(engine))
    (first, plain, computed), (again, plain_again, computed_again) = shown
    assert computed and not computed_again
    assert plain.outputs is plain_again.outputs is None and plain.text == plain_again.text == again.text
    assert first.outputs.keys() == again.outputs.keys()
    assert all(torch.equal(rows, again.outputs[name]) for name, rows in first.outputs.items())


def test_policies_decide_alike_when_the_node_runs_again(engine: Any, saver: Any, picture: Picture) -> None:
    """Also one that asks the model: who is disposable leaves first."""

    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        policy = ByDisposability(["what?"], max_tokens=3)
        with open_window(state.get("window"), runtime, system_prompt="hd", eviction=policy) as window:
            window.extend([picture(i) for i in range(4)])
            left = window.slide(2)
            verdict = window.disposable(window.ids[0], "what?", max_tokens=3)
            interrupt([left, verdict.disposable])
            return {"window": window.ref(), "shown": [*left, verdict.disposable]}

    app = compiled(look, saver)
    asked = app.invoke({}, CONFIG, context=WindowContext(engine))["__interrupt__"][0].value
    out = app.invoke(Command(resume="go"), CONFIG, context=WindowContext(engine))
    assert out["shown"] == [*asked[0], asked[1]] and len(asked[0]) == 2
    with load(engine, out["window"]) as window:
        assert set(window.evicted) == set(asked[0])


def test_a_node_in_a_subgraph(engine: Any, saver: Any, picture: Picture, oracle: Callable[..., str]) -> None:
    seen: list[Any] = []

    def ask(state: State, runtime: Runtime[WindowContext]) -> State:
        with open_window(state["window"], runtime) as window:
            window.append(picture(state["frame"]))
            seen.append(window.ask("what?", max_tokens=3, remember=True).text)
            interrupt(window.ids)
            return {"window": window.ref(), "answer": seen[-1]}

    inner = StateGraph(State, context_schema=WindowContext)
    inner.add_node("ask", ask)
    inner.add_edge(START, "ask")
    outer = StateGraph(State, context_schema=WindowContext)
    outer.add_node("look", camera(picture))
    outer.add_node("inner", inner.compile())
    outer.add_edge(START, "look")
    outer.add_edge("look", "inner")
    app, context = outer.compile(checkpointer=saver), WindowContext(engine)
    app.invoke({"frame": 1}, CONFIG, context=context)
    asked = engine.asked
    out = app.invoke(Command(resume="go"), CONFIG, context=context)
    assert engine.asked == asked and seen[0] == seen[1] == out["answer"]
    assert out["answer"] == oracle([picture(1), picture(1)], "what?")
    assert len(out["window"]["placed"]) == 3


def test_two_sessions_of_one_node_have_names(engine: Any, saver: Any, picture: Picture) -> None:
    def look(state: State, runtime: Runtime[WindowContext]) -> State:
        ids = []
        for name in ("left", "right"):
            with open_window(None, runtime, system_prompt="hd", name=name) as window:
                window.append(picture(1))
                ids += [window.id, *window.ids]
        return {"shown": ids}

    shown = compiled(look, saver).invoke({}, CONFIG, context=WindowContext(engine))["shown"]
    assert len(set(shown)) == 4
