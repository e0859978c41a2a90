"""Errors over HTTP: our exceptions as responses, and uniform errors on each API.

The shape is Anthropic's on ``/v1/messages``, and OpenAI's on everything else below ``/v1/``. The servers around our routes use
shapes of their own: FastAPI's ``{"detail": ...}`` where there is no route, and vLLM's on requests that it cannot read, whichever
API they are of.
"""

import errno
import json
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

from ctxwin.errors import BudgetExceeded, CtxwinError, StoreFull
from ctxwin_client.errors import KINDS, Kind

MESSAGES = "/v1/messages"
_MOST = 1 << 20
"""Bytes of an error that are read; a longer one passes unchanged."""
_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip
_ELSEWHERE = {
    "files": "files stand in libraries here: POST /v1/libraries/NAME/files",
    "uploads": "files stand in libraries here: POST /v1/libraries/NAME/files",
    "vector_stores": "libraries are searched instead: POST /v1/libraries, then /v1/libraries/NAME/search",
    "messages/batches": "send each request by itself",
    "batches": "send each request by itself",
    "conversations": "send the whole history with each request: what stood there before is not computed again",
    "assistants": "keep the conversation in your client and send it to /v1/chat/completions or /v1/responses",
    "threads": "keep the conversation in your client and send it to /v1/chat/completions or /v1/responses",
    "embeddings": "this model writes text; embed on a server of an embedding model",
    "images": "this server writes text only",
}
"""Alternatives to routes that do not exist, by the path below ``/v1/``."""
_BELOW_V1 = ("/windows", "/chunks", "/libraries", "/chat/", "/completions", "/responses", "/messages", "/models")
"""Paths that a client asks for whose base URL lacks the ``/v1``."""
_NO_RETRY = (409, 410, 413, 422, 501)
_INTERNAL = Kind(Exception, 500, "internal_error", "server_error")


def kind_of(error: BaseException) -> Kind:
    """Return the `Kind` of ``error``."""
    return next((kind for kind in KINDS if isinstance(error, kind.error)), _INTERNAL)


def to_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body in OpenAI's shape. Unexpected errors do not show their message."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        error = StoreFull("a disk or the shared memory of the server is full; make room there, then try again")
    kind = kind_of(error)
    # Python's own LookupErrors are bugs of ours; their messages are keys and indices.
    ours = isinstance(error, CtxwinError | ValueError | TypeError | AssertionError)
    if kind is _INTERNAL or not ours:
        kind, message = _INTERNAL, "the server failed on this request; its log says why"
    else:
        message = str(error) or type(error).__name__
    fields: dict[str, Any] = {"message": message, "type": kind.type, "param": None, "code": kind.code}
    if isinstance(error, BudgetExceeded):
        fields |= {"needed": error.needed, "budget": error.budget}
    return kind.status, {"error": fields}


def retry_headers(status: int, body: dict[str, Any]) -> dict[str, str]:
    """Return the headers that keep OpenAI's clients from sending again what would be refused again."""
    passes = body["error"]["code"] in ("window_busy", "stale_owner")
    return {"x-should-retry": "false"} if status in _NO_RETRY and not passes else {}


def reshape_errors(scope: Scope, send: Send) -> Send:
    """Wrap ``send`` so that a request's JSON errors have the shape of its API."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if scope["type"] != "http" or not path.startswith(("/v1/", *_BELOW_V1)):
        return send
    return _ErrorReshaper(send, scope.get("method", ""), path)


class _ErrorReshaper:
    def __init__(self, send: Send, method: str, path: str) -> None:
        self._send = send
        self._method = method
        self._path = path
        self._start: Message | None = None  # of an error whose body is being read
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message.get("headers", []))
            short = int(headers.get("content-length", 0)) <= _MOST
            if message["status"] >= 400 and "json" in headers.get("content-type", "") and short:
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body", False) and len(self._body) <= _MOST:
                return
            start, self._start = self._start, None
            body = self._shape(start["status"])
            MutableHeaders(raw=start.setdefault("headers", []))["content-length"] = str(len(body))
            await self._send(start)
            message = {**message, "body": body}
        await self._send(message)

    def _shape(self, status: int) -> bytes:
        with suppress(ValueError):
            if isinstance(answer := json.loads(self._body), dict):
                return json.dumps(shape(answer, status, self._method, self._path)).encode()
        return self._body


def shape(answer: dict[str, Any], status: int, method: str, path: str) -> dict[str, Any]:
    """Return an error's JSON in the shape of the API that ``path`` belongs to, unchanged if it has that shape already."""
    error = answer.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        shaped_error = error
    else:
        detail = error if isinstance(error, str) else answer.get("detail")
        shaped_error = {"message": _message(detail, status, method, path), "type": "invalid_request_error"}
        shaped_error |= {"param": None, "code": None}
        if status in (404, 405):
            shaped_error |= {"type": "not_found_error", "code": "not_found" if status == 404 else "method_not_allowed"}
    if path == MESSAGES or path.startswith(MESSAGES + "/"):
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        ours = {"code": shaped_error["code"]} if isinstance(shaped_error.get("code"), str) else {}
        return {"type": "error", "error": {"type": kind, "message": shaped_error["message"], **ours}}
    return {"error": shaped_error}


def elsewhere(path: str) -> str:
    """Return the alternative to a path that hosted APIs have and this server does not; "" for any other."""
    below = path.removeprefix("/v1/") + "/"
    return next((text for name, text in _ELSEWHERE.items() if below.startswith(name + "/")), "")


def _message(detail: Any, status: int, method: str, path: str) -> str:
    if status == 404 and detail in (None, "Not Found"):
        instead = elsewhere(path)
        if path.startswith(_BELOW_V1):
            instead = "it stands below /v1: OpenAI's clients and RemoteWindow take http://HOST:PORT/v1 as base_url"
        if path.startswith("/v1/v1/"):
            instead = "it stands below one /v1: Anthropic's clients take http://HOST:PORT as base_url"
        return f"{method} {path[:200]} is not served here; {instead or 'see /openapi.json or the reference'}"
    if status == 405:
        return f"{path[:200]} does not take {method}"
    return detail if isinstance(detail, str) else json.dumps(detail)[:2000]
