"""One server's state: tenants with their engines, stores and windows, and the threads that work for them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ctxwin.audit import Evidence, attach_audits, auditor_of
from ctxwin.audit.strategies import STRATEGIES
from ctxwin.engines.base import Engine
from ctxwin.engines.outputs import OutputReferences
from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin.store import parse_bytes
from ctxwin.store.base import Store
from ctxwin.window.window import Window
from ctxwin_chats.context_management import Count, counter
from ctxwin_chats.lazy_drops import LazyDrops
from ctxwin_chats.options import ChatDefaults
from ctxwin_chats.prediction import Histories, Prediction
from ctxwin_chats.prefill import ChatPrefill
from ctxwin_chats.shared_records import SharedConversations
from ctxwin_chats.template_arguments import TemplateArguments
from ctxwin_chats.volatile import VolatilePrompts
from ctxwin_server.app.accounts import BodyBytes, Rate, RunningRequests
from ctxwin_server.app.audit_log import AuditLog
from ctxwin_server.app.authentication import Authentication, Keys
from ctxwin_server.app.memory import Memory
from ctxwin_server.app.quarantine import Quarantine
from ctxwin_server.app.request_options import PendingRequests, RequestOptions
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.chat.conversations import Conversations
from ctxwin_server.process.fair import BackgroundWork, FairPool, Put, Stopped
from ctxwin_server.process.metrics import Metrics
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.registry.idempotency import IdempotencyCache
from ctxwin_server.registry.libraries import Libraries, Preparation
from ctxwin_server.registry.operations import OperationContext
from ctxwin_server.registry.streams import Streams
from ctxwin_server.registry.uploads import Uploads
from ctxwin_server.registry.windows import OpenWindows, WindowRegistry
from ctxwin_server.sandbox.decode_pool import FileSplitters, MediaDecoders, VideoHeaders
from ctxwin_server.sandbox.grammars import Grammars
from ctxwin_server.sandbox.helper import sweep

T = TypeVar("T")
STATE = "ctxwin_service"
"""Attribute of the app's state that holds the service."""
TENANT = "ctxwin.tenant"
"""Key of the tenant's name in an ASGI scope."""
OpenEngine = Callable[[str, Tenant | None], Engine]
"""``(tenant name, its entry)`` -> an engine of that tenant, which the service closes together with its store."""
SAVED = 16
"""Plain chats in a tenant's store for each that is remembered here: servers share it."""
_BRIEF_THREADS = 4
_HEADER_BYTES = 512 << 20
_STORES_S = 1.0
_log = logging.getLogger("ctxwin.serve")


@dataclass(frozen=True)
class TenantState:
    """Engine, windows, uploads and other state of one tenant; ``context`` returns that of one call of an operation."""

    tenant: str
    engine: Engine
    windows: WindowRegistry
    uploads: Uploads
    libraries: Libraries
    idempotency: IdempotencyCache
    conversations: Conversations
    lazy_drops: LazyDrops
    volatile: VolatilePrompts
    histories: Histories
    shared: SharedConversations
    streams: Streams
    count: Count
    max_text: int
    context: Callable[[], OperationContext]


