"""`WindowNode`: the window follows the messages, the messages stay the user's, and answers are those of a re-prefill."""

from __future__ import annotations

import asyncio
import base64
import io
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.runtime import Runtime
from PIL import Image

from ctxwin import Chunk, Window, open_engine
from ctxwin.errors import BudgetExceeded
from ctxwin.policies import ById, LeastRecentlyRead
from ctxwin.tiny import world
from langchain_ctxwin.langgraph import (
    DeltaWindowState,
    WindowContext,
    WindowNode,
    WindowState,
    load,
    merge_windows,
    open_window,
)
from node_graphs import CONFIG, EXACT, Chatty, Turn, content, frame, fresh_answer, graph_of, placed, shown
from twins import guard

ROOT = Path(__file__).parents[3]


@pytest.fixture
def engine() -> Iterator[Chatty]:
    with Chatty() as made:
        yield made


def test_turns_append_and_are_remembered(engine: Chatty, saver: Any) -> None:
    app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=3), saver)
    turns: list[Turn] = []
    for i in range(1, 5):
        state = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=WindowContext(engine))
        answer = state["messages"][-1]
        assert isinstance(answer, AIMessage) and len(state["messages"]) == 2 * i
        assert answer.text == fresh_answer([*turns, (i, "", "")], f"q{i}?")
        usage = answer.usage_metadata
        assert usage is not None and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        if i > 1:
            assert usage["input_token_details"]["cache_read"] > usage["input_tokens"] / 2
        turns.append((i, f"q{i}?", answer.text))
        assert placed(engine, state) == content(turns)
    assert engine.counters.vision_encodes == 4 and engine.asked == 4


def test_the_oldest_leave_the_window_and_stay_in_the_messages(engine: Chatty) -> None:
    app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, budget=40, max_tokens=3))
    turns: list[Turn] = []
    for i in range(1, 9):
        state = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=WindowContext(engine))
        turns.append((i, f"q{i}?", state["messages"][-1].text))
    assert len(state["messages"]) == 16
    held = placed(engine, state)
    assert held == content(turns)[-len(held) :] and 2 <= len(held) < 8
    assert state["window"]["evicted"] == 16 - len(held)


def test_a_window_with_a_mark_slides_in_batches_over_turns(engine: Chatty) -> None:
    """Each turn restores it from its reference; between two slides everything that stood there stays where it was."""
    app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, budget=60, low_water=0.5, max_tokens=3))
    held: list[list[Any]] = []
    for i in range(1, 16):
        state = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=WindowContext(engine))
        held.append(placed(engine, state))
    slides = [i for i in range(1, 15) if held[i][: len(held[i - 1])] != held[i - 1]]
    assert 2 <= len(slides) <= 5  # one by one it would slide in every turn but the first few
    for i in slides:
        assert len(held[i]) < len(held[i - 1]) and held[i][-1] != held[i - 1][-1]


def test_earlier_messages_that_change_are_followed(engine: Chatty) -> None:
    app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=3))
    context = WindowContext(engine)
    for i in range(1, 4):
        state = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=context)
    answers = [m.text for m in state["messages"] if isinstance(m, AIMessage)]
    turns: list[Turn] = [(i, f"q{i}?", a) for i, a in enumerate(answers, 1)]

    # Another picture in the second message, with the same id.
    other = shown(7, "q2?", id=state["messages"][2].id)
    state = app.invoke({"messages": [other, shown(4, "q4?")]}, CONFIG, context=context)
    turns[1] = (7, "q2?", answers[1])
    assert state["messages"][-1].text == fresh_answer([*turns, (4, "", "")], "q4?")
    turns.append((4, "q4?", state["messages"][-1].text))
    assert placed(engine, state) == content(turns)

    # The first turn is taken out, question and answer.
    gone = [RemoveMessage(id=m.id) for m in state["messages"][:2]]
    state = app.invoke({"messages": [*gone, shown(5, "q5?")]}, CONFIG, context=context)
    assert state["messages"][-1].text == fresh_answer([*turns[1:], (5, "", "")], "q5?")
    turns = [*turns[1:], (5, "q5?", state["messages"][-1].text)]
    assert placed(engine, state) == content(turns)

    # The same content at the end is encoded no more; back at its old place it is recalled.
    encodes = engine.counters.vision_encodes
    state = app.invoke({"messages": [shown(1, "q6?")]}, CONFIG, context=context)
    turns.append((1, "q6?", state["messages"][-1].text))
    assert placed(engine, state) == content(turns)
    everything = [shown(1, "q1?"), AIMessage(answers[0]), *state["messages"], HumanMessage("q7?")]
    told = list(
        app.stream(
            {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), *everything]}, CONFIG, context=context,
            stream_mode="custom",
        )
    )  # fmt: skip
    assert {t["op"] for t in told} >= {"recall", "ask"}
    state = app.get_state(CONFIG).values
    turns = [(1, "q1?", answers[0]), *turns]
    assert state["messages"][-1].text == fresh_answer(turns, "q7?")
    assert placed(engine, state) == content([*turns, (None, "q7?", state["messages"][-1].text)])
    assert engine.counters.vision_encodes == encodes


