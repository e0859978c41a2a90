"""`Window`: a deque of position-free chunks between an agent loop and an engine.

Every edit makes a new immutable version of the window's `State`; nothing is computed until an answer is asked for.
This module holds the edits, `ctxwin.lanes` decides how each chunk's KV reaches its place, `ctxwin.assembly` fetches and
stores it, `ctxwin.asking` runs questions. Neither torch nor vLLM is imported here.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ctxwin import asking, edits
from ctxwin.answer import Answer, Disposability, Plan, PlanEntry
from ctxwin.assembly import Assembly, Work
from ctxwin.checks import check_state
from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.errors import BudgetExceeded, ReadOnlyWindow, WindowBusy
from ctxwin.fidelity import Fidelity
from ctxwin.identity import digest
from ctxwin.state import Placed, State

_HISTORY = 1024


class Window:
    """A context window whose edits are cache edits.

    Args:
        engine: from `open_engine`; may be shared by any number of windows.
        header: system prompt, fixed for the life of the window (`fork` makes one behind another header).
        budget: most tokens of header, chunks, query and answer together; default: what the engine takes.
        fidelity: which approximations are allowed; ``auto`` follows the model's profile and is ``exact`` without one.

    Raises:
        BudgetExceeded: the header alone does not fit.

    A window has one writer: a second thread that edits or asks meanwhile gets WindowBusy. Use as a context manager, or
    call `close` to give its leases back.
    """

    def __init__(
        self, engine: Engine, header: str = "", budget: int | None = None, fidelity: Fidelity | None = None
    ) -> None:
        if not isinstance(header, str):
            raise TypeError(f"header must be a str, got {type(header).__name__}")
        limit = engine.spec.max_tokens
        budget = limit if budget is None else budget
        if not isinstance(budget, int) or not 0 < budget <= limit:
            raise ValueError(f"budget must be an int in 1..{limit} (what the engine takes), got {budget!r}")
        encoded = engine.encode_header(header)
        if encoded.tokens >= budget:
            raise BudgetExceeded(
                f"budget must exceed the header's {encoded.tokens} tokens, got {budget}",
                needed=encoded.tokens + 1,
                budget=budget,
            )
        fidelity = fidelity or Fidelity()
        state = State(
            engine=digest(engine.spec.name, engine.spec.identity), header=header, header_tokens=encoded.tokens,
            header_advance=encoded.advance, budget=budget, fidelity=fidelity,
        )  # fmt: skip
        self._open(engine, state)

    def _open(self, engine: Engine, state: State) -> None:
        self.engine = engine
        self._assembly = Assembly(engine)
        self._fidelity = state.fidelity.resolve(engine.spec.model)
        self._state = state
        self._lock = threading.Lock()
        self._leasing = threading.Lock()
        self._history: OrderedDict[int, State] = OrderedDict()
        self._parent: tuple[weakref.ref[Window], int] | None = None
        self._read_only = False
        self._closed = False
        self._encodes = 0  # vision encodes of this window since its last answer
        self._leases: set[str] = set()
        self._finalizer = weakref.finalize(self, _release_all, engine.repo, self._leases)  # for a window never closed
        self._lease()

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def header(self) -> str:
        return self._state.header

    @property
    def budget(self) -> int:
        """Most tokens of header, chunks, query and answer together."""
        return self._state.budget

    @property
    def tokens(self) -> int:
        """Tokens of header and placed chunks."""
        return self._state.tokens

    @property
    def version(self) -> int:
        """Changes with every edit; `at` reads an old one."""
        return self._state.version

    @property
    def fidelity(self) -> Fidelity:
        """The fidelity in force (``auto`` already resolved)."""
        return self._fidelity

    @property
    def chunks(self) -> tuple[PlanEntry, ...]:
        """Placed chunks in prompt order with id, lane, tokens, start and exactness. Cost: a plan; reads no KV."""
        return self.plan().entries

    @property
    def ids(self) -> tuple[str, ...]:
        """Placement ids in prompt order."""
        return tuple(p.id for p in self._state.placed)

    @property
    def evicted(self) -> tuple[str, ...]:
        """Placement ids that `recall` can bring back, oldest eviction first (the newest 4,096 are kept)."""
        return tuple(p.id for p in self._state.evicted)

    def chunk(self, placement: str) -> Chunk:
        """The chunk behind a placed or evicted id; raises UnknownChunk."""
        return self._state.find(placement).chunk

    def dependents(self, placement: str) -> tuple[str, ...]:
        """Placed chunks whose KV absorbed ``placement`` directly: edges of the cascade graph."""
        return tuple(p.id for p in self._state.placed if p.kv and placement in p.kv.antecedents)

    def plan(self) -> Plan:
        """What the next `ask` would do and cost, per chunk, before paying (the query comes on top). Reads no KV."""
        self._lease()  # what was lost may have been stored again by another window
        return self._assembly.plan(self._state, self._fidelity)

    def at(self, version: int) -> Window:
        """A read-only window on an old version (the newest 1,024 are kept); it can ask, plan, fork and snapshot."""
        state = self._state if version == self.version else self._history.get(version)
        if state is None:
            kept = f"{next(iter(self._history), self.version)}..{self.version}"
            raise LookupError(f"version must be a kept version of this window, {kept}, got {version!r}")
        old = Window.__new__(Window)
        old._open(self.engine, state)
        old._read_only = True
        return old

    def check(self) -> None:
        """Asserts every invariant of the window; AssertionError prints the state. Cost: a plan."""
        check_state(self._state, self.plan())
        held = set(filter(self.engine.repo.contains, self._state.keys()))
        assert self._closed or held <= self._leases | self._assembly.missing, f"unleased keys {held - self._leases}"

    # -- editing --------------------------------------------------------------------------------------------------

    def append(self, chunk: Chunk) -> str:
        """Places ``chunk`` behind everything; returns its placement id.

        Cost: tokenising, and one run of the vision tower for new media. May go over the budget (`slide` mends that) unless
        the chunk alone does. Raises BudgetExceeded, BadMedia, ChunkUnavailable, UnsupportedModel and changes nothing then.
        """
        with self._writing() as state:
            placed = self._new(state, chunk)
            self._commit(edits.appended(state, placed))
        return placed.id

    def extend(self, chunks: Sequence[Chunk]) -> list[str]:
        """Appends several chunks, all or none; returns their placement ids."""
        chunks = list(chunks)
        with self._writing() as state:
            for chunk in chunks:
                state = edits.appended(state, self._new(state, chunk))
            self._commit(state)
        return [p.id for p in state.placed[len(state.placed) - len(chunks) :]] if chunks else []

    def insert(self, index: int, chunk: Chunk) -> str:
        """Places ``chunk`` at ``index``; chunks behind it keep their KV, as after `recall`. Raises like `append`."""
        with self._writing() as state:
            index = edits.checked_index(index, len(state.placed))
            placed = self._new(state, chunk)
            self._commit(edits.inserted(state, placed, index).edited(arrivals=state.arrivals + 1))
        return placed.id

    def evict(self, placement: str, *, forget: bool = False) -> None:
        """Takes a chunk out; `recall` brings it back. Chunks behind it survive: their KV is rotated into place.

        Args:
            forget: (of an evicted chunk, too) also everything it left behind goes: chunks that absorbed it, directly or
                through others, are computed again at the next ask, its stored KV, embeddings and source are deleted, and
                it cannot be recalled.

        Raises UnknownChunk. Cost: none now; with ``forget`` a forward over each chunk concerned at the next ask.
        """
        with self._writing() as state:
            if not forget:
                self._commit(edits.evicted(state, [state.placed[state.index(placement)]]))
                return
            gone = state.find(placement)
            new, tainted = edits.forgotten(state, gone)
            past = [state, *self._history.values()]
            self._history.clear()  # an old version would bring it back
            self._commit(new, remember=False)
            asking.forget(self.engine, new, gone, tainted, past, self._fidelity.patch_name)

    def slide(self, count: int | None = None, *, room: int = 0) -> list[str]:
        """Evicts the oldest unpinned chunks: ``count`` of them, or as many as bring the window within its budget.

        ``room`` tokens are left free for a query and its answer. Returns the evicted ids. Raises BudgetExceeded where pinned
        chunks alone exceed the budget, ValueError where fewer than ``count`` can leave; the window is then as it was.
        """
        if count is not None and (not isinstance(count, int) or count < 0):
            raise ValueError(f"count must be an int >= 0, got {count!r}")
        with self._writing() as state:
            leaving = edits.leaving_for_budget(state, room) if count is None else edits.oldest_first(state)[:count]
            if count is not None and count > len(leaving):
                raise ValueError(f"count must be at most the {len(leaving)} unpinned chunks, got {count}")
            if leaving:
                self._commit(edits.evicted(state, leaving))
        return [p.id for p in leaving]

    def recall(self, placement: str, at: int | None = None, *, repair: bool = False) -> int:
        """Brings an evicted chunk back; returns its index.

        Args:
            at: index to place it at; default: its chronological place, before the first chunk that arrived later.
            repair: re-form the chunks behind it, which were conditioned without it (a forward each at the next ask).
                Otherwise they keep their KV unless stored KV or a patch fits; `plan` shows and prices both.

        Raises UnknownChunk. Cost at the next ask: its lane's, never a vision encode.
        """
        with self._writing() as state:
            back = state.find_evicted(placement)
            encoded = self.engine.encode(back.chunk)  # another engine may count it otherwise (a restored window)
            back = back.but(tokens=encoded.tokens, advance=encoded.advance)
            if at is None:
                at = next((i for i, p in enumerate(state.placed) if p.arrival > back.arrival), len(state.placed))
            at = edits.checked_index(at, len(state.placed))
            evicted = tuple(p for p in state.evicted if p.id != placement)
            self._commit(edits.inserted(state, back, at, repair=repair).edited(evicted=evicted))
        return at

    def reorder(self, ids: Sequence[str]) -> None:
        """Puts the placed chunks into the order ``ids``, a permutation of the placed ids (else ValueError)."""
        with self._writing() as state:
            by_id = {p.id: p for p in state.placed}
            if sorted(ids) != sorted(by_id):
                raise ValueError(f"ids must be a permutation of the placed ids {sorted(by_id)}, got {sorted(ids)}")
            if tuple(ids) != tuple(by_id):
                self._commit(state.edited(placed=tuple(by_id[i] for i in ids)))

    def toggle(self, placement: str, *, conditioned: bool) -> None:
        """Switches a chunk to its context-clean view (``conditioned=False``) or back to the same lane and bytes.

        Kamera, appendix E. Raises UnknownChunk. Cost at the next ask: one forward where the canonical is not held.
        """
        with self._writing() as state:
            i = state.index(placement)
            if state.placed[i].conditioned == conditioned:
                return
            placed = list(state.placed)
            placed[i] = placed[i].but(conditioned=conditioned)
            self._commit(state.edited(placed=tuple(placed)))

    def pin(self, placement: str, *, pinned: bool = True) -> None:
        """Protects a chunk from `slide`, or gives it free. Raises UnknownChunk."""
        with self._writing() as state:
            i = state.index(placement)
            placed = list(state.placed)
            placed[i] = placed[i].but(pinned=pinned)
            self._commit(state.edited(placed=tuple(placed)))

    def fork(self, header: str | None = None) -> Window:
        """A copy-on-write branch: it shares every chunk and costs no KV bytes until it is edited.

        ``header`` opens it behind another system prompt; its chunks are then conditioned anew at the next ask, with no
        vision encode. `adopt` brings a branch's state back.
        """
        branch = Window.__new__(Window)
        if header is None or header == self.header:
            branch._open(self.engine, self._state)
        else:
            fresh = Window(self.engine, header, self.budget, self._state.fidelity)._state
            strip = {"kv": None, "unseen": ()}
            bare = fresh.but(
                version=self.version,
                arrivals=self._state.arrivals,
                placed=tuple(p.but(**strip) for p in self._state.placed),
                evicted=tuple(p.but(**strip) for p in self._state.evicted),
            )
            branch._open(self.engine, bare)
        branch._parent = (weakref.ref(self), self.version)
        return branch

    def adopt(self, branch: Window, *, force: bool = False) -> None:
        """Makes a branch's state this window's. The branch stays usable.

        Raises ValueError where ``branch`` is no fork of this window, or this window was edited since the fork (``force``
        overrides both), or it runs on another engine.
        """
        if branch.engine is not self.engine:
            raise ValueError("branch must run on this window's engine, got another one; restore its snapshot instead")
        parent = branch._parent
        if not force and (parent is None or parent[0]() is not self):
            raise ValueError(
                "branch must be a fork of this window, got another window; pass force=True to adopt it anyway"
            )
        with self._writing() as state:
            if not force and parent is not None and parent[1] != state.version:
                raise ValueError(
                    f"this window must not have moved since the fork (version {parent[1]}), got version {state.version}; "
                    "pass force=True to drop its edits"
                )
            theirs = branch._state
            self._commit(theirs.but(version=max(state.version, theirs.version) + 1))
            self._fidelity = theirs.fidelity.resolve(self.engine.spec.model)

    # -- asking ---------------------------------------------------------------------------------------------------

    def ask(self, query: str, max_tokens: int = 32, **options: Any) -> Answer:
        """Answers ``query`` over the placed chunks.

        Args:
            query: text of the question; its KV is dropped afterwards unless remembered.
            max_tokens: most tokens of the answer.
            **options: ``remember=True`` appends the exchange as a chunk captured from this very pass; ``logprobs=n``
                (-1: whole vocabulary) returns first-token log-probabilities; ``temperature``, ``seed``, ``stop_ids``.

        Raises BudgetExceeded (header + chunks + query + max_tokens), ChunkUnavailable, EngineFailed; the window is then
        as it was. Cost: what `plan` says, and a forward over the query.
        """
        return asking.ask(self, query, max_tokens, **options)

    def stream(self, query: str, max_tokens: int = 32, **options: Any) -> Iterator[str]:
        """Like `ask`, yielding text as it is made; the iterator's ``answer`` holds the Answer at the end.

        Closing the iterator early stops the engine and leaves the window unchanged.
        """
        return asking.Stream(self, query, max_tokens, **options)

    async def aask(self, query: str, max_tokens: int = 32, **options: Any) -> Answer:
        """`ask` without blocking the event loop; cancelling it leaves the window unchanged."""
        return await asking.aask(self, query, max_tokens, **options)

    def astream(self, query: str, max_tokens: int = 32, **options: Any) -> AsyncIterator[str]:
        """`stream` for async code."""
        return asking.astream(self, query, max_tokens, **options)

    def remember(self, query: str, answer: str | Sequence[int]) -> str:
        """Appends an exchange that was made elsewhere, as a chunk; returns its placement id. Raises like `append`."""
        return asking.remember(self, query, answer)

    def disposable(self, placement: str, query: str, max_tokens: int = 32, *, clean: bool = False) -> Disposability:
        """Whether the answer to ``query`` is the same without a chunk: asking now against asking after its eviction.

        Args:
            clean: also drop what its dependents absorbed from it (they are re-formed, in a branch).

        Kamera, appendix E. Raises UnknownChunk. Cost: two asks; the window is unchanged.
        """
        return asking.disposable(self, placement, query, max_tokens, clean=clean)

    def prepare_orbit(self, ids: Sequence[str], orders: int = 6, seed: int = 0) -> list[str]:
        """Forms one patch per chunk that has all of ``ids`` (and nothing else) in front: served in any order of them.

        Kamera, section 5 "Reorder". It holds what the orders share and must fail where the answer depends on the order;
        used only with ``Fidelity(orbit=True)``. Up to ``orders`` permutations (all of them where there are fewer) are
        averaged. Returns the placement ids that got one. Cost: ``orders`` forwards of everything in front, no encode.
        """
        if not isinstance(orders, int) or orders < 1:
            raise ValueError(f"orders must be an int >= 1, got {orders!r}")
        with self._writing() as state:
            found = {state.index(i) for i in ids}
            k = len(found)
            if not k or found != set(range(k)):
                raise ValueError(
                    f"ids must be the first placed chunks in some order, got {list(ids)} of {list(self.ids)}"
                )
            if k == len(state.placed):
                raise ValueError("ids must leave a chunk behind them to form a patch for, got every placed chunk")
            sampled = edits.sampled_orders(k, orders, seed)
            self._assembly.orbit(state, k, sampled, self._fidelity, Work())
        return [state.placed[k].id]

    def refresh(self, count: int | None = None) -> list[str]:
        """Re-forms the ``count`` front-most approximations (all by default) behind what is in front of them now.

        For idle time: it bounds the drift of a long stream. Returns the ids, front to back. Cost: a forward each.
        """
        return asking.refresh(self, count)

    def compress(self) -> int:
        """Replaces conditioned spans by canonical + patch where the patch is smaller; returns the KV bytes given back.

        For idle time. Cost: a forward for each chunk whose canonical is not held. The chunks are then in lane ``patched``.
        """
        return asking.compress(self)

    # -- persistence ------------------------------------------------------------------------------------------------

    def snapshot(self) -> State:
        """This version as a pydantic model: JSON-able, a few hundred bytes a chunk, no tensors. O(n)."""
        return self._state

    @classmethod
    def restore(cls, engine: Engine, state: State | dict[str, Any] | str) -> Window:
        """A window from a snapshot (model, dict or JSON), on any engine.

        KV, patches and embeddings are found in the engine's store or recomputed from the sources. On another model the
        chunks are encoded again. Raises ChunkUnavailable where content and source are gone, ValueError for a snapshot of
        a newer format.
        """
        if isinstance(state, str):
            state = State.model_validate_json(state)
        elif isinstance(state, dict):
            state = State.model_validate(state)
        if state.format != 1:
            raise ValueError(f"snapshot format must be 1, got {state.format}; use the ctxwin version that wrote it")
        window = cls.__new__(cls)
        window._open(engine, asking.rebind(engine, state))
        return window

    def close(self) -> None:
        """Gives its leases back; the window cannot be edited or asked afterwards. Idempotent."""
        self._closed = True
        self._finalizer()

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Window v{self.version} {len(self._state.placed)} chunks {self.tokens}/{self.budget} tokens>"

    # -- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self, *, edit: bool = True) -> Iterator[State]:
        if self._closed:
            raise ReadOnlyWindow("this window is closed; restore its snapshot to go on")
        if edit and self._read_only:
            raise ReadOnlyWindow("an old version must not be edited; fork() it, or edit the window it came from")
        if not self._lock.acquire(blocking=False):
            raise WindowBusy("a window has one writer, and it is busy; wait for it, or fork() the window first")
        try:
            yield self._state
        finally:
            self._lock.release()

    def _commit(self, state: State, *, remember: bool = True) -> None:
        if remember and state.version != self._state.version:
            self._history[self._state.version] = self._state
            while len(self._history) > _HISTORY:
                self._history.popitem(last=False)
        self._state = state
        self._lease()

    def _lease(self) -> None:
        with self._leasing:  # `plan` may run beside an ask
            wanted = set() if self._closed else self._state.keys()
            for key in wanted - self._leases:
                if self.engine.repo.lease(key):
                    self._leases.add(key)
            for key in self._leases - wanted:
                self.engine.repo.release(key)
                self._leases.discard(key)

    def _new(self, state: State, chunk: Chunk) -> Placed:
        if not isinstance(chunk, Chunk):
            raise TypeError(
                f"chunk must be a ctxwin.Chunk, got {type(chunk).__name__}; make one with Chunk.text or Chunk.image"
            )
        before = self.engine.counters.vision_encodes
        encoded = self.engine.encode(chunk)
        self._encodes += self.engine.counters.vision_encodes - before
        alone = state.header_tokens + encoded.tokens
        if alone > state.budget:
            raise BudgetExceeded(
                f"a chunk must fit the budget of {state.budget} tokens beside the header ({state.header_tokens}), got a chunk "
                f"of {encoded.tokens}; raise the budget or split it",
                needed=alone, budget=state.budget,
            )  # fmt: skip
        asking.keep_source(self.engine, chunk)
        return Placed(
            id=f"{state.arrivals}-{uuid.uuid4().hex[:6]}", chunk=chunk.light(), chunk_id=chunk.id, tokens=encoded.tokens,
            advance=encoded.advance, arrival=state.arrivals, pinned=chunk.pin,
        )  # fmt: skip


def _release_all(repo: Any, leases: set[str]) -> None:
    for key in leases:
        repo.release(key)
    leases.clear()
