"""Our routes: ``/v1/chunks``, ``/v1/windows`` and chats that name chunks; ``/v1/libraries`` is in `library_routes`."""

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
from ctxwin.serve import completions, wire
from ctxwin.serve.about import about
from ctxwin.serve.audit_log import RECORDED
from ctxwin.serve.call import Call, Called, body_of
from ctxwin.serve.completions import ChatRequest
from ctxwin.serve.endpoints import ABOUT, CHUNKS, OUR_CHAT, READY, WINDOWS
from ctxwin.serve.errors import UnknownModel, to_body
from ctxwin.serve.fair import Put, Stopped
from ctxwin.serve.forms import read_form
from ctxwin.serve.library_routes import libraries
from ctxwin.serve.limits import Limits
from ctxwin.serve.live import Session
from ctxwin.serve.operations import OPERATIONS, AuditedAsk, OpenWindow, Operation
from ctxwin.serve.responses import Route, encoded, json_response, streamed, whole
from ctxwin.serve.service import STATE, TENANT, Service
from ctxwin.serve.snapshots import read_snapshot
from ctxwin.serve.specs import CHUNK, checked
from ctxwin.serve.streams import MESSAGE, LiveOptions, Push, Recall, read_message, spoken
from ctxwin.window.answer import Answer
from ctxwin.window.window import Window

_POLL_S = 0.02
router = APIRouter(route_class=Route, tags=["ctxwin"])


@router.post(CHUNKS, openapi_extra=body_of(CHUNK.json_schema()))
async def upload(call: Called) -> Response:
    """Uploads a chunk, as JSON or as multipart; 201 where it is new, 200 where it is known."""
    raw, kind = await call.request.body(), call.request.headers.get("content-type", "")
    read = (call.service.limits, raw, call.space.max_text)
    if kind.startswith("multipart/form-data"):
        chunk, files = await call.service.run_briefly(call.space.tenant, _chunk_in, kind, *read)
    else:
        chunk, files = await call.json(), {}

    def work() -> tuple[dict[str, Any], bool]:
        with call.running("upload", raw):
            return call.space.uploads.put(chunk, files)

    described, new = await call.service.run(call.space.tenant, work)
    call.record("store", object="ctxwin.chunk", id=described["id"], bytes=len(raw), new=new)
    return JSONResponse(described, status_code=201 if new else 200)


@router.get(CHUNKS + "/{chunk_id}")
async def describe(chunk_id: str, call: Called) -> Response:
    """Describes an uploaded chunk."""
    return await call.run(lambda: call.space.uploads.describe(chunk_id))


@router.delete(CHUNKS + "/{chunk_id}")
async def forget(chunk_id: str, call: Called) -> Response:
    """Forgets an upload; its pixels, too, where nothing else shows them."""
    return await call.deleted("ctxwin.chunk", chunk_id, call.space.uploads.delete)


@router.get(READY)
async def ready(request: Request) -> Response:
    """Whether new requests are taken; `/health` is whether the process lives. 503 while it ends or its engine has."""
    service: Service = getattr(request.app.state, STATE)
    status = service.readiness()
    return JSONResponse({"status": status}, status_code=200 if status == "ready" else 503)


@router.get(ABOUT)
async def tell(call: Called) -> Response:
    """What is served here, how, and in what state it is."""
    return await call.run(lambda: about(call.service, call.space))


@router.post(WINDOWS, openapi_extra=body_of(OpenWindow.model_json_schema()))
async def open_window(call: Called) -> Response:
    """Opens a window, or restores one from a snapshot."""
    body = await call.checked(OpenWindow.model_validate)

    def work() -> dict[str, Any]:
        opened = wire.window_to(_opened(call, body))
        call.record("store", object="ctxwin.window", id=opened["id"], restored=body.snapshot is not None)
        return opened

    return await call.once(work)


@router.get(WINDOWS + "/{window_id}")
async def show(window_id: str, call: Called) -> Response:
    """The window and its plan."""
    return await call.with_window(window_id, lambda w: {**wire.window_to(w), "plan": wire.plan_to(w.plan())})


