"""One replica: a vLLM with windows in the actor's own process, with any parallelism inside, asked without a socket."""

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

from ray import serve

from ctxwin.adapters.ray.hints import Head, Request, held_chunks
from ctxwin.errors import EngineFailed
from ctxwin.hashing import digest
from ctxwin.serve.settings import Settings
from ctxwin.store import STORE_KEY

MEMBER_S = 15.0
"""How long a fleet's claim on its registry outlives its last replica."""
_PIECES = 64
_log = logging.getLogger("ctxwin.serve")


class Replica:
    """One server of a fleet.

    Args:
        model, arguments: as ``ctxwin serve`` takes them.
        settings: fields of `Settings`.
        fleet: name of the fleet, which no other may have on the same registry.

    Raises:
        ValueError: another fleet uses the registry, or another replica of this one has other weights or another store key.
        OSError: the store cannot be reached.
    """

    def __init__(self, model: str, arguments: Sequence[str], settings: dict[str, Any], fleet: str) -> None:
        self._model, self._arguments, self._settings = model, list(arguments), Settings(**settings)
        self._fleet = fleet
        self._running = AsyncExitStack()
        self._app: Any = None
        self._service: Any = None
        self._checked = 0.0
        self._name = serve.get_replica_context().replica_id.unique_id

    async def __init_async__(self) -> None:
        """Starts the engine; the first health check waits for it."""
        from ctxwin.serve.vllm.server import serving_app

        self._app, self._service = await self._running.enter_async_context(
            serving_app(self._model, self._arguments, self._settings, journal(self._fleet))
        )
        space = self._service.space("")
        self._records, self._identity = space.windows.records, space.engine.spec.identity
        until = time.monotonic() + 2 * MEMBER_S
        while self._other_member() and time.monotonic() < until:
            await asyncio.sleep(1.0)  # a fleet that has just ended is forgotten by then
        self._check_member()

    async def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        """What our app answers: its head, then its body in pieces as they come."""
        pieces: asyncio.Queue[Any] = asyncio.Queue(_PIECES)
        left, given = asyncio.Event(), [request.body]

        async def receive() -> dict[str, Any]:
            if given:
                return {"type": "http.request", "body": given.pop(), "more_body": False}
            await left.wait()
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
                    yield Head(message["status"], headers, self._name, self._latest())
                elif message.get("body"):
                    yield bytes(message["body"])
            await task
        finally:  # also where the client has left
            left.set()
            while not task.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pieces.get(), 0.1)

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router knows of this replica: the windows that are open, and the KV bytes of their chunks."""
        if self._service is None:
            return {}
        held = [window for space in self._service.spaces() for window in space.windows.held()]
        token_bytes = self._service.space("").engine.spec.kv.token_bytes
        return {"windows": [window.id for window in held], "chunks": held_chunks(held, token_bytes)}

    async def check_health(self) -> None:
        """Raises where the engine has died, or the registry is another fleet's now: Ray starts another replica then."""
        if self._service is None:
            await self.__init_async__()
        if self._app.state.engine_client.errored:
            raise EngineFailed("vLLM ended by itself; its log says why")
        await asyncio.to_thread(self._check_member)

    async def __del__(self) -> None:
        """Puts every window aside and ends the engine, once the requests in hand are answered."""
        await self._running.aclose()

    def _latest(self) -> tuple[str, ...]:
        return tuple(window.id for space in self._service.spaces() for window in space.windows.held()[:8])

    def _other_member(self) -> str:
        """The entry of the registry that is not this replica's; "" where there is none."""
        key = digest("member", os.environ.get(STORE_KEY, ""))
        entry = f"{self._fleet} {self._identity} {key}"
        standing = self._records.hold("fleet", entry, MEMBER_S)
        return "" if standing == entry else standing

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
    """What the replicas of a fleet on this machine know of requests that ended an engine; it outlives each of them.

    Raises OSError where another user has made the folder.
    """
    folder = Path(tempfile.gettempdir()) / f"ctxwin-fleet-{os.getuid()}-{digest('fleet', fleet)[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{folder} must be a folder of this user's, got another's; remove it")
    return folder / "suspects.json"


def _scope(request: Request, app: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
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
