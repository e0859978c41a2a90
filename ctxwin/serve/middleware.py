"""In front of every route: authentication, then routing, then isolation, each in a module of its own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxwin import tracing
from ctxwin.hashing import digest
from ctxwin.serve import compaction
from ctxwin.serve.asked import ASKED, ROUTES, Reported, asked_of, mode_of
from ctxwin.serve.authentication import OPEN, authenticate
from ctxwin.serve.compaction import Compacted, asked_in, read_summary, request_for, resume
from ctxwin.serve.context_management import manage
from ctxwin.serve.endpoints import CHAT, OUR_CHAT, PLAIN, allowed_headers, check_endpoint, is_ours, names_chunks
from ctxwin.serve.errors import NotAllowed, TooLarge, to_body
from ctxwin.serve.expansion import expand, needs_vllm
from ctxwin.serve.isolation import bind, check_scores, plain_salt
from ctxwin.serve.service import STATE, TENANT, Service, Space

GATEWAY = "ctxwin.serve.middleware.Gateway"
"""The middleware as vLLM's ``--middleware`` takes it."""
Within = Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]]
"""``body`` -> status and JSON that it gets, as a request of its own to the same route."""
_SUMMARY_TOKENS = 1024
_log = logging.getLogger("ctxwin.serve")


class Gateway:
    """The middleware of a server.

    The service is looked up in the app's state (`ctxwin.serve.routes.install` puts it there): a server that makes its
    middleware from a name, as vLLM's ``--middleware`` does, has no service yet.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
            await self._app(scope, receive, send)
            return
        service: Service = getattr(scope["app"].state, STATE)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        ASKED.set(None)
        async with AsyncExitStack() as held:
            try:
                scope[TENANT] = tenant = authenticate(service, scope, path)
                if path not in (*OPEN, "/metrics"):
                    held.enter_context(service.draining.request(awaited=scope["type"] == "http"))
                    for quota, amount in zip(service.quotas.get(tenant or "", ()), (1, 0), strict=False):
                        if quota is not None:
                            quota.take(amount)
                    held.enter_context(_traced(scope, path))
                if path == "/metrics":
                    await service.run_briefly("", service.refresh_metrics)
                receive = await _routed(
                    service, scope, receive, path, held, partial(self._within, dict(scope), receive)
                )
            except _Answered as done:
                await done.response(scope, receive, send)
                return
            except Exception as error:
                status, body = to_body(service.as_shown(error))
                if status >= 500 and not service.draining.begun:
                    _log.error("%s failed before it was routed", path, exc_info=error)
                denied = "websocket.http.response" in scope.get("extensions", {})
                if scope["type"] == "websocket" and not denied:
                    await send({"type": "websocket.close", "code": 1008, "reason": body["error"]["message"][:100]})
                else:
                    after = getattr(error, "after", None)
                    headers = {"retry-after": str(after)} if after else None
                    await JSONResponse(body, status_code=status, headers=headers)(scope, receive, send)
                return
            asked = ASKED.get()
            await self._app(scope, receive, send if asked is None else Reported(send, asked))

    async def _within(self, scope: Scope, receive: Receive, data: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON of what a further request gets, of the same client and to the same route."""
        raw = json.dumps(data).encode()
        dropped = (b"content-length", b"transfer-encoding", b"idempotency-key")
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in dropped]
        given: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]
        status, parts = 0, list[bytes]()

        async def ask() -> Message:
            return given.pop() if given else await receive()  # that the client has left

        async def take(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        sub = {**scope, "headers": [*headers, (b"content-length", str(len(raw)).encode())]}
        await asyncio.create_task(self(sub, ask, take))  # a task of its own: `ASKED` is that of one request
        try:
            return status, json.loads(b"".join(parts))
        except ValueError:
            return status, None


class _Answered(Exception):
    """A request that needs no route any more."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


@contextmanager
def _traced(scope: Scope, path: str) -> Iterator[None]:
    """A span of the whole request below the client's; the server's own spans of it will be below ours."""
    with tracing.span("request", Headers(scope=scope), path=path[:200], tenant=scope[TENANT] or ""):
        if (carried := tracing.headers()) is not None:
            named = {name.encode(): value.encode() for name, value in carried.items()}
            scope["headers"] = [(k, v) for k, v in scope["headers"] if k.lower() not in named] + list(named.items())
        yield


async def _routed(
    service: Service, scope: Scope, receive: Receive, path: str, held: AsyncExitStack, within: Within
) -> Receive:
    """A ``receive`` of what the route behind may see; the scope leads to our route where it must.

    Args:
        held: gets what has to be given back when the request has ended.
        within: asks something else before it.
    """
    tenant: str | None = scope[TENANT]
    body = _Body(service, tenant or "", receive)
    held.callback(body.give_back)
    if is_ours(path):
        body.check_announced(scope)
        return body.receive
    headers = Headers(scope=scope)
    if tenant:
        if scope["type"] == "websocket":
            raise NotAllowed("no WebSocket is served to tenants")
        check_endpoint(scope["method"], path)
        scope["headers"] = allowed_headers(scope["headers"])
    if tenant is None or scope.get("method") != "POST":
        return receive
    bound = bool(service.keys.tenants) and path in PLAIN
    if not bound and "form" in headers.get("content-type", ""):
        return receive  # of vLLM's own routes for files, which tenants do not reach
    return await _checked(service, scope, headers, body, path, held, bound, within)


async def _checked(
    service: Service,
    scope: Scope,
    headers: Headers,
    body: _Body,
    path: str,
    held: AsyncExitStack,
    bound: bool,
    within: Within,
) -> Receive:
    """A plain request's body, checked, and bound to its tenant where there are tenants.

    Args:
        headers: as the client sent them.
    """
    tenant: str = scope[TENANT]
    body.check_announced(scope)
    raw = await body.read()
    space = service.space(tenant)
    try:
        data = await service.run_briefly(tenant, service.limits.parse, raw, space.max_text if tenant else None)
    except TooLarge:
        raise
    except ValueError:
        data = None
    changed = False
    if path == CHAT and names_chunks(data):
        windowed = service.windows and mode_of(headers, data, service.windows) == "auto"
        if not windowed and not needs_vllm(data):
            scope["path"] = scope.get("root_path", "") + OUR_CHAT
            scope["raw_path"] = scope["path"].encode()
            return body.again(raw)
        await service.run_briefly(tenant, expand, data, space.uploads, space.max_text)
        changed = True
    check_scores(data, service.limits.max_logprobs)
    if service.windows and path in ROUTES and isinstance(data, dict):
        changed |= await _with_window(service, space, headers, path, data, within)
    name = await service.run_briefly(tenant, digest, "plain", tenant, path, raw)
    if bound:
        if not isinstance(data, dict):
            raise ValueError("the body must be a JSON object")
        owned = partial(bind, path, data, tenant, plain_salt(space.engine), fetch=service.fetches_media)
        raw = await service.run_briefly(tenant, owned, space.uploads.allowance())
        if PLAIN[path].generates:
            await held.enter_async_context(service.place(tenant))
    elif changed:
        raw = await service.run_briefly(tenant, lambda: json.dumps(data).encode())
    if bound or changed:
        kept = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")]
        scope["headers"] = [*kept, (b"content-length", str(len(raw)).encode())]
    # Without tenants the server itself says what is wrong with what is no JSON.
    await held.enter_async_context(service.quarantine.running_async(name))
    return body.again(raw)


async def _with_window(
    service: Service, space: Space, headers: Headers, path: str, data: dict[str, Any], within: Within
) -> bool:
    """Has a window stand behind a plain request that may have one, and clears what it, or the policy, wants cleared.

    Returns whether the body is another one now.
    """
    said = "ctxwin" in data
    ours = {name: data.get(name) for name in ("ctxwin",) if name in data}
    said |= path != CHAT and await service.run_briefly(space.tenant, resume, path, data)
    asked = asked_of(path, headers, data, space.tenant, service.windows)
    if asked is None:
        return said
    ASKED.set(asked)
    compact = asked_in(path, data)
    applied = await service.run_briefly(space.tenant, manage, data, service.policy, space.count)
    if applied is not None:
        asked.reports["context_management"] = {"applied_edits": applied}
    if compact is None:
        return said or applied is not None
    names = ("system", "instructions", "tools", "messages", "input")
    tokens = await service.run_briefly(space.tenant, space.count, [data.get(name) for name in names])
    if tokens > compact.threshold:
        most = max(1, min(_SUMMARY_TOKENS, space.engine.spec.max_tokens // 8))
        status, answer = await within({**request_for(path, data, compact, most), **ours})
        if status != 200:
            _log.warning("a conversation was not compacted: its summary got status %d", status)
        summary, used = read_summary(path, answer) if status == 200 else (None, (0, 0))
        asked.compacted = done = Compacted(path, summary, used)
        if summary is not None:
            compaction.apply(path, data, summary)
        if compact.pause_after_compaction:
            model = data.get("model") or service.models[0]
            if data.get("stream"):
                events = b"".join(map(compaction.line_of, done.paused_events(model)))
                raise _Answered(Response(events, media_type="text/event-stream"))
            raise _Answered(JSONResponse(done.paused_answer(model)))
    return True


class _Body:
    """One request's body as it is received: within the server's limits, and counted among those that are held."""

    def __init__(self, service: Service, tenant: str, receive: Receive) -> None:
        self._limit = service.limits.max_upload_bytes
        self._held = service.body_bytes
        self._quota = service.quotas.get(tenant, (None, None))[1]
        self._tenant = tenant
        self._receive = receive
        self._size = 0

    def check_announced(self, scope: Scope) -> None:
        """Raises TooLarge where the headers announce a longer body than is taken, which is then not read at all."""
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limit):
            self._too_large(length[:20])

    async def receive(self) -> Message:
        """The next message; raises TooLarge or TooManyRequests."""
        message = await self._receive()
        size = len(message.get("body", b""))
        if self._size + size > self._limit:
            self._too_large("more")
        self._held.take(self._tenant, size)
        self._size += size
        if self._quota is not None:
            self._quota.charge(size)
        return message

    async def read(self) -> bytes:
        """The whole body; what a client sent that left on the way."""
        parts: list[bytes] = []
        while True:
            message = await self.receive()
            parts.append(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return b"".join(parts)

    def again(self, raw: bytes) -> Receive:
        """A ``receive`` that gives ``raw`` as the whole body, then what comes behind it."""
        messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await self._receive()

        return receive

    def give_back(self) -> None:
        self._held.give_back(self._tenant, self._size)

    def _too_large(self, got: str) -> None:
        raise TooLarge(f"a body must have at most {self._limit} bytes (--max-upload-bytes), got {got}")
