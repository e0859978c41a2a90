"""One server's state: tenants with their engines, stores and windows, and the threads that work for them."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ctxwin.engines.base import Engine
from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin.serve.audit_log import AuditLog
from ctxwin.serve.chat import Chat
from ctxwin.serve.context_management import Count, Policy, counter
from ctxwin.serve.conversations import Conversations
from ctxwin.serve.decoding import Cutters, Decoders
from ctxwin.serve.draining import Draining
from ctxwin.serve.fair import BackgroundWork, FairPool, Put, Stopped
from ctxwin.serve.libraries import Libraries, Preparation
from ctxwin.serve.limits import BodyBytes, Limits
from ctxwin.serve.metrics import Metrics
from ctxwin.serve.operations import OperationContext
from ctxwin.serve.quarantine import Quarantine
from ctxwin.serve.quotas import Rate
from ctxwin.serve.results import Results
from ctxwin.serve.streams import Streams
from ctxwin.serve.tenants import Keys, Tenant
from ctxwin.serve.uploads import Uploads
from ctxwin.serve.windows import OpenWindows, WindowRegistry
from ctxwin.store import parse_bytes
from ctxwin.store.base import Store
from ctxwin.trust.auditor import auditor_of
from ctxwin.trust.evidence import WAYS
from ctxwin.window.window import Window

T = TypeVar("T")
STATE = "ctxwin_service"
"""Where the service stands in the app's state."""
TENANT = "ctxwin.tenant"
"""Where the tenant's name stands in an ASGI scope."""
OpenEngine = Callable[[str, Tenant | None], Engine]
"""``(tenant name, its entry)`` -> an engine of that tenant, which the service closes together with its store."""
_BRIEF_THREADS = 4
_SWITCH_S = 0.0005
"""How long a thread that computes keeps Python's lock while others want it. By default ten times that, which the event loop
would wait each time that it wakes up beside one tenant's work."""
_log = logging.getLogger("ctxwin.serve")


@dataclass(frozen=True)
class Space:
    """What one tenant has."""

    tenant: str
    engine: Engine
    windows: WindowRegistry
    uploads: Uploads
    libraries: Libraries
    chat: Chat
    results: Results
    conversations: Conversations
    streams: Streams
    count: Count
    max_text: int

    def context(self) -> OperationContext:
        """What one call of an operation has beside its window."""
        return OperationContext(self.windows, self.uploads, self.libraries, self.uploads.allowance())


