"""Windows in vLLM's own API server: what is put beside its routes, in front of them and behind them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.engines.repair_install import require
from ctxwin.engines.vllm.engine import VLLMEngine
from ctxwin.serve.middleware import GATEWAY
from ctxwin.serve.quarantine import Quarantine
from ctxwin.serve.routes import install
from ctxwin.serve.service import STATE, OpenEngine, Service
from ctxwin.serve.settings import Options
from ctxwin.serve.supervisor import EngineDied, journal
from ctxwin.serve.tenants import Keys, Tenant
from ctxwin.serve.vllm.arguments import defaults_of, own_keys, parse, prepare
from ctxwin.serve.vllm.chats import put_windows_behind
from ctxwin.serve.vllm.seam import enlist
from ctxwin.store import open_store

_log = logging.getLogger("ctxwin.serve")


def run(model: str, given: Sequence[str], options: Options) -> None:
    """Serves until SIGINT or SIGTERM. Blocks.

    Raises:
        ValueError, UnsupportedModel: arguments that cannot be served.
        EngineFailed: a vLLM that was not tested. EngineDied: one that ended by itself.
        OSError: a port that is taken, a store that cannot be read.
    """
    import uvloop
    from vllm import envs, plugins
    from vllm.entrypoints.launchers.api_server.entry import run_server

    windows = Windows(options)
    args = parse(model, given)
    enlist(lambda _: windows, given)
    load = plugins.load_endpoint_plugins

    def load_endpoint_plugins(tasks: Any = None) -> list[Any]:
        others = [] if envs.VLLM_PLUGINS is None else load(tasks)
        return [windows, *(other for other in others if other is not windows)]

    plugins.load_endpoint_plugins = load_endpoint_plugins  # which loads those that VLLM_PLUGINS names, and no others
    uvloop.run(run_server(args))
    if windows.died:
        raise EngineDied("vLLM ended by itself; its log says why, and the server has to be started again")


class Windows:
    """An endpoint plugin of vLLM (its ``EndpointPlugin``), for one server.

    Attributes:
        died: whether vLLM had ended by itself when it was shut down.
    """

    name = "ctxwin"
    required_tasks = None

    def __init__(self, options: Options) -> None:
        self._options = options
        self._suspects = journal()
        self._keys = Keys()
        self._args: Namespace | None = None
        self._service: Service | None = None
        self._stopping = threading.Event()
        self.died = False

    def prepare(self, args: Namespace, given: Sequence[str]) -> None:
        """Before the engine starts: its arguments, and the middleware that stands in front of every route.

        Raises: as `run`.
        """
        require()
        own = own_keys(args)
        self._keys = Keys.of(own, self._options.tenants)  # before minutes of loading: a key may be given twice
        _warn_of_clients(bool(own), self._options.tenants)
        prepare(args, given)
        # vLLM guards its routes with every key; which tenant one belongs to is decided by our gateway.
        args.api_key = [*own, *(key for tenant in self._options.tenants for key in tenant.keys)] or None
        args.middleware = [*args.middleware, GATEWAY]
        self._args = args

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
        if engine_client is None or args is not self._args:
            raise ValueError("windows need vLLM's own server with an engine; leave ctxwin out of VLLM_PLUGINS here")
        quarantine = Quarantine(self._suspects, lambda: engine_client.errored and not self._stopping.is_set())
        self._follow_shutdown(engine_client)
        self._service = service = Service(
            _opener(engine_client, asyncio.get_running_loop(), args.model, self._options),
            models=args.served_model_name or [args.model],
            limits=replace(self._options.limits, max_logprobs=args.plain_max_logprobs),
            tenants=self._options.tenants,
            keys=self._keys,
            quarantine=quarantine,
            defaults=defaults_of(engine_client.model_config),
            private_metrics=self._options.private_metrics,
            fetches_media=bool(args.allowed_media_domains),
            windows=self._options.windows,
            policy=self._options.policy,
        )
        setattr(state, STATE, service)
        try:
            await service.start()
        except BaseException:
            await self._stop()
            raise
        put_windows_behind(engine_client, service)
        _log.info("ctxwin serves windows beside vLLM's own endpoints")

    def _follow_shutdown(self, client: Any) -> None:
        """Tells vLLM's end on purpose from its death: afterwards both look the same."""
        shutdown = client.shutdown

        def told(*args: Any, **options: Any) -> Any:
            if not self._stopping.is_set():
                self.died = client.errored
                self._stopping.set()
            return shutdown(*args, **options)

        client.shutdown = told

    async def _stop(self) -> None:
        if self._service is not None:
            await self._service.stop()


def _warn_of_clients(key: bool, tenants: Sequence[Tenant]) -> None:
    """Says what one client can do to another where no tenants keep them apart."""
    if not tenants:
        who = "everybody who has the key" if key else "everybody who reaches the port"
        _log.warning(
            "no tenants: %s shares windows, chunks, caches and quotas, and can affect every other client; give --tenants "
            "FILE to keep clients apart",
            who,
        )


def _opener(client: Any, loop: asyncio.AbstractEventLoop, model: str, options: Options) -> OpenEngine:
    base: list[VLLMEngine] = []

    def open_engine(name: str, tenant: Tenant | None) -> Engine:
        quota = (tenant.max_bytes if tenant else None) or options.store_bytes
        store = open_store(options.store, max_bytes=quota, tenant=name)
        try:
            if base:
                return base[0].view(name, store)
            base.append(VLLMEngine.attach(client, model=model, store=store, tenant=name, loop=loop))
        except BaseException:
            store.close()
            raise
        return base[0]

    return open_engine
