"""A live stream on a server: frames go in as they come, questions are answered meanwhile, over one socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any, Self, Unpack

import numpy as np
from anyio.from_thread import start_blocking_portal
from openai import AsyncOpenAI, OpenAI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ctxwin.adapters.openai import transport
from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin.media import png
from ctxwin.serve import wire
from ctxwin.serve.errors import from_body
from ctxwin.window.answer import Answer
from ctxwin.window.ask import AskOptions

_MOST_BYTES = 64 << 20
_REMEMBERED = 256


class AsyncLiveStream:
    """A live stream into a window on a server. Use as an async context manager.

    Args:
        client: an official client; its address, key and headers are used.
        window: id of an open window.
        options: ``reserve_tokens``, ``waiting`` and ``history``, see the guide on live streams.

    Attributes:
        placed: the latest frames that were placed: ``number``, ``placement``, ``evicted``, ``computed`` and ``tokens`` of each.
        dropped: frames of the stream that the server dropped, because they came faster than it could place them.
        failures: the latest frames that failed: their number and why. The stream goes on.

    Raises:
        UnknownWindow, TooManyRequests, ValueError: on entering. EngineFailed: the connection ended.
    """

    def __init__(self, client: OpenAI | AsyncOpenAI, window: str, **options: int) -> None:
        url = client.base_url.join(f"windows/{window}/live").copy_merge_params(options)
        self._url = str(url.copy_with(scheme={"http": "ws", "https": "wss"}[url.scheme]))
        self._headers = {**client._custom_headers, **client.auth_headers}
        self.placed: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        self.failures: deque[tuple[int, Exception]] = deque(maxlen=_REMEMBERED)
        self.dropped = self.pushed = self._settled = 0
        self._ids, self._open = itertools.count(), contextlib.AsyncExitStack()
        self._waiting: dict[str, asyncio.Queue[dict[str, Any] | Exception]] = {}
        self._moved = asyncio.Condition()  # of the loop it is first used on

    async def __aenter__(self) -> Self:
        try:
            self._socket: ClientConnection = await self._open.enter_async_context(
                connect(self._url, additional_headers=self._headers, max_size=_MOST_BYTES, compression=None)
            )
        except InvalidStatus as error:
            found = from_body(json.loads(error.response.body or b"{}").get("error"))
            raise found or error from None
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()
        await self._reader

    async def push(self, picture: bytes | np.ndarray, text: str = "", *, time: float | None = None, **said: Any) -> int:
        """Sends a frame and returns its number; the server places it in the order of arrival.

        Args:
            picture: an encoded picture, sent as it is, or pixels ``[height, width, 3]`` uint8, sent as PNG.
            text: stands in a line in front of it. time: when it was taken, in seconds, for `recall`.
            said: ``label``, ``pin``, ``priority``, ``keep_source``.
        """
        raw = png(picture) if isinstance(picture, np.ndarray) else picture
        head = {"text": text, **({} if time is None else {"time": time}), **said}
        return await self._push(json.dumps(head).encode() + b"\n" + raw)

    async def tell(self, text: str, *, pin: bool = True) -> int:
        """Sends a text, which stays unless ``pin`` is False; returns its number."""
        return await self._push(json.dumps({"type": "push", "chunk": {"type": "text", "text": text, "pin": pin}}))

    async def settle(self) -> None:
        """Returns when every frame that was pushed is placed, dropped or has failed."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._settled >= self.pushed or self._reader.done())

    async def ask(
        self, query: str, max_tokens: int = 32, *, now: bool = False, **options: Unpack[AskOptions]
    ) -> Answer:
        """Answers over the frames that were pushed before, or, with ``now``, that are placed; else as `ctxwin.Window.ask`."""
        async with contextlib.aclosing(
            self._told("ask", query=query, max_tokens=max_tokens, now=now, **transport.named(options))
        ) as told:
            async for message in told:
                if message["type"] == "answer":
                    return wire.answer_from(message["answer"])
        raise EngineFailed("the server ended the answer before its end")

    async def stream(
        self, query: str, max_tokens: int = 32, *, now: bool = False, **options: Unpack[AskOptions]
    ) -> AsyncGenerator[str]:
        """`ask`, giving the text as it is made. Closing it early stops the server."""
        async with contextlib.aclosing(
            self._told("ask", query=query, max_tokens=max_tokens, now=now, **transport.named(options))
        ) as told:
            async for message in told:
                if message["type"] == "text":
                    yield message["text"]

    async def recall(self, placement: str | None = None, *, time: float | None = None) -> str:
        """Brings a chunk back, by id or the one whose time is nearest; returns its placement id."""
        async with contextlib.aclosing(self._told("recall", placement=placement, time=time)) as told:
            return str((await anext(told))["placement"])

    async def _told(self, kind: str, **body: Any) -> AsyncGenerator[dict[str, Any]]:
        """The messages that answer one of ours."""
        name, inbox = f"{kind}-{next(self._ids)}", asyncio.Queue[dict[str, Any] | Exception]()
        self._waiting[name] = inbox
        last = False
        try:
            await self._send(json.dumps({"type": kind, "id": name, **{n: v for n, v in body.items() if v is not None}}))
            while not last:
                found = await inbox.get()
                last = isinstance(found, Exception) or found["type"] != "text"
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            del self._waiting[name]
            if not last:
                with contextlib.suppress(EngineFailed):
                    await self._send(json.dumps({"type": "stop", "id": name}))

    async def _push(self, message: bytes | str) -> int:
        self.pushed += 1
        number = self.pushed
        await self._send(message)
        return number

    async def _send(self, message: bytes | str) -> None:
        try:
            await self._socket.send(message)
        except ConnectionClosed as error:
            raise EngineFailed(f"the live stream has ended: {error}") from error

    async def _read(self) -> None:
        """Hands what the server says to whoever waits for it, until the socket ends."""
        with contextlib.suppress(ConnectionClosed):
            async for raw in self._socket:
                message = json.loads(raw)
                error = message.get("error")
                found = error and (from_body(error) or CtxwinError(error["message"]))
                if "number" in message:
                    self.dropped = max(self.dropped, message.get("dropped", 0))
                    if found:
                        self.failures.append((message["number"], found))
                    elif message["type"] == "placed":
                        self.placed.append(message)
                    async with self._moved:
                        self._settled += 1
                        self._moved.notify_all()
                elif message.get("id") in self._waiting:
                    self._waiting[message["id"]].put_nowait(found or message)
        for inbox in self._waiting.values():
            inbox.put_nowait(EngineFailed("the live stream has ended"))
        async with self._moved:
            self._moved.notify_all()


