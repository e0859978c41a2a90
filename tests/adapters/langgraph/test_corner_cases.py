"""What a hostile graph does to a window: each of these went wrong once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import io
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.runtime import ExecutionInfo, Runtime
from langgraph.types import interrupt
from PIL import Image

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import BudgetExceeded
from ctxwin.window import auditing, edits
from ctxwin.window.sync import sync
from langchain_ctxwin.langgraph import WindowContext, WindowNode, WindowState, load, merge_windows, open_window
from langchain_ctxwin.langgraph.node import follow
from langchain_ctxwin.langgraph.session import engine_of
from window.fake import FakeEngine

Picture = Callable[[int], Chunk]
CONFIG: Any = {"configurable": {"thread_id": "t"}}


def execution(engine: Any, told: list[Any] | None = None, task: str = "t") -> Runtime[WindowContext]:
    """As a node has it, behind the same checkpoint every time."""
    info = ExecutionInfo(checkpoint_id="c", checkpoint_ns="", task_id=task)
    writer = (lambda event: None) if told is None else told.append
    return Runtime(context=WindowContext(engine), stream_writer=writer, execution_info=info)


def test_notes_that_change_alone_are_kept(engine: Any) -> None:
    with open_window(None, execution(engine), system_prompt="hd") as window:
        before = window.ref()
    with open_window(before, execution(engine, task="u")) as window:
        window.notes["page"] = 3
        after = window.ref()
    merged = merge_windows(before, after)
    assert merged is not None and merged["notes"] == {"page": 3}
    with open_window(before, execution(engine, task="v")) as window:
        window.notes["page"] = 4
        other = window.ref()
    assert merge_windows(after, other) == merge_windows(other, after)


@pytest.mark.parametrize("budget", range(60, 66))
def test_a_budget_that_changes_alone_is_kept(engine: Any, budget: int) -> None:
    with open_window(None, execution(engine), system_prompt="hd", budget=50) as window:
        before = window.ref()
    with open_window(before, execution(engine, task="u"), budget=budget) as window:
        after = window.ref()
    assert merge_windows(before, after) == after and after["budget"] == budget


def test_no_budget_is_no_budget(engine: Any) -> None:
    with open_window(None, execution(engine), system_prompt="hd", budget=50) as window:
        reference = window.ref()
    with pytest.raises(ValueError, match=r"budget must be an int in 1\.\.4096"):
        open_window(reference, execution(engine), budget=0)


def test_a_smaller_engine_takes_the_window_with_a_fidelity(engine: Any) -> None:
    with open_window(None, execution(engine), system_prompt="hd") as window:
        window.append(Chunk.text("note"))
        reference = window.ref()
    smaller = FakeEngine(engine.store, max_tokens=100, name="smaller")
    with open_window(reference, execution(smaller), fidelity=Fidelity("exact")) as window:
        assert (window.budget, len(window.ids)) == (100, 1)


def test_two_windows_of_one_node_share_no_placements(engine: Any) -> None:
    """Forgetting in one must take nothing from the other."""
    with open_window(None, execution(engine, task="a"), system_prompt="hd") as window:
        left = window.ref()
    with open_window(None, execution(engine, task="b"), system_prompt="hd") as window:
        right = window.ref()
    with open_window(left, execution(engine)) as first, open_window(right, execution(engine)) as second:
        a, b = first.append(Chunk.text("the same")), second.append(Chunk.text("the same"))
        assert a != b
        second.evict(b)
        right = second.ref()
        first.evict(a, forget=True)
    with load(engine, right) as second:
        assert second.evicted == (b,)


def test_an_answer_kept_by_another_version_is_computed_again(engine: Any, picture: Picture) -> None:
    def once() -> str:
        with open_window(None, execution(engine), system_prompt="hd") as window:
            window.append(picture(1))
            return window.ask("what?", max_tokens=3).text

    text = once()
    (key,) = engine.store.list("journal/")
    record = engine.repo.get_json(key)
    record["answer"]["token_ids"] = "of another version"
    engine.repo.put_json(key, record)
    assert once() == text and engine.asked == 2


def test_a_stream_read_late_keeps_what_it_answered_over(engine: Any, picture: Picture) -> None:
    """What is placed between an answer and the end of reading it is no part of that answer."""

    def once() -> tuple[str, ...]:
        with open_window(None, execution(engine), system_prompt="hd") as window:
            window.append(picture(1))
            stream = window.stream("what?", max_tokens=3, remember=True)
            for thread in threading.enumerate():
                if thread.name == "ctxwin-answer":
                    thread.join()
            window.append(picture(2))
            list(stream)
            window.check()
            return window.ids

    first = once()
    assert len(first) == 3 and once() == first
    assert engine.asked == 1


def test_no_two_events_of_a_run_have_one_key(engine: Any, picture: Picture) -> None:
    def once() -> list[str]:
        told: list[Any] = []
        with open_window(None, execution(engine, told), system_prompt="hd") as window:
            ids = window.extend([picture(1), picture(2)])
            window.disposable(ids[0], "what?", max_tokens=2)
            sync(window.core, [picture(3), picture(2), picture(4)])
            window.at(2).ask("what?", max_tokens=2)
            window.ask("what?", max_tokens=2)
        return [event["key"] for event in told]

    keys = once()
    assert len(set(keys)) == len(keys) > 6
    assert once() == keys


def _trimmed(node: WindowNode, engine: Any, turns: int, other: bool) -> list[int]:
    """Bytes of the reference after each turn of a conversation whose oldest messages are taken out."""

    def before(state: WindowState, runtime: Runtime[WindowContext]) -> dict[str, Any]:
        with open_window(state.get("window"), runtime, system_prompt="hd") as window:
            window.append(Chunk.text(f"o{len(window.ids) + len(window.evicted)}"))
            return {"window": window.ref()}

    graph = StateGraph(WindowState, context_schema=WindowContext)
    graph.add_node(node)
    if other:
        graph.add_node("before", before)
        graph.add_edge("before", node.name)
    graph.add_edge(START, "before" if other else node.name)
    app, sizes = graph.compile(checkpointer=InMemorySaver()), []
    state: Any = {"messages": []}
    for turn in range(turns):
        old = [] if other else [RemoveMessage(id=m.id) for m in state["messages"][:-2]]
        new = HumanMessage(f"{turn}")
        state = app.invoke({"messages": [*old, new]}, CONFIG, context=WindowContext(engine))
        sizes.append(len(json.dumps(state["window"]["notes"])))
    return sizes


@pytest.mark.parametrize("other", [False, True])
def test_notes_of_a_long_conversation_stay_small(engine: Any, other: bool) -> None:
    sizes = _trimmed(WindowNode(budget=60, max_tokens=2), engine, 25, other)
    assert sizes[-1] < sizes[10] + 100


def test_what_another_node_brought_back_does_not_stop_a_conversation(engine: Any) -> None:
    with Window(engine, "hd") as window:
        follow(window, [Chunk.text("a"), Chunk.text("b")])
        (removed,) = follow(window, [Chunk.text("b")])
        window.recall(removed)
        assert follow(window, [Chunk.text("b"), Chunk.text("a")], removed=[removed]) == []
        assert [window.chunk(i) for i in window.ids] == [Chunk.text("b"), Chunk.text("a")]


@pytest.mark.parametrize("bring", [sync, follow])
def test_a_chunk_that_the_window_is_about_to_forget_is_placed_anew(
    engine: Any, bring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edits, "MAX_EVICTED", 3)
    with Window(engine, "hd") as window:
        ids = window.extend([Chunk.text(t) for t in "abcdef"])
        for placement in ids[:3]:
            window.evict(placement)
        wanted = [Chunk.text("a"), Chunk.text("f")]
        if bring is follow:
            follow(window, wanted, removed=ids[:3])
        else:
            sync(window.core, wanted)
        assert [window.chunk(i) for i in window.ids] == [Chunk.text("a"), Chunk.text("f")]
        window.check()


def test_pictures_seen_again_by_sync_are_counted(engine: Any, picture: Picture) -> None:
    with Window(engine, "hd") as window:
        window.append(picture(1))
        window.ask("what?", max_tokens=2)
        sync(window.core, [])
        for key in list(engine.store.list("embed/")):
            engine.store.delete(key)
        sync(window.core, [picture(1)])
        assert window.ask("what?", max_tokens=2).usage.vision_encodes == 1


def test_an_answer_kept_under_another_profile_is_computed_again(
    engine: Any, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once() -> None:
        with open_window(None, execution(engine), system_prompt="hd") as window:
            window.append(picture(1))
            window.ask("what?", max_tokens=3)

    once()
    monkeypatch.setattr(auditing, "resolve", lambda fidelity, model: fidelity.model_copy(update={"mode": "patched"}))
    once()
    assert engine.asked == 2
    once()
    assert engine.asked == 2


def held(engine: Any) -> int:
    gc.collect()
    engine.repo.leased("span/none")  # what collected windows left is released at the next call
    return sum(engine.repo._leases.values())


def _leasing(picture: Picture, end: Callable[[], Any], *, close: bool) -> Any:
    def look(state: WindowState, runtime: Runtime[WindowContext]) -> dict[str, Any]:
        window = open_window(None, runtime, system_prompt="hd")
        with window if close else contextlib.nullcontext(), window.fork() as branch:
            window.append(picture(1))
            branch.append(picture(2))
            window.ask("what?", max_tokens=3)
            assert held(engine_of(runtime.context)) > 0
            end()
            return {"window": window.ref()}

    graph = StateGraph(WindowState, context_schema=WindowContext)
    graph.add_node("look", look)
    graph.add_edge(START, "look")
    return graph.compile(checkpointer=InMemorySaver())


@pytest.mark.parametrize("close", [True, False])
def test_leases_are_given_back_however_a_node_ends(engine: Any, picture: Picture, close: bool) -> None:
    def fail() -> None:
        raise RuntimeError("the tool behind it failed")

    for end in (lambda: None, lambda: interrupt("wait"), fail):
        app = _leasing(picture, end, close=close)
        with contextlib.suppress(RuntimeError):
            app.invoke({}, CONFIG, context=WindowContext(engine))
        assert held(engine) == 0


def test_leases_are_given_back_when_a_run_is_cancelled(engine: Any) -> None:
    graph = StateGraph(WindowState, context_schema=WindowContext)
    graph.add_node(WindowNode(max_tokens=20))
    graph.add_edge(START, "window")
    app = graph.compile(checkpointer=InMemorySaver())
    engine.delay = 0.05

    async def cancelled() -> None:
        run = asyncio.ensure_future(
            app.ainvoke({"messages": [HumanMessage("what?")]}, CONFIG, context=WindowContext(engine))
        )
        while not engine.asked:
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancelled())
    assert held(engine) == 0


def test_a_window_closed_while_a_thread_still_edits_it_keeps_no_lease(
    engine: Any, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a cancelled async node leaves behind: its thread cannot be stopped."""
    window = Window(engine, "hd")
    closing = threading.Thread(target=window.close)
    lease = engine.repo.lease

    def slow(key: str) -> bool:
        if not closing.ident:
            closing.start()
            closing.join(0.05)
        return bool(lease(key))

    monkeypatch.setattr(engine.repo, "lease", slow)
    window.append(picture(1))
    closing.join()
    assert held(engine) == 0


