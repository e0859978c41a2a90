"""LangChain's own tests of chat models, unmodified."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from adapters.langchain.standard_models import BundledModel, ToolModel
from ctxwin.engines.base import Engine


@pytest.fixture(scope="class", autouse=True)
def engines(request: pytest.FixtureRequest, tiny: Engine, caller: Engine) -> None:
    request.cls.engines = {"tiny": tiny, "caller": caller}


class TestBundledModel(BundledModel, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny:hf"}

    @property
    def supports_video_inputs(self) -> bool:
        return True


class TestToolModel(ToolModel, ChatModelUnitTests):
    pass
