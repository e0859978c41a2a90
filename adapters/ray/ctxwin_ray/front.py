"""The front: reads a request, derives its routing hint, and passes on the answer of a replica; WebSockets both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketState

from ctxwin.errors import EngineFailed
from ctxwin_client.errors import TooManyRequests
from ctxwin_ray.hints import Request, hint_of
from ctxwin_ray.sockets import relay
from ctxwin_server.app.accounts import BodyBytes, BodyReader, parse_json
from ctxwin_server.app.error_shape import retry_headers, to_body
from ctxwin_server.protocol.limits import Limits

_CONNECTION_HEADERS = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}
_ENDED = "the replica that had this request has ended; send it again"


class Front:
    """The ingress of a fleet, as often as `FleetArguments.fronts` says; it holds no state that a request depends on."""

    def __init__(self, replicas: Any, limits: Limits) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")
        self._addresses = replicas.options(method_name="address")
        self._limits = limits
        self._body_bytes = BodyBytes(limits.max_body_bytes, max(limits.max_body_bytes // 2, limits.max_upload_bytes))

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI app that Ray serves."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a bound method for ASGI 2
            await self._serve(scope, receive, send)

        return app

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._relay(WebSocket(scope, receive, send))
        elif scope["type"] == "http":
            await (await self.answer(HttpRequest(scope, receive)))(scope, receive, send)
        else:  # of the app's own start and end
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})

    async def _relay(self, client: WebSocket) -> None:
        """Pass a WebSocket on to the replica of its window."""
        headers = tuple((k, v) for k, v in client.headers.raw if k.lower() not in _CONNECTION_HEADERS)
        try:
            hint = hint_of(client.scope["path"], client.headers, b"", partial(parse_json, self._limits))
            routed = Request(hint, "GET", client.scope["path"], client.scope["query_string"], headers, b"")
            address = await self._addresses.remote(routed)
            await relay(client, address, headers, self._limits.max_upload_bytes)
        except Exception as error:
            if client.application_state is not WebSocketState.CONNECTING:
                raise
            error = EngineFailed(_ENDED) if isinstance(error, OSError | TimeoutError) else error
            await client.send_denial_response(_error_response(error))

    async def answer(self, request: HttpRequest) -> Response:
        """Answer an HTTP request."""
        sender = request.client.host if request.client else ""
        # Its bytes count against the limit until the replica answers, as its key is not checked yet.
        reader = BodyReader(self._limits.max_upload_bytes, self._body_bytes, sender, request.receive)
        try:
            body = await reader.read()
            if reader.cut_off:
                raise ClientDisconnect
            dropped = _CONNECTION_HEADERS - {b"host"}  # redirects and links name the client's
            headers = tuple((k, v) for k, v in request.headers.raw if k.lower() not in dropped)
            headers = (*headers, (b"content-length", str(len(body)).encode()))
            path = request.scope["path"]
            hint = await asyncio.to_thread(hint_of, path, request.headers, body, partial(parse_json, self._limits))
            client = (request.client.host, request.client.port) if request.client else None
            query, scheme = request.scope["query_string"], request.scope.get("scheme", "http")
            routed = Request(hint, request.method, path, query, headers, body, client, scheme)
            answers = self._replicas.remote(routed)
            head = await anext(answers)
        except Exception as error:
            return _error_response(error)
        finally:
            reader.give_back()
        response = StreamingResponse(_remaining(answers), head.status)
        response.raw_headers = [(k, v) for k, v in head.headers if k.lower() not in _CONNECTION_HEADERS]
        return response


async def _remaining(answers: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in answers:
            yield piece
    finally:
        answers.cancel()


def _error_response(error: Exception) -> Response:
    status, body = to_body(_public_error(error))
    return JSONResponse(body, status, retry_headers(status, body) | ({"retry-after": "1"} if status == 503 else {}))


def _public_error(error: Exception) -> Exception:
    if isinstance(error, BackPressureError):
        return TooManyRequests("every replica has as many requests as it takes; send it again later")
    if isinstance(error, RayError | DeploymentUnavailableError | StopAsyncIteration):
        return EngineFailed(_ENDED)
    return error
