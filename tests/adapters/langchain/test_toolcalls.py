"""Reading answers: tool calls, stop sequences, any cutting of the text into tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxwin.engines.base import Engine
from ctxwin.errors import UnsupportedModel
from ctxwin.window.answer import BrokenCall, ToolCall
from ctxwin.window.ask import until_stop
from ctxwin.window.toolcalls import Part, Reader, Syntax, learn
from window.fake import FakeEngine

HERMES = Syntax("<tool_call>", "</tool_call>", "name", "arguments")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def read(text: str, stops: tuple[str, ...] = (), syntax: Syntax | None = HERMES) -> list[Part]:
    return Reader(syntax).read(until_stop(text, stops, last=True)[0], last=True)


def told(parts: list[Part]) -> list[Any]:
    """Parts without the ids made up for calls; texts that follow each other are one."""
    out: list[Any] = []
    for part in parts:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        elif isinstance(part, str):
            out.append(part)
        else:
            out.append(told_call(part))
    return out


def told_call(part: Any) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        return valid(part.name, **part.arguments)
    return {"type": "invalid_tool_call", "name": part.name, "args": part.text}


def valid(name: str, **args: Any) -> dict[str, Any]:
    return {"type": "tool_call", "name": name, "args": args}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("red", ["red"]),
        (" red\n", [" red\n"]),
        (call("look", at=1), [valid("look", at=1)]),
        ("I look.\n" + call("look", at="é"), ["I look.", valid("look", at="é")]),
        (call("a") + "\n" + call("b", x=[1]) + "\n", [valid("a"), valid("b", x=[1])]),
        (call("a") + "\nand\n" + call("b"), [valid("a"), "and", valid("b")]),
        (call("a", html="</tool_call>"), [valid("a", html="</tool_call>")]),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', [valid("a", x=1)]),
        ("2 < 3 <tool", ["2 < 3 <tool"]),
    ],
)
def test_what_is_read(text: str, parts: list[Any]) -> None:
    assert told(read(text)) == parts


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>\n{'name': 'a'}\n</tool_call>", "must be JSON"),
        ('<tool_call>\n{"name": "a", "arguments": [1]}\n</tool_call>', "must be JSON"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "must be JSON"),
        ('<tool_call>\n{"name": "a", "argum', "not finished"),
    ],
)
def test_what_cannot_be_read(text: str, error: str) -> None:
    (part,) = read(text)
    assert isinstance(part, BrokenCall)
    assert isinstance(part, BrokenCall) and part.text == text
    assert error in part.error


def test_stop_sequences() -> None:
    reader = Reader(None)
    stops = ["END", "\n\n"]
    assert reader.read(until_stop("red E", stops)[0]) == ["red "]
    assert reader.read(until_stop("red EN", stops)[0]) == []
    assert reader.read(until_stop("red END of it", stops)[0]) == []
    assert told(read("red ENd", ("END",))) == ["red ENd"]
    assert told(read(call("a") + " END " + call("b"), ("END",))) == [valid("a")]


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["red", " ", "\n", "<tool", "<tool_call>", "</tool_call>", "{", "ST", "STOP", "é"]),
        st.sampled_from([call("a"), call("b", x="</tool_call>"), call("c", y={"z": [1, "é"]})]),
    ),
    max_size=6,
).map("".join)


@given(TEXTS, st.lists(st.integers(1, 5), max_size=200), st.sampled_from([(), ("STOP",), ("STOP", "d\n")]))
def test_the_cutting_into_tokens_does_not_show(text: str, sizes: list[int], stops: tuple[str, ...]) -> None:
    reader, parts, at, stopped = Reader(HERMES), list[Part](), 0, False
    for size in sizes:
        at += size
        if at >= len(text) or stopped:
            break
        shown, stopped = until_stop(text[:at], stops)
        parts += reader.read(shown)
    parts += reader.read(until_stop(text, stops, last=True)[0], last=True)
    assert told(parts) == told(read(text, stops))


def test_half_a_character_waits() -> None:
    reader = Reader(None)
    assert reader.read("a\ufffd") == ["a"]
    assert reader.read("aé") == ["é"]


def test_the_syntax_is_read_off_the_template(caller: Engine, tiny: Engine) -> None:
    assert learn(caller) == HERMES
    with pytest.raises(UnsupportedModel, match="drops tool calls"):
        learn(tiny)
    with pytest.raises(UnsupportedModel, match="no chat template"):
        learn(FakeEngine())