class LiveStream:
    """`AsyncLiveStream` for code that blocks, with its methods; what it has seen is in ``state``. Use as a context manager."""

    def __init__(self, client: OpenAI, window: str, **options: int) -> None:
        self.state = AsyncLiveStream(client, window, **options)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opening:
            self._portal = opening.enter_context(start_blocking_portal())
            opening.enter_context(self._portal.wrap_async_context_manager(self.state))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def push(self, picture: bytes | np.ndarray, text: str = "", *, time: float | None = None, **said: Any) -> int:
        """See `AsyncLiveStream.push`."""
        return self._portal.call(partial(self.state.push, picture, text, time=time, **said))

    def tell(self, text: str, *, pin: bool = True) -> int:
        """See `AsyncLiveStream.tell`."""
        return self._portal.call(partial(self.state.tell, text, pin=pin))

    def settle(self) -> None:
        """See `AsyncLiveStream.settle`."""
        self._portal.call(self.state.settle)

    def ask(self, query: str, max_tokens: int = 32, *, now: bool = False, **options: Unpack[AskOptions]) -> Answer:
        """See `AsyncLiveStream.ask`."""
        return self._portal.call(partial(self.state.ask, query, max_tokens, now=now, **options))

    def stream(
        self, query: str, max_tokens: int = 32, *, now: bool = False, **options: Unpack[AskOptions]
    ) -> Iterator[str]:
        """`ask`, giving the text as it is made. Closing it early stops the server."""
        told = self.state.stream(query, max_tokens, now=now, **options)
        try:
            while (text := self._portal.call(anext, told, None)) is not None:
                yield text
        finally:
            self._portal.call(told.aclose)

    def recall(self, placement: str | None = None, *, time: float | None = None) -> str:
        """See `AsyncLiveStream.recall`."""
        return self._portal.call(partial(self.state.recall, placement, time=time))
