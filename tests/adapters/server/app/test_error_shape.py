"""Errors have the shape of the API that they are of, whoever raised them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ctxwin.errors import MissingExtra
from ctxwin_client.errors import from_body
from ctxwin_server.app.error_shape import reshape_errors, retry_headers, shape, to_body

OPENAI = {"message", "type", "param", "code"}
RAISED = {"message": "no", "type": "Bad Request", "param": "body", "code": 400}


def app() -> Any:
    async def wrong(request: Any) -> Any:
        return JSONResponse({"error": RAISED}, 400, headers={"x-request-id": "r"})

    async def plain(request: Any) -> Any:
        return PlainTextResponse("no", 500)

    async def right(request: Any) -> Any:
        return StreamingResponse(iter(["data: 1\n\n", "data: 2\n\n"]), media_type="text/event-stream")

    paths = {"/v1/messages": wrong, "/v1/chat/completions": wrong, "/v1/plain": plain, "/v1/right": right}
    inner = Starlette(routes=[Route(path, run, methods=["POST"]) for path, run in paths.items()])

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, receive, reshape_errors(scope, send))

    return outer


def test_each_api_has_its_own_shape() -> None:
    client = TestClient(app())
    answer = client.post("/v1/messages")
    assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}
    assert answer.headers["x-request-id"] == "r" and int(answer.headers["content-length"]) == len(answer.content)
    assert client.post("/v1/chat/completions").json() == {"error": RAISED}
    assert client.post("/v1/plain").text == "no" and client.post("/v1/right").text == "data: 1\n\ndata: 2\n\n"


def test_what_the_server_lacks_is_named_with_its_remedy() -> None:
    missing = MissingExtra("bm25s is not installed; run pip install 'ctxwin[library]'", name="bm25s")
    status, body = to_body(missing)
    assert status == 501 and body["error"]["code"] == "missing_extra" and retry_headers(status, body)
    again = from_body(body["error"])
    assert isinstance(again, MissingExtra) and str(again) == str(missing)


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/v1/files", "POST /v1/libraries/NAME/files"),
        ("POST", "/v1/files/file-7/content", "libraries"),
        ("POST", "/v1/vector_stores", "/search"),
        ("DELETE", "/v1/vector_stores/vs_1/files/f", "/search"),
        ("POST", "/v1/messages/batches", "by itself"),
        ("GET", "/v1/conversations/c/items", "whole history"),
        ("GET", "/v1/nothing", "GET /v1/nothing is not served here"),
        ("GET", "/v1/filesystem", "see /openapi.json"),
        ("POST", "/windows", "take http://HOST:PORT/v1 as base_url"),
        ("GET", "/windows/w/summary", "take http://HOST:PORT/v1 as base_url"),
        ("POST", "/chat/completions", "take http://HOST:PORT/v1 as base_url"),
        ("POST", "/v1/v1/messages", "take http://HOST:PORT as base_url"),
    ],
)
def test_what_is_not_served_says_what_is(method: str, path: str, said: str) -> None:
    async def missing(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse({"detail": "Not Found"}, 404)(scope, receive, reshape_errors(scope, send))

    answer = TestClient(missing).request(method, path)
    error = answer.json()["error"]
    assert answer.status_code == 404 and said in error["message"] and path in error["message"]
    assert error["type"] == "not_found_error"
    assert set(error) == ({"type", "message", "code"} if path.startswith("/v1/messages") else OPENAI)


def test_whatever_an_error_holds_becomes_a_message() -> None:
    for answer in (
        {"error": "Unauthorized"},
        {"detail": [{"loc": ["body"], "msg": "missing"}]},
        {"detail": None},
        {},
        {"error": {}},
    ):
        for path in ("/v1/messages", "/v1/responses"):
            for status in (400, 401, 404, 405, 409, 418, 429, 500, 503, 507):
                error = shape(answer, status, "POST", path)["error"]
                assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert (
        shape({"detail": "Method Not Allowed"}, 405, "PUT", "/v1/models")["error"]["message"]
        == "/v1/models does not take PUT"
    )


def test_a_body_in_pieces_or_none_at_all_passes() -> None:
    async def run(body: list[bytes]) -> tuple[dict[str, Any], bytes]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        out = reshape_errors({"type": "http", "path": "/v1/x", "method": "GET"}, send)
        await out({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]})
        for i, part in enumerate(body):
            await out({"type": "http.response.body", "body": part, "more_body": i + 1 < len(body)})
        return dict(sent[0]["headers"]), b"".join(m.get("body", b"") for m in sent[1:])

    headers, raw = asyncio.run(run([b'{"det', b'ail": "Not ', b'Found"}']))
    assert json.loads(raw)["error"]["code"] == "not_found" and int(headers[b"content-length"]) == len(raw)
    for broken in ([b""], [b"{"], [b"[1]"]):
        assert asyncio.run(run(broken))[1] == b"".join(broken)
