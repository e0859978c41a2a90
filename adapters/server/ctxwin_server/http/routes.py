"""Our routes: ``/v1/chunks`` and ``/v1/windows``; ``/v1/libraries`` is in `library_routes`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ctxwin.extras import optional_imports

with optional_imports():
    from fastapi import APIRouter, FastAPI, Request, Response, WebSocket
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

from ctxwin.errors import CtxwinError
from ctxwin.validation import validate
from ctxwin.window import serialization
from ctxwin.window.answer import Answer
from ctxwin.window.window import Window
from ctxwin_server.app.accounts import parse_json
from ctxwin_server.app.audit_log import RECORDED
from ctxwin_server.app.endpoints import ABOUT, CHUNKS, READY, WINDOWS
from ctxwin_server.app.error_shape import to_body
from ctxwin_server.app.info import describe_server
from ctxwin_server.app.service import STATE, TENANT, Service
from ctxwin_server.http.library_routes import libraries
from ctxwin_server.http.live import LiveSession
from ctxwin_server.http.request_context import CurrentRequest, RequestContext, openapi_body
from ctxwin_server.http.responses import Route, encode_json, json_response, stream_events, wait_result
from ctxwin_server.process.fair import Put, Stopped
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.protocol.multipart import read_form
from ctxwin_server.protocol.schemas import CHUNK, FormChunk
from ctxwin_server.registry.operations import OPERATIONS, AuditedAsk, OpenWindow, Operation
from ctxwin_server.registry.snapshots import read_snapshot
from ctxwin_server.registry.streams import MESSAGE, Frame, LiveOptions, Push, Recall, read_message, stream_answer

_POLL_S = 0.02
router = APIRouter(route_class=Route, tags=["ctxwin"])


@router.post(CHUNKS, openapi_extra=openapi_body(CHUNK.json_schema()))
async def upload(context: CurrentRequest) -> Response:
    """Upload a chunk, as JSON or as multipart; 201 if it is new, 200 if it exists."""
    raw, kind = await context.request.body(), context.request.headers.get("content-type", "")
    read = (context.service.limits, raw, context.tenant_state.max_text)
    if kind.lower().startswith("multipart/form-data"):
        chunk, files = await context.run_briefly(_chunk_in, kind, *read)
    else:
        chunk, files = await context.json(), {}

    def work() -> tuple[dict[str, Any], bool]:
        with context.running("upload", raw):
            return context.tenant_state.uploads.put(chunk, files)

    described, new = await context.run(work)
    context.record("store", object="ctxwin.chunk", id=described["id"], bytes=len(raw), new=new)
    return JSONResponse(described, status_code=201 if new else 200)


@router.get(CHUNKS + "/{chunk_id}")
async def describe(chunk_id: str, context: CurrentRequest) -> Response:
    """Describe an uploaded chunk."""
    return await context.respond(lambda: context.tenant_state.uploads.describe(chunk_id))


@router.delete(CHUNKS + "/{chunk_id}")
async def forget(chunk_id: str, context: CurrentRequest) -> Response:
    """Forget an upload, and its pixels unless something else uses them."""
    return await context.delete("ctxwin.chunk", chunk_id, context.tenant_state.uploads.delete)


@router.get(READY)
async def ready(request: Request) -> Response:
    """Report whether new requests are accepted; `/health` reports whether the process lives.

    503 while it shuts down or its engine has ended, while memory is short, and while a shared store does not answer.
    """
    service: Service = getattr(request.app.state, STATE)
    status = await asyncio.to_thread(service.readiness)
    return JSONResponse({"status": status}, status_code=200 if status == "ready" else 503)


@router.get(ABOUT)
async def tell(context: CurrentRequest) -> Response:
    """Describe the server, its configuration and its state."""
    return await context.respond(lambda: describe_server(context.service, context.tenant_state))


@router.post(WINDOWS, openapi_extra=openapi_body(OpenWindow.model_json_schema()))
async def open_window(context: CurrentRequest) -> Response:
    """Open a window, or restore one from a snapshot."""
    body = await context.validate(OpenWindow.model_validate)

    def work() -> dict[str, Any]:
        opened = serialization.window_to(_open_or_restore(context, body))
        context.record("store", object="ctxwin.window", id=opened["id"], restored=body.snapshot is not None)
        return opened

    return await context.run_once(work)


@router.get(WINDOWS + "/{window_id}")
async def show(window_id: str, context: CurrentRequest) -> Response:
    """Return the window and its plan."""
    return await context.read_window(
        window_id, lambda w: {**serialization.window_to(w), "plan": serialization.plan_to(w.plan())}
    )


@router.get(WINDOWS + "/{window_id}/{what}")
async def read(window_id: str, what: str, context: CurrentRequest) -> Response:
    """Return the window's plan, its snapshot or its summary."""
    if what not in ("plan", "snapshot", "summary"):
        raise HTTPException(404, f"what can be read of a window is its plan, snapshot or summary, got {what!r}")
    response = await context.read_window(
        window_id, lambda window: OPERATIONS[what](context.tenant_state.context(), window, {})[what]
    )
    if what in RECORDED:
        context.record(RECORDED[what], object="ctxwin.window", id=window_id, operation=what)
    return response


