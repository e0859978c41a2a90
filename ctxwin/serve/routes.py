"""Our routes as a FastAPI router: ``/v1/chunks``, ``/v1/windows`` and chats that name chunks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin.serve import completions, wire
from ctxwin.serve.completions import ChatRequest
from ctxwin.serve.errors import TooLarge, UnknownModel, kind_of, to_body
from ctxwin.serve.gate import OUR_CHAT, TENANT
from ctxwin.serve.operations import OPERATIONS, Ask, Open
from ctxwin.serve.service import Items, Service, Space
from ctxwin.serve.specs import checked
from ctxwin.window import ask as asking
from ctxwin.window.state import State
from ctxwin.window.window import Window

T = TypeVar("T")


class _LeftError(Exception):
    """The client has closed the connection: nobody reads the answer."""


_NO_RETRY = {409, 410, 422}
_log = logging.getLogger("ctxwin.serve")


def build_router(service: Service) -> APIRouter:
    """The routes of ``service``."""

    class Route(APIRoute):
        """Bounds what a body may hold, and shows errors in OpenAI's shape."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                limit = service.limits.max_upload_bytes
                bounded = Request(request.scope, _bounded(request.receive, limit, request.headers))
                try:
                    return await handler(bounded)
                except Exception as error:
                    if service.closing.is_set() and not isinstance(error, CtxwinError):
                        error = EngineFailed("the server is shutting down; try another one")
                    return _shown(service, request, error)

            return handle

    router = APIRouter(route_class=Route, tags=["ctxwin"])

    def space(request: Request) -> Space:
        return service.space(request.scope.get(TENANT) or "")

    async def data(request: Request) -> Any:
        return await service.run_briefly(space(request).tenant, _json, await request.body())

    async def once(request: Request, mine: Space, work: Callable[[], Any]) -> Response:
        """The result of ``work``, or the one it had under the same Idempotency-Key."""
        path, key = request.url.path, request.headers.get("idempotency-key")
        raw = await request.body()
        return _json_response(await service.run(mine.tenant, mine.results.once, path, key, raw, lambda: _raw(work())))

    # -- chunks ------------------------------------------------------------------------------------------------------

    @router.post("/v1/chunks")
    async def upload(request: Request) -> Response:
        mine = space(request)
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            chunk, files = await _form(request, service.limits.max_upload_bytes)
        else:
            chunk, files = await data(request), {}
        described, new = await service.run(mine.tenant, mine.uploads.put, chunk, files)
        return JSONResponse(described, status_code=201 if new else 200)

    @router.get("/v1/chunks/{chunk_id}")
    async def describe(chunk_id: str, request: Request) -> Response:
        mine = space(request)
        return JSONResponse(await service.run(mine.tenant, mine.uploads.describe, chunk_id))

    @router.delete("/v1/chunks/{chunk_id}")
    async def forget(chunk_id: str, request: Request) -> Response:
        mine = space(request)
        await service.run(mine.tenant, mine.uploads.delete, chunk_id)
        return JSONResponse({"object": "ctxwin.chunk", "id": chunk_id, "deleted": True})

    # -- windows -----------------------------------------------------------------------------------------------------

    @router.post("/v1/windows")
    async def open_window(request: Request) -> Response:
        mine = space(request)
        body = checked(Open.model_validate, await data(request))

        def work() -> dict[str, Any]:
            return wire.window_to(_opened(service, mine, body))

        return await once(request, mine, work)

    @router.get("/v1/windows/{window_id}")
    async def show(window_id: str, request: Request) -> Response:
        mine = space(request)

        def work() -> dict[str, Any]:
            with mine.windows.using(window_id) as window:
                return {**wire.window_to(window), "plan": wire.plan_to(window.plan())}

        return _json_response(await service.run(mine.tenant, lambda: _raw(work())))

    @router.get("/v1/windows/{window_id}/{what}")
    async def read(window_id: str, what: str, request: Request) -> Response:
        if what not in ("plan", "snapshot", "summary"):
            raise HTTPException(404, f"what can be read of a window is its plan, snapshot or summary, got {what!r}")
        mine = space(request)

        def work() -> Any:
            with mine.windows.using(window_id) as window:
                return OPERATIONS[what](mine.around, window, {})[what]

        return _json_response(await service.run(mine.tenant, lambda: _raw(work())))

    @router.delete("/v1/windows/{window_id}")
    async def close(window_id: str, request: Request) -> Response:
        mine = space(request)
        await service.run(mine.tenant, mine.windows.remove, window_id)
        return JSONResponse({"object": "ctxwin.window", "id": window_id, "deleted": True})

    @router.post("/v1/windows/{window_id}/ask")
    async def ask(window_id: str, request: Request) -> Response:
        mine = space(request)
        body: Ask = checked(Ask.model_validate, await data(request))
        path, raw = request.url.path, await request.body()
        # What is streamed has been heard in part: it is not given again.
        key = None if body.stream else request.headers.get("idempotency-key")

        def work(put: Callable[[str], None], stopped: Callable[[], bool]) -> bytes:
            sent = 0

            def on_token(_: int, text: str) -> bool:
                nonlocal sent
                ready = text.rstrip("\ufffd")  # half a character: its text changes with the next token
                if ready[sent:]:
                    put(ready[sent:])
                    sent = len(ready)
                return True

            heard = on_token if body.stream else None

            def asked() -> bytes:
                with mine.windows.using(window_id) as window:
                    answer = asking.ask(
                        window, body.query, body.max_tokens, on_token=heard, stopped=stopped, **body.options()
                    )
                if body.stream and answer.text[sent:]:
                    put(answer.text[sent:])
                return _raw(wire.answer_to(answer))

            return mine.results.once(path, key, raw, asked)

        items = service.items(mine.tenant, work)
        if not body.stream:
            return _json_response(await _whole(items, request))
        return await _streamed(
            items, lambda text: [{"text": text}], lambda raw: [b'{"answer": %s}' % raw], service, request
        )

    @router.post("/v1/windows/{window_id}/{operation}")
    async def operate(window_id: str, operation: str, request: Request) -> Response:
        if operation not in OPERATIONS:
            known = ", ".join(sorted([*OPERATIONS, "ask"]))
            raise HTTPException(404, f"an operation on a window must be one of {known}, got {operation!r}")
        mine, body = space(request), await data(request)

        def work() -> dict[str, Any]:
            with mine.windows.using(window_id) as window:
                return OPERATIONS[operation](mine.around, window, body)

        return await once(request, mine, work)

    # -- chats -------------------------------------------------------------------------------------------------------

    @router.post(OUR_CHAT)
    async def complete(request: Request) -> Response:
        mine = space(request)
        asked: ChatRequest = await service.run_briefly(mine.tenant, completions.parse, await data(request))
        if asked.model is not None and asked.model not in service.models:
            raise UnknownModel(f"model must be one of {', '.join(service.models)}, got {asked.model!r}")
        shapes = completions.Shapes(asked.model or service.model, mine.engine.decode, bool(asked.logprobs))
        usage = bool(asked.stream_options and asked.stream_options.include_usage)

        # Bodies are made in the worker's thread: log-probabilities are many tokens to decode.
        def work(put: Callable[[bytes], None], stopped: Callable[[], bool]) -> list[bytes]:
            if not asked.stream:
                return [_raw(shapes.completion(mine.chat.answer(asked, lambda piece: None, stopped)))]
            replies = mine.chat.answer(asked, lambda piece: put(_raw(shapes.piece(piece))), stopped)
            return [_raw(shapes.usage(replies))] if usage else []

        items = service.items(mine.tenant, work)
        if not asked.stream:
            return _json_response((await _whole(items, request))[0])
        opening = shapes.first(asked.n or 1)
        return await _streamed(items, lambda event: [event], lambda events: events, service, request, opening)

    return router