@router.get(WINDOWS + "/{window_id}/{what}")
async def read(window_id: str, what: str, call: Called) -> Response:
    """The window's plan, its snapshot or its summary."""
    if what not in ("plan", "snapshot", "summary"):
        raise HTTPException(404, f"what can be read of a window is its plan, snapshot or summary, got {what!r}")
    made = await call.with_window(window_id, lambda window: OPERATIONS[what](call.space.context(), window, {})[what])
    if what in RECORDED:
        call.record(RECORDED[what], object="ctxwin.window", id=window_id, operation=what)
    return made


@router.delete(WINDOWS + "/{window_id}")
async def close(window_id: str, call: Called) -> Response:
    """Closes a window for good."""
    return await call.deleted("ctxwin.window", window_id, call.space.windows.remove)


@router.post(WINDOWS + "/{window_id}/ask", openapi_extra=body_of(AuditedAsk.model_json_schema()))
async def ask(window_id: str, call: Called) -> Response:
    """Asks a question; ``stream`` answers as server-sent events."""
    body: AuditedAsk = await call.checked(AuditedAsk.model_validate)
    path, raw = call.request.url.path, await call.request.body()
    # What is streamed has been heard in part, so it is not given again.
    key = None if body.stream else call.idempotency_key

    asked: list[Answer] = []

    def work(put: Put, stopped: Stopped) -> bytes:
        def answered(window: Window) -> bytes:
            question = body.question(call.space.libraries.find)
            call.space.context().check_room(window, body.most_placed)
            with call.running("ask", raw, window):
                heard = partial(spoken, window, question, put) if body.stream else partial(window.answer, question)
                answer = heard(stopped=stopped)
            if window.core.trust.due is answer:
                asked.append(answer)
            return encoded(wire.answer_to(answer))

        return call.in_window_once(window_id, path, key, raw, answered)

    async def audited(made: bytes) -> bytes:
        """The answer with what its audit found, where that is waited for; no thread waits."""
        until = time.monotonic() + body.audit_within
        for answer in asked:
            while answer.audit is None and time.monotonic() < until and not call.service.closing.is_set():
                await asyncio.sleep(_POLL_S)
            if answer.audit is not None:
                made = await call.service.run_briefly(call.space.tenant, encoded, wire.answer_to(answer))
        return made

    async def last(made: bytes) -> list[bytes]:
        return [b'{"answer": %s}' % await audited(made)]

    running = call.service.begin(call.space.tenant, work)
    if not body.stream:
        return json_response(await audited(await whole(running, call.request)))
    return await streamed(running, call.request, last=last)


LIVE = WINDOWS + "/{window_id}/live"


@router.post(LIVE, openapi_extra=body_of(MESSAGE.json_schema()))
async def push(window_id: str, call: Called) -> Response:
    """Pushes a frame into a live stream, a picture as it is or a message of the socket, and says what became of it."""
    space, options = call.space, checked(LiveOptions.model_validate, dict(call.request.query_params))
    picture = call.request.headers.get("content-type", "").startswith(("image/", "application/octet-stream"))
    read = (call.service.limits.parse, await call.request.body(), picture, space.max_text)
    message, files = await call.service.run_briefly(space.tenant, read_message, *read)
    with space.streams.open(call.service, space, window_id) as stream:
        if isinstance(message, Push):
            return JSONResponse(await stream.push(message, files, options))
        if isinstance(message, Recall):
            return await call.run(lambda: stream.recall(message, options))
    raise ValueError("a message by HTTP must be a push or a recall; ask with /ask")


@router.websocket(LIVE)
async def stream(socket: WebSocket, window_id: str) -> None:
    """A live stream: frames in, answers out."""
    service: Service = getattr(socket.app.state, STATE)
    space = service.space(socket.scope.get(TENANT) or "")

    def summary() -> Any:
        with space.windows.using(window_id) as window:
            return wire.window_to(window)

    try:
        options = checked(LiveOptions.model_validate, dict(socket.query_params))
        opened = await service.run(space.tenant, summary)
        with space.streams.open(service, space, window_id) as held:
            await Session(socket, held, options).run(opened)
    except (CtxwinError, ValueError) as error:
        status, body = to_body(service.as_shown(error))
        await socket.send_denial_response(JSONResponse(body, status_code=status))


