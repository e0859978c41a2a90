"""The socket of a live stream: every message is a JSON object with a ``type``.

A picture may travel as it is: encoded bytes, in front of them a line of JSON where there is something to say of it. See
`ctxwin.serve.streams` for what the messages do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin.serve.errors import TooLarge, TooManyRequests, kind_of, to_body
from ctxwin.serve.fair import BackgroundWork
from ctxwin.serve.streams import Live, LiveAsk, LiveOptions, Push, Recall, read_message

_MOST_ASKED = 16
"""Answers of one socket that may be under way."""
_MOST_UNSENT = 128
"""Messages that one socket's client may leave unread, before no more are taken from it."""


class Session:
    """One socket of a stream."""

    def __init__(self, socket: WebSocket, live: Live, options: LiveOptions) -> None:
        self._socket, self._live, self._options = socket, live, options
        self._service, self._tenant = live.service, live.space.tenant
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[str, BackgroundWork[dict[str, Any]] | None] = {}  # None: waits for frames
        self._sending = asyncio.Lock()
        self._frames = 0

    async def run(self, summary: dict[str, Any]) -> None:
        """Serves the socket until its client leaves. A message that is wrong is answered with an error, and is all that fails."""
        await self._socket.accept()
        await self._send({"type": "open", "window": summary, "options": self._options.model_dump()})
        try:
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                picture = message.get("bytes")
                await self._take(picture or (message.get("text") or "").encode(), picture is not None)
                while len(self._tasks) >= _MOST_UNSENT:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in filter(None, self._asked.values()):
                work.close()
            for task in self._tasks:
                task.cancel()

    async def _take(self, raw: bytes, is_picture: bool) -> None:
        """Takes one message; frames are numbered in the order in which they come, the wrong ones included."""
        live, limits, held = self._live, self._service.limits, self._service.body_bytes
        numbered = is_picture or b'"push"' in raw[:64]  # also where it turns out to be malformed
        self._frames += numbered
        told: dict[str, Any] = {"number": self._frames} if numbered else {}
        give_back = partial(held.give_back, self._tenant, len(raw))
        try:
            if len(raw) > limits.max_upload_bytes:
                raise TooLarge(
                    f"a message must have at most {limits.max_upload_bytes} bytes (--max-upload-bytes), got {len(raw)}"
                )
            held.take(self._tenant, len(raw))
            if (quota := self._service.quotas.get(self._tenant, (None, None))[1]) is not None:
                quota.charge(len(raw))
        except CtxwinError as error:
            await self._fail(error, told)
            return
        work: Callable[[], Awaitable[dict[str, Any]]] | None = None
        try:
            read = partial(read_message, limits.parse, raw, is_picture, live.space.max_text)
            message, files = await self._service.run_briefly(self._tenant, read)
            if isinstance(message, Push):
                self._frames += not numbered
                done = live.push(message, files, self._options)
                done.add_done_callback(lambda _: give_back())
                told, work = {"number": self._frames}, lambda: done
            else:
                told, before = {"id": message.id}, live.under_way()
                if isinstance(message, Recall):
                    work = partial(self._after, before, partial(live.recall, message, self._options))
                elif isinstance(message, LiveAsk):
                    if message.id in self._asked or len(self._asked) >= _MOST_ASKED:
                        raise TooManyRequests(
                            f"a socket may wait for {_MOST_ASKED} answers, each under an id of its own"
                        )
                    self._asked[message.id] = None
                    work = partial(self._answered, [] if message.now else before, message)
                elif running := self._asked.get(message.id):
                    running.close()
                else:
                    self._asked.pop(message.id, None)
        except Exception as error:
            await self._fail(error, told)
        if not told.get("number") or work is None:
            give_back()
        if work is not None:
            task = asyncio.create_task(self._tell(work, told))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, work: Callable[[], Awaitable[dict[str, Any]]], told: dict[str, Any]) -> None:
        try:
            await self._send({**await work(), **told})
        except Exception as error:
            await self._fail(error, told)

    async def _after(self, before: list[asyncio.Future[Any]], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if before:
            await asyncio.wait(before)
        return await self._service.run(self._tenant, work)

    async def _answered(self, before: list[asyncio.Future[Any]], asked: LiveAsk) -> dict[str, Any]:
        try:
            if before:
                await asyncio.wait(before)
            if asked.id not in self._asked:
                raise EngineFailed("the answer was stopped before it began")
            work = self._asked[asked.id] = self._service.begin(self._tenant, partial(self._live.answer, asked))
            try:
                async for text in work:
                    await self._send({"type": "text", "id": asked.id, **json.loads(text)})
                return work.result
            finally:
                work.close()
        finally:
            self._asked.pop(asked.id, None)

    async def _fail(self, error: Exception, told: dict[str, Any]) -> None:
        shown = self._service.as_shown(error)
        metrics = self._service.metrics
        metrics.labelled(metrics.errors, self._tenant, kind_of(shown).code).inc()
        await self._send({"type": "error", **told, **to_body(shown)[1]})

    async def _send(self, message: dict[str, Any]) -> None:
        raw = json.dumps(message, allow_nan=False)
        # The reader finds out that a client has left.
        async with self._sending:
            with suppress(WebSocketDisconnect, RuntimeError):
                await self._socket.send_text(raw)
