"""Open windows by id: bounded in number and idle time, and reopened from the store on demand.

A window's current version is a fenced record of the store (`ctxwin.store.base.Store.commit`), so it has one owner among all
servers: the one that got its latest request. The owner writes every version before it answers the request that made it.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.errors import CtxwinError, ReadOnlyWindow, StaleOwner, StoreUnavailable, WindowBusy
from ctxwin.hashing import digest
from ctxwin.store import STORE_KEY
from ctxwin.store.base import Store, store_full
from ctxwin.window.core import demand_of
from ctxwin.window.state import State
from ctxwin.window.window import Window
from ctxwin_client.errors import TooManyWindows, UnknownWindow
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.registry.pages import EvictedPages
from ctxwin_server.registry.snapshots import check_snapshot, read_snapshot

WINDOW_ID = re.compile(r"[0-9a-z]{1,64}")
_SECRET = secrets.token_bytes(32)
"""Key of this process, unless servers share one. A version signed with it is trusted, others are checked like a client's."""
_MOST_ANSWERS, _LONGEST_ANSWER = 2, 32_768
"""Answers that are stored with a version: how many, and of how many characters."""
_TRIES = 8
"""Windows that are tried when a store refuses snapshots, before a new window is refused."""
_log = logging.getLogger("ctxwin.serve")


