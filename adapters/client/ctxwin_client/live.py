"""A live stream on a server: frames are pushed as they arrive and questions answered meanwhile, over one socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from openai import AsyncOpenAI, OpenAI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin.media import png
from ctxwin.window.answer import Answer
from ctxwin.window.ask import AskOptions
from ctxwin.window.stream import AsyncTextStream
from ctxwin_client import transport
from ctxwin_client.errors import TooLarge, from_body

P = ParamSpec("P")
T = TypeVar("T")
_MAX_MESSAGE_BYTES, _MAX_FRAME_BYTES, _HISTORY = 64 << 20, 16 << 20, 256
_OUTSIDE = "a live stream must be used within its with block, got a call outside; open another for the same window"


class AsyncLiveStream:
    """A live stream into a window on a server. Use as an async context manager.

    Args:
        client: an official client; its address, key and headers are used.
        window: id of an open window.
        options: ``reserve_tokens``, ``waiting`` and ``history``, see the guide on live streams.

    Attributes:
        placed: the latest placed frames, each with ``number``, ``placement``, ``evicted``, ``computed`` and ``tokens``.
        dropped: frames of the stream that the server dropped because they arrived faster than it could place them.
        failures: the latest failed frames, each with its number and error. The stream continues.

    Raises:
        UnknownWindow, TooManyRequests, ValueError: on entering. EngineFailed: the connection is closed.
    """

    def __init__(self, client: OpenAI | AsyncOpenAI, window: str, **options: int) -> None:
        url = client.base_url.join(f"windows/{window}/live").copy_merge_params(options)
        self._client, self._address = client, str(url.copy_with(scheme={"http": "ws", "https": "wss"}[url.scheme]))
        self.placed: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self.failures: deque[tuple[int, Exception]] = deque(maxlen=_HISTORY)
        self.dropped = self.pushed = self._settled = 0
        self._ids, self._open = itertools.count(), contextlib.AsyncExitStack()
        self._waiting: dict[str, asyncio.Queue[dict[str, Any] | Exception]] = {}
        self._progress = asyncio.Condition()  # bound to the loop of its first use
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> Self:
        client = self._client  # its key may be a function, asked for each connection
        await (asyncio.to_thread(client._refresh_api_key) if isinstance(client, OpenAI) else client._refresh_api_key())
        headers: Any = {**client._custom_headers, **client.auth_headers}
        try:
            live = connect(self._address, max_size=_MAX_MESSAGE_BYTES, additional_headers=headers, compression=None)
            self._socket = await self._open.enter_async_context(live)
        except InvalidStatus as error:
            body = json.loads(error.response.body or b"{}").get("error")
            raise (from_body(body) or CtxwinError(body["message"])) if body else error from None
        self._reader = asyncio.create_task(self._read(self._socket))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()
        await self._reader

    async def push(
        self, /, picture: bytes | np.ndarray, text: str = "", *, time: float | None = None, **metadata: Any
    ) -> int:
        """Send a frame and return its number; the server places frames in the order of arrival.

        Args:
            picture: an encoded picture, sent unchanged, or pixels ``[height, width, 3]`` uint8, sent as PNG.
            text: a line before the picture.
            time: of the picture in seconds, for `recall`.
            metadata: ``label``, before which the time stands; ``pin``, ``priority``, ``keep_source``.
        """
        raw = png(picture) if isinstance(picture, np.ndarray) else picture
        if not isinstance(raw, bytes | bytearray | memoryview):
            raise TypeError(f"picture must be an encoded picture in bytes or an array, got {type(picture).__name__}")
        head = {"text": text, **({} if time is None else {"time": float(time)}), **metadata}
        return await self._push(json.dumps(head).encode() + b"\n" + raw)

    async def tell(self, text: str, *, pin: bool = True) -> int:
        """Send a text, pinned unless ``pin`` is False; return its number."""
        return await self._push(json.dumps({"type": "push", "chunk": {"type": "text", "text": text, "pin": pin}}))

    async def settle(self) -> None:
        """Wait until every pushed frame is placed, dropped or has failed; EngineFailed if the connection ends before."""
        async with self._progress:
            await self._progress.wait_for(lambda: self._settled >= self.pushed or self._reader.done())
        if (left := self.pushed - self._settled) > 0:
            raise EngineFailed(f"the live stream ended before {left} frames were settled; push them again")

    async def ask(
        self, query: str, max_tokens: int = 32, *, now: bool = False, **options: Unpack[AskOptions]
    ) -> Answer:
        """Answer over all frames pushed so far, or, with ``now``, over those already placed; else as `ctxwin.Window.ask`."""
        return await transport.answer_of(self.stream(query, max_tokens, now=now, **options))

    def stream(
        self, query: str, max_tokens: int = 32, *, now: bool = False, **options: Unpack[AskOptions]
    ) -> AsyncTextStream:
        """`ask`, yielding the text as it is generated. Closing it early stops the server."""
        return transport.stream_of(self._exchange("ask", **transport.question(query, max_tokens, options, now=now)))

    async def recall(self, placement: str | None = None, *, time: float | None = None) -> str:
        """Recall a chunk, by id or the one whose time is nearest; return its placement id."""
        async with contextlib.aclosing(self._exchange("recall", placement=placement, time=time)) as messages:
            return str((await anext(messages))["placement"])

    async def _exchange(self, kind: str, **body: Any) -> AsyncGenerator[dict[str, Any]]:
        name, inbox, last = f"{kind}-{next(self._ids)}", asyncio.Queue[dict[str, Any] | Exception](), False
        self._waiting[name] = inbox
        try:
            await self._send(json.dumps({"type": kind, "id": name, **{n: v for n, v in body.items() if v is not None}}))
            while not last:
                reply = await inbox.get()
                last = isinstance(reply, Exception) or reply["type"] != "text"
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            del self._waiting[name]
            if not last:
                with contextlib.suppress(EngineFailed):
                    await self._send(json.dumps({"type": "stop", "id": name}))

    async def _push(self, message: bytes | str) -> int:
        if len(message) > _MAX_FRAME_BYTES:  # which would end the stream
            raise TooLarge(f"a frame must have at most {_MAX_FRAME_BYTES} bytes, got {len(message)}; send it as JPEG")
        self.pushed = number = self.pushed + (self._socket is not None)
        await self._send(message)
        return number

    async def _send(self, message: bytes | str) -> None:
        if self._socket is None:
            raise EngineFailed(_OUTSIDE)
        try:
            await self._socket.send(message)
        except ConnectionClosed as error:
            raise EngineFailed(f"the live stream has ended: {error}") from error

    async def _read(self, socket: ClientConnection) -> None:
        """Dispatch the server's messages to the waiting exchanges until the socket closes."""
        with contextlib.suppress(ConnectionClosed):
            async for raw in socket:
                body = (message := json.loads(raw)).get("error")
                error = body and (from_body(body) or CtxwinError(body["message"]))
                if "number" in message:
                    self.dropped = max(self.dropped, message.get("dropped", 0))
                    if error:
                        self.failures.append((message["number"], error))
                    elif message["type"] == "placed":
                        self.placed.append(message)
                    async with self._progress:
                        self._settled += 1
                        self._progress.notify_all()
                elif message.get("id") in self._waiting:
                    self._waiting[message["id"]].put_nowait(error or message)
        for inbox in self._waiting.values():
            inbox.put_nowait(EngineFailed("the live stream has ended"))
        async with self._progress:
            self._progress.notify_all()


