"""`WindowCore`: a window's versions, the assembly that serves them, and its observers.

`ctxwin.window.window` edits it, `ctxwin.window.ask` asks it, and `ctxwin.window.maintenance` does its background work.
Adapters and servers that bring windows of their own build on it as well. Nothing here knows what an edit means.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.forks import check_process
from ctxwin.errors import ReadOnlyWindow, UnknownVersion, WindowBusy
from ctxwin.hashing import digest
from ctxwin.window import edits, placements
from ctxwin.window.answer import Plan
from ctxwin.window.assembly import Assembly
from ctxwin.window.auditing import Auditing, open_audits
from ctxwin.window.events import EDITS, Event, Observer, Op
from ctxwin.window.idle import IdlePrefill, prefiller_of
from ctxwin.window.invariants import check_state
from ctxwin.window.lanes import choose
from ctxwin.window.leases import Leases
from ctxwin.window.placed_list import PlacedList, unshared
from ctxwin.window.removed import check_present
from ctxwin.window.reordering import reorder_advice
from ctxwin.window.sliding import SlidingAdvice, own_mark, sliding_advice
from ctxwin.window.state import Placed, State, read_state
from ctxwin.window.storage_policy import Demand, DemandTracker

if TYPE_CHECKING:
    from ctxwin.fidelity import Fidelity
    from ctxwin.store.base import Store
    from ctxwin.store.spans import SpanRepository

_HISTORY, _FEWEST = 1024, 16
_UNSHARED = 16384
"""Versions that are kept, and placements in them that no newer one shares, some 20 MB: in a stream whose window holds a hundred
frames every frame makes a hundred of them. The newest few versions are kept whatever they hold."""
_SLIDES = 3
"""Slides by a few chunks, one after the other, from which on a window counts as one that slides one by one."""
_log = logging.getLogger("ctxwin")
_BUSY = "a window has one writer, and it is busy; wait for it, close() the stream that answers, or fork() the window"
_open: weakref.WeakKeyDictionary[SpanRepository, weakref.WeakSet[WindowCore]] = weakref.WeakKeyDictionary()
"""The windows of this process by their store, for `WindowCore.forget`."""
_trackers: weakref.WeakKeyDictionary[SpanRepository, DemandTracker] = weakref.WeakKeyDictionary()
"""The demand of these windows."""
_opening = threading.Lock()


class WindowCore:
    """One window over time: immutable states, one writer, leases on the KV of the current state.

    Args:
        state: the first version.
        seed: placement ids and forks follow from it, so that the same edits give the same ids; random by default.
        parent: id of the window that this one was forked from.
        origin: the core that it was forked from, whose leases and choices it goes on with.

    Attributes:
        state: the current version.
        audits: what audits allow it to be served with.
        observers: called with every `Event`; forks inherit them.
        operations: how many operations have begun, asks and failed ones included.
        vision_encodes: runs of the vision tower since the last answer.
        leases: those of all that were forked from one another.
        idle: computes ahead of the next ask; None unless the state says so.
        heartbeat: called when an operation begins and ends, and for every chunk placed and token answered.
    """

    def __init__(
        self,
        engine: Engine,
        state: State,
        *,
        seed: str | None = None,
        observers: tuple[Observer, ...] = (),
        parent: str | None = None,
        read_only: bool = False,
        origin: WindowCore | None = None,
    ) -> None:
        self.engine = engine
        self.assembly = Assembly(engine, partial(demand_of, engine))
        if origin is not None:
            self.assembly.follow(origin.assembly)
        self.state = state
        self.audits: Auditing = open_audits(engine, state.fidelity, partial(_emit_audit, weakref.ref(self)))
        self.seed = uuid.uuid4().hex if seed is None else seed
        self.observers, self.parent, self.read_only, self.closed = observers, parent, read_only, False
        self.operations = self.vision_encodes = self._single_slides = 0
        self.heartbeat: Callable[[], None] = lambda: None
        self.idle: IdlePrefill | None = None
        if state.prefill == "idle" and not read_only:
            self.idle = IdlePrefill(Assembly(engine, self.assembly.demand, memo=self.assembly.memo))
        self._forked_from: tuple[weakref.ref[WindowCore], int] | None = None
        self._history: OrderedDict[int, tuple[State, int | None]] = OrderedDict()
        self._unshared: dict[int, int] = {}  # placements of a kept version that the next one does not have
        self._undo_version: int | None = None  # the version that `undo` goes back to; of older ones it is beside them
        self._pending: list[Event] = []  # sent when the writer is done
        self._writer = threading.Lock()  # of who writes, or wrote last
        self._stopping: Callable[[int], bool] = lambda writer: False
        self._guard = threading.Lock()  # of leases, counts and the writer
        self.leases: Leases = origin.leases if origin is not None else Leases(engine.repo)
        self._leased = [PlacedList[Placed]()]
        self._finalizer = weakref.finalize(self, self.leases.abandon, self._leased)  # for a window never closed
        with _opening:
            _open.setdefault(engine.repo, weakref.WeakSet()).add(self)
        self.lease()

    @property
    def id(self) -> str:
        """The window's id."""
        return self.state.window

    @property
    def fidelity(self) -> Fidelity:
        """The one in force; ``auto`` is resolved."""
        return self.audits.fidelity

    @contextmanager
    def writing(self, *, edit: bool = True, stopped: Callable[[], bool] = lambda: False) -> Iterator[State]:
        """The current state, for the one thread that may `commit`.

        Announced events are sent when the block ends without an error. Raises ReadOnlyWindow, EngineFailed in a forked process,
        and WindowBusy where another thread is writing; once that one's ``stopped`` is true, it is waited for.
        """
        check_process()
        if self.closed:
            raise ReadOnlyWindow("this window is closed; restore its snapshot to go on")
        if edit and self.read_only:
            raise ReadOnlyWindow("an old version must not be edited; fork() it, or edit the window it came from")
        writer, mine, sent = threading.get_ident(), threading.Lock(), list[Event]()
        waits, begin = self._stopping(writer), time.perf_counter()
        with mine:  # no interrupt comes between a lock and its ``with`` block, which `Lock.acquire` could not promise
            while True:
                with self._guard:
                    other = self._writer = self._writer if self._writer.locked() else mine
                    self.operations += other is mine
                if other is mine:
                    break
                if not waits:
                    raise WindowBusy(_BUSY)
                with other:
                    begin = time.perf_counter()
            try:
                self._stopping = lambda other: other != writer and stopped()
                self.heartbeat()
                yield self.state
                sent = self._pending
            finally:
                self._pending, self._stopping = [], lambda writer: False
        for event in sent:
            self.emit(replace(event, seconds=time.perf_counter() - begin))
        self.heartbeat()

    def commit(
        self, state: State, op: Op | None = None, ids: Sequence[str] = (), *, remember: bool = True, **details: Any
    ) -> None:
        """Make ``state`` the current version, inside `writing`, and announce ``op``.

        However many steps led to it, an edit is one version; `adopt` takes its branch's. ``remember=False`` leaves the
        version before it out of the history that `at` reads.
        """
        applied: list[edits.Applied] = []
        if op in EDITS:
            state, applied = edits.apply_if_broken(self.state, state)
        if op != "adopt":
            state = edits.merge_versions(self.state, state)
        if remember and state.version != self.state.version:
            self._keep_version(state)
        is_new, self.state = state.version != self.state.version, state
        self.lease()
        if is_new:
            self.prefill_ahead()
        if op is not None:
            self.announce(self.event(op, ids, **details))
        self.announce_applied(applied)

    def _keep_version(self, state: State) -> None:
        """Keep the current version beside ``state``, which follows it, for `at` and `undo`; drop the oldest beyond the limits."""
        old = self.state
        self._history[old.version] = old, self._undo_version
        self._unshared[old.version] = unshared((old.placed, old.evicted), (state.placed, state.evicted))
        self._undo_version = old.version
        over = sum(self._unshared.values()) - _UNSHARED
        while len(self._history) > _HISTORY or (over > 0 and len(self._history) > _FEWEST):
            over -= self._unshared.pop(self._history.popitem(last=False)[0])

    def announce_applied(self, applied: Sequence[edits.Applied]) -> None:
        """Announce the lazy edits that `edits.apply_pending` applied."""
        for op, ids, note in applied:
            self.announce(self.event(op, ids, note=note))

    def prefill_ahead(self, *, answered: bool = False) -> None:
        """Submit the current version, or the one that is expected to follow it, to be computed while the engine is idle.

        ``answered``: True behind an answer, where that is the first version of a turn.
        """
        if self.idle is not None:
            self.idle.submit(self.audits.with_fallbacks(self.state), self.fidelity, answered=answered)

    def announce(self, event: Event) -> None:
        """Send ``event`` to the observers when the writer is done."""
        if self.observers:
            self._pending.append(event)

    def event(self, op: Op, ids: Sequence[str] = (), **details: Any) -> Event:
        """An operation that has just taken effect on the current state."""
        return Event(self.id, op, self.state.version, self.state, tuple(ids), self.parent, **details)

    def emit(self, event: Event) -> None:
        """Send ``event`` to the observers now; what one of them raises is logged."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception:
                _log.exception("an observer failed on %s of window %s; the window goes on", event.op, event.window)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Add an observer, once; return a function that removes it from this window, and leaves it to the forks made before."""
        if not callable(observer):
            raise TypeError(f"observer must be callable, got {observer!r}")
        if observer not in self.observers:
            self.observers = (*self.observers, observer)

        def stop() -> None:
            self.observers = tuple(o for o in self.observers if o != observer)

        return stop

    def plan(self, query: str | None = None) -> Plan:
        """Return how the next ask would serve each chunk, and its cost. Reads no KV."""
        self.lease()  # what was lost may have been stored again by another window
        self.engine.costs.settle()  # the ask that follows goes by the same prices
        plan = self.assembly.plan(self.audits.with_fallbacks(self.state), self.fidelity, query)
        ahead = self.idle.pending_tokens if self.idle is not None else 0
        reorder = reorder_advice(self.state, {entry.id: entry.compute for entry in plan.entries if entry.compute})
        return replace(plan, sliding=self.sliding_advice(), prefilled_tokens=ahead, reorder=reorder)

    def mark_of(self, state: State, reserved: int = 0) -> int | None:
        """Return the tokens that ``state`` falls to when it is over its budget with ``reserved`` tokens free; None: the budget.
        ``auto`` is a mark by the sizes of what is placed in an exact window, and none where survivors move for little."""
        if state.low_water != "auto":
            return state.low_water
        if self.fidelity.mode != "exact":
            return None
        tokens, count = state.placed.tokens, len(state.placed)
        return own_mark(state.budget, tokens, count, system_prompt=state.system_prompt_tokens, query=reserved)

    def note_slide(self, count: int) -> None:
        """Note that `Window.slide` evicted ``count`` chunks without a mark; log once what a mark would save."""
        remaining = len(self.state.placed)
        self._single_slides = self._single_slides + 1 if 4 * count <= remaining else 0
        if self._single_slides == _SLIDES and (advice := self.sliding_advice()) is not None:
            _log.warning(
                "window %s is exact and slides %d of %d chunks at a time, so that each ask computes all chunks behind them, "
                'about %.0f tokens; Window(low_water="auto") makes room for several at once: about %.0f an ask, with three '
                "quarters of the chunks shown on average (see ctxwin.policies.best_low_water)",
                self.id, count, remaining + count, advice.one_by_one, advice.halved.tokens,
            )  # fmt: skip

    def sliding_advice(self) -> SlidingAdvice | None:
        """Return the saving of a low-water mark for an exact window that slides a few chunks at a time; None for others."""
        if self._single_slides < _SLIDES or self.fidelity.mode != "exact" or self.state.low_water is not None:
            return None
        return sliding_advice(self.state.placed.tokens, len(self.state.placed), self.state.system_prompt_tokens)

    def check(self) -> None:
        """Assert the invariants of the state, its plan and its leases."""
        check_state(self.state, self.plan())
        lost = {*filter(self.engine.repo.contains, self.state.keys())} - self.leases.keys - self.assembly.missing
        assert self.closed or not lost, f"unleased keys {lost}"

    def place(self, state: State, chunk: Chunk) -> Placed:
        """A new placement of ``chunk`` for ``state``, encoded but not yet part of it. Raises like `Window.append`."""
        if not isinstance(chunk, Chunk):
            got = type(chunk).__name__
            raise TypeError(f"chunk must be a ctxwin.Chunk, got {got}; make one with Chunk.text or Chunk.image")
        with self.counting_encodes():
            entry = placements.new_placement(self.engine, state, chunk, self.seed)
        self.heartbeat()  # many pictures may arrive in one operation
        return entry

    def cheapest_index(self, state: State, back: Placed, *, repair: bool = False) -> int:
        """Return the index at which ``back`` makes the next ask compute least: its chronological place, the end or the front, the
        first of these on a tie. Cost: three plans."""

        def cost(recalled: tuple[State, int]) -> int:
            return self.assembly.plan(self.audits.with_fallbacks(recalled[0]), self.fidelity).computed_tokens

        return min((edits.recall(state, back, at, repair=repair) for at in (None, len(state.placed), 0)), key=cost)[1]

    def default_index(self, state: State, back: Placed, *, repair: bool = False) -> int | None:
        """Return where a recall places ``back`` that says nothing: None for the chronological place; in an exact window the end
        if fewer tokens are computed then. It goes by the KV that the state names, not by what is stored, so that an operation
        that is run again places it there again. O(n) in placed and evicted chunks."""
        if self.fidelity.mode != "exact":
            return None
        named = {p.kv.span for p in (*state.placed, *state.evicted) if p.kv}
        states = (edits.recall(state, back, at, repair=repair)[0] for at in (None, len(state.placed)))
        choices = (choose(new, self.fidelity, named.__contains__) for new in states)
        there, at_end = (sum(choice.entry.tokens for choice in some if choice.compute) for some in choices)
        return len(state.placed) if at_end < there else None

    def free_tail(self, state: State) -> list[Placed]:
        """Return the chunks of an exact window that leave before all others; see `edits.free_tail`."""
        return edits.free_tail(state) if self.fidelity.mode == "exact" else []

    def evicted_entry(self, state: State, evicted: str) -> Placed:
        """An evicted chunk, encoded again: a restored window may run on another engine. Raises UnknownChunk, and
        ChunkUnavailable for one of a file that has left its library."""
        back = state.find_evicted(evicted)
        check_present(back.chunk)
        with self.counting_encodes():
            encoded = self.engine.encode(back.chunk)
        return back.replace(tokens=encoded.tokens, advance=encoded.advance, media=encoded.media_ranges)

    @contextmanager
    def counting_encodes(self) -> Iterator[None]:
        """Add the vision encodes inside the ``with`` block to `vision_encodes`."""
        start = self.engine.counters.vision_encodes
        try:
            yield
        finally:
            self.vision_encodes += self.engine.counters.vision_encodes - start

    def at(self, version: int) -> WindowCore:
        """A read-only core of an old version, or of the one before it where `adopt` skipped it. Raises UnknownVersion."""
        first = next(iter(self._history), self.state.version)
        if not isinstance(version, int) or not first <= version <= self.state.version:
            raise UnknownVersion(
                f"version must be a kept version of this window, {first}..{self.state.version}, got {version!r}"
            )
        kept = reversed([*self._history.values(), (self.state, None)])
        state = self.audits.with_fallbacks(next(state for state, _ in kept if state.version <= version))
        return WindowCore(self.engine, state, observers=self.observers, parent=self.parent, read_only=True)

    def fork(self, system_prompt: str | None = None, budget: int | None = None) -> WindowCore:
        """Return a copy-on-write branch, with another system prompt or budget where given.

        O(1), whatever is placed and remembered; a new system prompt places it all anew.
        """
        state = self.state
        if system_prompt is not None and system_prompt != state.system_prompt:
            state = placements.with_system_prompt(self.engine, state, system_prompt)
        with self._guard:
            self.operations += 1
            seed = digest("fork", self.seed, self.id, self.operations)
        state = state.replace(window=new_id(self.engine, seed), root=state.unit)
        if budget is not None:  # a test of what one question answers; nothing is predicted of it
            state = state.replace(budget=budget, prefill=None)
        branch = WindowCore(self.engine, state, seed=seed, observers=self.observers, parent=self.id, origin=self)
        branch.audits = self.audits.branch(partial(_emit_audit, weakref.ref(branch)))
        branch._forked_from = (weakref.ref(self), state.version)
        self.emit(self.event("fork", other=branch.id, note=system_prompt or ""))
        return branch

    def adopt(self, branch: WindowCore, *, force: bool = False) -> None:
        """Make a branch's state the current version; see `Window.adopt`."""
        if branch.engine is not self.engine:
            raise ValueError("branch must run on this window's engine, got another one; restore its snapshot instead")
        parent, version = branch._forked_from or (None, None)
        if not force and (parent is None or parent() is not self):
            raise ValueError("branch must be a fork of this window, got another; pass force=True to adopt it anyway")
        with self.writing() as state:
            if not force and version != state.version:
                raise ValueError(
                    f"this window must not have moved since the fork (version {version}), got version {state.version}; "
                    "pass force=True to drop its edits"
                )
            theirs = branch.state
            arrivals = max(state.arrivals, theirs.arrivals)  # ids of dropped edits are not given again
            adopted = theirs.replace(version=max(state.version, theirs.version) + 1, arrivals=arrivals, window=self.id)
            self.commit(adopted, "adopt", other=branch.id)
            if branch.audits.requested == self.audits.requested:
                self.audits.adopt(branch.audits)
            else:
                self.audits = branch.audits.branch(partial(_emit_audit, weakref.ref(self)))
            self.assembly.follow(branch.assembly)

    def undo(self) -> None:
        """Go back to the version before the last edit that is not undone yet; see `Window.undo`."""
        with self.writing() as state:
            if self._undo_version is None or self._undo_version not in self._history:
                raise UnknownVersion(f"an edit before version {state.version} must be kept to be undone, got none")
            old, previous = self._history[self._undo_version]
            arrivals = state.arrivals  # ids of edits that were taken back are not given again
            self.commit(old.replace(version=state.version + 1, arrivals=arrivals), "undo")
            self._undo_version = previous

    def forget(self, state: State, entry: Placed) -> None:
        """Commit ``state``, which carries nothing of ``entry``, and delete its stored KV and media; see `placements.forget`.

        Old versions go, as they would bring it back. Other windows that hold it, placed or evicted, keep its media.
        """
        with prefiller_of(self.engine).hold():  # nothing of it may be stored behind the deletion
            self._history.clear()
            self._unshared.clear()
            self.assembly.forget()
            self.engine.repo.note_forgetting()
            self.audits.forget()
            if self.idle is not None:
                self.idle.forget()
            self.commit(state, "forget", [entry.id], remember=False)
            with _opening:
                others = [core for core in _open[self.engine.repo] if core.id != self.id and not core.closed]
            held = [p for other in others for p in (*other.state.placed, *other.state.evicted)]
            placements.forget(self.engine, state, entry, held)

    def take_back(self, placement_id: str) -> None:
        """Return to the previous version if the only edit since was appending, ``placement_id`` among others."""
        with self.writing() as state:
            old, previous = self._history.get(state.version - 1, (None, None))
            ids, kept = state.placed.ids, old.placed.ids if old else ()
            if old and ids[: len(kept)] == kept and placement_id in ids[len(kept) :]:
                del self._history[old.version], self._unshared[old.version]
                self.commit(old, "forget", ids[len(kept) :], remember=False)
                self._undo_version = previous

    def lease(self) -> None:
        """Lease the KV that the current state needs, and release the rest."""
        with self._guard:  # `plan` may run beside an ask
            self.leases.follow(self._leased, PlacedList() if self.closed else self.state.placed)

    def close(self) -> None:
        """Release the leases; the window can be neither edited nor asked afterwards. Idempotent."""
        if self.closed:
            return
        if self.idle is not None:
            self.idle.close()
        with self._guard:  # a thread that still edits must not lease behind this
            self.closed = True
            self._finalizer.detach()
            self.leases.follow(self._leased, PlacedList())
        if not self.read_only:  # an old version has the id of a window that goes on
            self.emit(self.event("close"))


