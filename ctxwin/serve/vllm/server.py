"""vLLM's API server with our routes in its app: built from vLLM's own parts, in the order of its ``run_server``."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.serve.context_management import Policy
from ctxwin.serve.limits import Limits
from ctxwin.serve.quarantine import Quarantine
from ctxwin.serve.service import OpenEngine, Service
from ctxwin.serve.supervisor import EngineDied, journal
from ctxwin.serve.tenants import Keys, Tenant
from ctxwin.serve.vllm.arguments import defaults_of, own_keys, parse
from ctxwin.store import open_store

_SSL = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh")
_UVICORN = ("host", "port", *_SSL, "h11_max_incomplete_event_size", "h11_max_header_count")
"""vLLM's arguments that its server takes as they are."""
_log = logging.getLogger("ctxwin.serve")


@dataclass(frozen=True)
class Options:
    """What ``ctxwin serve`` takes beside vLLM's arguments.

    Attributes:
        store: where KV, patches, embeddings and uploads are kept (`open_store`); each tenant has its own in it.
        store_bytes: limit of a tenant's store unless the tenants file names another.
        tenants: see `ctxwin.serve.tenants`.
        private_metrics: whether ``/metrics`` needs a key where there are keys.
        policy: what is cleared from plain chats that have windows and say nothing of it.
        windows: ``auto`` puts windows behind plain chats that say nothing, ``off`` behind those that ask for it.
    """

    store: str = "memory:"
    store_bytes: int | str | None = None
    tenants: Sequence[Tenant] = ()
    private_metrics: bool = False
    windows: str = "off"
    policy: Policy | None = None
    limits: Limits = field(default_factory=Limits)


def run(model: str, given: Sequence[str], options: Options) -> None:
    """Serves until SIGINT or SIGTERM. Blocks.

    Raises:
        ValueError, UnsupportedModel: arguments that cannot be served.
        EngineFailed: a vLLM that was not tested. EngineDied: one that ended by itself.
        OSError: a port that is taken, a store that cannot be read.
    """
    import uvloop

    suspects = journal()
    args = parse(model, given)
    keys = Keys.of(own_keys(args), options.tenants)  # before minutes of loading: a key may be given twice
    uvloop.run(_serve(args, options, keys, suspects))


async def _serve(args: Namespace, options: Options, keys: Keys, suspects: Path | None) -> None:
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.launcher import setup_server

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    signal.signal(signal.SIGTERM, interrupted)  # until the server has its own handlers
    try:
        address, sock = setup_server(args, reuse_port=False)
    except OSError as error:
        where = args.uds or f"port {args.port} of {args.host or 'this machine'}"
        raise OSError(f"{where} must be free to listen on, got {error}; choose another, e.g. with --port") from error
    _warn_of_clients(args, options.tenants)
    # vLLM guards its routes with every key; which tenant one belongs to is decided by our gateway.
    args.api_key = [*own_keys(args), *(key for tenant in options.tenants for key in tenant.keys)] or None
    try:
        async with build_async_engine_client(args) as client:
            stopping = _told_to_stop(client)
            quarantine = Quarantine(suspects, lambda: client.errored and not stopping.is_set())
            ended = await _with_windows(client, address, sock, args, options, keys, quarantine)
            died = client.errored and not stopping.is_set()
        await ended  # once vLLM has shut down
        if died:
            raise EngineDied("vLLM ended by itself; its log says why, and the server has to be started again")
    finally:
        sock.close()


def _told_to_stop(client: Any) -> threading.Event:
    """Set once vLLM is shut down on purpose, which looks like its death afterwards."""
    stopping, shutdown = threading.Event(), client.shutdown

    def told(*args: Any, **options: Any) -> Any:
        stopping.set()
        return shutdown(*args, **options)

    client.shutdown = told
    return stopping


def _warn_of_clients(args: Namespace, tenants: Sequence[Tenant]) -> None:
    """Says what one client can do to another where no tenants keep them apart."""
    if not tenants:
        who = "everybody who has the key" if args.api_key else "everybody who reaches the port"
        _log.warning(
            "no tenants: %s shares windows, chunks, caches and quotas, and can affect every other client; give --tenants "
            "FILE to keep clients apart",
            who,
        )


async def _with_windows(
    client: Any, address: str, sock: Any, args: Namespace, options: Options, keys: Keys, quarantine: Quarantine
) -> Any:
    """Runs the HTTP server on a vLLM that is up; returns what is left to wait for."""
    from vllm import envs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    from ctxwin.serve.middleware import GATEWAY
    from ctxwin.serve.routes import install
    from ctxwin.serve.vllm.chats import put_windows_behind

    tasks = await client.get_supported_tasks()
    args.middleware = [*args.middleware, GATEWAY]
    app = build_app(args, tasks, client.model_config)
    await init_app_state(client, app.state, args, tasks)
    service = Service(
        _opener(client, asyncio.get_running_loop(), args.model, options),
        models=args.served_model_name or [args.model],
        limits=replace(options.limits, max_logprobs=args.plain_max_logprobs),
        tenants=options.tenants,
        keys=keys,
        quarantine=quarantine,
        defaults=defaults_of(client.model_config),
        private_metrics=options.private_metrics,
        fetches_media=bool(args.allowed_media_domains),
        windows=options.windows,
        policy=options.policy,
    )
    install(app, service)
    try:
        await service.start()
        put_windows_behind(client, service)
        _log.info("ctxwin serves windows on %s", address)
        config = get_uvicorn_log_config(args)
        return await serve_http(
            app,
            sock=sock,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            **{name: getattr(args, name) for name in _UVICORN},
            **({} if config is None else {"log_config": config}),
        )
    finally:
        await service.stop()


def _opener(client: Any, loop: asyncio.AbstractEventLoop, model: str, options: Options) -> OpenEngine:
    from ctxwin.engines.vllm.engine import VLLMEngine

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