def _blocking(
    method: Callable[Concatenate[AsyncLiveStream, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[LiveStream, P], T]:
    """Return ``method`` as one of `LiveStream` that waits for it; the signature stays."""

    @wraps(method)
    def call(self: LiveStream, /, *args: P.args, **options: P.kwargs) -> T:
        return self._call(partial(method, self.state, *args, **options))

    return call


class LiveStream:
    """Blocking counterpart of `AsyncLiveStream`, whose attributes are in ``state``. Use as a context manager."""

    def __init__(self, client: OpenAI, window: str, **options: int) -> None:
        self.state = AsyncLiveStream(client, window, **options)
        self._open = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opening:
            portal = opening.enter_context(start_blocking_portal())
            opening.enter_context(portal.wrap_async_context_manager(self.state))
            self._open, self._portal = opening.pop_all(), portal
        return self

    def __exit__(self, *exc: object) -> None:
        self._portal = None
        self._open.close()

    def _call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        if self._portal is None:
            raise EngineFailed(_OUTSIDE)
        return cast("T", self._portal.call(function, *args))

    push = _blocking(AsyncLiveStream.push)
    tell = _blocking(AsyncLiveStream.tell)
    settle = _blocking(AsyncLiveStream.settle)
    ask = _blocking(AsyncLiveStream.ask)
    recall = _blocking(AsyncLiveStream.recall)

    def stream(
        self, query: str, max_tokens: int = 32, *, now: bool = False, **options: Unpack[AskOptions]
    ) -> Iterator[str]:
        """`ask`, yielding the text as it is generated. Closing it early stops the server."""
        texts = self.state.stream(query, max_tokens, now=now, **options)
        try:
            while (text := self._call(anext, texts, None)) is not None:
                yield text
        finally:
            with contextlib.suppress(EngineFailed):  # the stream has ended before
                self._call(texts.aclose)