class Service:
    """Everything behind the routes.

    Args:
        open_engine: opens a tenant's engine; called in a worker thread, once for each tenant, the unnamed one first.
        model: name that answers carry; ``models``: every name that requests may use.
        tenants: see `ctxwin.serve.tenants`; without any there is one space, for everybody.
        keys: who asks, by API key.
        private_metrics: whether ``/metrics`` needs a key where there are keys.
        defaults: how chats are decoded that say nothing: fields of `Sampling`.
        fetches_media: whether tenants' plain requests may name media by URL, which the server then fetches.
        windows: whether windows stand behind plain chats that say nothing: ``auto``, ``off``, or "" where none ever can.
        policy: what is cleared from plain chats that have windows and send no ``context_management``.
        quarantine: what runs in the engine, and what may not because it ends it.
        metrics_key: the key that ``/metrics`` wants, beside the server's own; "" is none.
        audit_log: see `ctxwin.serve.audit_log`.
        open_records: opens the store of a tenant's windows, by its name, where that is not the engine's.
        references: the store of libraries that tenants are granted, which the service closes.
    """

    def __init__(
        self,
        open_engine: OpenEngine,
        *,
        models: Sequence[str],
        limits: Limits | None = None,
        tenants: Sequence[Tenant] = (),
        keys: Keys | None = None,
        metrics: Metrics | None = None,
        defaults: Mapping[str, float] | None = None,
        private_metrics: bool = False,
        fetches_media: bool = False,
        windows: str = "",
        policy: Policy | None = None,
        quarantine: Quarantine | None = None,
        metrics_key: str = "",
        audit_log: str = "",
        open_records: Callable[[str], Store] | None = None,
        references: Store | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.models = tuple(models)
        self.private_metrics = private_metrics
        self.fetches_media = fetches_media
        self.windows = windows
        self.policy = policy
        self.keys = keys or Keys()
        self.quarantine = quarantine or Quarantine()
        self.metrics_keys = Keys.of([metrics_key] if metrics_key else [], ())
        self.audit = AuditLog(audit_log)
        self.draining = Draining()
        self.quotas = {
            t.name: (_rate(t.requests_per_minute, "requests"), _rate(t.bytes_per_minute, "bytes")) for t in tenants
        }
        self._open_windows = OpenWindows(self.limits.max_windows_total)
        self.metrics = metrics or Metrics(by_tenant=bool(tenants))
        self._defaults = dict(defaults or {})
        self._tenants: dict[str, Tenant | None] = {"": None, **{t.name: t for t in tenants}}
        self._open_engine = open_engine
        self._open_records = open_records
        self._references = references
        self._spaces: dict[str, Space] = {}
        total = self.limits.max_body_bytes
        self.body_bytes = BodyBytes(total, max(total // 2, self.limits.max_upload_bytes) if tenants else total)
        caps = {t.name: t.max_concurrency for t in tenants if t.max_concurrency is not None}
        self._pool = FairPool(self.limits.threads, caps, waiting=self.limits.max_waiting)
        # What takes milliseconds must not wait until one of many long answers has ended.
        self._brief = FairPool(_BRIEF_THREADS, waiting=self.limits.max_waiting, name="ctxwin-brief")
        # Of requests that hold a place already: were it one pool, they could wait for each other.
        self._chats = FairPool(self.limits.threads, waiting=self.limits.max_waiting, name="ctxwin-chats")
        self._decoders = Decoders(self.limits.decode_seconds, self.limits.decode_bytes)
        self._cutters = Cutters(self.limits.decode_seconds, self.limits.decode_bytes)
        self._sweeper: asyncio.Task[None] | None = None
        self.closing = threading.Event()
        self.preparation = Preparation(self.closing)

    async def start(self) -> None:
        """Opens every tenant's space and begins to close and to compress idle windows."""
        sys.setswitchinterval(_SWITCH_S)
        for name, tenant in self._tenants.items():
            self._spaces[name] = await asyncio.to_thread(self._open, name, tenant)
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Puts every window aside, gives back their leases, closes engines and stores. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self.closing.set()
        await asyncio.to_thread(self._close)

    def space(self, tenant: str) -> Space:
        """What ``tenant`` has."""
        return self._spaces[tenant]

    def spaces(self) -> list[Space]:
        """What every tenant has."""
        return list(self._spaces.values())

    async def run(self, tenant: str, work: Callable[..., T], *args: Any) -> T:
        """``work(*args)`` in a worker thread, when it is the tenant's turn; the event loop never waits for an engine."""
        return await asyncio.wrap_future(self._pool.submit(tenant, copy_context().run, work, *args))

    async def run_briefly(self, tenant: str, work: Callable[..., T], *args: Any) -> T:
        """`run` for what needs no engine: it is not behind the requests that do."""
        return await asyncio.wrap_future(self._brief.submit(tenant, work, *args))

    async def run_chat(self, tenant: str, work: Callable[[], T]) -> T:
        """`run` for the windows behind plain chats."""
        return await asyncio.wrap_future(self._chats.submit(tenant, copy_context().run, work))

    def begin(self, tenant: str, work: Callable[[Put, Stopped], T]) -> BackgroundWork[T]:
        """`run` for work that has something to say before its end."""
        return BackgroundWork(partial(self._pool.submit, tenant, copy_context().run), work, self.closing)

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """A place among the requests that run, for one that the engine's own routes answer. Waits for the tenant's turn."""
        future = self._pool.reserve(tenant)
        try:
            give_back = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda late: late.cancelled() or late.result()())
            raise
        try:
            yield
        finally:
            give_back()

    def as_shown(self, error: Exception) -> Exception:
        """What a client is told: whatever goes wrong while the server shuts down is no slip of it."""
        if self.closing.is_set() and not isinstance(error, CtxwinError):
            return EngineFailed("the server is shutting down; try another one")
        return error

    def drain(self, seconds: float) -> None:
        """Takes no more requests, gives those that run ``seconds`` to finish, and tells the rest to stop. Blocks."""
        left = self.draining.drain(seconds)
        if left:
            _log.warning("%d requests had not finished after %g s and are stopped (--shutdown-timeout)", left, seconds)
        self.closing.set()

    def readiness(self) -> str:
        """What a load balancer should know: ``ready``, ``draining`` or ``engine has ended``."""
        return "draining" if self.draining.begun else "engine has ended" if self.quarantine.died() else "ready"

    def refresh_metrics(self) -> None:
        """Brings figures that are counted elsewhere up to date."""
        for space in self._spaces.values():
            self.metrics.read(space.tenant, space.engine, len(space.windows), self._pool.waiting(space.tenant))
            auditor = auditor_of(space.engine)
            ways = auditor.ledger(space.engine, self.limits.fidelity.reference).record.ways
            standing = {name: name in ways and ways[name].promoted for name in WAYS}
            self.metrics.read_audits(space.tenant, auditor.counted(space.tenant), standing)

    def _open(self, name: str, tenant: Tenant | None) -> Space:
        engine = self._open_engine(name, tenant)
        most = (tenant.max_windows if tenant else None) or self.limits.max_windows

        def watch(window: Window) -> None:
            window.observe(lambda event: self.metrics.heard(name, event))

        records = self._open_records(name) if self._open_records else None
        uploads = Uploads(engine, self.limits, self._decoders.decode)
        return Space(
            tenant=name,
            engine=engine,
            windows=WindowRegistry(engine, most, self.limits, self._open_windows, watch=watch, records=records),
            uploads=uploads,
            libraries=Libraries(name, engine, self._references, self.limits, self._cutters.cut, self.preparation.due),
            chat=Chat(engine, uploads, self.limits.fidelity, self._defaults, watch, partial(self._pool.submit, name)),
            results=Results(),
            conversations=Conversations(most, self.limits.window_ttl_s),
            streams=Streams(most),
            count=counter(engine),
            max_text=self.limits.text(engine.spec.max_tokens),
        )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.limits.window_ttl_s / 4))
            for space in list(self._spaces.values()):
                try:
                    closed = await self.run(space.tenant, space.windows.sweep)
                    freed = await self.run(space.tenant, space.windows.economise)
                except Exception:
                    _log.exception("idle windows of tenant %r could not be kept up", space.tenant)
                    continue
                if closed or freed:
                    _log.info("closed %d idle windows, compression gave back %d bytes", closed, freed)

    def _close(self) -> None:
        # No new work is taken; what runs has been told to stop.
        self._pool.shutdown()
        self._brief.shutdown()
        self._chats.shutdown()
        self._decoders.close()
        self._cutters.close()
        self.preparation.close()
        spaces, self._spaces = self._spaces, {}
        for space in spaces.values():
            space.windows.close()
            if space.windows.records is not space.engine.repo.store:
                space.windows.records.close()
        # The unnamed tenant's engine is the one the others are views of.
        for space in reversed(list(spaces.values())):
            space.engine.close()
            space.engine.repo.store.close()
        if self._references is not None:
            self._references.close()
        self.metrics.close()
        self.audit.close()


def _rate(most: int | str | None, what: str) -> Rate | None:
    return None if most is None else Rate(parse_bytes(most), what)