def test_ids_of_messages_do_not_matter(engine: Chatty) -> None:
    """The same conversation under new ids, as another process or a copied thread has it."""
    app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=3))
    state = app.invoke({"messages": [shown(1, "q1?", id="a")]}, CONFIG, context=WindowContext(engine))
    copied = [m.model_copy(update={"id": f"new-{i}"}) for i, m in enumerate(state["messages"])]
    thread: Any = {"configurable": {"thread_id": "copy"}}
    told = list(
        app.stream(
            {"messages": [*copied, shown(2, "q2?")], "window": state["window"]}, thread,
            context=WindowContext(engine), stream_mode="custom",
        )
    )  # fmt: skip
    assert [(t["op"], len(t["ids"])) for t in told] == [("append", 1), ("ask", 1)]


def test_a_conversation_that_was_cut_short_and_one_that_diverged(engine: Chatty) -> None:
    """Time travel: going on from the first turn in two ways."""
    app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=3))
    context = WindowContext(engine)
    first = app.invoke({"messages": [shown(1, "q1?")]}, CONFIG, context=context)
    turns: list[Turn] = [(1, "q1?", first["messages"][-1].text)]
    base = app.get_state(CONFIG).config
    for i in (2, 3):
        state = app.invoke({"messages": [shown(i, "q2?")]}, base, context=context)
        assert len(state["messages"]) == 4
        assert placed(engine, state) == content([*turns, (i, "q2?", state["messages"][-1].text)])


def test_system_messages_are_the_header(engine: Chatty) -> None:
    app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=3))
    context = WindowContext(engine)
    said = SystemMessage("be short", id="s")
    state = app.invoke({"messages": [said, shown(1, "q1?")]}, CONFIG, context=context)
    assert state["window"]["system_prompt"] == "hd\nbe short"
    answer = state["messages"][-1].text
    assert answer == fresh_answer([(1, "", "")], "q1?", "hd\nbe short")
    window = state["window"]["window"]
    changed = SystemMessage("be long", id="s")
    state = app.invoke({"messages": [changed, shown(2, "q2?")]}, CONFIG, context=context)
    assert state["window"]["system_prompt"] == "hd\nbe long" and state["window"]["window"] == window
    assert state["messages"][-1].text == fresh_answer([(1, "q1?", answer), (2, "", "")], "q2?", "hd\nbe long")


def test_what_other_nodes_place_is_left_alone(engine: Chatty) -> None:
    def before(state: WindowState, runtime: Runtime[WindowContext]) -> dict[str, Any]:
        with open_window(state.get("window"), runtime, system_prompt="theirs") as window:
            if not window.ids:
                window.append(Chunk.text("a hint", pin=True))
            return {"window": window.ref()}

    app = graph_of(WindowNode(fidelity=EXACT, max_tokens=3), before=before)
    context = WindowContext(engine)
    hint = Chunk.text("a hint").id
    state = app.invoke({"messages": [shown(1, "q1?")]}, CONFIG, context=context)
    assert state["window"]["system_prompt"] == "theirs"
    assert placed(engine, state)[0] == hint
    changed = shown(3, "q1?", id=state["messages"][0].id)
    answer = state["messages"][1].text
    state = app.invoke({"messages": [changed, shown(2, "q2?")]}, CONFIG, context=context)
    assert placed(engine, state) == [hint, *content([(3, "q1?", answer), (2, "q2?", state["messages"][-1].text)])]


