"""A window on a server: `RemoteWindow` has the methods of `ctxwin.Window` and sends them to ``ctxwin serve``.

It uses the official ``openai`` client, with its keys, retries, timeouts and proxies. Chunks are uploaded once and then named
by id, in windows and in plain chats (`chunk_part`). `LiveStream` pushes frames into a window as they arrive, `RemoteLibrary`
manages files that windows retrieve from.

Importing this package loads no client; its names are looked up when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctxwin.extras import optional_imports

if TYPE_CHECKING:
    from ctxwin_client.library import RemoteLibrary
    from ctxwin_client.live import AsyncLiveStream, LiveStream
    from ctxwin_client.transport import chunk_part, fetch_output, upload
    from ctxwin_client.window import RemoteWindow

__all__ = ["AsyncLiveStream", "LiveStream", "RemoteLibrary", "RemoteWindow", "chunk_part", "fetch_output", "upload"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"RemoteLibrary": "library", "RemoteWindow": "window"}.get(name, "transport" if name.islower() else "live")
    with optional_imports():
        return getattr(import_module(f"{__name__}.{module}"), name)
