"""Open windows by id: bounded in number and in idle time, and brought back from the store when they are asked for.

A window's current version is a fenced record of the store (`ctxwin.store.base.Store.commit`), so it has one owner among all
servers: who was asked for it last. The owner writes every version before the request that made it is answered.
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
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.errors import CtxwinError, ReadOnlyWindow, StaleOwner, StoreFull, WindowBusy
from ctxwin.hashing import digest
from ctxwin.serve.errors import TooManyWindows, UnknownWindow
from ctxwin.serve.limits import Limits
from ctxwin.serve.snapshots import check_snapshot, read_snapshot
from ctxwin.store import STORE_KEY
from ctxwin.store.base import Store
from ctxwin.window.core import demand_of
from ctxwin.window.state import State
from ctxwin.window.window import Window

WINDOW_ID = re.compile(r"[0-9a-z]{1,64}")
_SECRET = secrets.token_bytes(32)
"""Of this process, unless servers share a key. A version so signed is taken back as it is, others are checked like a client's."""
_MOST_ANSWERS, _LONGEST_ANSWER = 2, 32_768
"""Answers that stand beside a version: how many, and of how many characters."""
_TRIES = 8
"""Windows that are offered to a store which refuses snapshots, before a new window is refused."""
_log = logging.getLogger("ctxwin.serve")