class NewestFirst:
    def order(self, window: Window) -> Iterable[str]:
        return reversed(window.ids)


def _turn(node: WindowNode, engine: Any, turns: list[list[Any]]) -> list[str]:
    """Content placed after the last of the turns; a number in a turn is a picture."""
    graph = StateGraph(WindowState, context_schema=WindowContext)
    graph.add_node(node)
    graph.add_edge(START, "window")
    app = graph.compile(checkpointer=InMemorySaver())
    for turn in turns:
        blocks = [
            {"type": "image", "base64": _png(part), "mime_type": "image/png"} if isinstance(part, int) else part
            for part in turn
        ]
        state = app.invoke({"messages": [HumanMessage(blocks)]}, CONFIG, context=WindowContext(engine))
    with load(engine, state["window"]) as window:
        return [window.chunk(i).id for i in window.ids]


def _png(i: int) -> str:
    png = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(png, "PNG")
    return base64.b64encode(png.getvalue()).decode()


def test_what_is_asked_about_never_leaves_before_the_answer(engine: Any) -> None:
    node = WindowNode(system_prompt="hd", budget=30, max_tokens=2, eviction=NewestFirst())
    picture = Chunk.image(np.full((4, 4, 3), 7, np.uint8)).id
    assert picture in _turn(node, engine, [[1, "q1?"], [2, "q2?"], [7, "q3?"]])