def _emit_audit(
    window: weakref.ref[WindowCore], fallen: Sequence[str], query: str, audit: dict[str, float | bool], note: str
) -> None:
    """Report the finding of an audit to the window of the answer, unless it is gone."""
    core = window()
    if core is not None:
        if fallen:
            _log.warning("window %s: an answer was %s; exact from now on: %s", core.id, note, ", ".join(fallen))
        core.emit(core.event("audit", fallen, query=query, audit=audit, note=note))


def new_id(engine: Engine, seed: str) -> str:
    """Return the id of a new window, from a random seed or that of a fork."""
    return engine.window_prefix + seed[:12]


def open_windows(store: Store) -> list[WindowCore]:
    """Return the windows that this process has open on ``store``."""
    with _opening:
        return [core for repo, cores in _open.items() if repo.store is store for core in cores if not core.closed]


def demand_of(engine: Engine) -> Demand:
    """Return the demand of the windows that this process has open on the engine's store. Cost: O(windows), and O(placed chunks)
    of those that changed since the last call, unless the store has no limit."""
    limit = engine.repo.store.limit()
    if not limit:
        return Demand()
    with _opening:
        tracker = _trackers.setdefault(engine.repo, DemandTracker(engine.spec.kv))
        cores = [core for core in _open.get(engine.repo, ()) if not core.closed and not core.read_only]
        return tracker.demand({id(core): core.state for core in cores}, limit)


def restore_core(engine: Engine, state: State | dict[str, Any] | str, seed: str | None = None) -> WindowCore:
    """Return a core from a snapshot (model, dict or JSON); see `Window.restore`."""
    state = read_state(state)
    if not state.window:
        state = state.replace(window=new_id(engine, uuid.uuid4().hex))
    name = Auditing(engine, state.fidelity).fidelity.patch_name
    return WindowCore(engine, placements.rebind(engine, state, name), seed=seed)
