"""The front: reads a request, says what it is about, and passes on what a replica answers."""

from __future__ import annotations

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

_OF_CONNECTION = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}


class Front:
    """The ingress of a fleet: one a machine is enough; it holds no state that a request depends on."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: HttpRequest) -> Response:
        """Answers an HTTP request."""
        try:
            body = await self._body(request)
            headers = tuple((k, v) for k, v in request.headers.raw if k.lower() not in _OF_CONNECTION)
            headers = (*headers, (b"host", b"fleet"), (b"content-length", str(len(body)).encode()))
            path = request.scope["path"]
            hint = hint_of(path, request.headers, body)
            client = (request.client.host, request.client.port) if request.client else None
            asked = Request(hint, request.method, path, request.scope["query_string"], headers, body, client)
            answers = self._replicas.remote(asked)
            head = await anext(answers)
        except Exception as error:
            status, shown = to_body(_as_shown(error))
            return JSONResponse(shown, status, {"retry-after": "1"} if status == 503 else None)
        learn(head)
        kept = [(k, v) for k, v in head.headers if k.lower() not in _OF_CONNECTION]
        response = StreamingResponse(_rest(answers), head.status)
        response.raw_headers = kept
        return response

    async def _body(self, request: HttpRequest) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise TooLarge(f"a body must have at most {self._max_body_bytes} bytes (--max-upload-bytes), got more")
            parts.append(part)
        return b"".join(parts)


async def _rest(answers: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in answers:
            yield piece
    finally:
        answers.cancel()


def _as_shown(error: Exception) -> Exception:
    if isinstance(error, BackPressureError):
        return TooManyRequests("every replica has as many requests as it takes; send it again later")
    if isinstance(error, RayError | DeploymentUnavailableError | StopAsyncIteration):
        return EngineFailed("the replica that had this request has ended; send it again")
    return error