def test_what_is_asked_about_must_fit(engine: Any) -> None:
    node = WindowNode(system_prompt="hd", budget=12, max_tokens=2)
    with pytest.raises(BudgetExceeded):
        _turn(node, engine, [[*range(1, 9), "q?"]])


def test_sync_reorders_as_reorder_does() -> None:
    states = []
    for by_sync in (True, False):
        with FakeEngine() as engine, Window(engine, "hd", fidelity=Fidelity("patched", rank=2)) as window:
            window.extend([Chunk.text(t) for t in "abc"])
            window.ask("what?", max_tokens=2)
            window.insert(0, Chunk.text("n"))
            n, a, b, c = window.ids
            if by_sync:
                sync(window.core, [window.chunk(i) for i in (a, n, b, c)])
            else:
                window.reorder([a, n, b, c])
            states.append([(p.chunk_id, [window.chunk(u).id for u in p.unseen]) for p in window.snapshot().placed])
    assert states[0] == states[1]


def shown(window: Window) -> list[Chunk]:
    return [window.chunk(i) for i in window.ids]


@pytest.mark.parametrize("most", [0, 3, 4096])
@pytest.mark.parametrize("edit", ["a recent one", "the first placed", "one that left", "remove"])
def test_edits_of_a_long_conversation_keep_its_newest_part(
    engine: Any, edit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the window has forgotten what left it: with its store, or behind `edits.MAX_EVICTED`."""
    monkeypatch.setattr(edits, "MAX_EVICTED", most)
    with Window(engine, "hd") as window:
        talk = [Chunk.text(f"q{i:02}") for i in range(30)]
        window.extend(talk)
        for placement in window.ids[:20]:
            window.evict(placement)
        lost = 20 - len(window.evicted)
        at = {"a recent one": 27, "the first placed": 20, "one that left": 10, "remove": 27}[edit]
        talk[at : at + 1] = [] if edit == "remove" else [Chunk.text("edited")]
        follow(window, [*talk, Chunk.text("next")], lost=lost)
        assert shown(window) == [*talk[20:], Chunk.text("next")]
        follow(window, [*talk, Chunk.text("next"), Chunk.text("again")], lost=lost)
        assert shown(window) == [*talk[20:], Chunk.text("next"), Chunk.text("again")]


def test_a_summary_of_what_left_is_placed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "MAX_EVICTED", 3)
    with Window(engine, "hd") as window:
        talk = [Chunk.text(f"q{i:02}") for i in range(30)]
        window.extend(talk)
        for placement in window.ids[:20]:
            window.evict(placement)
        follow(window, [Chunk.text("summary"), *talk[25:]], lost=17)
        assert shown(window) == [Chunk.text("summary"), *talk[25:]]
    with Window(engine, "hd") as window:
        window.extend(talk)
        for placement in window.ids[:20]:
            window.evict(placement)
        lost = 20 - len(window.evicted)
        follow(window, [Chunk.text("summary"), *talk[18:]], lost=lost)
        assert shown(window) == [Chunk.text("summary"), *talk[20:]]


def test_an_edit_behind_a_chunk_that_left_by_itself_is_placed(engine: Any) -> None:
    with Window(engine, "hd") as window:
        ids = window.extend(talk := [Chunk.text(f"q{i}") for i in range(6)])
        window.evict(ids[1])
        follow(window, [Chunk.text("edited"), *talk[1:], Chunk.text("next")])
        assert shown(window) == [Chunk.text("edited"), *talk[2:], Chunk.text("next")]


class OtherTokens(FakeEngine):
    """Another model, of another tokenizer."""

    def _text(self, text: str) -> list[int]:
        return [400 + byte for byte in text.encode()]


def test_a_thread_that_goes_on_with_another_model_reads_its_messages_anew() -> None:
    node = WindowNode(system_prompt="hd", max_tokens=3, fidelity=Fidelity("exact"))
    with FakeEngine() as first, OtherTokens(name="other") as second, OtherTokens(name="other") as third:
        graph = StateGraph(WindowState, context_schema=WindowContext).add_node("n", node).add_edge(START, "n")
        threads = [graph.compile(checkpointer=InMemorySaver()) for _ in range(2)]
        threads[0].invoke({"messages": [HumanMessage("hello?")]}, CONFIG, context=WindowContext(first))
        said = threads[0].invoke({"messages": [HumanMessage("second?")]}, CONFIG, context=WindowContext(second))
        fresh = threads[1].invoke({"messages": said["messages"][:-1]}, CONFIG, context=WindowContext(third))
        assert said["messages"][-1].text == fresh["messages"][-1].text
        with load(second, said["window"]) as one, load(third, fresh["window"]) as other:
            assert [one.chunk(i).id for i in one.ids] == [other.chunk(i).id for i in other.ids]
