"""Windows in vLLM's own API server: our routes, the middleware of all routes, and the engine client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ctxwin import tracing
from ctxwin.engines.base import Engine
from ctxwin.engines.torchvision_repair import require_fit
from ctxwin.process_exit import abandon
from ctxwin.store import Store, open_store
from ctxwin_server.app.authentication import Keys
from ctxwin_server.app.isolation import most_scores
from ctxwin_server.app.middleware import GATEWAY
from ctxwin_server.app.quarantine import Quarantine, died_by_itself
from ctxwin_server.app.service import STATE, OpenEngine, Service
from ctxwin_server.app.settings import Settings
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.http.connections import bound_connections
from ctxwin_server.http.routes import install
from ctxwin_server.process.supervisor import EngineDied, journal, serves
from ctxwin_server.vllm.arguments import SERVED, parse, prepare, server_keys
from ctxwin_server.vllm.chats import install_chat_client
from ctxwin_server.vllm.renderer import ChatTemplates, compiles_with_xgrammar, grammar_vocabulary
from ctxwin_vllm import internals
from ctxwin_vllm.engine import VLLMEngine

_ABORT_S, _ENGINE_S, _CONNECTIONS_S, _WINDOWS_S = 0.2, 0.9, 0.4, 0.6
"""Seconds for each step of a shutdown after draining: stopped requests send their end, vLLM's processes end, connections close,
windows are saved. With 2 seconds of draining the sum is below 5; see `ctxwin_server.process.supervisor`."""
_SWITCH_S = 0.0005
"""Seconds for which a computing thread keeps Python's lock while others wait for it. Python's default is ten times that, for
which the event loop would wait at each wake-up while a tenant's work runs."""
_log = logging.getLogger("ctxwin.serve")


def own_process() -> None:
    """Set what a server sets for its whole process, which must be its own: threads change hands ten times as often."""
    sys.setswitchinterval(_SWITCH_S)