def test_policies_and_look_back(engine: Chatty) -> None:
    node = WindowNode(
        system_prompt="hd", fidelity=EXACT, budget=48, max_tokens=3, eviction=LeastRecentlyRead(), retrieval=ById()
    )
    app, context = graph_of(node), WindowContext(engine)
    for i in range(1, 7):
        state = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=context)
    with load(engine, state["window"]) as window:
        back = window.evicted[0]
    state = app.invoke({"messages": [shown(8, f"and {back}?")]}, CONFIG, context=context)
    assert back in [p["id"] for p in state["window"]["placed"]]

    # What was removed from the conversation is not looked back at.
    with load(engine, state["window"]) as window:
        back = next(i for i in window.evicted if window.chunk(i).id == Chunk.image(frame(2)).id)
    gone = [RemoveMessage(id=m.id) for m in state["messages"][2:4]]
    state = app.invoke({"messages": [*gone, HumanMessage("hm?")]}, CONFIG, context=context)
    state = app.invoke({"messages": [HumanMessage(f"{back}?")]}, CONFIG, context=context)
    assert back not in [p["id"] for p in state["window"]["placed"]]


def test_async_turns(engine: Chatty) -> None:
    app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=3, messages_key="messages", name="eyes"))

    async def run() -> Any:
        ops = []
        for i in (1, 2):
            turn = {"messages": [shown(i, f"q{i}?")]}
            async for event in app.astream(turn, CONFIG, context=WindowContext(engine), stream_mode="custom"):
                ops.append(event["op"])
        return ops

    assert asyncio.run(run()) == ["append", "ask", "append", "ask"]
    state = app.get_state(CONFIG).values
    first, second = (m.text for m in state["messages"] if isinstance(m, AIMessage))
    assert second == fresh_answer([(1, "q1?", first), (2, "", "")], "q2?")


class OtherKeys(TypedDict, total=False):
    talk: Annotated[list[Any], add_messages]
    seen: Annotated[dict[str, Any], merge_windows]


def test_other_keys() -> None:
    graph = StateGraph(OtherKeys, context_schema=WindowContext)
    graph.add_node(WindowNode(messages_key="talk", window_key="seen", name="eyes", max_tokens=3))
    graph.add_edge(START, "eyes")
    with Chatty() as engine:
        state = graph.compile().invoke({"talk": [shown(1, "q?")]}, context=WindowContext(engine))
    assert state["talk"][-1].text == fresh_answer([(1, "", "")], "q?", "") and len(state["seen"]["placed"]) == 2


def test_files_are_read_only_where_they_are_allowed(tmp_path: Path) -> None:
    Image.fromarray(frame(1)).save(tmp_path / "a.png")
    asked = HumanMessage([{"type": "image", "path": str(tmp_path / "a.png")}, "what?"])
    with Chatty() as refusing, pytest.raises(ValueError, match="allowed_local_media_path"):
        graph_of(WindowNode()).invoke({"messages": [asked]}, CONFIG, context=WindowContext(refusing))
    with Chatty() as engine, Chatty() as emptied:
        node = graph_of(WindowNode(allowed_local_media_path=tmp_path))
        state = node.invoke({"messages": [asked]}, CONFIG, context=WindowContext(engine))
        # A picture on disk is read again where the store lost everything.
        with load(emptied, state["window"]) as window:
            assert window.chunk(window.ids[0]).source == str(tmp_path / "a.png")
            window.ask("again?")
            assert emptied.counters.vision_encodes == 1


@pytest.mark.parametrize("schema", [WindowState, DeltaWindowState])
@pytest.mark.parametrize("lost", ["all", "pictures"])
def test_pictures_in_the_messages_outlive_the_store(engine: Chatty, schema: Any, lost: str) -> None:
    """As where a process with a store in memory ends, or another thread has forgotten the same picture."""
    saver = InMemorySaver()
    app, turns = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=6), saver, state=schema), []
    for i in (1, 2):
        state = app.invoke({"messages": [shown(i, f"q{i}?")]}, CONFIG, context=WindowContext(engine))
        turns.append((i, f"q{i}?", state["messages"][-1].text))
    if lost == "pictures":
        for key in [key for key in engine.store.list() if not key.startswith(("entry/", "page/", "manifest/"))]:
            engine.store.delete(key)
    with Chatty() as emptied:
        left = engine if lost == "pictures" else emptied
        state = app.invoke({"messages": [HumanMessage("q3?")]}, CONFIG, context=WindowContext(left))
        turns.append((None, "q3?", state["messages"][-1].text))
        assert turns[-1][2] == fresh_answer(turns[:2], "q3?")[: len(turns[-1][2])] and placed(left, state) == content(
            turns
        )


