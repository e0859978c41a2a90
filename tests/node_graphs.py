"""Graphs of one `WindowNode`, on an engine whose answers can be made by hand."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from PIL import Image

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.base import Engine
from langchain_ctxwin.langgraph import WindowContext, WindowNode, WindowState, load
from window.fake import FakeEngine

EXACT = Fidelity("exact")
CONFIG: Any = {"configurable": {"thread_id": "t"}}


class Chatty(FakeEngine):
    """Reads its own answers back as the tokens they were."""

    asked = 0

    def text_ids(self, text: str) -> tuple[int, ...]:
        words = text.split()
        return tuple(map(int, words)) if words and all(w.isdigit() for w in words) else super().text_ids(text)

    def generate(self, *args: Any, **options: Any) -> Any:
        self.asked += 1
        return super().generate(*args, **options)


def graph_of(node: WindowNode, saver: Any = None, before: Any = None, state: Any = WindowState) -> Any:
    graph = StateGraph(state, context_schema=WindowContext)
    graph.add_node(node)
    if before is not None:
        graph.add_node("before", before)
        graph.add_edge(START, "before")
        graph.add_edge("before", node.name)
    else:
        graph.add_edge(START, node.name)
    graph.add_edge(node.name, END)
    return graph.compile(checkpointer=saver or InMemorySaver())


def frame(i: int) -> np.ndarray:
    return np.full((4, 4, 3), i, np.uint8)


def shown(i: int, question: str, **fields: Any) -> HumanMessage:
    png = io.BytesIO()
    Image.fromarray(frame(i)).save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    return HumanMessage(
        [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}], **fields
    )


Turn = tuple[int | None, str, str]


def content(turns: Sequence[Turn], system_prompt: str = "hd", engine: Engine | None = None) -> list[str]:
    """By hand: ids of the chunks that (frame, question, answer) turns are; the last answer may still be missing."""
    with Chatty() as other, Window(other, system_prompt) as window:
        for picture, question, answer in turns:
            if picture is not None:
                window.append(Chunk.image(frame(picture)))
            if answer:
                window.remember(question, [int(t) for t in answer.split()])
        return [window.chunk(i).id for i in window.ids]


def placed(engine: Engine, state: Any) -> list[str]:
    with load(engine, state["window"]) as window:
        window.check()
        return [window.chunk(i).id for i in window.ids]


def fresh_answer(turns: Sequence[Turn], question: str, system_prompt: str = "hd") -> str:
    """What a window made from nothing answers after the turns."""
    with Chatty() as other, Window(other, system_prompt, fidelity=EXACT) as window:
        for picture, asked, answer in turns:
            if picture is not None:
                window.append(Chunk.image(frame(picture)))
            if answer:
                window.remember(asked, [int(t) for t in answer.split()])
        return window.ask(question, max_tokens=3).text