def run(model: str, arguments: Sequence[str], settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, in a process of its own. Blocks.

    Raises:
        ValueError, UnsupportedModel: arguments that cannot be served.
        EngineFailed: a vLLM that was not tested. EngineDied: one that ended by itself.
        OSError: a port that is taken, a store that cannot be read.
    """
    import uvloop

    own_process()
    for number in (signal.SIGINT, signal.SIGTERM):  # until the server has handlers of its own
        signal.signal(number, lambda number, _: abandon(128 + number))
    windows, args = _load(model, arguments, settings)
    uvloop.run(_run(args, windows, [model, *arguments]))
    if windows.died:
        raise EngineDied("vLLM ended by itself; its log says why, and the server has to be started again")


async def _run(args: Namespace, windows: Windows, arguments: Sequence[str]) -> None:
    """Run vLLM's ``run_server``, but prepare the engine's arguments once the port is bound."""
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.system_utils import decorate_logs

    decorate_logs("APIServer", skip_if_decorated=True)
    try:
        address, listening = setup_server(args, reuse_port=False)
    except OverflowError as error:
        raise ValueError(f"--port must be 0 to 65535, got {args.port}") from error
    except OSError as error:
        where = args.uds or f"port {args.port} of {args.host or 'this machine'}"
        raise OSError(f"{where} must be free to listen on, got {error}; choose another with --port") from error
    with listening:
        windows.prepare(args, arguments)
        await run_server_worker(address, listening, args, timeout_graceful_shutdown=_CONNECTIONS_S)


def _load(model: str, arguments: Sequence[str], settings: Settings) -> tuple[Windows, Namespace]:
    """Return our plugin and vLLM's namespace for a server of this process, and have vLLM load the plugin."""
    from vllm import envs, plugins

    windows = Windows(settings)
    SERVED[:] = [windows]  # which prepares itself
    args = parse(model, arguments)
    load = plugins.load_endpoint_plugins

    def load_endpoint_plugins(tasks: Any = None) -> list[Any]:
        plugins.load_endpoint_plugins = load
        others = [] if envs.VLLM_PLUGINS is None else load(tasks)
        return [windows, *(other for other in others if other is not windows)]

    plugins.load_endpoint_plugins = load_endpoint_plugins  # which loads those that VLLM_PLUGINS names, and no others
    return windows, args


@contextlib.asynccontextmanager
async def serving_app(
    model: str, arguments: Sequence[str], settings: Settings, suspects: Path | None = None
) -> AsyncIterator[tuple[Any, Service]]:
    """Run a server without a socket: yields the ASGI app and its service. One per process.

    ``suspects`` is the journal of `Quarantine`. Raises: as `run`.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app

    windows, args = _load(model, arguments, settings)
    windows.prepare(args, [model, *arguments])
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
        suspects: journal of `Quarantine`; None keeps nothing across restarts.
        prepared: vLLM's arguments, once prepared.
        service: service of the routes, once the engine is up.
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

    def prepare(self, args: Namespace, arguments: Sequence[str]) -> None:
        """Prepare the engine's arguments and the middleware of every route, before the engine starts.

        Raises: as `run`.
        """
        from ctxwin_vllm import decoded_images

        self.prepared = args
        decoded_images.use()
        log_like_vllm()
        require_fit()
        keys, tenants = server_keys(args), self._given["tenants"]
        self._keys = Keys.of(keys, tenants)  # before minutes of loading: keys may clash
        if self._given["private_metrics"] and not (self._keys.by_hash or self._given["metrics_key"]):
            raise ValueError(
                "--private-metrics must have a key, got none; give --api-key, --tenants or --metrics-key-file"
            )
        _warn_of_clients(bool(keys), tenants)
        prepare(args, arguments, self._settings.outputs)
        # vLLM guards its routes with every key; which tenant one belongs to is decided by our gateway.
        args.api_key = [*keys, *(key for tenant in tenants for key in tenant.keys)] or None
        args.middleware = [*args.middleware, GATEWAY]

    def attach_router(self, app: Any) -> None:
        """Add our routes, bound connections, and stop the service when the app ends."""
        install(app)
        inner = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[Any]:
            async with inner(app) as state:
                bound_connections(app)
                try:
                    yield state
                finally:
                    await self._stop()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open every tenant's engine on vLLM's, before the first request."""
        if engine_client is None or args is not self.prepared:
            raise ValueError("windows need vLLM's own server with an engine; leave ctxwin out of VLLM_PLUGINS here")
        quarantine = Quarantine(self.suspects, died_by_itself(engine_client, self._stopping))
        if args.otlp_traces_endpoint:
            tracing.start()
        templates = ChatTemplates(engine_client, args)
        most = most_scores(args.plain_max_logprobs, engine_client.model_config.get_vocab_size())
        limits = replace(self._given["limits"], max_logprobs=most)
        late_system, names = templates.take_late_system(), templates.variables()
        defaults = replace(self._given["chat_defaults"], late_system=late_system, template_variables=names)
        self.service = service = Service(
            _engine_opener(engine_client, asyncio.get_running_loop(), args.model, self._settings),
            **{**self._given, "limits": limits, "chat_defaults": defaults},
            models=args.served_model_name or [args.model],
            keys=self._keys,
            quarantine=quarantine,
            fetches_media=bool(args.allowed_media_domains),
            open_records=self._open_records if self._settings.registry else None,
            references=open_store(self._settings.libraries) if self._settings.libraries else None,
            grammar_vocabulary=partial(grammar_vocabulary, engine_client),
            grammars_compiled=compiles_with_xgrammar(engine_client),
        )
        setattr(state, STATE, service)
        self._follow_shutdown(engine_client, state, args.shutdown_timeout)
        try:
            await service.start()
        except BaseException:
            await self._stop()
            raise
        install_chat_client(state, engine_client, service)
        serves(args.shutdown_timeout)
        _log.info("ctxwin serves windows beside vLLM's own endpoints")

    def _open_records(self, tenant: str) -> Store:
        return open_store(self._settings.registry, tenant=tenant, max_bytes=self._settings.registry_bytes or None)

    def _follow_shutdown(self, client: Any, state: Any, seconds: float) -> None:
        """Drain before vLLM shuts down, and record whether it died, since both look alike afterwards.

        On a signal vLLM's server shuts the engine down from another thread than that of its event loop, where requests continue.
        """
        shutdown, loop = client.shutdown, asyncio.get_running_loop()
        loop_thread = threading.get_ident()

        def shut_down(timeout: float | None = None) -> None:
            if not self._stopping.is_set():
                self.died = client.errored
                self._stopping.set()
                in_order = not self.died and threading.get_ident() != loop_thread
                until = time.monotonic() + seconds
                if self.service is not None:
                    self.service.drain(seconds if in_order else 0.0)
                if in_order:
                    self._stop_requests(client, loop)
                    shutdown(timeout=_ENGINE_S + max(0.0, until - time.monotonic()))
                    loop.call_soon_threadsafe(loop.call_later, _CONNECTIONS_S / 2, _close_connections, state)
                    return
            shutdown(timeout=timeout)

        client.shutdown = shut_down

    def _stop_requests(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Abort the requests that still run on vLLM, as if their clients had disconnected; their streams report it."""

        async def stop() -> None:
            await internals.abort_all(client)
            if self.service is not None:
                await asyncio.to_thread(self.service.requests.drain, _ABORT_S)
            internals.stop_listening(client)

        stopping = asyncio.run_coroutine_threadsafe(stop(), loop)
        with contextlib.suppress(TimeoutError):
            stopping.result(2 * _ABORT_S)

    async def _stop(self) -> None:
        if self.service is None:
            return
        stopping = asyncio.ensure_future(self.service.stop())
        await asyncio.wait([stopping], timeout=_WINDOWS_S)
        if not stopping.done():
            _log.warning("windows were not put aside in %g s; a durable store has their newest versions", _WINDOWS_S)
        elif stopping.exception() is not None:
            _log.error("windows could not be put aside", exc_info=stopping.exception())


def _close_connections(state: Any) -> None:
    """Close the connections that clients keep open; one that does not read would stay open forever."""
    for connection in list(state.server.server_state.connections):
        if connection.transport is not None:
            connection.transport.abort()


def log_like_vllm() -> None:
    """Log through vLLM's handlers, in its format (``--logging-config.formatter json`` for lines of JSON)."""
    ours, vllms = logging.getLogger("ctxwin"), logging.getLogger("vllm")
    if vllms.handlers and not ours.handlers:
        ours.handlers, ours.propagate = list(vllms.handlers), False
        ours.setLevel(vllms.level)


def _warn_of_clients(key: bool, tenants: Sequence[Tenant]) -> None:
    """Warn that clients are not isolated from each other without tenants."""
    if not tenants:
        who = "everybody who has the key" if key else "everybody who reaches the port"
        _log.warning(
            "no tenants: %s shares windows, chunks, caches and quotas, and can affect every other client; give --tenants "
            "FILE to keep clients apart",
            who,
        )


def _engine_opener(client: Any, loop: asyncio.AbstractEventLoop, model: str, settings: Settings) -> OpenEngine:
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
