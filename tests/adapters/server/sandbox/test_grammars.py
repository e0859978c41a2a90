"""Schemas and grammars are tried in a process of its own before an engine compiles them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.server.calls import call
from adapters.server.serving import Server, serving
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.sandbox.grammars import GrammarRefused, Grammars, constraints_in

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
NEVER = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"anyOf": [{"$ref": "#"}]},
    False,
    {"$ref": "#/$defs/nowhere"},
    {"enum": []},
]
"""Schemas that no answer fits, in the end or at once."""


def many_rules(count: int = 3000, seed: int = 0) -> str:
    """A grammar whose rules all reach each other."""
    step = random.Random(seed).randrange(3, 97, 2)
    rules = [f'r{i} ::= [a-z]+ r{(i * step) % count} "x" | r{(i * 13 + 1) % count}? "b"' for i in range(count)]
    return "\n".join(["root ::= (" + " | ".join(f"r{i}" for i in range(count)) + ")*", *rules])


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(seconds=0.5)
    yield made
    made.close()


def check(grammars: Grammars, data: Any, tenant: str = "") -> None:
    asyncio.run(grammars.check(tenant, data))


def refusal(grammars: Grammars, data: Any) -> str:
    with pytest.raises(GrammarRefused) as raised:
        check(grammars, data)
    return str(raised.value)


TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}


@pytest.mark.parametrize(
    "data",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "structural_tag", "format": TAG}},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"structured_outputs": {"regex": r"\d{3}-\d{4}"}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no" rest\nrest ::= [a-z]*'}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"structured_outputs": {"choice": ["a", 'b"\\', "ü\n"]}},
        {"text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}},
        {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
        {"json_schema": PERSON},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": PERSON}}], "tool_choice": "required"},
        {"json_schema": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"$ref": "#"}]}}},
    ],
    ids=str,
)
def test_what_people_ask_for_passes(grammars: Grammars, data: dict[str, Any]) -> None:
    check(grammars, data)


@pytest.mark.parametrize("schema", NEVER, ids=json.dumps)
def test_a_schema_that_nothing_fits_is_refused(grammars: Grammars, schema: Any) -> None:
    for data in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"text": {"format": {"type": "json_schema", "name": "p", "schema": schema}}},
    ):
        assert "must be one that an answer can follow" in refusal(grammars, data)


@pytest.mark.parametrize(
    "constraint",
    [
        {"grammar": many_rules()},
        {"regex": "|".join(f"[a-z]{{{i},{i + 500}}}{i}" for i in range(1, 2000))},
        {"json": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "minLength": 5, "maxLength": 3000 + i} for i in range(100)},
        }},
    ],
    ids=["rules", "alternatives", "lengths"],
)  # fmt: skip
def test_what_costs_is_refused_and_others_go_on(grammars: Grammars, constraint: dict[str, Any]) -> None:
    said = refusal(grammars, {"structured_outputs": constraint})
    assert "cheap enough to compile" in said and "make it smaller" in said
    check(grammars, {"json_schema": PERSON})


def test_texts_are_bounded_before_anything_is_tried() -> None:
    grammars = Grammars()
    for data in (
        {"structured_outputs": {"grammar": "root ::= " + '"a" ' * 70_000}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300_000]}}}},
        {"structured_outputs": {"choice": ["x" * 300] * 1000}},
    ):
        assert "262144 characters" in refusal(grammars, data)
    assert grammars._helper is None
    grammars.close()


def test_a_constraint_is_tried_once() -> None:
    grammars = Grammars()
    tried: list[bytes] = []
    grammars._ask = lambda raw: tried.append(raw) or (0.0, 0, "")  # type: ignore[method-assign,func-returns-value]

    async def asked() -> None:
        await asyncio.gather(*[grammars.check("a", {"json_schema": PERSON}) for _ in range(20)])
        await grammars.check("b", {"json_schema": PERSON})  # another tenant's costs are not told

    asyncio.run(asked())
    assert len(tried) == 2
    grammars.close()


def test_tenants_try_in_turns() -> None:
    """One of a tenant at a time: many of one are no reason that another one waits for more than one."""
    grammars, order, first = Grammars(shared=True), list[str](), threading.Event()

    def ask(raw: bytes) -> tuple[float, int, str]:
        order.append(json.loads(raw)[1])
        first.wait(30)
        return 0.0, 0, ""

    grammars._ask = ask  # type: ignore[method-assign]

    async def asked() -> None:
        many = [asyncio.create_task(grammars.check("greedy", {"json_schema": {"const": i}})) for i in range(20)]
        await asyncio.sleep(0.1)
        one = asyncio.create_task(grammars.check("small", {"json_schema": PERSON}))
        await asyncio.sleep(0.1)
        first.set()
        await one
        assert order.index(json.dumps(PERSON)) <= 2
        await asyncio.gather(*many)

    asyncio.run(asked())
    grammars.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["json", "schema", "json_schema", "format", "type", "choice", "regex", "grammar", "structural_tag", "tools", "function",
         "parameters", "tool_choice", "strict", "$defs", "structured_outputs", "response_format", "text", "sampling_params"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_any_json_is_read_or_refused(data: Any) -> None:
    try:
        if isinstance(data, dict):
            for kind, text in constraints_in(data):
                assert kind in ("json", "regex", "grammar", "structural_tag") and isinstance(text, str)
    except GrammarRefused:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(None, [Tenant(name="acme", keys=["key-a"])], api_keys=["only"]) as running:
        yield running


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
FUNCTION = {"name": "f", "parameters": {"$ref": "#/$defs/b", "$defs": {"a": {"$ref": "#/$defs/a"}}}}
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": FORMAT}),
        ("/v1/chat/completions", {"messages": MESSAGES, "structured_outputs": {"json": '{"$ref": "#"}'}}),
        ("/v1/chat/completions", {
            "messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
        }),
        ("/v1/chat/completions", {
            "messages": [{"role": "user", "content": [{"type": "ctxwin_chunk", "id": "x"}]}], "response_format": FORMAT,
        }),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": 'root ::= root'}}),
        ("/v1/completions", {"prompt": "x", "response_format": FORMAT}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}),
        ("/v1/messages", {
            "messages": MESSAGES, "max_tokens": 1,
            "output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}},
        }),
        ("/v1/messages", {
            "messages": MESSAGES, "max_tokens": 1, "tool_choice": {"type": "any"},
            "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"x": {"enum": []}}}}],
        }),
        ("/v1/windows/x/ask", {"query": "x", "json_schema": {"$ref": "#"}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["only", "key-a"])
def test_every_route_refuses_what_no_answer_fits(server: Server, path: str, body: dict[str, Any], key: str) -> None:
    passed = len(server.passed)
    status, answer = call(server, path, body, authorization=f"Bearer {key}")
    assert (status, "an answer can follow" in answer["error"]["message"]) == (400, True), answer
    assert len(server.passed) == passed
