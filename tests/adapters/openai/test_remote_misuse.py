"""Values of another type: a window on a server refuses what one in this process does, in words that name the argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from openai import OpenAI

from ctxwin import Chunk, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.errors import CtxwinError
from ctxwin.window.ask import AskOptions
from ctxwin_client import RemoteWindow

CHUNKS = [Chunk.text(text) for text in ("one two", "three four", "five six")]
ODD = ["2", 2.5, True, None, -1, float("nan"), {0, 1}, b"x", [1], {"a": 1}, "", object()]
OPERATIONS = (
    "append", "extend", "insert", "evict", "slide", "recall", "reorder", "toggle", "pin", "fork", "adopt", "look_back", "ask",
    "remember", "disposable",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine("tiny:hf") as opened:
        yield opened


def arguments(operation: str) -> dict[str, bool]:
    """Return the names of the arguments of an operation, and whether each must be given."""
    parameters = inspect.signature(getattr(Window, operation)).parameters.values()
    named = {p.name: p.default is p.empty for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD}
    return named | dict.fromkeys(AskOptions.__annotations__ if operation == "ask" else (), False)


def outcome(window: Any, operation: str, name: str, value: Any) -> Exception | None:
    """Return what ``operation`` raises with ``value`` for the argument ``name`` and sensible ones for the others."""
    ids = window.ids
    sensible = {"placement": ids[0], "ids": ids, "chunk": CHUNKS[0], "chunks": CHUNKS[:1], "index": 0, "query": "what?"}
    sensible |= {"conditioned": True, "answer": "that", "branch": None}
    if operation == "recall":
        window.evict(ids[0])
    if operation == "adopt":
        sensible["branch"] = window.fork()
    given = {n: sensible[n] for n, needed in arguments(operation).items() if needed} | {name: value}
    given |= {"max_tokens": 1} if operation in ("ask", "disposable") and name != "max_tokens" else {}
    version = window.version
    try:
        getattr(window, operation)(**given)
    except Exception as error:
        assert window.version == version
        return error
    return None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_a_window_refuses_its_remote_form_refuses(operation: str, engine: Engine, client: OpenAI) -> None:
    differences = []
    for name in arguments(operation):
        for value in ODD:
            with ExitStack() as stack:
                local = stack.enter_context(Window(engine, budget=900))
                remote = stack.enter_context(RemoteWindow(client, budget=900))
                for window in (local, remote):
                    window.extend(CHUNKS)
                here, there = (outcome(window, operation, name, value) for window in (local, remote))
            named = all(e is None or isinstance(e, CtxwinError) or "must" in str(e) for e in (here, there))
            if (here is None) != (there is None) or not named:
                differences.append(f"{name}={value!r}: {here!r}, {there!r}")
    assert not differences, "\n".join(differences)
