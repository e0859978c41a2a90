"""The socket of a live stream: every message is a JSON object with a ``type``.

A picture may be sent as encoded bytes, optionally after one line of JSON with its fields. `ctxwin_server.registry.streams`
describes the messages.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin_client.errors import TooLarge, TooManyRequests
from ctxwin_server.app.accounts import parse_json
from ctxwin_server.app.error_shape import kind_of, to_body
from ctxwin_server.app.service import Service, TenantState
from ctxwin_server.process.fair import BackgroundWork
from ctxwin_server.registry.streams import LiveAsk, LiveOptions, LiveStream, Push, Recall, read_message

_MOST_ANSWERS = 16
"""Most answers of one socket in progress."""
_MOST_UNSENT = 128
"""Messages that a client may leave unread before no more are accepted from it."""


class LiveSession:
    """One socket of the stream ``live`` of a tenant."""

    def __init__(
        self, socket: WebSocket, service: Service, tenant_state: TenantState, live: LiveStream, options: LiveOptions
    ) -> None:
        self._socket, self._live, self._options = socket, live, options
        self._service, self._tenant, self._max_text = service, tenant_state.tenant, tenant_state.max_text
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[str, BackgroundWork[dict[str, Any]] | None] = {}  # None: waits for frames
        self._sending = asyncio.Lock()
        self._frames = 0

    async def run(self, summary: dict[str, Any]) -> None:
        """Serve the socket until its client leaves. An invalid message is answered with an error and affects nothing else."""
        await self._socket.accept()
        await self._send({"type": "open", "window": summary, "options": self._options.model_dump()})
        try:
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                picture = message.get("bytes")
                await self._take(picture or (message.get("text") or "").encode(), picture is not None)
                while len(self._tasks) >= _MOST_UNSENT:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in filter(None, self._answers.values()):
                work.close()
            for task in self._tasks:
                task.cancel()

    async def _take(self, raw: bytes, is_picture: bool) -> None:
        """Handle one message; frames are numbered in order of arrival, invalid ones included."""
        live, limits, body_bytes = self._live, self._service.limits, self._service.body_bytes
        numbered = is_picture or b'"push"' in raw[:64]  # even if it turns out to be malformed
        self._frames += numbered
        reply_fields: dict[str, Any] = {"number": self._frames} if numbered else {}
        give_back = partial(body_bytes.give_back, self._tenant, len(raw))
        try:
            if len(raw) > limits.max_upload_bytes:
                raise TooLarge(
                    f"a message must have at most {limits.max_upload_bytes} bytes (--max-upload-bytes), got {len(raw)}"
                )
            self._service.memory.check()
            body_bytes.take(self._tenant, len(raw))
            if (quota := self._service.quotas.get(self._tenant, (None, None))[0]) is not None:
                quota.charge(len(raw))
        except CtxwinError as error:
            await self._fail(error, reply_fields)
            return
        work: Callable[[], Awaitable[dict[str, Any]]] | None = None
        try:
            read = partial(read_message, partial(parse_json, limits), raw, is_picture, self._max_text)
            message, files = await self._service.brief_pool.run(self._tenant, read)
            if isinstance(message, Push):
                self._frames += not numbered
                done = live.push(message, files, self._options)
                done.add_done_callback(lambda _: give_back())
                reply_fields, work = {"number": self._frames}, lambda: done
            else:
                reply_fields, earlier = {"id": message.id}, live.pending()
                if isinstance(message, Recall):
                    work = partial(self._run_after, earlier, partial(live.recall, message, self._options))
                elif isinstance(message, LiveAsk):
                    await self._service.grammars.check(self._tenant, {"json_schema": message.json_schema})
                    if message.id in self._answers or len(self._answers) >= _MOST_ANSWERS:
                        raise TooManyRequests(f"a socket may await {_MOST_ANSWERS} answers, each under its own id")
                    self._answers[message.id] = None
                    work = partial(self._answer, [] if message.now else earlier, message)
                elif running := self._answers.get(message.id):
                    running.close()
                else:
                    self._answers.pop(message.id, None)
        except Exception as error:
            await self._fail(error, reply_fields or _id_in(raw))  # who sent it waits for a reply to that id
        if not reply_fields.get("number") or work is None:
            give_back()
        if work is not None:
            task = asyncio.create_task(self._reply(work, reply_fields))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, work: Callable[[], Awaitable[dict[str, Any]]], reply_fields: dict[str, Any]) -> None:
        try:
            await self._send({**await work(), **reply_fields})
        except Exception as error:
            await self._fail(error, reply_fields)

    async def _run_after(
        self, earlier: list[asyncio.Future[Any]], work: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        if earlier:
            await asyncio.wait(earlier)
        return await self._service.pool.run(self._tenant, work)

    async def _answer(self, earlier: list[asyncio.Future[Any]], question: LiveAsk) -> dict[str, Any]:
        try:
            if earlier:
                await asyncio.wait(earlier)
            if question.id not in self._answers:
                raise EngineFailed("the answer was stopped before it began")
            work = self._answers[question.id] = self._service.begin(self._tenant, partial(self._live.answer, question))
            try:
                async for text in work:
                    await self._send({"type": "text", "id": question.id, **json.loads(text)})
                return work.result
            finally:
                work.close()
        finally:
            self._answers.pop(question.id, None)

    async def _fail(self, error: Exception, reply_fields: dict[str, Any]) -> None:
        client_error = self._service.to_client_error(error)
        metrics = self._service.metrics
        metrics.count(metrics.errors, self._tenant, kind_of(client_error).code)
        await self._send({"type": "error", **reply_fields, **to_body(client_error)[1]})

    async def _send(self, message: dict[str, Any]) -> None:
        raw = json.dumps(message, allow_nan=False)
        # That a client has left is noticed by the reader.
        async with self._sending:
            with suppress(WebSocketDisconnect, RuntimeError):
                await self._socket.send_text(raw)


def _id_in(raw: bytes) -> dict[str, str]:
    """Return the id of a message that cannot be read, as a field of the reply; nothing if it does not begin with one."""
    match = re.match(rb'\s*\{(?:\s*"type"\s*:\s*"\w+"\s*,)?\s*"id"\s*:\s*"([\w.:-]{1,100})"', raw)
    return {"id": match[1].decode()} if match else {}
