"""LangChain's integration tests of chat models, unmodified.

On the bundled model those without tools run for real (a picture that they would download is put in their hands). Those
with tools run with a scripted decoder behind a real prefill: it calls the first tool it is offered, with arguments out of
the question.
"""

from __future__ import annotations

import io
import json
import re
from types import SimpleNamespace

import httpx
import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from PIL import Image

from adapters.langchain.standard_models import BundledModel, ToolModel
from ctxwin.engines.base import Engine
from engines.scripted import ScriptedEngine


def obedient(prompt: str) -> str:
    """Calls the first tool with words and numbers of the question; says something once there is a result."""
    turns = re.split(r"<\|im_start\|>(\w+)\n", prompt)[1:]
    offered = re.search(r"<tools>\n(.*?)\n</tools>", turns[1], re.DOTALL)
    question = turns[-3].removesuffix("<|im_end|>\n")
    if offered is None or "<tool_response>" in question:
        return "It is sunny."
    tool = json.loads(offered[1].splitlines()[0])["function"]
    number = re.search(r"\d+", question)
    quoted = re.search(r"'(.+?)'", question)
    words = quoted[1] if quoted else question
    values = {"integer": int(number[0]) if number else 1, "string": words}
    fields = tool["parameters"]["properties"]
    arguments = {name: values.get(field.get("type", "string"), words) for name, field in fields.items()}
    call = {"name": tool["name"], "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


@pytest.fixture(scope="class", autouse=True)
def engines(request: pytest.FixtureRequest, tiny: Engine, caller: Engine) -> None:
    request.cls.engines = {"tiny": tiny, "caller": ScriptedEngine(caller, obedient)}


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    Image.new("RGB", (224, 224), (9, 99, 199)).save(out, "PNG")
    monkeypatch.setattr(httpx, "get", lambda *_, **__: SimpleNamespace(content=out.getvalue()))


class TestBundledModel(BundledModel, ChatModelIntegrationTests):
    @property
    def supports_model_override(self) -> bool:
        return False


class TestToolModel(ToolModel, ChatModelIntegrationTests):
    """With a scripted decoder."""

    @property
    def has_tool_choice(self) -> bool:
        return False  # a call cannot be forced

    @property
    def supports_model_override(self) -> bool:
        return False
