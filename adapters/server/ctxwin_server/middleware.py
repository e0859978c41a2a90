"""Middleware of every route: authentication, then routing, then isolation, each in a module of its own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxwin import tracing
from ctxwin.hashing import digest
from ctxwin_client.errors import MemoryShort, NotAllowed, TooLarge
from ctxwin_server.authentication import OPEN, authenticate
from ctxwin_server.compaction import MESSAGES
from ctxwin_server.endpoints import (
    CHAT,
    COUNT,
    PLAIN,
    allowed_headers,
    check_endpoint,
    check_stored,
    is_ours,
    names_chunks,
)
from ctxwin_server.error_shape import reshape_errors, to_body
from ctxwin_server.expansion import expand
from ctxwin_server.isolation import bind, check_options, check_scores, plain_salt
from ctxwin_server.limits import Malformed
from ctxwin_server.plain_chat import EarlyResponse, PlainChat, SubRequest, apply_edits
from ctxwin_server.prefill import Ahead
from ctxwin_server.request_options import REQUEST_OPTIONS, ROUTES, ReportingSend, RequestOptions
from ctxwin_server.service import STATE, TENANT, Service
from ctxwin_server.typed_tools import describe_tools

GATEWAY = "ctxwin_server.middleware.Gateway"
"""The middleware as vLLM's ``--middleware`` takes it."""
_FREE = ("GET", "HEAD", "DELETE", "OPTIONS")
"""Methods whose requests need hardly any memory, or free some."""
_FOLLOW = "ctxwin.follow"
"""Key of an ASGI scope whose request is served as it came."""
_AHEAD = "ctxwin.ahead"
"""Key of an ASGI scope with an `Ahead`: a prompt is computed that its client has not sent yet."""
_log = logging.getLogger("ctxwin.serve")


class Gateway:
    """The middleware of a server.

    The service is looked up in the app's state for each request: a server that creates its middleware from a name, as vLLM's
    ``--middleware`` does, has no service yet.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or _is_preflight(scope):
            await self._app(scope, receive, send)
            return
        service: Service = getattr(scope["app"].state, STATE)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        first = dict(scope)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._serve_as_sent, scope, first, send)
            send = reshape_errors(scope, send)
            try:
                scope[TENANT] = tenant = authenticate(service, scope, path)
                if path not in (*OPEN, "/metrics"):
                    stack.enter_context(service.draining.request(awaited=scope["type"] == "http"))
                    stack.enter_context(service.requests.one(tenant or ""))
                    if scope.get("method") not in _FREE:
                        service.memory.check()
                    for quota, amount in zip(service.quotas.get(tenant or "", ()), (1, 0), strict=False):
                        if quota is not None and _AHEAD not in scope:
                            quota.take(amount)
                    stack.enter_context(_trace(scope, path))
                if path == "/metrics":
                    await service.run_briefly("", service.refresh_metrics)
                receive = await _route(service, scope, receive, path, stack, partial(self._sub_request, first, receive))
            except EarlyResponse as early:
                await early.response(scope, receive, send)
                return
            except Exception as error:
                status, body = to_body(service.to_client_error(error))
                if REQUEST_OPTIONS in scope and scope[REQUEST_OPTIONS].refuse(status):
                    return
                if status >= 500 and not service.draining.begun and not isinstance(error, MemoryShort):
                    _log.error("%s failed before it was routed", path, exc_info=error)
                denied = "websocket.http.response" in scope.get("extensions", {})
                if scope["type"] == "websocket" and not denied:
                    await send({"type": "websocket.close", "code": 1008, "reason": body["error"]["message"][:100]})
                else:
                    after = getattr(error, "after", None)
                    headers = {"retry-after": str(after)} if after else None
                    await JSONResponse(body, status_code=status, headers=headers)(scope, receive, send)
                return
            options: RequestOptions | None = scope.get(REQUEST_OPTIONS)
            if options is not None:
                stack.enter_context(service.pending_requests.carry(options, scope))
            await self._app(scope, receive, send if options is None else ReportingSend(send, options))
            if options is not None and options.next_prompt is not None:
                service.chat_prefill.submit(options.tenant, options.next_prompt, partial(self._send_ahead, first))

    async def _serve_as_sent(self, scope: Scope, first: Scope, send: Send) -> None:
        """Serve a request as it came if it was refused with another prompt; ``first``: its scope as it came."""
        options: RequestOptions | None = scope.get(REQUEST_OPTIONS)
        if options is not None and options.refused and options.resend is not None:
            await self({**first, _FOLLOW: True}, options.resend, send)

    async def _send_ahead(self, scope: Scope, ahead: Ahead) -> None:
        """Send a predicted request as the client of an earlier one would."""

        async def receive() -> Message:  # it never leaves
            await asyncio.get_running_loop().create_future()
            return {}

        await self._sub_request({**scope, _AHEAD: ahead}, receive, ahead.prediction.body)

    async def _sub_request(self, scope: Scope, receive: Receive, data: dict[str, Any]) -> tuple[int, Any]:
        """Return status and JSON of the response to a further request of the same client to the same route."""
        raw = json.dumps(data).encode()
        dropped = (b"content-length", b"transfer-encoding", b"idempotency-key")
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in dropped]
        pending: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]
        status, parts = 0, list[bytes]()

        async def receive_body() -> Message:
            return pending.pop() if pending else await receive()  # that the client has left

        async def collect(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        sub_scope = {**scope, _FOLLOW: True, "headers": [*headers, (b"content-length", str(len(raw)).encode())]}
        await self(sub_scope, receive_body, collect)
        try:
            return status, json.loads(b"".join(parts))
        except ValueError:
            return status, None


def _is_preflight(scope: Scope) -> bool:
    """Return whether a request is a browser's CORS preflight, which has no key, and CORS is on (--allowed-origins)."""
    if scope.get("method") != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    if "origin" not in headers or "access-control-request-method" not in headers:
        return False
    cors_options = [
        middleware.kwargs for middleware in scope["app"].user_middleware if middleware.cls is CORSMiddleware
    ]
    return any(options.get("allow_origins") or options.get("allow_origin_regex") for options in cors_options)


