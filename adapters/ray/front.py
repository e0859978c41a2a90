"""The front: reads a request, says what it is about, and passes on what a replica answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from ctxwin.adapters.ray.hints import Request, hint_of
from ctxwin.adapters.ray.owners import learn
from ctxwin.errors import EngineFailed
from ctxwin.serve.errors import TooLarge, TooManyRequests, to_body
from ctxwin.serve.limits import BodyBytes, Limits

_OF_CONNECTION = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}


class Front:
    """The ingress of a fleet: one a machine is enough; it holds no state that a request depends on."""

    def __init__(self, replicas: Any, limits: Limits) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")
        self._limits = limits
        self._held = BodyBytes(limits.max_body_bytes, max(limits.max_body_bytes // 2, limits.max_upload_bytes))

    async def __call__(self, request: HttpRequest) -> Response:
        """Answers an HTTP request."""
        try:
            body = await self._body(request)
        except Exception as error:
            return _failed(error)
        try:
            headers = tuple((k, v) for k, v in request.headers.raw if k.lower() not in _OF_CONNECTION)
            headers = (*headers, (b"host", b"fleet"), (b"content-length", str(len(body)).encode()))
            path = request.scope["path"]
            hint = await asyncio.to_thread(hint_of, path, request.headers, body, self._limits.parse)
            client = (request.client.host, request.client.port) if request.client else None
            asked = Request(hint, request.method, path, request.scope["query_string"], headers, body, client)
            answers = self._replicas.remote(asked)
            head = await anext(answers)
        except Exception as error:
            return _failed(error)
        finally:
            self._held.give_back(_sender(request), len(body))
        learn(head)
        kept = [(k, v) for k, v in head.headers if k.lower() not in _OF_CONNECTION]
        response = StreamingResponse(_rest(answers), head.status)
        response.raw_headers = kept
        return response

    async def _body(self, request: HttpRequest) -> bytes:
        """The body, whose bytes are held until the replica has answered; nobody has looked at its key yet."""
        parts, size, most = [], 0, self._limits.max_upload_bytes
        try:
            async for part in request.stream():
                if size + len(part) > most:
                    raise TooLarge(f"a body must have at most {most} bytes (--max-upload-bytes), got more")
                self._held.take(_sender(request), len(part))
                size += len(part)
                parts.append(part)
        except BaseException:
            self._held.give_back(_sender(request), size)
            raise
        return b"".join(parts)


async def _rest(answers: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in answers:
            yield piece
    finally:
        answers.cancel()


def _sender(request: HttpRequest) -> str:
    return request.client.host if request.client else ""


def _failed(error: Exception) -> Response:
    status, shown = to_body(_as_shown(error))
    return JSONResponse(shown, status, {"retry-after": "1"} if status == 503 else None)


def _as_shown(error: Exception) -> Exception:
    if isinstance(error, BackPressureError):
        return TooManyRequests("every replica has as many requests as it takes; send it again later")
    if isinstance(error, RayError | DeploymentUnavailableError | StopAsyncIteration):
        return EngineFailed("the replica that had this request has ended; send it again")
    return error
