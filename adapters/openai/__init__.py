"""A window on a server: `RemoteWindow` has the methods of `ctxwin.Window` and speaks to ``ctxwin serve``.

It rides on the official ``openai`` client, so keys, retries, timeouts and proxies are that client's. Chunks are uploaded
once and named by id, in windows and in plain chats (`chunk_part`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxwin.adapters.openai.chunks import chunk_part, upload
    from ctxwin.adapters.openai.window import RemoteWindow

_HOME = {"RemoteWindow": "window", "chunk_part": "chunks", "upload": "chunks"}

__all__ = ["RemoteWindow", "chunk_part", "upload"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ctxwin.adapters.openai' has no attribute {name!r}")
    from ctxwin.extras import optional_imports

    with optional_imports():
        value = getattr(import_module(f"ctxwin.adapters.openai.{_HOME[name]}"), name)
    globals()[name] = value
    return value
