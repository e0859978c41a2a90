"""Our routes: ``/v1/chunks``, ``/v1/windows`` and chats that name chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from ctxwin.serve import completions, wire
from ctxwin.serve.background import Put, Stopped
from ctxwin.serve.completions import ChatRequest
from ctxwin.serve.endpoints import CHUNKS, OUR_CHAT, WINDOWS
from ctxwin.serve.errors import UnknownModel
from ctxwin.serve.operations import OPERATIONS, Ask, OpenWindow, Operation
from ctxwin.serve.responses import Route, encoded, json_response, streamed, whole
from ctxwin.serve.service import STATE, TENANT, Service, Space
from ctxwin.serve.specs import CHUNK, checked
from ctxwin.window.state import State
from ctxwin.window.stream import TextDelta
from ctxwin.window.window import Window

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

    async def once(self, work: Callable[[], Any]) -> Response:
        """`run`, or what an earlier request with the same Idempotency-Key got."""
        path, key, raw = self.request.url.path, self.idempotency_key, await self.request.body()
        made = await self.service.run(
            self.space.tenant, self.space.results.once, path, key, raw, lambda: encoded(work())
        )
        return json_response(made)

    @property
    def idempotency_key(self) -> str | None:
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
    if call.request.headers.get("content-type", "").startswith("multipart/form-data"):
        chunk, files = await _form(call)
    else:
        chunk, files = await call.json(), {}
    described, new = await call.service.run(call.space.tenant, call.space.uploads.put, chunk, files)
    return JSONResponse(described, status_code=201 if new else 200)


@router.get(CHUNKS + "/{chunk_id}")
async def describe(chunk_id: str, call: Called) -> Response:
    return await call.run(lambda: call.space.uploads.describe(chunk_id))


@router.delete(CHUNKS + "/{chunk_id}")
async def forget(chunk_id: str, call: Called) -> Response:
    def work() -> Any:
        call.space.uploads.delete(chunk_id)
        return {"object": "ctxwin.chunk", "id": chunk_id, "deleted": True}

    return await call.run(work)


@router.post(WINDOWS, openapi_extra=_body(OpenWindow.model_json_schema()))
async def open_window(call: Called) -> Response:
    body = await call.checked(OpenWindow.model_validate)
    return await call.once(lambda: wire.window_to(_opened(call, body)))


@router.get(WINDOWS + "/{window_id}")
async def show(window_id: str, call: Called) -> Response:
    def work() -> Any:
        with call.space.windows.using(window_id) as window:
            return {**wire.window_to(window), "plan": wire.plan_to(window.plan())}

    return await call.run(work)


@router.get(WINDOWS + "/{window_id}/{what}")
async def read(window_id: str, what: str, call: Called) -> Response:
    if what not in ("plan", "snapshot", "summary"):
        raise HTTPException(404, f"what can be read of a window is its plan, snapshot or summary, got {what!r}")

    def work() -> Any:
        with call.space.windows.using(window_id) as window:
            return OPERATIONS[what](call.space.context(), window, {})[what]

    return await call.run(work)


@router.delete(WINDOWS + "/{window_id}")
async def close(window_id: str, call: Called) -> Response:
    def work() -> Any:
        call.space.windows.remove(window_id)
        return {"object": "ctxwin.window", "id": window_id, "deleted": True}

    return await call.run(work)


@router.post(WINDOWS + "/{window_id}/ask", openapi_extra=_body(Ask.model_json_schema()))
async def ask(window_id: str, call: Called) -> Response:
    body: Ask = await call.checked(Ask.model_validate)
    path, raw = call.request.url.path, await call.request.body()
    # What is streamed has been heard in part, so it is not given again.
    key = None if body.stream else call.idempotency_key

    def work(put: Put, stopped: Stopped) -> bytes:
        delta = TextDelta()

        def on_token(_: int, text: str) -> bool:
            if new := delta.feed(text):
                put(encoded({"text": new}))
            return True

        def answered() -> bytes:
            with call.space.windows.using(window_id) as window:
                if body.remember:
                    call.space.context().check_room(window, 1)
                answer = window.answer(body.question(), on_token=on_token if body.stream else None, stopped=stopped)
            if body.stream and (rest := delta.feed(answer.text, last=True)):
                put(encoded({"text": rest}))
            return encoded(wire.answer_to(answer))

        return call.space.results.once(path, key, raw, answered)

    running = call.service.begin(call.space.tenant, work)
    if not body.stream:
        return json_response(await whole(running, call.request))
    return await streamed(running, call.request, last=lambda answer: [b'{"answer": %s}' % answer])


def _operate(name: str, operation: Operation) -> Callable[[str, Call], Any]:
    async def operate(window_id: str, call: Called) -> Response:
        body = await call.json()

        def work() -> Any:
            with call.space.windows.using(window_id) as window:
                return operation(call.space.context(), window, body)

        return await call.once(work)

    operate.__name__ = name
    return operate


for _name, _operation in OPERATIONS.items():
    router.post(
        f"{WINDOWS}/{{window_id}}/{_name}",
        name=f"{_name}_window",
        openapi_extra=_body(_operation.body.model_json_schema()),
    )(_operate(_name, _operation))


@router.post(WINDOWS + "/{window_id}/{operation}", include_in_schema=False)
async def unknown(window_id: str, operation: str) -> Response:
    known = ", ".join(sorted([*OPERATIONS, "ask"]))
    raise HTTPException(404, f"an operation on a window must be one of {known}, got {operation[:80]!r}")


@router.post(OUR_CHAT, openapi_extra=_body(ChatRequest.model_json_schema()))
async def complete(call: Called) -> Response:
    asked: ChatRequest = await call.checked(ChatRequest.model_validate)
    models = call.service.models
    if asked.model is not None and asked.model not in models:
        raise UnknownModel(f"model must be one of {', '.join(models)}, got {asked.model[:200]!r}")
    chat = call.space.chat
    bodies = completions.Bodies(asked.model or models[0], call.space.engine.decode, bool(asked.logprobs))
    usage = bool(asked.stream_options and asked.stream_options.include_usage)

    # Bodies are made in the worker's thread: log-probabilities are many tokens to decode.
    def work(put: Put, stopped: Stopped) -> list[bytes]:
        if not asked.stream:
            return [bodies.completion(chat.answer(asked, lambda piece: None, stopped))]
        replies = chat.answer(asked, lambda piece: put(bodies.piece(piece)), stopped)
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
    return space.windows.restore(checked(State.model_validate, body.snapshot))


async def _form(call: Call) -> tuple[Any, dict[str, bytes]]:
    """The ``chunk`` field (JSON) of a multipart body and its files; or ``file`` and plain fields, for a single picture."""
    limits = call.service.limits
    try:
        async with call.request.form(
            max_files=limits.max_frames + 1, max_fields=64, max_part_size=limits.max_upload_bytes
        ) as form:
            files = {name: await value.read() for name, value in form.items() if isinstance(value, UploadFile)}
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
    except HTTPException as error:
        raise ValueError(f"the multipart body is malformed: {error.detail}") from None
    parse, max_text = limits.parse, call.space.max_text
    if "chunk" in fields:
        raw = fields["chunk"].encode()
        return await call.service.run_briefly(call.space.tenant, parse, raw, max_text), files
    if set(files) != {"file"}:
        raise ValueError("a multipart body must have a field chunk (JSON) that names its files, or one file named file")
    parse(encoded(fields), max_text)
    return {"type": "image", "image": {"file": "file"}, **fields}, files
