"""A window on a server: `RemoteWindow` has the methods of `ctxwin.Window` and speaks to ``ctxwin serve``.

It rides on the official ``openai`` client, so keys, retries, timeouts and proxies are that client's. Chunks are uploaded
once and named by id, in windows and in plain chats (`chunk_part`). `LiveStream` pushes frames into a window as they come,
`RemoteLibrary` keeps files that windows retrieve from.
"""

from __future__ import annotations

from ctxwin.extras import optional_imports

with optional_imports():
    from ctxwin.adapters.openai.library import RemoteLibrary
    from ctxwin.adapters.openai.live import AsyncLiveStream, LiveStream
    from ctxwin.adapters.openai.transport import chunk_part, upload
    from ctxwin.adapters.openai.window import RemoteWindow

__all__ = ["AsyncLiveStream", "LiveStream", "RemoteLibrary", "RemoteWindow", "chunk_part", "upload"]
