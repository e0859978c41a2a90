"""One server's state: tenants with their engines, stores and windows, and the threads that work for them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ctxwin.engines.base import Engine
from ctxwin.errors import EngineFailed
from ctxwin.serve.chat import Chat
from ctxwin.serve.fair import FairPool
from ctxwin.serve.limits import Limits
from ctxwin.serve.metrics import CountingStore, Metrics
from ctxwin.serve.operations import Around
from ctxwin.serve.tenants import Keys, Tenant
from ctxwin.serve.uploads import Uploads
from ctxwin.serve.windows import Registry
from ctxwin.window import ask as asking
from ctxwin.window.window import Window

T = TypeVar("T")
OpenEngine = Callable[[str, Tenant | None], "tuple[Engine, CountingStore]"]
"""``(tenant name, its entry)`` -> an engine of that tenant and the store behind it, which the service closes."""
_REMEMBERED_BYTES = 16 << 20
_BESIDE_BYTES = 512  # Python objects beside a kept answer
_BRIEF_THREADS = 4
_STOPPED = "the answer was stopped before its end: the server is shutting down, or the client has left"
_log = logging.getLogger("ctxwin.serve")


class Results:
    """Answers to requests by their Idempotency-Key: a client that asks again after a broken connection gets the same.

    The newest 16 MiB are kept, what stands beside the answers included. Thread-safe.
    """

    def __init__(self, most: int = _REMEMBERED_BYTES) -> None:
        self._most = most
        self._bytes = 0
        self._kept: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # by request: digest of its body, answer
        self._turns: dict[bytes, _Turn] = {}
        self._lock = threading.Lock()

    def once(self, path: str, key: str | None, body: bytes, work: Callable[[], bytes]) -> bytes:
        """What ``work`` gives, or has given under the same key. Blocks while another request is at it.

        A client that lost its connection asks again while the first request still runs: it waits for that one's answer,
        and does the work where that one failed. Raises ValueError where the key came with another body.
        """
        if not key:
            return work()
        # Keys are the client's, up to the size of a header: only digests are kept.
        name, asked = _digest(path.encode(), key.encode()), _digest(body)
        with self._lock:
            turn = self._turns.setdefault(name, _Turn())
            turn.users += 1
        try:
            with turn.lock:
                raw = self._find(name, asked)
                if raw is None:
                    raw = work()
                    self._keep(name, asked, raw)
                return raw
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[name]

    def _find(self, name: bytes, asked: bytes) -> bytes | None:
        with self._lock:
            before, raw = self._kept.get(name, (asked, None))
        if before != asked:
            raise ValueError("an Idempotency-Key must stand for one request, got another body with it; make a new key")
        return raw

    def _keep(self, name: bytes, asked: bytes, raw: bytes) -> None:
        with self._lock:
            self._kept[name] = asked, raw
            self._bytes += len(raw) + _BESIDE_BYTES
            while self._bytes > self._most and self._kept:
                self._bytes -= len(self._kept.popitem(last=False)[1][1]) + _BESIDE_BYTES


@dataclass
class _Turn:
    """Requests with one key, one after another."""

    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def _digest(*parts: bytes) -> bytes:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8) + part)
    return made.digest()


@dataclass(frozen=True)
class Space:
    """What one tenant has."""

    tenant: str
    engine: Engine
    store: CountingStore
    windows: Registry
    uploads: Uploads
    chat: Chat
    results: Results

    @property
    def around(self) -> Around:
        return Around(self.windows, self.uploads)


class Service:
    """Everything behind the routes.

    Args:
        open_engine: opens a tenant's engine; called in a worker thread, once for each tenant, the unnamed one first.
        model: name that answers carry; ``models``: every name that requests may use.
        tenants: see `ctxwin.serve.tenants`; without any there is one space, for everybody.
        keys: who asks, by API key.
        defaults: how chats are decoded that say nothing: fields of `Sampling`.
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
    ) -> None:
        self.limits = limits or Limits()
        self.models = tuple(models)
        self.keys = keys or Keys()
        self.metrics = metrics or Metrics(by_tenant=bool(tenants))
        self._defaults = dict(defaults or {})
        self._tenants: dict[str, Tenant | None] = {"": None, **{t.name: t for t in tenants}}
        self._open_engine = open_engine
        self._spaces: dict[str, Space] = {}
        self._pool = FairPool(
            self.limits.threads, {t.name: t.max_concurrency for t in tenants if t.max_concurrency is not None}
        )
        # What takes milliseconds must not wait until one of many long answers has ended.
        self._brief = FairPool(_BRIEF_THREADS, name="ctxwin-gate")
        self._sweeper: asyncio.Task[None] | None = None
        self.closing = threading.Event()

    @property
    def model(self) -> str:
        return self.models[0]

    async def start(self) -> None:
        """Opens every tenant's space and begins to close idle windows."""
        for name, tenant in self._tenants.items():
            self._spaces[name] = await self.run(name, self._open, name, tenant)
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Puts every window aside, gives back their leases, closes engines and stores. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self.closing.set()
        await asyncio.to_thread(self._close)

    def space(self, tenant: str) -> Space:
        return self._spaces[tenant]

    async def run(self, tenant: str, work: Callable[..., T], *args: Any) -> T:
        """``work(*args)`` in a worker thread, when it is the tenant's turn; the event loop never waits for an engine."""
        return await asyncio.wrap_future(self._pool.submit(tenant, work, *args))

    async def run_briefly(self, tenant: str, work: Callable[..., T], *args: Any) -> T:
        """`run` for what needs no engine: it is not behind the requests that do."""
        return await asyncio.wrap_future(self._brief.submit(tenant, work, *args))

    def items(self, tenant: str, work: Callable[[Callable[[Any], None], Callable[[], bool]], T]) -> Items[T]:
        return Items(partial(self._pool.submit, tenant), work, self.closing)

    def refresh_metrics(self) -> None:
        """Brings figures that are counted elsewhere up to date."""
        for space in self._spaces.values():
            encodes, waiting = space.engine.counters.vision_encodes, self._pool.waiting(space.tenant)
            self.metrics.read(space.tenant, space.store, encodes, len(space.windows), waiting)

    def _open(self, name: str, tenant: Tenant | None) -> Space:
        engine, store = self._open_engine(name, tenant)
        most = (tenant.max_windows if tenant else None) or self.limits.max_windows

        def watch(window: Window) -> None:
            window.observe(lambda event: self.metrics.heard(name, event))

        uploads = Uploads(engine, self.limits.max_pixels)
        return Space(
            name, engine, store,
            Registry(engine, most, self.limits.window_ttl_s, watch=watch), uploads,
            Chat(engine, uploads, self.limits.fidelity, self._defaults, watch, partial(self._pool.submit, name)), Results(),
        )  # fmt: skip

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.limits.window_ttl_s / 4))
            for space in list(self._spaces.values()):
                try:
                    closed = await self.run(space.tenant, space.windows.sweep)
                except Exception:
                    _log.exception("idle windows of tenant %r could not be closed", space.tenant)
                    continue
                if closed:
                    _log.info("closed %d idle windows", closed)

    def _close(self) -> None:
        # No new work is taken; what runs has been told to stop.
        self._pool.shutdown()
        self._brief.shutdown()
        spaces, self._spaces = self._spaces, {}
        for space in spaces.values():
            space.windows.close()
        # The unnamed tenant's engine is the one the others are views of.
        for space in reversed(list(spaces.values())):
            space.engine.close()
            space.store.close()
        self.metrics.close()


class Items(Generic[T]):
    """Work in a thread that hands items to the event loop as it goes; iterate it, then read ``result``.

    Leaving it early (`close`, a cancelled task) tells the work to stop and leaves the window as it was.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[], None]], Future[None]],
        work: Callable[[Callable[[Any], None], Callable[[], bool]], T],
        closing: threading.Event,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._stop = threading.Event()
        self.result: T

        def put(item: Any) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, item)

        def run() -> None:
            try:
                made = work(put, lambda: self._stop.is_set() or closing.is_set())
                put(_End(made))
            except asking._StoppedError:
                put(_End(error=EngineFailed(_STOPPED)))
            except BaseException as error:  # handed to the event loop, which raises it
                put(_End(error=error))

        def ended(future: Future[None]) -> None:
            if future.cancelled() and not loop.is_closed():  # it never ran
                put(_End(error=EngineFailed(_STOPPED)))

        self._future = submit(run)
        self._future.add_done_callback(ended)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            item = await self._queue.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                self.result = item.result
                return
            yield item

    def close(self) -> None:
        self._stop.set()
        self._future.cancel()  # where it has not begun, nobody's turn is spent on it


@dataclass(frozen=True)
class _End:
    result: Any = None
    error: BaseException | None = None
