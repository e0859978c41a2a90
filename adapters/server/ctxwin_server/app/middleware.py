"""Middleware of every route: authentication and accounts, then routing and isolation (`ctxwin_server.app.plain_requests`)."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ctxwin import tracing
from ctxwin_chats.prefill import Ahead
from ctxwin_client.errors import MemoryShort
from ctxwin_server.app.accounts import encode_body, replace_body
from ctxwin_server.app.authentication import OPEN
from ctxwin_server.app.error_shape import reshape_errors, retry_headers, to_body
from ctxwin_server.app.plain_requests import AHEAD, FOLLOW, EarlyResponse, route
from ctxwin_server.app.request_options import REQUEST_OPTIONS, ReportingSend, RequestOptions
from ctxwin_server.app.service import STATE, TENANT, Service

GATEWAY = "ctxwin_server.app.middleware.Gateway"
"""The middleware as vLLM's ``--middleware`` takes it."""
_FREE = ("GET", "HEAD", "DELETE", "OPTIONS")
"""Methods whose requests need hardly any memory, or free some."""
_CUT_OFF = b'event: error\ndata: {"type":"error","error":{"message":"the server is shutting down; ask another"}}\n\n'
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
        if path in OPEN and scope.get("method") == "HEAD":  # as probes ask; the server around us sends no body then
            scope = {**scope, "method": "GET"}
        first = dict(scope)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._serve_as_sent, scope, first, send)
            send = reshape_errors(scope, send)
            try:
                scope[TENANT] = tenant = service.authentication.authenticate(scope, path)
                if path == "/metrics":
                    await service.brief_pool.run("", service.refresh_metrics)
                elif path not in OPEN:
                    _admit(service, scope, path, tenant or "", stack)
                receive = await route(service, scope, receive, path, stack, partial(self._sub_request, first, receive))
            except EarlyResponse as early:
                await early.response(scope, receive, send)
                return
            except Exception as error:
                await _send_error(service, error, scope, receive, send)
                return
            options: RequestOptions | None = scope.get(REQUEST_OPTIONS)
            if options is not None:
                stack.enter_context(service.pending_requests.carry(options, scope))
            try:
                await self._app(scope, receive, send if options is None else ReportingSend(send, options))
            except RuntimeError as error:  # vLLM has no event of responses for an answer that a shutdown cuts off
                if not service.requests.draining or "already started" not in str(error):
                    raise
                await send({"type": "http.response.body", "body": _CUT_OFF})
            if options is not None and options.off:  # else it is saved with its window
                service.tenant_state(options.tenant).shared.save(options.record_name)
            if options is not None and options.next_prompt is not None:
                service.chat_prefill.submit(options.tenant, options.next_prompt, partial(self._send_ahead, first))

    async def _serve_as_sent(self, scope: Scope, first: Scope, send: Send) -> None:
        """Serve a request as it came if it was refused with another prompt; ``first``: its scope as it came."""
        options: RequestOptions | None = scope.get(REQUEST_OPTIONS)
        if options is not None and options.refused and options.resend is not None:
            await self({**first, FOLLOW: True}, options.resend, send)

    async def _send_ahead(self, scope: Scope, ahead: Ahead) -> None:
        """Send a predicted request as the client of an earlier one would."""

        async def receive() -> Message:  # it never leaves
            await asyncio.get_running_loop().create_future()
            return {}

        await self._sub_request({**scope, AHEAD: ahead}, receive, ahead.prediction.body)

    async def _sub_request(self, scope: Scope, receive: Receive, data: dict[str, Any]) -> tuple[int, Any]:
        """Return status and JSON of the response to a further request of the same client to the same route."""
        headers, receive_body = replace_body(scope, receive, encode_body(data))  # then that the client has left
        status, parts = 0, list[bytes]()

        async def collect(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        sub_scope = {**scope, FOLLOW: True, "headers": [(k, v) for k, v in headers if k.lower() != b"idempotency-key"]}
        await self(sub_scope, receive_body, collect)
        try:
            return status, json.loads(b"".join(parts))
        except ValueError:
            return status, None


def _admit(service: Service, scope: Scope, path: str, tenant: str, stack: AsyncExitStack) -> None:
    """Count a request, charge it to its tenant and trace it; ``stack`` ends that. Raises what refuses it."""
    stack.enter_context(service.requests.one(tenant, awaited=scope["type"] == "http"))
    if scope.get("method") not in _FREE:
        service.memory.check()
    # The bytes first, as a request that they refuse must not count among those that were taken.
    for quota, amount in zip(service.quotas.get(tenant, ()), (0, 1), strict=False):
        if quota is not None and AHEAD not in scope:
            quota.take(amount)
    span = tracing.span("request", Headers(scope=scope), path=path[:200], tenant=tenant)
    stack.enter_context(span)  # of the client's; the server's own spans become children of ours
    if (carry := tracing.headers()) is not None:
        named = {name.encode(): value.encode() for name, value in carry.items()}
        others = [(k, v) for k, v in scope["headers"] if k.lower() not in named]
        scope["headers"] = [*others, *named.items()]


async def _send_error(service: Service, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that was refused or failed before it was routed, unless it is served as it came instead."""
    status, body = to_body(service.to_client_error(error))
    if REQUEST_OPTIONS in scope and scope[REQUEST_OPTIONS].refuse(status):
        return
    if status >= 500 and not service.requests.draining and not isinstance(error, MemoryShort):
        _log.error("%s failed before it was routed", scope["path"], exc_info=error)
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": body["error"]["message"][:100]})
        return
    headers = retry_headers(status, body)
    if after := getattr(error, "after", None):
        headers["retry-after"] = str(after)
    await JSONResponse(body, status_code=status, headers=headers)(scope, receive, send)


def _is_preflight(scope: Scope) -> bool:
    """Return whether a request is a browser's CORS preflight, which has no key, and CORS is on (--allowed-origins)."""
    if scope.get("method") != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    if "origin" not in headers or "access-control-request-method" not in headers:
        return False
    cors_options = [entry.kwargs for entry in scope["app"].user_middleware if entry.cls is CORSMiddleware]
    return any(options.get("allow_origins") or options.get("allow_origin_regex") for options in cors_options)
