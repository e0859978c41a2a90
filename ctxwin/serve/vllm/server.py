"""Windows in vLLM's own API server: what is put beside its routes, in front of them and behind them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxwin import tracing
from ctxwin.engines.base import Engine
from ctxwin.engines.repair_install import require
from ctxwin.engines.vllm.engine import VLLMEngine
from ctxwin.serve.isolation import most_scores
from ctxwin.serve.middleware import GATEWAY
from ctxwin.serve.quarantine import Quarantine
from ctxwin.serve.routes import install
from ctxwin.serve.service import STATE, OpenEngine, Service
from ctxwin.serve.settings import Settings
from ctxwin.serve.supervisor import EngineDied, journal
from ctxwin.serve.tenants import Keys, Tenant
from ctxwin.serve.vllm.arguments import defaults_of, enlist, own_keys, parse, prepare
from ctxwin.serve.vllm.chats import put_windows_behind
from ctxwin.store import Store, open_store

_log = logging.getLogger("ctxwin.serve")


def run(model: str, given: Sequence[str], settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM. Blocks.

    Raises:
        ValueError, UnsupportedModel: arguments that cannot be served.
        EngineFailed: a vLLM that was not tested. EngineDied: one that ended by itself.
        OSError: a port that is taken, a store that cannot be read.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server

    windows, args = _enlisted(model, given, settings)
    try:
        uvloop.run(run_server(args))
    except (OSError, OverflowError) as error:
        if windows.prepared:
            raise
        where = args.uds or f"port {args.port} of {args.host or 'this machine'}"
        raise OSError(f"{where} must be free to listen on, got {error}; choose another with --port") from error
    if windows.died:
        raise EngineDied("vLLM ended by itself; its log says why, and the server has to be started again")


def _enlisted(model: str, given: Sequence[str], settings: Settings) -> tuple[Windows, Namespace]:
    """vLLM's namespace for a server of this process, and what it will load beside its own routes."""
    from vllm import envs, plugins

    windows = Windows(settings)
    args = parse(model, given)
    enlist(lambda _: windows, given)
    load = plugins.load_endpoint_plugins

    def load_endpoint_plugins(tasks: Any = None) -> list[Any]:
        others = [] if envs.VLLM_PLUGINS is None else load(tasks)
        return [windows, *(other for other in others if other is not windows)]

    plugins.load_endpoint_plugins = load_endpoint_plugins  # which loads those that VLLM_PLUGINS names, and no others
    return windows, args


