"""Our routes: ``/v1/chunks``, ``/v1/windows`` and chats that name chunks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, Any

from ctxwin.extras import optional_imports

with optional_imports():
    from fastapi import APIRouter, Depends, FastAPI, Request, Response, WebSocket
    from fastapi.responses import JSONResponse
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import FormParser, parse_options_header
    from starlette.exceptions import HTTPException

from ctxwin.errors import CtxwinError
from ctxwin.hashing import digest
from ctxwin.serve import completions, wire
from ctxwin.serve.about import about
from ctxwin.serve.audit_log import RECORDED
from ctxwin.serve.completions import ChatRequest
from ctxwin.serve.endpoints import ABOUT, CHUNKS, OUR_CHAT, READY, WINDOWS
from ctxwin.serve.errors import TooLarge, UnknownModel, to_body
from ctxwin.serve.fair import Put, Stopped
from ctxwin.serve.limits import Limits
from ctxwin.serve.live import Session
from ctxwin.serve.operations import OPERATIONS, AuditedAsk, OpenWindow, Operation
from ctxwin.serve.responses import Route, encoded, json_response, streamed, whole
from ctxwin.serve.service import STATE, TENANT, Service, Space
from ctxwin.serve.snapshots import read_snapshot
from ctxwin.serve.specs import CHUNK, checked
from ctxwin.serve.streams import MESSAGE, LiveOptions, Push, Recall, read_message, spoken
from ctxwin.window.answer import Answer
from ctxwin.window.window import Window

_MOST_FIELDS = 64
_POLL_S = 0.02
router = APIRouter(route_class=Route, tags=["ctxwin"])


class Call:
    """One request to a route of ours: whose it is, and where its work is done."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.service: Service = getattr(request.app.state, STATE)
        self.space: Space = self.service.space(request.scope.get(TENANT) or "")

    async def json(self) -> Any:
        """The body, parsed within the server's limits, off the event loop."""
        raw = await self.request.body()
        return await self.service.run_briefly(self.space.tenant, self.service.limits.parse, raw, self.space.max_text)

    async def checked(self, validate: Callable[[Any], Any]) -> Any:
        """What ``validate`` makes of the body."""
        data = await self.json()
        return await self.service.run_briefly(self.space.tenant, checked, validate, data)

    async def run(self, work: Callable[[], Any]) -> Response:
        """What ``work`` returns, as JSON; it runs in a worker thread when it is the tenant's turn."""
        return json_response(await self.service.run(self.space.tenant, lambda: encoded(work())))

    async def with_window(self, window_id: str, read: Callable[[Window], Any]) -> Response:
        """What ``read`` finds in a window, as JSON."""

        def work() -> Any:
            with self.space.windows.using(window_id) as window:
                return read(window)

        return await self.run(work)

    def record(self, action: str, **said: Any) -> None:
        """A line in the audit log."""
        client = self.request.client.host if self.request.client else ""
        self.service.audit.record(self.space.tenant, client, action, **said)

    async def deleted(self, kind: str, name: str, delete: Callable[[str], None]) -> Response:
        """Deletes what ``name`` names, and says so."""
        await self.service.run(self.space.tenant, delete, name)
        self.record("delete", object=kind, id=name)
        return JSONResponse({"object": kind, "id": name, "deleted": True})

    async def once(self, work: Callable[[], Any]) -> Response:
        """`run`, or what an earlier request with the same Idempotency-Key got."""
        path, key, raw = self.request.url.path, self.idempotency_key, await self.request.body()
        made = await self.service.run(
            self.space.tenant, self.space.results.once, path, key, raw, lambda: encoded(work())
        )
        return json_response(made)

    def in_window_once(
        self, window_id: str, path: str, key: str | None, raw: bytes, work: Callable[[Window], bytes]
    ) -> bytes:
        """`once` for what is done to a window, whose record knows it, too: another server may have done it."""

        def once() -> bytes:
            with self.space.streams.turn(window_id):
                return self.space.windows.once(window_id, path, key, raw, work)

        return self.space.results.once(path, key, raw, once)

    def running(self, what: str, raw: bytes, window: Window | None = None) -> AbstractContextManager[None]:
        """While this request may be in the hands of the engine; see `Quarantine`."""
        content = () if window is None else (window.system_prompt, *(p.chunk_id for p in window.core.state.placed))
        return self.service.quarantine.running(digest("request", self.space.tenant, what, raw, content))

    @property
    def idempotency_key(self) -> str | None:
        """What the client calls this request, to get its answer again."""
        return self.request.headers.get("idempotency-key")


async def _call(request: Request) -> Call:
    return Call(request)


