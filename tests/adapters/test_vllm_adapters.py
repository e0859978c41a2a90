"""LangGraph and LangChain on vLLM: one small engine, held against transformers on the same run."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import pytest
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from PIL import Image
from pydantic import RootModel

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.errors import UnsupportedModel
from ctxwin.tiny import world
from langchain_ctxwin import ChatCtxwin
from langchain_ctxwin.langgraph import WindowContext, WindowNode, WindowState

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.slow
FRAMES = world.make_stream(seed=3, n_frames=7)
EXACT = Fidelity("exact")


@pytest.fixture(scope="module")
def vllm() -> Iterator[Engine]:
    with open_engine("tiny:vllm", dtype="float32") as opened:
        yield opened


@pytest.fixture(scope="module")
def hf() -> Iterator[Engine]:
    with open_engine("tiny:hf", dtype="float32") as opened:
        yield opened


def asked(second: int) -> list[Any]:
    png = io.BytesIO()
    Image.fromarray(world.render(FRAMES[second])).save(png, "PNG")
    picture = {"type": "image", "base64": base64.b64encode(png.getvalue()).decode(), "mime_type": "image/png"}
    return [{"type": "text", "text": f"t={second} s\n"}, picture, f"color of {FRAMES[second].marks[0]:02d}?"]


def watched(engine: Engine) -> list[tuple[str, list[str], int]]:
    """Of each turn of a graph: the answer, what was streamed of it, and how many chunks were placed."""
    graph = StateGraph(WindowState, context_schema=WindowContext)
    graph.add_node(WindowNode(system_prompt="You watch.", budget=400, max_tokens=4, fidelity=EXACT, keep_media=False))
    graph.add_edge(START, "window")
    app = graph.compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t"}}
    turns = []
    for second in range(len(FRAMES)):
        given: Any = {"messages": [HumanMessage(asked(second))]}
        told = app.stream(given, thread, context=WindowContext(engine), stream_mode="messages")
        streamed = [message.text for message, _ in told if message.text]
        state = app.get_state(thread).values
        turns.append((state["messages"][-1].text, streamed, len(state["window"]["placed"])))
    return turns


def test_a_graph_answers_alike_and_streams(vllm: Engine, hf: Engine) -> None:
    ours, theirs = watched(vllm), watched(hf)
    assert [turn[0] for turn in ours] == [turn[0] for turn in theirs]
    assert [turn[2] for turn in ours] == [turn[2] for turn in theirs] and ours[-1][2] < 2 * len(FRAMES)
    assert all("".join(streamed) == answer for answer, streamed, _ in ours)


def conversation(last: int) -> list[BaseMessage]:
    seen = [HumanMessage(asked(second)[:2]) for second in range(max(0, last - 3), last + 1)]
    return [SystemMessage("You watch."), *seen, HumanMessage(asked(last)[2])]


def test_a_chat_model_answers_alike_with_its_scores(vllm: Engine, hf: Engine) -> None:
    with (
        ChatCtxwin(engine=vllm, max_tokens=4, fidelity=EXACT) as ours,
        ChatCtxwin(engine=hf, max_tokens=4, fidelity=EXACT) as theirs,
    ):
        for last in range(len(FRAMES)):
            options: Any = {"logprobs": True, "top_logprobs": 2, "stop": ["zzz"], "top_p": 0.9}
            one, other = (chat.invoke(conversation(last), **options) for chat in (ours, theirs))
            assert one.text == other.text
            scores, others = (made.response_metadata["logprobs"]["content"] for made in (one, other))
            assert "".join(s["token"] for s in scores).strip().startswith(one.text.strip())
            for score, like in zip(scores, others, strict=True):
                assert score["token"] == like["token"] and len(score["top_logprobs"]) == 2
                assert score["logprob"] == pytest.approx(like["logprob"], abs=1e-3)
        assert one.usage_metadata and one.usage_metadata["input_token_details"]["cache_read"] > 0


def test_choices_differ_and_are_repeatable(vllm: Engine) -> None:
    with closing(ChatCtxwin(engine=vllm, max_tokens=6, temperature=2.0, seed=7)) as chat:
        made = [chat.generate([conversation(2)], n=3).generations[0] for _ in range(2)]
        texts = [[choice.text for choice in choices] for choices in made]
        assert texts[0] == texts[1] and len(set(texts[0])) > 1
        with pytest.raises(ValueError, match="n must be 1 where an answer is streamed"):
            next(chat.stream(conversation(2), n=3))


class Seen(RootModel[Literal["crimson", "navy blue"]]):
    """No object: the bundled model prefers a blank wherever JSON allows one, without end."""


def test_structured_output_is_vllms_own_and_refused_by_transformers(vllm: Engine, hf: Engine) -> None:
    with ChatCtxwin(engine=vllm, max_tokens=32) as chat:
        held = chat.with_structured_output(Seen, method="json_schema")
        assert isinstance(held.invoke(conversation(1)), Seen)
        raw = chat.with_structured_output(Seen, method="json_schema", include_raw=True)
        made = raw.invoke(conversation(1))
        assert made["parsed"] == Seen(json.loads(made["raw"].text)) and made["parsing_error"] is None
        plain = chat.with_structured_output(Seen.model_json_schema(), method="json_schema").invoke(conversation(1))
        assert plain in ("crimson", "navy blue")
        short = ChatCtxwin(engine=vllm, max_tokens=1)
        cut = short.with_structured_output(Seen, method="json_schema", include_raw=True).invoke(conversation(1))
        assert cut["parsed"] is None and cut["parsing_error"] is not None
        with pytest.raises(ValueError, match="Invalid JSON"):
            short.with_structured_output(Seen, method="json_schema").invoke(conversation(1))
        short.close()
        with pytest.raises(ValueError, match="method must be"):
            chat.with_structured_output(Seen, method="yaml")  # type: ignore[arg-type]
    with ChatCtxwin(engine=hf) as chat:
        for method in ("json_schema", "json_mode"):
            with pytest.raises(UnsupportedModel, match="hf engine has no JSON schemas"):
                chat.with_structured_output(Seen, method=method).invoke(conversation(1))  # type: ignore[arg-type]


def test_an_answer_is_json_of_its_schema(vllm: Engine) -> None:
    """Whichever schema is the first: vLLM keeps the library that it compiles that with, and xgrammar joins no schemas."""
    with Window(vllm, "You watch.", 400) as window:
        window.append(Chunk.text("t=0 s"))
        for schema in ({"enum": [11, 77]}, {"allOf": [{"enum": [11, 77]}, {"minimum": 50}]}):
            answer = window.ask("How many?", 8, json_schema=schema)
        assert answer.text == "77"
        with pytest.raises(ValueError, match=r'Unimplemented keys: \["not"\]; leave that out'):
            window.ask("How many?", 8, json_schema={"enum": [11, 77], "not": {"const": 11}})
        assert vllm.counters.retries == 0


def test_ids_and_counts_end_with_the_vocabulary_on_both(vllm: Engine, hf: Engine) -> None:
    for engine in (vllm, hf):
        with Window(engine, "You watch.", 400) as window:
            size = len(window.ask("color?", 1, logprobs=-1).first_token_logprobs)
            assert window.ask("color?", 1, logprobs=size, stop=[size - 1]).text is not None
            for options in ({"logprobs": size + 1}, {"stop": [size]}):
                with pytest.raises(ValueError, match=r"(logprobs|token ids in stop) must be an int in"):
                    window.ask("color?", 1, **options)  # type: ignore[arg-type]