class Service:
    """State and worker threads of one server, used by the routes.

    Args:
        open_engine: opens a tenant's engine; called in a worker thread, once for each tenant, the unnamed one first.
        models: names that requests may use; answers carry the first.
        tenants: see `ctxwin_server.app.tenants`; without any there is one state, shared by everybody.
        keys: tenants by API key.
        private_metrics: whether ``/metrics`` needs a key where there are keys.
        fetches_media: whether tenants' plain requests may name media by URL, which the server then fetches.
        chat_defaults: of plain chats; an attribute, too.
        quarantine: registers requests that run in the engine, and refuses those that end it.
        metrics_key: key of ``/metrics``, besides the server's own; "" is none.
        audit_log: see `ctxwin_server.app.audit_log`.
        open_records: opens the store of a tenant's windows by the tenant's name; None uses the engine's store.
        references: the store of libraries that tenants are granted, which the service closes.
        grammar_vocabulary, grammars_compiled: see `Grammars`.

    Attributes:
        pool: of work that uses the engine; the event loop never waits for one.
        brief_pool: of work of milliseconds without the engine, which must not wait for long answers.
        chat_pool: of windows behind plain chats, which hold a slot already: in one pool they could wait for each other.
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
        private_metrics: bool = False,
        fetches_media: bool = False,
        chat_defaults: ChatDefaults | None = None,
        quarantine: Quarantine | None = None,
        metrics_key: str = "",
        audit_log: str = "",
        open_records: Callable[[str], Store] | None = None,
        references: Store | None = None,
        grammar_vocabulary: Callable[[], str | None] | None = None,
        grammars_compiled: bool = True,
    ) -> None:
        self.limits = limits or Limits()
        self.models = tuple(models)
        self.fetches_media, self.chat_defaults = fetches_media, chat_defaults or ChatDefaults()
        metrics_keys = Keys.of([metrics_key] if metrics_key else [], ())
        self.authentication = Authentication(keys or Keys(), metrics_keys, private_metrics)
        self.quarantine = quarantine or Quarantine()
        self.audit = AuditLog(audit_log)
        self.pending_requests = PendingRequests()
        self.memory = Memory(self.limits.max_memory)
        rates = ((t, _rate(t.bytes_per_minute, "bytes"), _rate(t.requests_per_minute, "requests")) for t in tenants)
        self.quotas = {tenant.name: (size, requests) for tenant, size, requests in rates}
        self._open_windows = OpenWindows(self.limits.max_windows_total)
        self.metrics = metrics or Metrics(by_tenant=bool(tenants))
        self.chat_prefill = ChatPrefill(self.busy, partial(self.metrics.count, self.metrics.prefills))
        self._stores_asked, self._asking_stores = (float("-inf"), True), threading.Lock()
        self._tenants: dict[str, Tenant | None] = {"": None, **{t.name: t for t in tenants}}
        self._open_engine, self._open_records, self._references = open_engine, open_records, references
        self._tenant_states: dict[str, TenantState] = {}
        total = self.limits.max_body_bytes
        self.body_bytes = BodyBytes(total, max(total // 2, self.limits.max_upload_bytes) if tenants else total)
        self.requests = RunningRequests(self.limits.threads + self.limits.max_waiting)
        caps = {t.name: t.max_concurrency for t in tenants if t.max_concurrency is not None}
        # No tenant may use the last quarter: another one's first request must not wait for the end of a long answer.
        each = self.limits.threads - (self.limits.threads // 4 if len(tenants) > 1 else 0)
        self.pool = FairPool(self.limits.threads, caps, each=each, waiting=self.limits.max_waiting)
        self.brief_pool = FairPool(_BRIEF_THREADS, waiting=self.limits.max_waiting, name="ctxwin-brief")
        self.chat_pool = FairPool(self.limits.threads, waiting=self.limits.max_waiting, name="ctxwin-chats")
        self._decoders = MediaDecoders(self.limits.decode_seconds, self.limits.decode_bytes, shared=bool(tenants))
        self._file_splitters = FileSplitters(self.limits.decode_seconds, self.limits.decode_bytes, shared=bool(tenants))
        self.template_arguments = TemplateArguments(self.chat_defaults.template_variables)
        self.grammars = Grammars(
            self.limits.grammar_seconds, self.limits.grammar_bytes, grammar_vocabulary,
            compiles=grammars_compiled, shared=bool(tenants),
        )  # fmt: skip
        self.video_headers = VideoHeaders(self.limits.decode_seconds, _HEADER_BYTES, count=1)
        self._sweeper: asyncio.Task[None] | None = None
        self.closing = threading.Event()
        self.preparation = Preparation(self.closing)

    async def start(self) -> None:
        """Open the state of every tenant, and start closing and compressing idle windows."""
        await asyncio.to_thread(sweep)
        for name, tenant in self._tenants.items():
            self._tenant_states[name] = await asyncio.to_thread(self._open, name, tenant)
        self._sweeper = asyncio.create_task(self._sweep())
        self.memory.start()

    async def stop(self) -> None:
        """Save and close every window, release its leases, close engines and stores. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self.closing.set()
        await self.chat_prefill.stop()
        await asyncio.to_thread(self._close)

    def tenant_state(self, tenant: str) -> TenantState:
        """Return the state of ``tenant``."""
        return self._tenant_states[tenant]

    def pending_request(
        self, headers: Mapping[str, str] | None
    ) -> tuple[RequestOptions | None, TenantState | None, dict[str, str] | None]:
        """Return the options of a request with these tracing headers and its tenant's state; see `PendingRequests.read`."""
        options, others = self.pending_requests.read(headers)
        return options, None if options is None else self._tenant_states[options.tenant], others

    def tenant_states(self) -> list[TenantState]:
        """Return the states of all tenants."""
        return list(self._tenant_states.values())

    def begin(self, tenant: str, work: Callable[[Put, Stopped], T]) -> BackgroundWork[T]:
        """Start work that yields items before its end, in a thread of `pool` when it is the tenant's turn."""
        return BackgroundWork(partial(self.pool.submit, tenant, copy_context().run), work, self.closing)

    def to_client_error(self, error: Exception) -> Exception:
        """Return the error to report to the client: unexpected ones during shutdown become EngineFailed."""
        if self.closing.is_set() and not isinstance(error, CtxwinError):
            return EngineFailed("the server is shutting down; try another one")
        return error

    def drain(self, seconds: float) -> None:
        """Refuse new requests, give running ones ``seconds`` to finish, and tell the others to stop. Blocks."""
        if running := self.requests.drain(seconds):
            _log.warning("%d requests are unfinished after %g s and are stopped (--shutdown-timeout)", running, seconds)
        self.closing.set()

    def readiness(self) -> str:
        """Return ``ready``, or the reason for which a load balancer should send requests elsewhere.

        Blocks. Cost: a round trip to a shared store, once a second at most.
        """
        if self.requests.draining:
            return "draining"
        if self.quarantine.died():
            return "engine has ended"
        if self.memory.short:
            return "memory is short"
        return "ready" if self._stores_reachable() else "store does not answer"

    def _stores_reachable(self) -> bool:
        """Return whether the shared stores answer, checked once a second at most."""
        with self._asking_stores:
            asked, answered = self._stores_asked
            now = time.monotonic()
            if now - asked > _STORES_S:
                stores = [self._references]
                if (tenant_state := self._tenant_states.get("")) is not None:
                    stores += [tenant_state.engine.repo.store, tenant_state.windows.records]
                answered = all(store.reachable() for store in dict.fromkeys(stores) if store is not None)
                self._stores_asked = now, answered
            return answered

    def busy(self, *, apart_from: int = 0) -> bool:
        """Return whether requests wait for the engine, of plain chats more than ``apart_from``, or it is to stop."""
        shared = self._tenant_states.get("")
        if shared is None or self.requests.draining:
            return True
        return len(self.pending_requests) > apart_from or shared.engine.busy

    def refresh_metrics(self) -> None:
        """Update metrics from counters kept elsewhere."""
        self.metrics.read_memory(self.memory.used, self.memory.limit, self.memory.refused)
        for state in self._tenant_states.values():
            records = {"reopened": state.windows.taken_over, "fenced_off": state.windows.fenced_off}
            self.metrics.read(state.tenant, state.engine, len(state.windows), self.pool.waiting(state.tenant), records)
            auditor = auditor_of(state.engine)
            strategies = auditor.evidence_of(state.engine, self.limits.fidelity.advanced.reference).record.strategies
            known = {name: strategies.get(name, Evidence()) for name in STRATEGIES}
            standing = {name: (evidence.promoted, bool(evidence.stopped)) for name, evidence in known.items()}
            self.metrics.read_audits(state.tenant, auditor.counts_of(state.tenant), standing)

    def _open(self, name: str, tenant: Tenant | None) -> TenantState:
        engine = self._open_engine(name, tenant)
        attach_audits(engine)
        most = (tenant.max_windows if tenant else None) or self.limits.max_windows

        def watch(window: Window) -> None:
            window.observe(lambda event: self.metrics.observe(name, event))

        def missed(prediction: Prediction) -> None:
            self.metrics.count(self.metrics.prefilled, name, "missed", by=prediction.tokens)

        records = self._open_records(name) if self._open_records else None
        uploads = Uploads(engine, self.limits, partial(self._decoders.decode, tenant=name))
        split = partial(self._file_splitters.split, tenant=name)
        windows = WindowRegistry(engine, most, self.limits, self._open_windows, watch=watch, records=records)
        bounds = most, self.limits.window_ttl_s
        conversations, histories = Conversations(*bounds), Histories(*bounds, missed)
        volatile = VolatilePrompts(*bounds, engine.spec.max_tokens)
        saved = [*conversations.saved(), *volatile.saved(), *histories.saved()]
        count = partial(self.metrics.count, self.metrics.chat_records, name)
        shared = SharedConversations(windows.records, saved, SAVED * most, self.limits.window_ttl_s, count)
        libraries = Libraries(name, engine, self._references, self.limits, split, self.preparation.due)
        outputs = OutputReferences(self.limits.max_output_bytes, self.limits.output_ttl)

        def context() -> OperationContext:
            return OperationContext(windows, uploads, libraries, outputs, uploads.allowance())

        return TenantState(
            tenant=name,
            engine=engine,
            windows=windows,
            uploads=uploads,
            libraries=libraries,
            idempotency=IdempotencyCache(),
            conversations=conversations,
            lazy_drops=LazyDrops(*bounds),
            volatile=volatile,
            histories=histories,
            shared=shared,
            streams=Streams(name, most, context, self.pool, self.metrics, self.quarantine.running),
            count=counter(engine),
            max_text=self.limits.text(engine.spec.max_tokens),
            context=context,
        )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.limits.window_ttl_s / 4))
            for tenant_state in list(self._tenant_states.values()):
                try:
                    closed = await self.pool.run(tenant_state.tenant, tenant_state.windows.sweep)
                    freed = await self.pool.run(tenant_state.tenant, tenant_state.windows.compress_idle)
                    await self.pool.run(tenant_state.tenant, tenant_state.libraries.sweep)
                except Exception:
                    _log.exception("idle windows of tenant %r could not be kept up", tenant_state.tenant)
                    continue
                if closed or freed:
                    _log.info("closed %d idle windows, compression gave back %d bytes", closed, freed)

    def _close(self) -> None:
        # New work is refused; running work has been told to stop.
        self.memory.close()
        for pool in (self.pool, self.brief_pool, self.chat_pool):
            pool.shutdown()
        for processes in (self._decoders, self._file_splitters, self.video_headers):
            processes.close()
        self.grammars.close()
        self.preparation.close()
        tenant_states, self._tenant_states = self._tenant_states, {}
        for tenant_state in tenant_states.values():
            tenant_state.shared.close()
            tenant_state.windows.close()
            if tenant_state.windows.records is not tenant_state.engine.repo.store:
                tenant_state.windows.records.close()
        # The unnamed tenant's engine is the one the others are views of.
        for tenant_state in reversed(list(tenant_states.values())):
            tenant_state.engine.close()
            tenant_state.engine.repo.store.close()
        if self._references is not None:
            self._references.close()
        self.metrics.close()
        self.audit.close()


def _rate(most: int | str | None, what: str) -> Rate | None:
    return None if most is None else Rate(parse_bytes(most), what)
