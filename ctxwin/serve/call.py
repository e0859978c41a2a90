"""What every route of ours does with a request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any

from ctxwin.extras import optional_imports

with optional_imports():
    from fastapi import Depends, Request, Response
    from fastapi.responses import JSONResponse

from ctxwin.hashing import digest
from ctxwin.serve.responses import encoded, json_response
from ctxwin.serve.service import STATE, TENANT, Service, Space
from ctxwin.serve.specs import checked
from ctxwin.window.window import Window


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

    async def once(self, work: Callable[[], Any], content: bytes | None = None) -> Response:
        """`run`, or what an earlier request with the same Idempotency-Key got.

        ``content``: what makes it the same request; the body by default.
        """
        path, key = self.request.url.path, self.idempotency_key
        content = await self.request.body() if content is None else content
        made = await self.service.run(
            self.space.tenant, self.space.results.once, path, key, content, lambda: encoded(work())
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


def body_of(schema: dict[str, Any]) -> dict[str, Any]:
    """What OpenAPI says of a body that is read by hand."""
    definitions = schema.get("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, dict) and "$ref" in part:
            return inlined(definitions[part["$ref"].rpartition("/")[2]])
        if isinstance(part, dict):
            return {k: inlined(v) for k, v in part.items() if k not in ("$defs", "discriminator")}
        return [inlined(item) for item in part] if isinstance(part, list) else part

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
