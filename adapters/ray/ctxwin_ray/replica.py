"""One replica: a vLLM with windows in the actor's process, with any parallelism inside, called without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import ray
from ray import serve

from ctxwin.errors import EngineFailed
from ctxwin.hashing import digest
from ctxwin.store import STORE_KEY
from ctxwin_ray.hints import Head, Request, window_prefix
from ctxwin_ray.sockets import Address, listening
from ctxwin_server.app.settings import Settings

MEMBER_S = 15.0
"""Seconds that a fleet's claim on its registry outlives its last replica."""
_PIECES = 64
_log = logging.getLogger("ctxwin.serve")


class Replica:
    """One server of a fleet.

    Args:
        model, arguments: as ``ctxwin serve`` takes them.
        settings: fields of `Settings`.
        fleet: name of the fleet, unique on its registry.

    Raises:
        ValueError: another fleet uses the registry, or another replica of this one has other weights or another store key.
        OSError: the store cannot be reached.
    """

    def __init__(self, model: str, arguments: Sequence[str], settings: dict[str, Any], fleet: str) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        if settings.get("audit_log"):  # each file has one writer
            settings = {**settings, "audit_log": f"{settings['audit_log']}.{self._name}"}
        self._model, self._arguments, self._settings = model, list(arguments), Settings(**settings)
        self._fleet = fleet
        self._running = AsyncExitStack()
        self._app: Any = None
        self._service: Any = None

    async def __init_async__(self) -> None:
        """Start the engine; the first health check waits for it."""
        from ctxwin_server.vllm.server import own_process, serving_app

        own_process()  # Ray gives each replica one
        self._app, self._service = await self._running.enter_async_context(
            serving_app(self._model, self._arguments, self._settings, journal(self._fleet))
        )
        most_bytes = self._service.limits.max_upload_bytes
        self._address = await self._running.enter_async_context(
            listening(self._app, ray.util.get_node_ip_address(), most_bytes)
        )
        for tenant_state in self._service.tenant_states():
            tenant_state.engine.window_prefix = window_prefix(self._name)
        tenant_state = self._service.tenant_state("")
        self._records, self._identity = tenant_state.windows.records, tenant_state.engine.spec.identity
        until = time.monotonic() + 2 * MEMBER_S
        while self._other_member() and time.monotonic() < until:
            await asyncio.sleep(1.0)  # the claim of a fleet that has just ended expires
        self._check_member()

    async def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        """Yield the app's answer: its head, then its body in pieces as they are sent."""
        pieces: asyncio.Queue[Any] = asyncio.Queue(_PIECES)
        disconnected, body = asyncio.Event(), [request.body]

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(_scope(request, self._app), receive, pieces.put)
            finally:
                await pieces.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await pieces.get()) is not None:
                if message["type"] == "http.response.start":
                    headers = tuple((bytes(k), bytes(v)) for k, v in message["headers"])
                    yield Head(message["status"], headers)
                elif message.get("body"):
                    yield bytes(message["body"])
            await task
        finally:  # also if the client has disconnected
            disconnected.set()
            while not task.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pieces.get(), 0.1)

    async def address(self, request: Request) -> Address:
        """Return where the front passes on a WebSocket that is routed here."""
        return self._address

    async def check_health(self) -> None:
        """Raise if the engine has died or another fleet has taken the registry; Ray then starts another replica."""
        if self._service is None:
            await self.__init_async__()
        if self._app.state.engine_client.errored:
            raise EngineFailed("vLLM ended by itself; its log says why")
        await asyncio.to_thread(self._check_member)

    async def __del__(self) -> None:
        """Suspend every window and end the engine once the ongoing requests are answered."""
        await self._running.aclose()

    def _other_member(self) -> str:
        """Return the registry's entry if it is not this replica's, else an empty string."""
        key = digest("member", os.environ.get(STORE_KEY, ""))
        entry = f"{self._fleet} {self._identity} {key}"
        current = self._records.hold("fleet", entry, MEMBER_S)
        return "" if current == entry else current

    def _check_member(self) -> None:
        other = self._other_member()
        if not other:
            return
        name, identity, _ = other.rsplit(" ", 2)
        if name != self._fleet:
            raise ValueError(
                f"a registry must be one fleet's, and fleet {name!r} uses it; give another database "
                "(redis://HOST:PORT/N), or end that fleet"
            )
        if identity == self._identity:
            raise ValueError(
                f"every replica of fleet {name!r} must have the same {STORE_KEY}, and the others' is another; set it alike on "
                "every machine of the cluster"
            )
        raise ValueError(
            f"every replica of fleet {name!r} must serve the same weights, got {self._identity[:12]} beside {identity[:12]}; "
            "deploy one checkpoint and revision everywhere"
        )


def journal(fleet: str) -> Path:
    """Return the file in which a fleet's replicas on this machine record requests that ended an engine; it outlives them.

    Raises OSError if the folder belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"ctxwin-fleet-{os.getuid()}-{digest('fleet', fleet)[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise OSError(f"{folder} must be a folder of this user's, got another's; remove it")
    return folder / "suspects.json"


def _scope(request: Request, app: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": request.client,
        "server": ("replica", 80),
        "app": app,
        "state": {},
    }
