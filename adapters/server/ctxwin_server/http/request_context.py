"""Request handling that all of our routes share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any, TypeVar

from ctxwin.extras import optional_imports

with optional_imports():
    from fastapi import Depends, Request, Response
    from fastapi.responses import JSONResponse

from ctxwin.hashing import digest
from ctxwin.validation import validate
from ctxwin.window.window import Window
from ctxwin_server.app.accounts import parse_json
from ctxwin_server.app.service import STATE, TENANT, Service, TenantState
from ctxwin_server.http.responses import encode_json, json_response

T = TypeVar("T")


class RequestContext:
    """One request to a route of ours, with its tenant's state."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.service: Service = getattr(request.app.state, STATE)
        self.tenant_state: TenantState = self.service.tenant_state(request.scope.get(TENANT) or "")
        self.tenant = self.tenant_state.tenant

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Return ``work(*args)``, run in a worker thread when it is the tenant's turn."""
        return await self.service.pool.run(self.tenant, work, *args)

    async def run_briefly(self, work: Callable[..., T], *args: Any) -> T:
        """Do as `run`, for work without the engine, which does not wait for requests that use it."""
        return await self.service.brief_pool.run(self.tenant, work, *args)

    async def json(self) -> Any:
        """Return the body, parsed within the server's limits, off the event loop."""
        limits, body = self.service.limits, await self.request.body()
        data = await self.run_briefly(parse_json, limits, body, self.tenant_state.max_text)
        await self.service.grammars.check(self.tenant, data)
        return data

    async def validate(self, validator: Callable[[Any], Any]) -> Any:
        """Parse the body and validate it."""
        return await self.run_briefly(validate, validator, await self.json())

    async def respond(self, work: Callable[[], Any]) -> Response:
        """Return the result of ``work`` as JSON; see `run`."""
        return json_response(await self.run(lambda: encode_json(work())))

    async def read_window(self, window_id: str, read: Callable[[Window], Any]) -> Response:
        """Return ``read(window)`` as JSON."""

        def work() -> Any:
            with self.tenant_state.windows.using(window_id) as window:
                return read(window)

        return await self.respond(work)

    def record(self, action: str, **details: Any) -> None:
        """Write a line to the audit log."""
        client = self.request.client.host if self.request.client else ""
        self.service.audit.record(self.tenant, client, action, **details)

    async def delete(self, kind: str, name: str, remove: Callable[[str], None], **details: Any) -> Response:
        """Delete an object by name, and confirm it; ``details``: for the audit log."""
        await self.run(remove, name)
        self.record("delete", object=kind, id=name, **details)
        return JSONResponse({"object": kind, "id": name, "deleted": True})

    async def run_once(self, work: Callable[[], Any], content: bytes | None = None) -> Response:
        """Do as `respond`, or return the answer of an earlier request with the same Idempotency-Key.

        ``content`` identifies equal requests; the body by default.
        """
        path, key = self.request.url.path, self.idempotency_key
        content = await self.request.body() if content is None else content
        run_once = self.tenant_state.idempotency.run_once
        return json_response(await self.run(run_once, path, key, content, lambda: encode_json(work())))

    def in_window_once(
        self, window_id: str, path: str, key: str | None, raw: bytes, work: Callable[[Window], bytes]
    ) -> bytes:
        """Do as `run_once` for an operation on a window, whose record has its answer, too: another server may have done it."""

        def take_turn() -> bytes:
            with self.tenant_state.streams.turn(window_id):
                return self.tenant_state.windows.run_once(window_id, path, key, raw, work)

        return self.tenant_state.idempotency.run_once(path, key, raw, take_turn)

    def running(self, operation: str, raw: bytes, window: Window | None = None) -> AbstractContextManager[None]:
        """Register this request as running in the engine within the block; see `Quarantine`."""
        content = () if window is None else (window.system_prompt, *(p.chunk_id for p in window.core.state.placed))
        return self.service.quarantine.running(digest("request", self.tenant, operation, raw, content))

    @property
    def idempotency_key(self) -> str | None:
        """The client's Idempotency-Key, under which it can get the answer again."""
        return self.request.headers.get("idempotency-key")


async def _request_context(request: Request) -> RequestContext:
    return RequestContext(request)


CurrentRequest = Annotated[RequestContext, Depends(_request_context)]


def openapi_body(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that FastAPI does not parse."""
    definitions = schema.get("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, dict) and "$ref" in part:
            return inline(definitions[part["$ref"].rpartition("/")[2]])
        if isinstance(part, dict):
            return {k: inline(v) for k, v in part.items() if k not in ("$defs", "discriminator")}
        return [inline(item) for item in part] if isinstance(part, list) else part

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inline(schema)}}}}