def test_bad_input(engine: Chatty) -> None:
    with pytest.raises(TypeError, match=r"sampling must be of temperature, top_p, .*, got \['beams'\]"):
        WindowNode(beams=1)
    app = graph_of(WindowNode(system_prompt="hd", budget=40, max_tokens=3))
    context = WindowContext(engine)
    with pytest.raises(ValueError, match="must end with a text to answer"):
        app.invoke({"messages": []}, CONFIG, context=context)
    with pytest.raises(BudgetExceeded, match="budget of 40"):
        app.invoke({"messages": [HumanMessage("x" * 60)]}, CONFIG, context=context)
    with pytest.raises(TypeError, match="must have an engine"):
        app.invoke({"messages": [HumanMessage("x")]}, CONFIG)


@pytest.mark.parametrize("saver", ["sqlite"], indirect=True)
def test_turns_on_the_model_equal_a_re_prefill(saver: Any) -> None:
    """Over more turns than fit: the same token ids as a window made from nothing out of the same content."""
    stream = world.make_stream(seed=5, n_frames=9)
    with open_engine("tiny:hf") as engine, open_engine("tiny:hf") as other:
        node = WindowNode(system_prompt="You watch a camera.", fidelity=EXACT, budget=420, max_tokens=4)
        app, talk = graph_of(node, saver), []
        for second, seen in enumerate(stream):
            pixels, question = world.render(seen), f"color of {seen.marks[0]:02d}?"
            png = io.BytesIO()
            Image.fromarray(pixels).save(png, "PNG")
            block = {"type": "image", "base64": base64.b64encode(png.getvalue()).decode(), "mime_type": "image/png"}
            asked = HumanMessage([{"type": "text", "text": f"t={second} s\n"}, block, question])
            state = app.invoke({"messages": [asked]}, CONFIG, context=WindowContext(engine))
            answer = state["messages"][-1]

            talk.append(Chunk.image(pixels, text=f"t={second} s"))
            with Window(other, "You watch a camera.", fidelity=EXACT) as window:
                needed = 4 + other.encode_query(question).tokens + window.tokens
                while needed + sum(other.encode(c).tokens for c in talk) > 420:
                    talk.pop(0)
                window.extend(talk)
                fresh = window.ask(question, max_tokens=4, remember=True)
                talk.append(window.chunk(window.ids[-1]))
                assert fresh.remembered is not None and answer.text == fresh.text
                assert placed(engine, state) == [window.chunk(i).id for i in window.ids]
        assert state["window"]["evicted"] > 4 and engine.counters.vision_encodes == len(stream)


@guard
def test_the_ten_lines_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (ROOT / "examples" / "langgraph_ten_lines.py").read_text()
    graph = [line for line in script.splitlines() if "graph" in line or "app" in line]
    assert sum("import" not in line for line in graph) <= 10
    (tmp_path / "run.py").write_text(script.replace('open_engine("tiny")', 'open_engine("tiny:hf")'))
    runpy.run_path(str(tmp_path / "run.py"), run_name="__main__")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("t=")]
    assert len(lines) == 10 and "13 chunks placed" in lines[-1]


def test_a_node_looks_things_up_in_libraries(tmp_path: Path) -> None:
    """What was looked up stays in the window with the exchange, and the next turn goes on behind it."""
    from ctxwin import Library
    from ctxwin.store import open_store
    from engines.scripted import ScriptedEngine
    from engines.tool_models import write_tool_model
    from window.test_lookups import called

    shelf = Library(open_store("memory:"), "manuals")
    shelf.add(b"The pump is oiled on Monday.", "pump.txt")
    said = [called("pump"), "On Monday.", "I said so."]
    with open_engine(f"hf:{write_tool_model(tmp_path)}", dtype="float32") as opened:
        engine = ScriptedEngine(opened, said)
        app = graph_of(WindowNode(system_prompt="hd", fidelity=EXACT, max_tokens=300, libraries=[shelf]))
        context = WindowContext(engine)
        state = app.invoke({"messages": [HumanMessage("When is it oiled?")]}, CONFIG, context=context)
        assert state["messages"][-1].text == "On Monday." and "oiled on Monday" in engine.prompts[1]
        state = app.invoke({"messages": [HumanMessage("Sure?")]}, CONFIG, context=context)
        assert state["messages"][-1].text == "I said so." and len(state["messages"]) == 4
        last = engine.prompts[-1]
        assert (
            last.index("When is it oiled?")
            < last.index("oiled on Monday")
            < last.index("On Monday.<")
            < last.index("Sure?")
        )
