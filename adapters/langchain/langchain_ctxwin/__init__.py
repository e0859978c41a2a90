"""LangChain: a chat model over windows, and middleware that keeps an agent's context within bounds.

Importing this package loads no LangChain; its names are looked up when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctxwin.extras import optional_imports

if TYPE_CHECKING:
    from langchain_ctxwin.chat import ChatCtxwin
    from langchain_ctxwin.messages import Conversation, converse
    from langchain_ctxwin.middleware import LeastRecentlyReadMessages, MessagePolicy, OldestMessages, WindowMiddleware
    from langchain_ctxwin.retrieval import Documents, LibraryRetriever

__all__ = [
    "ChatCtxwin",
    "Conversation",
    "Documents",
    "LeastRecentlyReadMessages",
    "LibraryRetriever",
    "MessagePolicy",
    "OldestMessages",
    "WindowMiddleware",
    "converse",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"ChatCtxwin": "chat", "Conversation": "messages", "converse": "messages"}
    home |= {"Documents": "retrieval", "LibraryRetriever": "retrieval"}
    with optional_imports():
        return getattr(import_module(f"{__name__}.{home.get(name, 'middleware')}"), name)
