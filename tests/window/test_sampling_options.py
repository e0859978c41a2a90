"""A sampling option is defined once: every layer that takes one takes them all."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ctxwin import Window
from ctxwin.engines.sampling import Sampling, SamplingOptions
from ctxwin.window.ask import AskOptions
from ctxwin_client import RemoteWindow
from ctxwin_server.app.endpoints import PLAIN
from ctxwin_server.registry.operations import Ask
from ctxwin_server.registry.streams import LiveAsk
from langchain_ctxwin.decoding import ChatDecoding

ROOT = Path(__file__).parents[2]
OPTIONS = set(SamplingOptions.__annotations__)
AMBIGUOUS = {"temperature", "seed", "top_p", "top_k"}
"""Names that stand for something else as well, or, as ``top_k`` in the endpoint of messages, for another API's option."""


def test_engines_have_a_value_for_each() -> None:
    assert {field.name for field in dataclasses.fields(Sampling)} >= OPTIONS


@pytest.mark.parametrize(
    "method", [getattr(kind, name) for kind in (Window, RemoteWindow) for name in ("ask", "stream", "aask", "astream")]
)
def test_every_ask_has_them_in_its_signature(method: Callable[..., Any]) -> None:
    """``Unpack`` of the typed dictionary, which editors and type checkers complete and check."""
    assert inspect.signature(method).parameters["options"].annotation == "Unpack[AskOptions]"
    assert set(AskOptions.__annotations__) > OPTIONS


@pytest.mark.parametrize("schema", [Ask, LiveAsk, ChatDecoding])
def test_every_schema_has_them_and_their_ranges(schema: type[BaseModel]) -> None:
    assert schema.model_fields.keys() >= OPTIONS
    properties = schema.model_json_schema()["properties"]
    assert {"type": "number", "minimum": 0, "maximum": 1} in properties["min_p"]["anyOf"]
    if issubclass(schema, Ask):
        assert schema.model_fields.keys() >= set(AskOptions.__annotations__)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_tenants_may_send_them(path: str) -> None:
    assert PLAIN[path].fields >= OPTIONS


@pytest.mark.parametrize("name", sorted(OPTIONS - AMBIGUOUS))
def test_an_option_touches_at_most_three_files(name: str) -> None:
    sources = [path for folder in ("ctxwin", "adapters") for path in (ROOT / folder).rglob("*.py")]
    naming = [str(path.relative_to(ROOT)) for path in sources if re.search(rf"\b{name}\b", path.read_text())]
    assert "ctxwin/engines/sampling.py" in naming and len(naming) <= 3, naming
