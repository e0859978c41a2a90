"""LangChain: a chat model over windows, and middleware that keeps an agent's context within bounds.

Importing this package loads no LangChain; its names are looked up when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxwin.adapters.langchain.chat import ChatCtxwin
    from ctxwin.adapters.langchain.messages import Conversation, converse
    from ctxwin.adapters.langchain.middleware import WindowMiddleware
    from ctxwin.adapters.langchain.units import LeastRecentlyReadMessages, MessagePolicy, OldestMessages

_MODULES = {
    "ChatCtxwin": "chat", "Conversation": "messages", "converse": "messages", "WindowMiddleware": "middleware",
    "LeastRecentlyReadMessages": "units", "MessagePolicy": "units", "OldestMessages": "units",
}  # fmt: skip

__all__ = [
    "ChatCtxwin", "Conversation", "LeastRecentlyReadMessages", "MessagePolicy", "OldestMessages", "WindowMiddleware", "converse",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ctxwin.extras import optional_imports

    with optional_imports():
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
