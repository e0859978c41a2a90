"""Models that LangChain's standard tests of chat models run on."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel

from ctxwin.engines.base import Engine
from langchain_ctxwin.chat import ChatCtxwin


class ToolModel:
    """A model whose chat template takes tools."""

    engines: dict[str, Engine]

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatCtxwin

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engines["caller"], "model": "hf:caller"}


class BundledModel(ToolModel):
    """The bundled model: it sees, and takes no tools."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engines["tiny"]}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_image_inputs(self) -> bool:
        return True