@contextlib.asynccontextmanager
async def serving_app(
    model: str, given: Sequence[str], settings: Settings, suspects: Path | None = None
) -> AsyncIterator[tuple[Any, Service]]:
    """`run` without a socket: the ASGI app, and what stands behind it, for whoever brings requests. One a process.

    ``suspects`` is the journal of `Quarantine`. Raises: as `run`.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app

    windows, args = _enlisted(model, given, settings)
    windows.suspects = suspects
    async with build_async_engine_client(args) as client:
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        async with app.router.lifespan_context(app):
            assert windows.service is not None
            yield app, windows.service


class Windows:
    """An endpoint plugin of vLLM (its ``EndpointPlugin``), for one server.

    Attributes:
        suspects: journal of `Quarantine`; None remembers nothing over a restart.
        prepared: vLLM's arguments, once its engine is asked for.
        service: what stands behind the routes, once the engine is up.
        died: whether vLLM had ended by itself when it was shut down.
    """

    name = "ctxwin"
    required_tasks = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._given = settings.service()
        self.suspects = journal()
        self._keys = Keys()
        self.prepared: Namespace | None = None
        self.service: Service | None = None
        self._stopping = threading.Event()
        self.died = False

    def prepare(self, args: Namespace, given: Sequence[str]) -> None:
        """Before the engine starts: its arguments, and the middleware that stands in front of every route.

        Raises: as `run`.
        """
        self.prepared = args
        log_like_vllm()
        require()
        own, tenants = own_keys(args), self._given["tenants"]
        self._keys = Keys.of(own, tenants)  # before minutes of loading: a key may be given twice
        _warn_of_clients(bool(own), tenants)
        prepare(args, given)
        # vLLM guards its routes with every key; which tenant one belongs to is decided by our gateway.
        args.api_key = [*own, *(key for tenant in tenants for key in tenant.keys)] or None
        args.middleware = [*args.middleware, GATEWAY]

    def attach_router(self, app: Any) -> None:
        """Adds our routes, and ends what `init_state` starts when the app ends."""
        install(app)
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            async with inner(app) as state:
                try:
                    yield state
                finally:
                    await self._stop()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Opens every tenant's engine on vLLM's, before the first request."""
        if engine_client is None or args is not self.prepared:
            raise ValueError("windows need vLLM's own server with an engine; leave ctxwin out of VLLM_PLUGINS here")
        quarantine = Quarantine(self.suspects, lambda: engine_client.errored and not self._stopping.is_set())
        if args.otlp_traces_endpoint:
            tracing.start()
        most = most_scores(args.plain_max_logprobs, engine_client.model_config.get_vocab_size())
        limits = replace(self._given["limits"], max_logprobs=most)
        self.service = service = Service(
            _opener(engine_client, asyncio.get_running_loop(), args.model, self._settings),
            **{**self._given, "limits": limits},
            models=args.served_model_name or [args.model],
            keys=self._keys,
            quarantine=quarantine,
            defaults=defaults_of(engine_client.model_config),
            fetches_media=bool(args.allowed_media_domains),
            open_records=self._open_records if self._settings.registry else None,
            references=open_store(self._settings.libraries) if self._settings.libraries else None,
        )
        setattr(state, STATE, service)
        self._follow_shutdown(engine_client, args.shutdown_timeout)
        try:
            await service.start()
        except BaseException:
            await self._stop()
            raise
        put_windows_behind(engine_client, service)
        _log.info("ctxwin serves windows beside vLLM's own endpoints")

    def _open_records(self, tenant: str) -> Store:
        return open_store(self._settings.registry, tenant=tenant)

    def _follow_shutdown(self, client: Any, seconds: float) -> None:
        """Drains before vLLM's end, and tells that from its death: afterwards both look the same.

        On a signal vLLM's server shuts the engine down from another thread than its event loop's, on which requests go on.
        """
        shutdown, loop_thread = client.shutdown, threading.get_ident()

        def told(*args: Any, **options: Any) -> Any:
            if not self._stopping.is_set():
                self.died = client.errored
                self._stopping.set()
                if self.service is not None:
                    self.service.drain(0.0 if self.died or threading.get_ident() == loop_thread else seconds)
            return shutdown(*args, **options)

        client.shutdown = told

    async def _stop(self) -> None:
        if self.service is not None:
            await self.service.stop()


def log_like_vllm() -> None:
    """Has our log lines stand among vLLM's, in its format (``--logging-config.formatter json`` for lines of JSON)."""
    ours, vllms = logging.getLogger("ctxwin"), logging.getLogger("vllm")
    if vllms.handlers and not ours.handlers:
        ours.handlers, ours.propagate = list(vllms.handlers), False
        ours.setLevel(vllms.level)


def _warn_of_clients(key: bool, tenants: Sequence[Tenant]) -> None:
    """Says what one client can do to another where no tenants keep them apart."""
    if not tenants:
        who = "everybody who has the key" if key else "everybody who reaches the port"
        _log.warning(
            "no tenants: %s shares windows, chunks, caches and quotas, and can affect every other client; give --tenants "
            "FILE to keep clients apart",
            who,
        )


def _opener(client: Any, loop: asyncio.AbstractEventLoop, model: str, settings: Settings) -> OpenEngine:
    base: list[VLLMEngine] = []

    def open_engine(name: str, tenant: Tenant | None) -> Engine:
        quota = (tenant.max_bytes if tenant else None) or settings.store_bytes or None
        store = open_store(settings.store, max_bytes=quota, tenant=name)
        try:
            if base:
                return base[0].view(name, store)
            base.append(VLLMEngine.attach(client, model=model, store=store, tenant=name, loop=loop))
        except BaseException:
            store.close()
            raise
        return base[0]

    return open_engine
