"""LangChain's own tests of chat models, unmodified."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from ctxwin.engines.base import Engine
from langchain_ctxwin.chat import ChatCtxwin


@pytest.fixture(scope="class", autouse=True)
def engines(request: pytest.FixtureRequest, tiny: Engine, caller: Engine) -> None:
    request.cls.engines = {"tiny": tiny, "caller": caller}


class TestBundledModel(ChatModelUnitTests):
    """The bundled model, which takes no tools."""

    engines: dict[str, Engine]

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCtxwin

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny:hf"}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_video_inputs(self) -> bool:
        return True


class TestToolModel(ChatModelUnitTests):
    """A model whose chat template takes tools."""

    engines: dict[str, Engine]

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCtxwin

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engines["caller"], "model": "hf:caller"}