def _opened(service: Service, mine: Space, body: Open) -> Window:
    if body.snapshot is not None:
        others = body.model_fields_set - {"snapshot"}
        if others:
            raise ValueError(
                f"a window from a snapshot has everything in it, got {', '.join(sorted(others))} beside it"
            )
        return mine.windows.restore(checked(State.model_validate, body.snapshot))
    window = Window(
        mine.engine,
        body.system_prompt,
        body.budget,
        body.fidelity or service.limits.fidelity,
        budget_bytes=body.budget_bytes,
    )
    return mine.windows.add(window)


def _raw(data: Any) -> bytes:
    """JSON; in the thread that made ``data``, for a whole vocabulary takes longer than an event loop may wait."""
    return json.dumps(data, allow_nan=False).encode()


def _json_response(raw: bytes) -> Response:
    return Response(raw, media_type="application/json")


def _json(raw: bytes) -> Any:
    if not raw:
        return {}
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body must be JSON: {error}") from None


async def _form(request: Request, limit: int) -> tuple[Any, dict[str, bytes]]:
    """The ``chunk`` field (JSON) of a multipart body and its files; or ``file`` and plain fields, for a single picture."""
    try:
        async with request.form(max_files=4096, max_fields=64, max_part_size=limit) as form:
            files = {name: await value.read() for name, value in form.items() if isinstance(value, UploadFile)}
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
    except HTTPException as error:
        raise ValueError(f"the multipart body is malformed: {error.detail}") from None
    if "chunk" in fields:
        return _json(fields["chunk"].encode()), files
    if set(files) != {"file"}:
        raise ValueError("a multipart body must have a field chunk (JSON) that names its files, or one file named file")
    return {"type": "image", "image": {"file": "file"}, **fields}, files