@router.get(WINDOWS + "/{window_id}/outputs/{digest}")
async def output(digest: str, context: CurrentRequest) -> Response:
    """Return a stage output that an answer refers to, as a file of safetensors."""
    raw = await context.run_briefly(context.tenant_state.context().outputs.get, digest)
    return Response(raw, media_type="application/octet-stream")


@router.delete(WINDOWS + "/{window_id}")
async def close(window_id: str, context: CurrentRequest) -> Response:
    """Close a window for good."""
    return await context.delete("ctxwin.window", window_id, context.tenant_state.windows.remove)


@router.post(WINDOWS + "/{window_id}/ask", openapi_extra=openapi_body(AuditedAsk.model_json_schema()))
async def ask(window_id: str, context: CurrentRequest) -> Response:
    """Ask a question; ``stream`` answers as server-sent events."""
    body: AuditedAsk = await context.validate(AuditedAsk.model_validate)
    path, raw = context.request.url.path, await context.request.body()
    # A streamed answer may have been received in part, so it is not repeated.
    key = None if body.stream else context.idempotency_key

    audited_answers: list[Answer] = []
    keep = partial(context.tenant_state.context().outputs.put, folder=f"/windows/{window_id}/outputs")

    def work(put: Put, stopped: Stopped) -> bytes:
        def answer_question(window: Window) -> bytes:
            question = body.question(context.tenant_state.libraries.find)
            context.tenant_state.context().check_room(window, body.most_placed)
            with context.running("ask", raw, window):
                if body.stream:
                    answer = stream_answer(window, question, put, stopped=stopped)
                else:
                    answer = window.answer(question, stopped=stopped)
            if answer.remembered is not None:
                context.record("store", object="ctxwin.window", id=window_id, operation="ask", bytes=len(raw))
            if window.core.audits.due is answer:
                audited_answers.append(answer)
            return encode_json(serialization.answer_to(answer, keep))

        return context.in_window_once(window_id, path, key, raw, answer_question)

    async def wait_for_audit(raw_answer: bytes) -> bytes:
        """Return the answer with its audit's result, after waiting for it without a thread if requested."""
        until = time.monotonic() + body.audit_within
        for answer in audited_answers:
            while answer.audit is None and time.monotonic() < until and not context.service.closing.is_set():
                await asyncio.sleep(_POLL_S)
            if answer.audit is not None:
                raw_answer = await context.run_briefly(encode_json, serialization.answer_to(answer, keep))
        return raw_answer

    async def final_events(raw_answer: bytes) -> list[bytes]:
        return [b'{"answer": %s}' % await wait_for_audit(raw_answer)]

    running = context.service.begin(context.tenant, work)
    if not body.stream:
        return json_response(await wait_for_audit(await wait_result(running, context.request)))
    return await stream_events(running, context.request, final_events)


LIVE = WINDOWS + "/{window_id}/live"


@router.post(LIVE, openapi_extra=openapi_body(MESSAGE.json_schema()))
async def push(window_id: str, context: CurrentRequest) -> Response:
    """Push a frame into a live stream, as a picture or as a message of the socket, and return what became of it."""
    options = validate(LiveOptions.model_validate, dict(context.request.query_params))
    picture = context.request.headers.get("content-type", "").startswith(("image/", "application/octet-stream"))
    parse = partial(parse_json, context.service.limits)
    raw = await context.request.body()
    message, files = await context.run_briefly(read_message, parse, raw, picture, context.tenant_state.max_text)
    record = partial(context.record, "store", object="ctxwin.window", id=window_id, bytes=len(raw))
    with context.tenant_state.streams.open(window_id) as stream:
        if isinstance(message, Push):
            return JSONResponse(await stream.push(Frame(message, files, options, record)))
        if isinstance(message, Recall):
            return await context.respond(lambda: stream.recall(message, options))
    raise ValueError("a message by HTTP must be a push or a recall; ask with /ask")