@dataclass
class _Entry:
    """An open window and its users.

    Attributes:
        used: time of the last use.
        removed: whether it left the registry, so that its last user closes it and nothing saves it any more.
        stale: whether another server has taken it over.
        saved, token: the version in the store, and the fencing token it was written with.
        answers: answers to the latest requests that made a version: (body's digest, answer) by request.
        maintenance_lock: held by background work on the window; requests wait for it.
        compressed_version: the version that was last worked on, and whether bytes were short then.
        pages: in the store, of its evicted chunks.
    """

    window: Window
    used: float
    pages: EvictedPages
    users: int = 0
    removed: bool = False
    stale: bool = False
    saved: State | None = None
    token: int = 1
    answers: dict[str, tuple[str, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    maintenance_lock: threading.Lock = field(default_factory=threading.Lock)
    compressed_version: tuple[State, bool] | None = None


class OpenWindows:
    """The open windows of all tenants together, at most ``most``. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._registries: list[WindowRegistry] = []

    def add(self, registry: WindowRegistry) -> None:
        """Register the windows of one more tenant."""
        self._registries.append(registry)

    def make_room(self) -> None:
        """Save and close idle windows while too many are open, of the tenant that has most; raise TooManyWindows.

        Call it without holding the lock of a registry.
        """
        while sum(map(len, self._registries)) >= self._most:
            if not any(registry.close_idle() for registry in sorted(self._registries, key=len, reverse=True)):
                raise TooManyWindows(
                    f"all {self._most} windows of the server are in use (--max-windows-total); try again later, or raise it"
                )


class WindowRegistry:
    """Windows of one tenant. Thread-safe.

    Args:
        most: open windows; the least recently used idle one is saved and closed for a new one.
        limits: of the server; after ``window_ttl_s`` idle seconds `sweep` saves and closes a window.
        total: the windows of all tenants.
        watch: called with every window that is opened or reopened, to observe it.
        records: where versions are written; the engine's store by default.

    Attributes:
        taken_over: number of windows that were reopened from the store.
        fenced_off: number of versions that were refused because another server had taken their window over.
        forking: lock held while a window is forked. A fork of a large window is serialised in Python, which runs one thread at a
            time: a tenant that forked in all of its threads at once would block all others.

    The version that a request makes is in the store before the request is answered. So a window that was closed to make room,
    or was open when the process was killed, can be reopened under its id, here or on another server. If a local store refuses
    a version, the window stays open; if a shared one does, the version is undone and the request fails. A full store may drop
    versions of windows that are not open. A reopened branch no longer knows the window it was forked from, so `Window.adopt`
    accepts it with ``force`` only.
    """

    def __init__(
        self,
        engine: Engine,
        most: int,
        limits: Limits,
        total: OpenWindows,
        *,
        watch: Callable[[Window], None] = lambda window: None,
        records: Store | None = None,
    ) -> None:
        self._engine = engine
        self.records = engine.repo.store if records is None else records
        self.taken_over = self.fenced_off = 0
        self.forking = threading.Lock()
        self._most, self._limits, self._total, self._watch = most, limits, total, watch
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()
        self._closed = False
        total.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, window: Window, *, watched: bool = False) -> Window:
        """Add ``window``; close it and raise TooManyWindows if every other one is in use."""
        try:
            self._total.make_room()
        except TooManyWindows:
            window.close()
            raise
        return self._admit(window, watched=watched)

    def restore(self, state: State) -> Window:
        """Open a window from a client's snapshot, under the snapshot's id unless that is taken; see `Window.restore`.

        Paths in it are dropped: a client must not make the server read files. Its tokens and positions must be those of
        its content (ValueError), since engine and budget rely on them. Cost: encoding every placed chunk; stored media
        need no run of the vision tower.
        """
        state = check_snapshot(self._engine, state, self._limits)
        if not WINDOW_ID.fullmatch(state.window) or self._is_taken(state.window):
            state = state.replace(window="")
        window = Window.restore(self._engine, state)
        self._total.make_room()  # not under the lock
        with self._lock:
            if not self._is_taken(window.id):
                return self._admit(window)
        window.close()  # two snapshots of one window at the same time: the other one has the id
        return self.add(Window.restore(self._engine, state.replace(window="")))

    def _is_taken(self, window_id: str) -> bool:
        return window_id in self._entries or self._is_stored(window_id)

    @contextmanager
    def using(self, window_id: str) -> Iterator[Window]:
        """Lend the window with that id; it stays open within the block, after which its version is in the store.

        Raises:
            UnknownWindow, TooManyWindows.
            StaleOwner: another server took the window over meanwhile; it has every version but this one.
            StoreUnavailable, StoreFull: a shared store refused the version, which is undone.

        Cost: a read of the window's record for its owner, and a small write for every new version.
        """
        with self._using(window_id) as entry:
            yield entry.window

    def run_once(
        self, window_id: str, path: str, key: str | None, body: bytes, work: Callable[[Window], bytes]
    ) -> bytes:
        """Return the result of ``work`` on the window, or the stored one if this request made one of the latest versions.

        So a client can repeat a request whose answer it lost, with the same Idempotency-Key, even if the server ended
        between its version and its answer. Answers of more than 32,768 characters are not kept. Raises as `using`.
        """
        with self._using(window_id) as entry:
            name, body_digest = digest(path, key or ""), digest(body)
            cached = entry.answers.get(name) if key else None
            if cached is not None and cached[0] == body_digest:
                return cached[1].encode()
            raw = work(entry.window)
            if key and len(raw) <= _LONGEST_ANSWER:
                entry.answers[name] = body_digest, raw.decode()
                while len(entry.answers) > _MOST_ANSWERS:
                    del entry.answers[next(iter(entry.answers))]
            return raw

    @contextmanager
    def _using(self, window_id: str) -> Iterator[_Entry]:
        entry = self._take(window_id)
        try:
            with entry.maintenance_lock:
                pass
            yield entry
        finally:
            entry.used = time.monotonic()
            try:
                self._leave(entry, answering=True)
            finally:
                with self._lock:
                    if self._entries.get(window_id) is entry:
                        self._entries.move_to_end(window_id)

    def _leave(self, entry: _Entry, *, answering: bool = False) -> None:
        """End a use: save the window's version, and close the window if it was removed meanwhile."""
        try:
            self._save(entry, answering=answering)
        finally:
            with self._lock:
                entry.users -= 1
                last = entry.removed and entry.users == 0
            if last:
                entry.window.close()

    def remove(self, window_id: str) -> None:
        """Close a window and delete its record. Raises UnknownWindow."""
        with self._lock:
            entry = self._entries.get(window_id)
            if entry is not None:
                self._release(window_id)
            was_stored = WINDOW_ID.fullmatch(window_id) is not None
            raw = self.records.read(_key(window_id)) if was_stored else None
            was_stored = was_stored and self.records.retire(_key(window_id))
            with suppress(ValueError, TypeError, AttributeError):  # damaged: what it names is nobody's
                EvictedPages(self.records, window_id).delete(json.loads(raw or b"{}").get("pages", ()))
            if entry is None and not was_stored:
                raise UnknownWindow(_unknown(window_id))

    def sweep(self) -> int:
        """Save and close windows that were idle for too long; return how many."""
        with self._lock:
            deadline = time.monotonic() - self._limits.window_ttl_s
            old = [i for i, entry in self._entries.items() if entry.users == 0 and entry.used <= deadline]
            return sum(map(self._save_and_close, old))

    def compress_idle(self) -> int:
        """Compress unused windows (`Window.maintenance.compress`, ``if_short=True``); return the bytes freed.

        Each version is tried once, and once more if bytes became short since. Ends as soon as a request waits for the engine.
        Requests to a window wait while it is compressed.
        """
        freed, short = 0, demand_of(self._engine).short
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            if self._engine.busy:
                break
            core = entry.window.core
            if not short and not core.fidelity.allows("orbit"):
                continue
            looked = core.state, short
            with self._lock:
                if entry.users or entry.removed or entry.compressed_version == looked:
                    continue
                entry.users += 1
                entry.maintenance_lock.acquire()
            try:
                freed += entry.window.maintenance.compress(if_short=True)
                entry.compressed_version = core.state, short
            except CtxwinError as error:  # it is served uncompressed
                _log.warning("window %s was not compressed: %s", entry.window.id, error)
            finally:
                entry.maintenance_lock.release()
                self._leave(entry)
        return freed

    def close(self) -> None:
        """Save and close every window; those in use are closed after their use."""
        with self._lock:
            self._closed = True
            for window_id in list(self._entries):
                if not self._save_and_close(window_id):
                    self._release(window_id)

    def close_idle(self) -> bool:
        """Save and close the least recently used idle window that the store accepts; return False if there is none."""
        with self._lock:
            idle = list(islice((i for i, entry in self._entries.items() if entry.users == 0), _TRIES))
            return any(map(self._save_and_close, idle))

    def _take(self, window_id: str) -> _Entry:
        entry = self._entries.get(window_id)
        if entry is None and self._is_stored(window_id):
            self._total.make_room()
        elif entry is not None and self.records.token(_key(window_id)) > entry.token:
            with self._lock:
                if self._entries.get(window_id) is entry:
                    _log.info("window %s was taken over by another server; its newest version is read", window_id)
                    entry.stale = True
                    self._release(window_id)
        with self._lock:
            entry = self._entries.get(window_id) or self._reopen(window_id)
            entry.users += 1
            return entry

    def _reopen(self, window_id: str) -> _Entry:
        # Under the lock, so that two requests do not open one window twice; a window costs a template's tokens to open.
        is_open = WINDOW_ID.fullmatch(window_id) and not self._closed
        claimed = self.records.claim(_key(window_id)) if is_open else None
        pages = EvictedPages(self.records, window_id)
        record = None if claimed is None else self._record(window_id, claimed[1], pages)
        if claimed is None or record is None:
            raise UnknownWindow(_unknown(window_id))
        state, answers = record
        self._engine.repo.store.prefetch(state.keys())
        self._admit(Window.restore(self._engine, state), token=claimed[0], pages=pages)
        self.records.lease(_key(window_id))
        self.taken_over += 1
        entry = self._entries[window_id]
        entry.answers = answers
        return entry

    def _record(
        self, window_id: str, raw: bytes, pages: EvictedPages
    ) -> tuple[State, dict[str, tuple[str, str]]] | None:
        """Parse a stored version and its answers, and check it if it is not signed; None if it is not the window's."""
        try:
            record = json.loads(raw)
            # Trusted as much as the store; with a shared key, its seal shows that a server wrote them.
            answers = {str(name): (str(sent), str(answer)) for name, (sent, answer) in record["answers"].items()}
            data, keys = record["state"], [str(key) for key in record.get("pages", ())]
            signed = hmac.compare_digest(str(record["mac"]), _mac(window_id, [data, keys]))
            parse = State.model_validate if signed else partial(read_snapshot, limits=self._limits)
            state = parse(data)
            bare = {name: value for name, value in data.items() if name not in ("placed", "evicted", "orders")}
            older = pages.read(keys, lambda page: parse({**bare, **page}))
            state = state.replace(evicted=(*older, *state.evicted))
            if not signed:
                state = check_snapshot(self._engine, state, self._limits)
        except StoreUnavailable:
            raise
        except (CtxwinError, ValueError, TypeError, KeyError, AttributeError) as error:
            pages.release()
            _log.warning("the stored version of window %s was not taken: %s", window_id, error)
            return None
        return (state, answers) if state.window == window_id else None

    def _admit(
        self, window: Window, *, watched: bool = False, token: int = 0, pages: EvictedPages | None = None
    ) -> Window:
        """Add ``window``, whose version was claimed with ``token`` or is saved now; close it if there is no room."""
        pages, saved = pages or EvictedPages(self.records, window.id), window.core.state if token else None
        entry = _Entry(window, time.monotonic(), pages, saved=saved, token=token or 1)
        try:
            with self._lock:
                self._check_room()
                self._entries[window.id] = entry
        except TooManyWindows:
            window.close()
            pages.release()
            raise
        if not watched:
            self._watch(window)
        try:
            self._save(entry, answering=True)
        except CtxwinError:
            with self._lock:
                self._release(window.id)
            raise
        return window

    def _check_room(self) -> None:
        if self._closed:
            raise TooManyWindows("the server is shutting down; try another one")
        if len(self._entries) < self._most or self.close_idle():
            return
        if all(entry.users for entry in self._entries.values()):
            raise TooManyWindows(f"all {self._most} windows are in use (--max-windows); close some, or try again later")
        raise TooManyWindows(
            f"{self._most} windows are open (--max-windows) and the store takes no more snapshots; close some, or make room "
            "there"
        )

    def _save(self, entry: _Entry, *, answering: bool = False) -> bool:
        """Write the window's current version to the store; return False if the store refuses it.

        ``answering``: for a request, which must not be answered if a shared store refused its version.
        """
        try:
            failure = self._commit(entry)
        except StaleOwner:
            self.fenced_off += 1
            with self._lock:
                entry.stale = True
                if self._entries.get(entry.window.id) is entry:
                    self._release(entry.window.id)
            raise StaleOwner(
                f"window {entry.window.id} must be edited by the server that took it over meanwhile; send the request again"
            ) from None
        if failure is None:
            return True
        _log.warning("the store did not take the version of window %s: %s", entry.window.id, failure)
        if not (answering and self.records.shared):
            return False
        entry.answers.clear()
        core = entry.window.core
        # A concurrent writer saves this version with its own, or undoes both.
        with suppress(WindowBusy, ReadOnlyWindow), core.writing(edit=False):
            core.commit(entry.saved or core.state, remember=False)
        raise failure

    def _commit(self, entry: _Entry) -> OSError | None:
        """Write the window's current version to the store; return the error, or None. Raises StaleOwner."""
        window, records = entry.window, self.records
        with entry.lock:
            state = window.core.state
            if state is entry.saved or (entry.removed and not entry.stale):
                return None
            answers = {name: list(answer) for name, answer in entry.answers.items()}
            try:
                newest, pages = entry.pages.write(state)
                packed = newest.model_dump(mode="json")
                record = {"state": packed, "pages": pages, "answers": answers, "mac": _mac(window.id, [packed, pages])}
                if not records.commit(_key(window.id), json.dumps(record, allow_nan=False).encode(), entry.token):
                    return store_full("a window's version")
            except OSError as error:
                return error
            entry.pages.keep(pages)
            if entry.saved is None:
                records.lease(_key(window.id))  # until the window is closed
            entry.saved = state
            return None

    def _save_and_close(self, window_id: str) -> bool:
        """Save and close a window; return False, and leave it open, if the store refuses its version."""
        try:
            saved = self._save(self._entries[window_id])
        except StaleOwner:
            return True  # another server owns it already
        if saved:
            self._release(window_id)
        return saved

    def _release(self, window_id: str) -> None:
        entry = self._entries.pop(window_id)
        with entry.lock:
            entry.removed = True
            entry.pages.release()
            if entry.saved is not None:
                self.records.release(_key(window_id))
        if entry.users == 0:
            entry.window.close()

    def _is_stored(self, window_id: str) -> bool:
        return WINDOW_ID.fullmatch(window_id) is not None and self.records.token(_key(window_id)) > 0


def _key(window_id: str) -> str:
    return f"window/{window_id}"


def _unknown(window_id: Any) -> str:
    return f"window must be the id of a window of yours, got {str(window_id)[:80]!r}; open one with POST /v1/windows"


def _mac(window_id: str, state: Any) -> str:
    text = json.dumps([window_id, state], sort_keys=True, allow_nan=False)
    shared = os.environ.get(STORE_KEY)  # its holders trust each other, and the store's seal tells their tenants apart
    return hmac.new(digest("windows", shared).encode() if shared else _SECRET, text.encode(), "sha256").hexdigest()
