"""Clients set variables of the chat template, and nothing of the tokenizer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.server.calls import call
from adapters.server.serving import Server, serving
from ctxwin_chats.options import ChatDefaults
from ctxwin_chats.template_arguments import template_variables
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.protocol.limits import Limits

TEMPLATE = "{{ hello }}{{ tools | tojson(indent=indent) }}{{ max_length }}{{ raise_exception }}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    tenants = [Tenant(name="acme", keys=["key-a"])]
    defaults = ChatDefaults(template_variables=template_variables([TEMPLATE]))
    with serving(Limits(), tenants, ["key-own"], chat_defaults=defaults) as running:
        yield running


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokenize": True, "padding": "max_length", "max_length": 20_000_000},
        {"max_length": 5},
        {"truncation": True},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 10**8}},
        {"processor_kwargs": {"size": {"height": 10**5, "width": 10**5}}},
        {"return_tensors": "pt"},
        {"return_dict": True},
        {"pad_to_multiple_of": 10**9},
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
        {"conversation": [{"role": "user", "content": "x"}]},
        {"messages": []},
        {"tools": [{}]},
        {"raise_exception": "x"},
        {"Max_Length": 5},
        {"indent": 10**9},
        {"indent": -(10**9)},
        {"indent": 1e300},
        {"indent": float("inf")},
        {"hello": {"deep": [{"indent": 2**40}]}},
        {"hello": [""] * 30_000},
        ["tokenize"],
        "tokenize",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/chat/completions/batch", "/invocations"]
)
@pytest.mark.parametrize("key", ["key-a", "key-own"])
def test_what_is_no_variable_is_refused_on_every_route(server: Server, arguments: Any, path: str, key: str) -> None:
    body = {"messages": [], "chat_template_kwargs": arguments}
    status, answer = call(server, path, body, authorization=f"Bearer {key}")
    assert status in (400, 403), answer
    said = answer["error"]["message"]
    assert status == 403 or "chat_template_kwargs" in said or "indent must be a finite number" in said
    assert not server.passed


@pytest.mark.parametrize(
    "body",
    [
        {"bad_words": ["x"] * 2000},
        {"logit_bias": {str(i): 1 for i in range(2000)}},
        {"stop": ["x"] * 2000},
        {"prompt": ["x"] * 100, "n": 100},
        {"structured_outputs": [1]},
        {"structured_outputs": "x"},
        {"stop": "\ud800"},
        {"x\udfff": 1},
        {"top_k": 10**30},
        {"messages": [{"role": "user", "content": "x", "n": [10**30]}]},
    ],
)
def test_options_without_a_bound_in_vllm_are_the_clients_error(server: Server, body: dict[str, Any]) -> None:
    status, answer = call(server, "/v1/completions", {"prompt": "x", **body}, authorization="Bearer key-a")
    assert status in (400, 403), answer
    assert not server.passed
