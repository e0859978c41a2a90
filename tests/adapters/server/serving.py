"""A server on loopback for tests: our routes and gate in front of a stand-in for an OpenAI server's own routes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from openai import OpenAI
from prometheus_client import CollectorRegistry, generate_latest

from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.store import Store, open_store
from ctxwin.tiny import checkpoint_dir
from ctxwin_server.app.authentication import Keys
from ctxwin_server.app.middleware import Gateway
from ctxwin_server.app.service import STATE, OpenEngine, Service
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.http.connections import BoundedProtocol, ConnectionLimits, bounded_protocol
from ctxwin_server.http.routes import install
from ctxwin_server.process.metrics import Metrics
from ctxwin_server.protocol.limits import Limits


@dataclass
class Server:
    """A running server.

    Attributes:
        engines: by tenant.
        passed, heads: bodies and headers that reached the stand-in's routes.
    """

    url: str
    service: Service
    engines: dict[str, Engine]
    passed: list[Any]
    heads: list[dict[str, str]]
    app: FastAPI
    protocol: type[BoundedProtocol]

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)


def open_tiny(
    engines: dict[str, Engine], url: str = "memory:", make: Callable[[Store], Engine] | None = None
) -> OpenEngine:
    """An engine of its own for each tenant, as views of one vLLM would be."""

    def opener(name: str, tenant: Tenant | None) -> Engine:
        quota = tenant.max_bytes if tenant else None
        store = open_store(url, max_bytes=quota, tenant=name)
        engines[name] = make(store) if make else HFEngine(checkpoint_dir(), store=store)
        if name:
            engines[name].plain_salt = f"salt-of-{name}"  # type: ignore[attr-defined]
        return engines[name]

    return opener


@contextlib.contextmanager
def serving(
    limits: Limits | None = None,
    tenants: Sequence[Tenant] = (),
    api_keys: Sequence[str] = (),
    store: str = "memory:",
    make: Callable[[Store], Engine] | None = None,
    connections: ConnectionLimits | None = None,
    cors: Sequence[str] | None = None,
    **options: Any,
) -> Iterator[Server]:
    """A server that answers on a free port until the block ends."""
    registry, engines = CollectorRegistry(), dict[str, Engine]()
    passed, heads = list[Any](), list[dict[str, str]]()
    service = Service(
        open_tiny(engines, store, make),
        models=["tiny"],
        limits=limits,
        tenants=tenants,
        keys=Keys.of(api_keys, tenants),
        metrics=Metrics(by_tenant=bool(tenants), registry=registry),
        **options,
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    @app.post("/v1/responses")
    @app.post("/v1/messages")
    @app.post("/v1/completions")
    @app.post("/tokenize")
    async def plain(request: Request) -> dict[str, Any]:
        passed.append(await request.json())
        heads.append(dict(request.headers))
        return {"plain": True}

    @app.post("/v1/messages/count_tokens")
    async def count(request: Request) -> dict[str, Any]:
        tokens = len(await request.body())
        return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}

    @app.post("/invocations")
    @app.post("/v1/chat/completions/batch")
    @app.post("/inference/v1/generate")
    async def invocations(request: Request) -> dict[str, Any]:
        return {"plain": True}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    @app.get("/metrics")
    async def metrics() -> Any:
        from fastapi.responses import PlainTextResponse

        return PlainTextResponse(generate_latest(registry))

    setattr(app.state, STATE, service)
    install(app)
    if cors is not None:  # as vLLM's server has it
        app.add_middleware(CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Gateway)
    protocol = bounded_protocol(connections)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", http=protocol))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Server(f"http://127.0.0.1:{port}", service, engines, passed, heads, app, protocol)
    finally:
        server.should_exit = True
        thread.join()