@router.websocket(LIVE)
async def stream(socket: WebSocket, window_id: str) -> None:
    """Serve a live stream: frames in, answers out."""
    service: Service = getattr(socket.app.state, STATE)
    tenant_state = service.tenant_state(socket.scope.get(TENANT) or "")

    def summary() -> Any:
        with tenant_state.windows.using(window_id) as window:
            return serialization.window_to(window)

    try:
        options = validate(LiveOptions.model_validate, dict(socket.query_params))
        opened = await service.pool.run(tenant_state.tenant, summary)
        with tenant_state.streams.open(window_id) as live:
            await LiveSession(socket, service, tenant_state, live, options).run(opened)
    except (CtxwinError, ValueError) as error:
        status, body = to_body(service.to_client_error(error))
        await socket.send_denial_response(JSONResponse(body, status_code=status))


def _operate(name: str, operation: Operation) -> Callable[[str, RequestContext], Any]:
    async def operate(window_id: str, context: CurrentRequest) -> Response:
        raw, body = await context.request.body(), await context.json()

        def work(window: Window) -> bytes:
            with context.running(name, raw, window):
                response = encode_json(operation(context.tenant_state.context(), window, body))
            action = "delete" if name == "evict" and body.get("forget") else RECORDED.get(name)
            if action is not None:
                context.record(action, object="ctxwin.window", id=window_id, operation=name, bytes=len(raw))
            return response

        once = partial(context.in_window_once, window_id, context.request.url.path, context.idempotency_key, raw, work)
        return json_response(await context.run(once))

    operate.__name__ = name
    return operate


for _name, _operation in OPERATIONS.items():
    _path, _body = f"{WINDOWS}/{{window_id}}/{_name}", openapi_body(_operation.body.model_json_schema())
    _route = router.post(_path, name=f"{_name}_window", description=_operation.text, openapi_extra=_body)
    _route(_operate(_name, _operation))


@router.post(WINDOWS + "/{window_id}/{operation}", include_in_schema=False)
async def unknown(window_id: str, operation: str) -> Response:
    """Refuse an unknown operation, naming the known ones."""
    names = ", ".join(sorted([*OPERATIONS, "ask"]))
    raise HTTPException(404, f"an operation on a window must be one of {names}, got {operation[:80]!r}")


def _open_or_restore(context: RequestContext, body: OpenWindow) -> Window:
    tenant_state = context.tenant_state
    if body.snapshot is None:
        fidelity = body.fidelity or context.service.limits.fidelity
        window = Window(
            tenant_state.engine, body.system_prompt, body.budget, fidelity,
            budget_bytes=body.budget_bytes, low_water=body.low_water, prefill=body.prefill,
        )  # fmt: skip
        return tenant_state.windows.add(window)
    if others := body.model_fields_set - {"snapshot"}:
        raise ValueError(f"a window from a snapshot has everything in it, got {', '.join(sorted(others))} beside it")
    read = partial(read_snapshot, limits=tenant_state.uploads.limits)
    return tenant_state.windows.restore(validate(read, body.snapshot))


def _chunk_in(kind: str, limits: Limits, raw: bytes, max_text: int) -> tuple[Any, dict[str, bytes]]:
    """Return the chunk and the files of a multipart body: a field ``chunk`` (JSON), or one ``file`` and plain fields."""
    form = read_form(kind, limits, raw)
    files = {name: data for name, (_, data) in form.files.items()}
    if "chunk" in form.fields:
        return parse_json(limits, form.fields["chunk"].encode(), max_text), files
    if set(files) != {"file"}:
        raise ValueError("a multipart body must have a field chunk (JSON) that names its files, or one file named file")
    parse_json(limits, encode_json(form.fields), max_text)
    fields = validate(FormChunk.model_validate, form.fields).model_dump(exclude_unset=True)
    return {"type": "image", "image": {"file": "file"}, **fields}, files


def install(app: FastAPI) -> None:
    """Add our routes to an app, which needs `GATEWAY` among its middleware and a service in its state."""
    app.include_router(router)
    app.include_router(libraries)