def _bounded(receive: Receive, limit: int, headers: Any) -> Receive:
    """``receive`` that raises TooLarge beyond ``limit`` bytes; what is announced as longer is not read at all."""
    left = limit
    length = headers.get("content-length", "")
    announced = int(length) if length.isdecimal() else 0

    async def bounded() -> Message:
        nonlocal left
        if announced > limit:
            raise TooLarge(f"a body must have at most {limit} bytes, got {announced}; raise --max-upload-bytes")
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise TooLarge(f"a body must have at most {limit} bytes, got more; raise --max-upload-bytes")
        return message

    return bounded


def _shown(service: Service, request: Request, error: Exception) -> Response:
    if isinstance(error, _LeftError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        found = {"message": str(error.detail), "type": "not_found_error", "param": None, "code": "unknown_route"}
        return JSONResponse({"error": found}, status_code=error.status_code)
    status, body = _counted(service, request, error)
    headers = {"x-should-retry": "false"} if status in _NO_RETRY else None
    return JSONResponse(body, status_code=status, headers=headers)


def _counted(service: Service, request: Request, error: Exception) -> tuple[int, dict[str, Any]]:
    status, body = to_body(error)
    if status >= 500:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    if request.method != "GET":  # whether a chunk is there is a question, and no is an answer
        service.metrics.labelled(service.metrics.errors, request.scope.get(TENANT) or "", kind_of(error).code).inc()
    return status, body


async def _whole(items: Items[Any], request: Request) -> Any:
    """The result of ``items``; a client that leaves stops the work."""

    async def drain() -> Any:
        async for _ in items:
            pass
        return items.result

    try:
        return await _unless_left(drain(), request)
    finally:
        items.close()


async def _unless_left(awaited: Coroutine[Any, Any, T], request: Request) -> T:
    """What is awaited; raises _LeftError where the client closes the connection before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(awaited), asyncio.ensure_future(left())
    try:
        done, _ = await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            return working.result()
        raise _LeftError
    finally:
        working.cancel()
        leaving.cancel()


class _Events(StreamingResponse):
    """Server-sent events; the work behind them is told to stop however the response ends.

    The events' own end is no place for that: where the client has left before the first one, they never begin.
    """

    def __init__(self, events: AsyncIterator[str], items: Items[Any]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._items.close()


async def _streamed(
    items: Items[Any],
    piece: Callable[[Any], list[Any]],
    last: Callable[[Any], list[Any]],
    service: Service,
    request: Request,
    opening: list[Any] | None = None,
) -> Response:
    """Items as server-sent events. What fails before the first item is an error of its own, with its status."""
    source = aiter(items)

    async def begin() -> list[Any]:
        async for item in source:
            return [item]
        return []

    try:
        first = await _unless_left(begin(), request)
    except BaseException:
        items.close()
        raise

    async def events() -> AsyncIterator[str]:
        try:
            for event in opening or []:
                yield completions.sse(event)
            for item in first:
                for event in piece(item):
                    yield completions.sse(event)
            if first:
                async for item in source:
                    for event in piece(item):
                        yield completions.sse(event)
            for event in last(items.result):
                yield completions.sse(event)
            yield completions.DONE
        except Exception as error:
            yield completions.sse(_counted(service, request, error)[1])

    return _Events(events(), items)