Called = Annotated[Call, Depends(_call)]


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    """What OpenAPI says of a body that is read by hand."""
    definitions = schema.get("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, dict) and "$ref" in part:
            return inlined(definitions[part["$ref"].rpartition("/")[2]])
        if isinstance(part, dict):
            return {k: inlined(v) for k, v in part.items() if k not in ("$defs", "discriminator")}
        return [inlined(item) for item in part] if isinstance(part, list) else part

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}


@router.post(CHUNKS, openapi_extra=_body(CHUNK.json_schema()))
async def upload(call: Called) -> Response:
    """Uploads a chunk, as JSON or as multipart; 201 where it is new, 200 where it is known."""
    raw, kind = await call.request.body(), call.request.headers.get("content-type", "")
    read = (call.service.limits, raw, call.space.max_text)
    if kind.startswith("multipart/form-data"):
        chunk, files = await call.service.run_briefly(call.space.tenant, _form, kind, *read)
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


@router.post(WINDOWS, openapi_extra=_body(OpenWindow.model_json_schema()))
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


@router.post(WINDOWS + "/{window_id}/ask", openapi_extra=_body(AuditedAsk.model_json_schema()))
async def ask(window_id: str, call: Called) -> Response:
    """Asks a question; ``stream`` answers as server-sent events."""
    body: AuditedAsk = await call.checked(AuditedAsk.model_validate)
    path, raw = call.request.url.path, await call.request.body()
    # What is streamed has been heard in part, so it is not given again.
    key = None if body.stream else call.idempotency_key

    asked: list[Answer] = []

    def work(put: Put, stopped: Stopped) -> bytes:
        def answered(window: Window) -> bytes:
            if body.remember:
                call.space.context().check_room(window, 1)
            with call.running("ask", raw, window):
                if body.stream:
                    answer = spoken(window, body.question(), put, stopped)
                else:
                    answer = window.answer(body.question(), stopped=stopped)
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


@router.post(LIVE, openapi_extra=_body(MESSAGE.json_schema()))
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
        openapi_extra=_body(_operation.body.model_json_schema()),
    )(_operate(_name, _operation))


@router.post(WINDOWS + "/{window_id}/{operation}", include_in_schema=False)
async def unknown(window_id: str, operation: str) -> Response:
    """Says which operations there are."""
    known = ", ".join(sorted([*OPERATIONS, "ask"]))
    raise HTTPException(404, f"an operation on a window must be one of {known}, got {operation[:80]!r}")


@router.post(OUR_CHAT, openapi_extra=_body(ChatRequest.model_json_schema()))
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


def _form(kind: str, limits: Limits, raw: bytes, max_text: int) -> tuple[Any, dict[str, bytes]]:
    """The ``chunk`` field (JSON) of a multipart body and its files; or ``file`` and plain fields, for a single picture."""
    files: dict[str, bytes] = {}
    fields: dict[str, str] = {}
    parts: Counter[str] = Counter()  # of one name, too

    def on_file(part: Any) -> None:
        parts["files"] += 1
        if parts["files"] > limits.max_frames + 1:
            raise TooLarge(f"a multipart body must have at most {limits.max_frames + 1} files (--max-frames), got more")
        part.file_object.seek(0)
        files[part.field_name.decode()] = part.file_object.read()

    def on_field(part: Any) -> None:
        parts["fields"] += 1
        if parts["fields"] > _MOST_FIELDS:
            raise TooLarge(f"a multipart body must have at most {_MOST_FIELDS} fields, got more")
        fields[part.field_name.decode()] = (part.value or b"").decode()

    try:
        boundary = parse_options_header(kind)[1].get(b"boundary")
        in_memory = {"MAX_MEMORY_FILE_SIZE": limits.max_upload_bytes + 1}
        parser = FormParser("multipart/form-data", on_field, on_file, boundary=boundary, config=in_memory)
        for begin in range(0, len(raw), 1 << 20):
            parser.write(raw[begin : begin + (1 << 20)])
        parser.finalize()
    except FormParserError as error:
        raise ValueError(f"the multipart body is malformed: {error}") from None
    if "chunk" in fields:
        return limits.parse(fields["chunk"].encode(), max_text), files
    if set(files) != {"file"}:
        raise ValueError("a multipart body must have a field chunk (JSON) that names its files, or one file named file")
    limits.parse(encoded(fields), max_text)
    return {"type": "image", "image": {"file": "file"}, **fields}, files


def install(app: FastAPI) -> None:
    """Adds our routes; the app's own stay as they are. `GATEWAY` must be among its middleware, a service in its state."""
    app.include_router(router)