def _operate(name: str, operation: Operation) -> Callable[[str, Call], Any]:
    async def operate(window_id: str, call: Called) -> Response:
        raw, body = await call.request.body(), await call.json()

        def work(window: Window) -> bytes:
            with call.running(name, raw, window):
                made = encoded(operation(call.space.context(), window, body))
            action = "delete" if name == "evict" and body.get("forget") else RECORDED.get(name)
            if action is not None:
                call.record(action, object="ctxwin.window", id=window_id, operation=name, bytes=len(raw))
            return made

        once = partial(call.in_window_once, window_id, call.request.url.path, call.idempotency_key, raw, work)
        return json_response(await call.service.run(call.space.tenant, once))

    operate.__name__ = name
    return operate


for _name, _operation in OPERATIONS.items():
    router.post(
        f"{WINDOWS}/{{window_id}}/{_name}",
        name=f"{_name}_window",
        description=_operation.text,
        openapi_extra=body_of(_operation.body.model_json_schema()),
    )(_operate(_name, _operation))


@router.post(WINDOWS + "/{window_id}/{operation}", include_in_schema=False)
async def unknown(window_id: str, operation: str) -> Response:
    """Says which operations there are."""
    known = ", ".join(sorted([*OPERATIONS, "ask"]))
    raise HTTPException(404, f"an operation on a window must be one of {known}, got {operation[:80]!r}")


@router.post(OUR_CHAT, openapi_extra=body_of(ChatRequest.model_json_schema()))
async def complete(call: Called) -> Response:
    """Answers a chat whose messages name chunks; `/v1/chat/completions` leads here for those."""
    asked: ChatRequest = await call.checked(ChatRequest.model_validate)
    raw = await call.request.body()
    models = call.service.models
    if asked.model is not None and asked.model not in models:
        raise UnknownModel(f"model must be one of {', '.join(models)}, got {asked.model[:200]!r}")
    chat = call.space.chat
    bodies = completions.Bodies(asked.model or models[0], call.space.engine.decode, bool(asked.logprobs))
    usage = bool(asked.stream_options and asked.stream_options.include_usage)

    # Bodies are made in the worker's thread: log-probabilities are many tokens to decode.
    def work(put: Put, stopped: Stopped) -> list[bytes]:
        with call.running("chat", raw):
            replies = chat.answer(asked, lambda p: put(bodies.piece(p)) if asked.stream else None, stopped)
        if not asked.stream:
            return [bodies.completion(replies)]
        return [bodies.usage(replies)] if usage else []

    running = call.service.begin(call.space.tenant, work)
    if not asked.stream:
        return json_response((await whole(running, call.request))[0])
    return await streamed(running, call.request, opening=bodies.opening(asked.n or 1))


def _opened(call: Call, body: OpenWindow) -> Window:
    space = call.space
    if body.snapshot is None:
        fidelity = body.fidelity or call.service.limits.fidelity
        window = Window(space.engine, body.system_prompt, body.budget, fidelity, budget_bytes=body.budget_bytes)
        return space.windows.add(window)
    others = body.model_fields_set - {"snapshot"}
    if others:
        raise ValueError(f"a window from a snapshot has everything in it, got {', '.join(sorted(others))} beside it")
    return space.windows.restore(checked(partial(read_snapshot, limits=space.uploads.limits), body.snapshot))


def _chunk_in(kind: str, limits: Limits, raw: bytes, max_text: int) -> tuple[Any, dict[str, bytes]]:
    """The ``chunk`` field (JSON) of a multipart body and its files; or ``file`` and plain fields, for a single picture."""
    form = read_form(kind, limits, raw)
    files = {name: data for name, (_, data) in form.files.items()}
    if "chunk" in form.fields:
        return limits.parse(form.fields["chunk"].encode(), max_text), files
    if set(files) != {"file"}:
        raise ValueError("a multipart body must have a field chunk (JSON) that names its files, or one file named file")
    limits.parse(encoded(form.fields), max_text)
    return {"type": "image", "image": {"file": "file"}, **form.fields}, files


def install(app: FastAPI) -> None:
    """Adds our routes; the app's own stay as they are. `GATEWAY` must be among its middleware, a service in its state."""
    app.include_router(router)
    app.include_router(libraries)
