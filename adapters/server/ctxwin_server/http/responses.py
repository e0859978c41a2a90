"""Responses of our routes: errors in OpenAI's shape, clients that leave, and server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ctxwin_server.app.error_shape import kind_of, retry_headers, to_body
from ctxwin_server.app.service import STATE, TENANT, Service
from ctxwin_server.process.fair import BackgroundWork

T = TypeVar("T")
_log = logging.getLogger("ctxwin.serve")


class ClientLeftError(Exception):
    """The client has closed the connection, so nobody reads the answer."""


class Route(APIRoute):
    """Route that returns errors in OpenAI's shape, and counts them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with errors converted to responses."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                return _error_response(request, error)

        return handle


def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeftError | ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        fields = {"message": str(error.detail), "type": "not_found_error", "param": None, "code": "unknown_route"}
        return JSONResponse({"error": fields}, status_code=error.status_code)
    status, body = _count_error(request, error)
    return JSONResponse(body, status_code=status, headers=retry_headers(status, body))


def _count_error(request: Request, error: Exception) -> tuple[int, dict[str, Any]]:
    service: Service = getattr(request.app.state, STATE)
    status, body = to_body(service.to_client_error(error))
    if status >= 500:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    if request.method != "GET":  # a missing chunk is a valid answer to a GET
        service.metrics.count(service.metrics.errors, request.scope.get(TENANT) or "", kind_of(error).code)
    return status, body


def encode_json(data: Any) -> bytes:
    """Encode ``data`` as JSON. Call it in the worker thread: a whole vocabulary takes longer than an event loop may wait."""
    return json.dumps(data, allow_nan=False).encode()


def json_response(raw: bytes) -> Response:
    """Return a response of encoded JSON."""
    return Response(raw, media_type="application/json")


async def wait_result(work: BackgroundWork[T], request: Request) -> T:
    """Return the result of ``work``; if the client disconnects, stop it and raise ClientLeftError."""

    async def drain() -> T:
        async for _ in work:
            pass
        return work.result

    try:
        return await _await_while_connected(drain(), request)
    finally:
        work.close()


async def stream_events(
    work: BackgroundWork[Any], request: Request, last: Callable[[Any], Awaitable[list[bytes]]]
) -> Response:
    """Stream the items of ``work``, which are JSON, as server-sent events; an error before the first one has its own status.

    Args:
        last: converts the result to events.
    """
    source = aiter(work)
    try:
        first: bytes | None = await _await_while_connected(anext(source, None), request)
    except BaseException:
        work.close()
        raise

    async def events() -> AsyncIterator[str]:
        try:
            if first is not None:
                yield first.decode()
                async for event in source:
                    yield event.decode()
            for event in await last(work.result):
                yield event.decode()
            yield "[DONE]"
        except Exception as error:
            yield json.dumps(_count_error(request, error)[1])

    return _Events(events(), work)


class _Events(EventSourceResponse):
    """Response that stops its work however it ends: a client may disconnect before the first event."""

    def __init__(self, events: AsyncIterator[str], work: BackgroundWork[Any]) -> None:
        super().__init__(events, sep="\n", headers={"Cache-Control": "no-cache"})
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.close()


async def _await_while_connected(awaited: Awaitable[T], request: Request) -> T:
    """Await a result; raise ClientLeftError if the client closes the connection first."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(awaited), asyncio.ensure_future(wait_for_disconnect())
    try:
        done, _ = await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            return working.result()
        raise ClientLeftError
    finally:
        working.cancel()
        leaving.cancel()
