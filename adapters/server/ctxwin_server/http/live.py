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

from ctxwin.errors import EngineFailed
from ctxwin_client.errors import TooManyRequests
from ctxwin_server.app.accounts import BodyReader, parse_json
from ctxwin_server.app.error_shape import kind_of, to_body
from ctxwin_server.app.service import Service, TenantState
from ctxwin_server.process.fair import BackgroundWork
from ctxwin_server.registry.streams import Frame, LiveAsk, LiveOptions, LiveStream, Push, Recall, Stop, read_message

Work = Callable[[], Awaitable[dict[str, Any]]]
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
        self._size_quota, self._requests_quota = service.quotas.get(self._tenant, (None, None))
        client = socket.client.host if socket.client else ""
        self._record = partial(service.audit.record, self._tenant, client, "store", object="ctxwin.window")
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
        live, service, limits, quota = self._live, self._service, self._service.limits, self._size_quota
        body = BodyReader(limits.max_upload_bytes, service.body_bytes, self._tenant, self._socket.receive, quota)
        numbered = is_picture or b'"push"' in raw[:64]  # even if it turns out to be malformed
        self._frames += numbered
        reply_fields: dict[str, Any] = {"number": self._frames} if numbered else {}
        work: Work | None = None
        earlier: list[asyncio.Future[Any]] = []
        record = partial(self._record, id=live.window_id, bytes=len(raw))
        try:
            service.memory.check()
            if quota is not None:
                quota.take(0)
            body.count(len(raw))
            read = partial(read_message, partial(parse_json, limits), raw, is_picture, self._max_text)
            message, files = await service.brief_pool.run(self._tenant, read)
            if isinstance(message, Push):
                self._frames += not numbered
                done = live.push(Frame(message, files, self._options, record))
                done.add_done_callback(lambda _: body.give_back())
                reply_fields, work = {"number": self._frames}, lambda: done
            else:
                reply_fields, earlier = {"id": message.id}, live.pending()
                if self._requests_quota is not None and not isinstance(message, Stop):
                    self._requests_quota.take(1)
                if isinstance(message, Recall):
                    work = partial(service.pool.run, self._tenant, partial(live.recall, message, self._options))
                elif isinstance(message, LiveAsk):
                    await service.grammars.check(self._tenant, {"json_schema": message.json_schema})
                    if message.id in self._answers or len(self._answers) >= _MOST_ANSWERS:
                        raise TooManyRequests(f"a socket may await {_MOST_ANSWERS} answers, each under its own id")
                    self._answers[message.id] = None
                    earlier = [] if message.now else earlier
                    work = partial(self._answer, message, record)
                elif running := self._answers.get(message.id):
                    running.close()
                else:
                    self._answers.pop(message.id, None)
        except Exception as error:
            await self._fail(error, reply_fields or _id_in(raw))  # who sent it waits for a reply to that id
        if not reply_fields.get("number") or work is None:
            body.give_back()
        if work is not None:
            task = asyncio.create_task(self._reply(work, earlier, reply_fields))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, work: Work, earlier: list[asyncio.Future[Any]], reply_fields: dict[str, Any]) -> None:
        try:
            if earlier:
                await asyncio.wait(earlier)
            await self._send({**await work(), **reply_fields})
        except Exception as error:
            await self._fail(error, reply_fields)

    async def _answer(self, question: LiveAsk, record: Callable[..., None]) -> dict[str, Any]:
        try:
            if question.id not in self._answers:
                raise EngineFailed("the answer was stopped before it began")
            answer = partial(self._live.answer, question, record)
            work = self._answers[question.id] = self._service.begin(self._tenant, answer)
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