@dataclass
class _Entry:
    """An open window, and who uses it.

    Attributes:
        used: when it was used last.
        gone: whether it left the registry, so that its last user closes it and nothing saves it any more.
        stale: whether another server has taken it over.
        saved, token: the version that stands in the store, and the fencing token it was written with.
        answers: what the latest requests that made a version were answered: (body's digest, answer) by request.
        upkeep: held while the window is worked on in the background; who comes meanwhile waits for it.
        kept_up: the version that this was last done for, and whether bytes were short then.
    """

    window: Window
    used: float
    users: int = 0
    gone: bool = False
    stale: bool = False
    saved: State | None = None
    token: int = 1
    answers: dict[str, tuple[str, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    upkeep: threading.Lock = field(default_factory=threading.Lock)
    kept_up: tuple[State, bool] | None = None


class OpenWindows:
    """The open windows of all tenants together: at most ``most``. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._registries: list[WindowRegistry] = []

    def add(self, registry: WindowRegistry) -> None:
        """Counts the windows of one more tenant."""
        self._registries.append(registry)

    def make_room(self) -> None:
        """Puts an idle window aside where there are too many, of the tenant that has most; raises TooManyWindows.

        Call it without the lock of a registry.
        """
        while sum(map(len, self._registries)) >= self._most:
            if not any(registry.give_way() for registry in sorted(self._registries, key=len, reverse=True)):
                raise TooManyWindows(
                    f"all {self._most} windows of the server are in use (--max-windows-total); try again later, or raise it"
                )


class WindowRegistry:
    """Windows of one tenant. Thread-safe.

    Args:
        most: windows that may be open; the least recently used idle one is put aside for a new one.
        limits: of the server; its ``window_ttl_s`` are the idle seconds after which `sweep` puts a window aside.
        total: the windows of all tenants.
        watch: called with every window that is opened or brought back, to observe it.
        records: where versions are written; the engine's store by default.

    Attributes:
        taken_over: windows that were brought back from the store.
        fenced_off: versions that were refused, as another server had taken their window over.

    The version that a request leaves behind is in the store before the request is answered. So a window that was put aside,
    or was open when the process was killed, opens again under its id, here or on another server. Where a store of this
    machine refuses a version the window stays open; where a shared one does, the version is taken back and the request fails. A
    full store may drop versions of windows that are not open. A branch that was brought back no longer knows which
    window it was forked from, so `Window.adopt` takes it by force only.
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
        self._most = most
        self._limits = limits
        self._total = total
        self._ttl_s = limits.window_ttl_s
        self._watch = watch
        self._held: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()
        self._closed = False
        total.add(self)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, window: Window, *, watched: bool = False) -> Window:
        """Keeps ``window``; TooManyWindows (and it is closed) where every other one is in use."""
        try:
            self._total.make_room()
        except TooManyWindows:
            window.close()
            raise
        return self._admit(window, watched=watched)

    def restore(self, state: State) -> Window:
        """A window from a client's snapshot, under the snapshot's id unless that is taken; see `Window.restore`.

        Paths in it are dropped: a client must not make the server read files. What it says of tokens and positions must
        be what its content has (ValueError), for the engine and the budget go by it. Cost: encoding every placed chunk;
        media that the store has take no run of the vision tower.
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
        return window_id in self._held or self._is_kept(window_id)

    @contextmanager
    def using(self, window_id: str) -> Iterator[Window]:
        """The window with that id; it stays open until the block ends, and its version is in the store then.

        Raises:
            UnknownWindow, TooManyWindows.
            StaleOwner: another server took the window over meanwhile; it has every version but this one.
            StoreUnavailable, StoreFull: a shared store did not take the version, which is taken back.

        Cost: a small write for every new version, and with a shared store a round trip for the window's owner.
        """
        with self._using(window_id) as held:
            yield held.window

    def once(self, window_id: str, path: str, key: str | None, body: bytes, work: Callable[[Window], bytes]) -> bytes:
        """What ``work`` gives with the window, or has given where one of the latest versions is its doing.

        So a client may send a request again whose answer it lost, with the same Idempotency-Key, also after the server ended
        between its version and its answer. Answers of more than 32,768 characters are not kept. Raises as `using`.
        """
        with self._using(window_id) as held:
            name, asked = digest(path, key or ""), digest(body)
            known = held.answers.get(name) if key else None
            if known is not None and known[0] == asked:
                return known[1].encode()
            raw = work(held.window)
            if key and len(raw) <= _LONGEST_ANSWER:
                held.answers[name] = asked, raw.decode()
                while len(held.answers) > _MOST_ANSWERS:
                    del held.answers[next(iter(held.answers))]
            return raw

    @contextmanager
    def _using(self, window_id: str) -> Iterator[_Entry]:
        held = self._take(window_id)
        try:
            with held.upkeep:
                pass
            yield held
        finally:
            held.used = time.monotonic()
            try:
                self._leave(held, answering=True)
            finally:
                with self._lock:
                    if self._held.get(window_id) is held:
                        self._held.move_to_end(window_id)

    def _leave(self, held: _Entry, *, answering: bool = False) -> None:
        """Ends a use: its version is in the store then, and what left the registry meanwhile is closed."""
        try:
            self._save(held, answering=answering)
        finally:
            with self._lock:
                held.users -= 1
                last = held.gone and held.users == 0
            if last:
                held.window.close()

    def held(self) -> list[Window]:
        """The windows that are open here, the one that was used last first."""
        with self._lock:
            return [held.window for held in reversed(self._held.values())]

    def remove(self, window_id: str) -> None:
        """Closes a window for good: its snapshot goes, too. Raises UnknownWindow."""
        with self._lock:
            held = self._held.get(window_id)
            if held is not None:
                self._release(window_id)
            kept = WINDOW_ID.fullmatch(window_id) is not None and self.records.retire(_key(window_id))
            if held is None and not kept:
                raise UnknownWindow(_unknown(window_id))

    def sweep(self) -> int:
        """Closes windows that were idle for too long; returns how many."""
        with self._lock:
            before = time.monotonic() - self._ttl_s
            old = [i for i, held in self._held.items() if held.users == 0 and held.used <= before]
            return sum(map(self._put_aside, old))

    def economise(self) -> int:
        """Compresses windows that nobody uses (`Window.compress`, ``if_short=True``); returns the bytes given back.

        Each version is looked at once, and once more where bytes got short since. Ends as soon as somebody waits for the engine.
        Who asks for the window meanwhile waits for it.
        """
        freed, short = 0, demand_of(self._engine).short  # which adds up all open windows
        with self._lock:
            entries = list(self._held.values())
        for held in entries:
            if self._engine.busy:
                break
            core = held.window.core
            if not short and not core.fidelity.allows("orbit"):
                continue
            looked = core.state, short
            with self._lock:
                if held.users or held.gone or held.kept_up == looked:
                    continue
                held.users += 1
                held.upkeep.acquire()
            try:
                freed += held.window.compress(if_short=True)
                held.kept_up = core.state, short
            except CtxwinError as error:  # it is served as it is
                _log.warning("window %s was not compressed: %s", held.window.id, error)
            finally:
                held.upkeep.release()
                self._leave(held)
        return freed

    def close(self) -> None:
        """Puts every window aside; those in use are closed as soon as they are not."""
        with self._lock:
            self._closed = True
            for window_id in list(self._held):
                if not self._put_aside(window_id):
                    self._release(window_id)

    def give_way(self) -> bool:
        """Puts the least recently used idle window aside that the store takes; False where there is none."""
        with self._lock:
            idle = [i for i, held in self._held.items() if held.users == 0]
            return any(self._put_aside(window_id) for window_id in idle[:_TRIES])

    def _take(self, window_id: str) -> _Entry:
        held = self._held.get(window_id)
        if held is None and self._is_kept(window_id):
            self._total.make_room()
        elif held is not None and self.records.shared and self.records.token(_key(window_id)) > held.token:
            with self._lock:
                if self._held.get(window_id) is held:
                    _log.info("window %s was taken over by another server; its newest version is read", window_id)
                    held.stale = True
                    self._release(window_id)
        with self._lock:
            held = self._held.get(window_id) or self._bring_back(window_id)
            held.users += 1
            return held

    def _bring_back(self, window_id: str) -> _Entry:
        # Under the lock, so that two requests do not open one window twice; a window costs a template's tokens to open.
        known = WINDOW_ID.fullmatch(window_id) and not self._closed
        claimed = self.records.claim(_key(window_id)) if known else None
        record = None if claimed is None else self._record(window_id, claimed[1])
        if claimed is None or record is None:
            raise UnknownWindow(_unknown(window_id))
        state, answers = record
        self._engine.repo.store.prefetch(state.keys())
        self._admit(Window.restore(self._engine, state), token=claimed[0])
        self.records.lease(_key(window_id))
        self.taken_over += 1
        held = self._held[window_id]
        held.answers = answers
        return held

    def _record(self, window_id: str, raw: bytes) -> tuple[State, dict[str, tuple[str, str]]] | None:
        """A stored version and its answers, checked where a stranger wrote it; None where it is none of the window's."""
        try:
            record = json.loads(raw)
            # Believed as the store is: with a key its seal says that a server wrote them.
            answers = {str(name): (str(asked), str(answer)) for name, (asked, answer) in record["answers"].items()}
            if hmac.compare_digest(str(record["mac"]), _mac(window_id, record["state"])):
                state = State.model_validate(record["state"])
            else:
                state = check_snapshot(self._engine, read_snapshot(record["state"], self._limits), self._limits)
        except (CtxwinError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("the stored version of window %s was not taken: %s", window_id, error)
            return None
        return (state, answers) if state.window == window_id else None

    def _admit(self, window: Window, *, watched: bool = False, token: int = 0) -> Window:
        """Keeps ``window``, whose version was claimed with ``token`` or is saved; closes it where there is no room."""
        held = _Entry(window, time.monotonic(), saved=window.core.state if token else None, token=token or 1)
        try:
            with self._lock:
                self._check_room()
                self._held[window.id] = held
        except TooManyWindows:
            window.close()
            raise
        if not watched:
            self._watch(window)
        try:
            self._save(held, answering=True)
        except CtxwinError:
            with self._lock:
                self._release(window.id)
            raise
        return window

    def _check_room(self) -> None:
        if self._closed:
            raise TooManyWindows("the server is shutting down; try another one")
        if len(self._held) < self._most or self.give_way():
            return
        if all(held.users for held in self._held.values()):
            raise TooManyWindows(f"all {self._most} windows are in use (--max-windows); close some, or try again later")
        raise TooManyWindows(
            f"{self._most} windows are open (--max-windows) and the store takes no more snapshots; close some, or make room "
            "there"
        )

    def _save(self, held: _Entry, *, answering: bool = False) -> bool:
        """Brings the store up to the window's current version; False where the store refuses it.

        ``answering``: of a request, which must not be answered where a shared store has not taken what it did.
        """
        try:
            failure = self._commit(held)
        except StaleOwner:
            self.fenced_off += 1
            with self._lock:
                held.stale = True
                if self._held.get(held.window.id) is held:
                    self._release(held.window.id)
            raise StaleOwner(
                f"window {held.window.id} must be edited by the server that took it over meanwhile; send the request again"
            ) from None
        if failure is None:
            return True
        _log.warning("the store did not take the version of window %s: %s", held.window.id, failure)
        if not (answering and self.records.shared):
            return False
        held.answers.clear()
        core = held.window.core
        # Whoever writes now saves this version with its own, or takes both back.
        with suppress(WindowBusy, ReadOnlyWindow), core.writing(edit=False):
            core.commit(held.saved or core.state, remember=False)
        raise failure

    def _commit(self, held: _Entry) -> OSError | None:
        """Why the store did not take the window's current version; None where it has it. Raises StaleOwner."""
        window, records = held.window, self.records
        with held.lock:
            state = window.core.state
            if state is held.saved or (held.gone and not held.stale):
                return None
            packed, answers = state.model_dump(mode="json"), {name: list(known) for name, known in held.answers.items()}
            record = {"state": packed, "answers": answers, "mac": _mac(window.id, packed)}
            try:
                if not records.commit(_key(window.id), json.dumps(record, allow_nan=False).encode(), held.token):
                    return StoreFull(
                        "the store must take a window's version, and is full; make room there, or raise its limit"
                    )
            except OSError as error:
                return error
            if held.saved is None:
                records.lease(_key(window.id))  # until the window is put aside
            held.saved = state
            return None

    def _put_aside(self, window_id: str) -> bool:
        """Closes a window whose snapshot is in the store; False, and it stays open, where the store refuses that."""
        try:
            saved = self._save(self._held[window_id])
        except StaleOwner:
            return True  # it has left already, and lives elsewhere
        if saved:
            self._release(window_id)
        return saved

    def _release(self, window_id: str) -> None:
        held = self._held.pop(window_id)
        with held.lock:
            held.gone = True
            if held.saved is not None:
                self.records.release(_key(window_id))
        if held.users == 0:
            held.window.close()

    def _is_kept(self, window_id: str) -> bool:
        return WINDOW_ID.fullmatch(window_id) is not None and self.records.token(_key(window_id)) > 0


def _key(window_id: str) -> str:
    return f"window/{window_id}"


def _unknown(window_id: Any) -> str:
    return f"window must be the id of a window of yours, got {str(window_id)[:80]!r}; open one with POST /v1/windows"


def _mac(window_id: str, state: Any) -> str:
    text = json.dumps([window_id, state], sort_keys=True, allow_nan=False)
    shared = os.environ.get(STORE_KEY)  # its holders trust each other, and the store's seal tells their tenants apart
    return hmac.new(digest("windows", shared).encode() if shared else _SECRET, text.encode(), "sha256").hexdigest()