@contextmanager
def _trace(scope: Scope, path: str) -> Iterator[None]:
    """Trace the whole request in a child span of the client's; the server's own spans become children of ours."""
    with tracing.span("request", Headers(scope=scope), path=path[:200], tenant=scope[TENANT] or ""):
        if (carry := tracing.headers()) is not None:
            named = {name.encode(): value.encode() for name, value in carry.items()}
            scope["headers"] = [(k, v) for k, v in scope["headers"] if k.lower() not in named] + list(named.items())
        yield


async def _route(
    service: Service, scope: Scope, receive: Receive, path: str, stack: AsyncExitStack, sub_request: SubRequest
) -> Receive:
    """Return the ``receive`` of the route that is called next.

    Args:
        stack: gets the callbacks that release resources when the request has ended.
        sub_request: sends a further request before this one.
    """
    tenant: str | None = scope[TENANT]
    body = _Body(service, tenant or "", receive)
    stack.callback(body.give_back)
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
    return await _check_body(service, scope, headers, body, path, stack, bound, sub_request)


async def _check_body(
    service: Service,
    scope: Scope,
    headers: Headers,
    body: _Body,
    path: str,
    stack: AsyncExitStack,
    bound: bool,
    sub_request: SubRequest,
) -> Receive:
    """Check a plain request's body, bind it to its tenant if there are tenants, and return its ``receive``.

    Args:
        headers: as the client sent them.
    """
    tenant: str = scope[TENANT]
    body.check_announced(scope)
    raw = await body.read()
    tenant_state = service.tenant_state(tenant)
    try:
        data = await service.run_briefly(tenant, service.limits.parse, raw, tenant_state.max_text if tenant else None)
    except (TooLarge, Malformed):
        raise
    except ValueError:
        data = None
    check_scores(data, service.limits.max_logprobs)
    check_options(data)
    await service.grammars.check(tenant, data)
    service.template_arguments.check(data)
    changed, windows = False, service.windows
    if path == CHAT and names_chunks(data):
        await service.run_briefly(tenant, expand, data, tenant_state.uploads, tenant_state.max_text)
        changed, windows = True, windows and "auto"
    if isinstance(data, dict):
        check_stored(path, data, tenant)
        if path in (MESSAGES, COUNT):
            changed |= await service.run_briefly(tenant, describe_tools, data)
        if path == COUNT:
            changed |= await service.run_briefly(tenant, apply_edits, data, tenant_state.count)
    if windows and path in ROUTES and isinstance(data, dict) and _AHEAD in scope:
        scope[REQUEST_OPTIONS] = RequestOptions(tenant, off="it is computed ahead", ahead=scope[_AHEAD])
    elif windows and path in ROUTES and isinstance(data, dict):
        chat = PlainChat(service, tenant_state, path, data, sub_request, follows=_FOLLOW in scope)
        changed |= await chat.rewrite(headers, windows)
        if chat.options is not None:
            scope[REQUEST_OPTIONS] = chat.options
            if any(rewrite["parts"] for rewrite in chat.options.rewrites.values()):
                chat.options.resend = body.replay(raw)
    name = await service.run_briefly(tenant, digest, "plain", tenant, path, raw)
    if bound:
        if not isinstance(data, dict):
            raise ValueError("the body must be a JSON object")
        owned = partial(bind, path, data, tenant, plain_salt(tenant_state.engine), fetch=service.fetches_media)
        raw = await service.run_briefly(
            tenant, partial(owned, tenant_state.uploads.allowance(), video_size=service.video_headers.size)
        )
        if PLAIN[path].generates and _AHEAD not in scope:
            await stack.enter_async_context(service.place(tenant))
    elif changed:
        raw = await service.run_briefly(tenant, lambda: json.dumps(data).encode())
    if bound or changed:
        other_headers = [
            (k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")
        ]
        scope["headers"] = [*other_headers, (b"content-length", str(len(raw)).encode())]
    # Without tenants the server itself reports malformed JSON.
    await stack.enter_async_context(service.quarantine.running_async(name))
    return body.replay(raw)


class _Body:
    """One request's body while it is received: within the server's limits, and counted among all bodies in memory."""

    def __init__(self, service: Service, tenant: str, receive: Receive) -> None:
        self._limit = service.limits.max_upload_bytes
        self._held = service.body_bytes
        self._quota = service.quotas.get(tenant, (None, None))[1]
        self._tenant = tenant
        self._receive = receive
        self._size = 0

    def check_announced(self, scope: Scope) -> None:
        """Raise TooLarge if the headers announce too long a body, which is then not read at all."""
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limit):
            self._too_large(length[:20])

    async def receive(self) -> Message:
        """Return the next message; raise TooLarge or TooManyRequests."""
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
        """Return the whole body, or what a client had sent when it disconnected."""
        parts: list[bytes] = []
        while True:
            message = await self.receive()
            parts.append(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return b"".join(parts)

    def replay(self, raw: bytes) -> Receive:
        """Return a ``receive`` that returns ``raw`` as the whole body, then the messages that follow it."""
        messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await self._receive()

        return receive

    def give_back(self) -> None:
        self._held.give_back(self._tenant, self._size)

    def _too_large(self, got: str) -> None:
        raise TooLarge(f"a body must have at most {self._limit} bytes (--max-upload-bytes), got {got}")
