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
from starlette.types import Receive, Scope, Send

from ctxwin.serve.errors import kind_of, to_body
from ctxwin.serve.fair import BackgroundWork
from ctxwin.serve.service import STATE, TENANT, Service

T = TypeVar("T")
_NO_RETRY = {409, 410, 413, 422}
_log = logging.getLogger("ctxwin.serve")


class ClientLeftError(Exception):
    """The client has closed the connection, so nobody reads the answer."""


class Route(APIRoute):
    """Shows errors in OpenAI's shape, and counts them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with its errors shown."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                return _refusal(request, error)

        return handle


def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeftError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        found = {"message": str(error.detail), "type": "not_found_error", "param": None, "code": "unknown_route"}
        return JSONResponse({"error": found}, status_code=error.status_code)
    status, body = _counted(request, error)
    headers = {"x-should-retry": "false"} if status in _NO_RETRY else None
    return JSONResponse(body, status_code=status, headers=headers)


def _counted(request: Request, error: Exception) -> tuple[int, dict[str, Any]]:
    service: Service = getattr(request.app.state, STATE)
    status, body = to_body(service.as_shown(error))
    if status >= 500:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    if request.method != "GET":  # whether a chunk is there is a question, and no is an answer
        service.metrics.labelled(service.metrics.errors, request.scope.get(TENANT) or "", kind_of(error).code).inc()
    return status, body


def encoded(data: Any) -> bytes:
    """JSON; call it in the thread that made ``data``, since a whole vocabulary takes longer than an event loop may wait."""
    return json.dumps(data, allow_nan=False).encode()


def json_response(raw: bytes) -> Response:
    """A response with JSON that was made already."""
    return Response(raw, media_type="application/json")


async def whole(work: BackgroundWork[T], request: Request) -> T:
    """The result of ``work``; a client that leaves stops it, and ClientLeftError is raised."""

    async def drain() -> T:
        async for _ in work:
            pass
        return work.result

    try:
        return await _unless_left(drain(), request)
    finally:
        work.close()


async def streamed(
    work: BackgroundWork[Any],
    request: Request,
    *,
    opening: list[bytes] | None = None,
    last: Callable[[Any], Awaitable[list[bytes]]] | None = None,
) -> Response:
    """The items of ``work``, which are JSON, as server-sent events; what fails before the first one has its own status.

    Args:
        opening: events in front of the first item.
        last: events that the result becomes; None: it is a list of them.
    """
    source = aiter(work)
    try:
        first: bytes | None = await _unless_left(anext(source, None), request)
    except BaseException:
        work.close()
        raise

    async def events() -> AsyncIterator[str]:
        try:
            for event in opening or []:
                yield event.decode()
            if first is not None:
                yield first.decode()
                async for event in source:
                    yield event.decode()
            for event in work.result if last is None else await last(work.result):
                yield event.decode()
            yield "[DONE]"
        except Exception as error:
            yield json.dumps(_counted(request, error)[1])

    return _Events(events(), work)


class _Events(EventSourceResponse):
    """Stops the work behind the events however the response ends: a client may leave before they begin."""

    def __init__(self, events: AsyncIterator[str], work: BackgroundWork[Any]) -> None:
        super().__init__(events, sep="\n", headers={"Cache-Control": "no-cache"})
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.close()


async def _unless_left(awaited: Awaitable[T], request: Request) -> T:
    """What is awaited; raises ClientLeftError where the client closes the connection before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(awaited), asyncio.ensure_future(left())
    try:
        done, _ = await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            return working.result()
        raise ClientLeftError
    finally:
        working.cancel()
        leaving.cancel()
