"""`Window`: a deque of position-free chunks between an agent loop and an engine.

Every edit makes a new immutable version of the window's `State`; nothing is computed until an answer is asked for.
This module holds the edits, `ctxwin.window.lanes` decides how each chunk's KV reaches its place, `ctxwin.window.assembly` fetches
and stores it, `ctxwin.window.ask` runs questions. Neither torch nor vLLM is imported here.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.policies.base import Eviction, Retrieval
from ctxwin.policies.eviction import OldestFirst
from ctxwin.policies.retrieval import ById
from ctxwin.store import parse_bytes
from ctxwin.window import ask as asking
from ctxwin.window import edits
from ctxwin.window import placement as placing
from ctxwin.window.answer import Answer, Disposability, Plan, PlanEntry
from ctxwin.window.assembly import Assembly, Work
from ctxwin.window.core import Versions
from ctxwin.window.invariants import check_state
from ctxwin.window.state import Placed, State


class Window(Versions):
    """A context window whose edits are cache edits.

    Args:
        engine: from `open_engine`; may be shared by any number of windows.
        system_prompt: system prompt, fixed for the life of the window (`fork` makes one behind another system prompt).
        budget: most tokens of system prompt, chunks, query and answer together; default: what the engine takes.
        fidelity: which approximations are allowed; ``auto`` follows the model's profile and is ``exact`` without one.
        budget_bytes: the same as KV bytes (an int, or ``"512MB"``); the smaller budget counts.
        eviction: who leaves first when `slide` or `look_back` makes room (`ctxwin.policies`).
        retrieval: what `look_back` brings back.

    Raises:
        BudgetExceeded: the system prompt alone does not fit.

    A window has one writer: a second thread that edits or asks meanwhile gets WindowBusy. Use as a context manager, or
    call `close` to give its leases back.
    """

    def __init__(
        self, engine: Engine, system_prompt: str = "", budget: int | None = None, fidelity: Fidelity | None = None, *,
        budget_bytes: int | str | None = None, eviction: Eviction | None = None, retrieval: Retrieval | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(system_prompt, str):
            raise TypeError(f"system_prompt must be a str, got {type(system_prompt).__name__}")
        limit = engine.spec.max_tokens
        budget = limit if budget is None else budget
        if not isinstance(budget, int) or not 0 < budget <= limit:
            raise ValueError(f"budget must be an int in 1..{limit} (what the engine takes), got {budget!r}")
        if budget_bytes is not None:
            budget = min(budget, parse_bytes(budget_bytes) // engine.spec.kv.token_bytes)
        state = placing.opened(engine, system_prompt, budget, fidelity or Fidelity())
        self._open(engine, state.replace(window=uuid.uuid4().hex[:12]), eviction, retrieval)

    def _open(
        self,
        engine: Engine,
        state: State,
        eviction: Eviction | None,
        retrieval: Retrieval | None,
        seed: str | None = None,
    ) -> None:
        self.eviction: Eviction = eviction or OldestFirst()
        self.retrieval: Retrieval = retrieval or ById()
        self._assembly = Assembly(engine)
        self._fidelity = state.fidelity.resolve(engine.spec.model)
        self._seed = uuid.uuid4().hex if seed is None else seed  # of placement ids
        self._parent: tuple[weakref.ref[Window], int] | None = None
        self._encodes = 0  # vision encodes of this window since its last answer
        self._start(engine, state)

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Stays over edits and restarts; a fork has its own."""
        return self._state.window

    @property
    def system_prompt(self) -> str:
        return self._state.system_prompt

    @property
    def budget(self) -> int:
        """Most tokens of system prompt, chunks, query and answer together."""
        return self._state.budget

    @property
    def tokens(self) -> int:
        """Tokens of system prompt and placed chunks."""
        return self._state.tokens

    @property
    def bytes(self) -> int:
        """KV bytes of system prompt and placed chunks, as they are served."""
        return self._state.tokens * self.engine.spec.kv.token_bytes

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
        old._open(self.engine, state, self.eviction, self.retrieval)
        old._read_only = True
        old._observers, old._origin = self._observers, self._origin
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
            self._commit(edits.appended(state, placed), "append", [placed.id])
        return placed.id

    def extend(self, chunks: Sequence[Chunk]) -> list[str]:
        """Appends several chunks, all or none; returns their placement ids."""
        chunks = list(chunks)
        with self._writing() as state:
            before = len(state.placed)
            for chunk in chunks:
                state = edits.appended(state, self._new(state, chunk))
            ids = [p.id for p in state.placed[before:]]
            if ids:
                self._commit(state, "append", ids)
        return ids

    def insert(self, index: int, chunk: Chunk) -> str:
        """Places ``chunk`` at ``index``; chunks behind it keep their KV, as after `recall`. Raises like `append`."""
        with self._writing() as state:
            index = edits.checked_index(index, len(state.placed))
            placed = self._new(state, chunk)
            self._commit(
                edits.inserted(state, placed, index).edited(arrivals=state.arrivals + 1), "insert", [placed.id]
            )
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
                self._commit(edits.evicted(state, [state.placed[state.index(placement)]]), "evict", [placement])
                return
            gone = state.find(placement)
            new, tainted = edits.forgotten(state, gone)
            past = [state, *self._history.values()]
            self._history.clear()  # an old version would bring it back
            self._commit(new, "forget", [placement], remember=False)
            placing.forget(self.engine, new, gone, tainted, past, self._fidelity.patch_name)

    def slide(self, count: int | None = None, *, reserve_tokens: int = 0) -> list[str]:
        """Evicts unpinned chunks in the order of `eviction` (oldest first): ``count``, or until within the budget.

        ``reserve_tokens`` tokens are left free for a query and its answer. Returns the evicted ids. Raises
        BudgetExceeded where pinned chunks alone exceed the budget, ValueError where fewer than ``count`` can leave; the
        window is then as it was.
        """
        if count is not None and (not isinstance(count, int) or count < 0):
            raise ValueError(f"count must be an int >= 0, got {count!r}")
        with self._writing() as state:
            order = self.eviction.order(self)
            if count is None:
                leaving = edits.leaving_for_budget(state, order, reserve_tokens)
            elif count > len(leaving := list(islice(edits.free_in_order(state, order), count))):
                raise ValueError(f"count must be at most the {len(leaving)} unpinned chunks, got {count}")
            if leaving:
                self._commit(edits.evicted(state, leaving), "slide", [p.id for p in leaving])
        return [p.id for p in leaving]

    def recall(self, placement: str, at: int | None = None, *, repair: bool = False) -> int:
        """Brings an evicted chunk back; returns its index.

        Args:
            at: index to place it at; default: its chronological place, before the first chunk that arrived later.
            repair: re-form the chunks behind it, which were conditioned without it (a forward each at the next ask).
                Otherwise they keep their KV unless stored KV or a patch fits; `plan` shows and prices both.

        Raises UnknownChunk. Cost at the next ask: its lane's, never a vision encode.
        """
        with self._writing() as state, self._seeing():
            new, at = edits.recalled(state, self._back(state, placement), at, repair=repair)
            self._commit(new, "recall", [placement])
        return at

    def look_back(self, query: str | Chunk, *, reserve_tokens: int = 0) -> list[str]:
        """Recalls what `retrieval` picks for ``query``, at chronological places; returns the ids.

        Others leave in the order of `eviction` where the budget, with ``reserve_tokens`` tokens free, needs it. All or nothing.
        Raises BudgetExceeded where they do not fit, UnknownChunk, ChunkUnavailable. Cost: the policies', then see `recall`.
        """
        with self._writing() as state:
            with self._seeing():
                ids = list(dict.fromkeys(self.retrieval.choose(self, query)))
                new = edits.looked_back(state, [self._back(state, i) for i in ids])
            if ids:
                leaving = edits.leaving_for_budget(new, self.eviction.order(self), reserve_tokens, stay=ids)
                self._commit(edits.evicted(new, leaving) if leaving else new, "look_back", ids)
        return ids

    def reorder(self, ids: Sequence[str]) -> None:
        """Puts the placed chunks into the order ``ids``, a permutation of the placed ids (else ValueError)."""
        with self._writing() as state:
            if sorted(ids) != sorted(self.ids):
                raise ValueError(f"ids must be a permutation of the placed ids {sorted(self.ids)}, got {sorted(ids)}")
            if tuple(ids) != self.ids:
                self._commit(edits.reordered(state, ids), "reorder", ids)

    def toggle(self, placement: str, *, conditioned: bool) -> None:
        """Switches a chunk to its context-clean view (``conditioned=False``) or back to the same lane and bytes.

        Kamera, appendix E. Raises UnknownChunk. Cost at the next ask: one forward where the canonical is not held.
        """
        with self._writing() as state:
            if state.placed[state.index(placement)].conditioned != conditioned:
                note = "conditioned" if conditioned else "clean"
                self._commit(edits.changed(state, placement, conditioned=conditioned), "toggle", [placement], note=note)

    def pin(self, placement: str, *, pinned: bool = True) -> None:
        """Protects a chunk from `slide`, or gives it free. Raises UnknownChunk."""
        with self._writing() as state:
            note = "pinned" if pinned else "free"
            self._commit(edits.changed(state, placement, pinned=pinned), "pin", [placement], note=note)

    def touch(self, placement: str) -> None:
        """Marks a chunk as just read, for `ctxwin.policies.LeastRecentlyRead`. Raises UnknownChunk. Cost: none."""
        with self._writing() as state:
            self._commit(edits.changed(state, placement, read=state.version + 1), "touch", [placement])

    def fork(self, system_prompt: str | None = None) -> Window:
        """A copy-on-write branch: it shares every chunk and costs no KV bytes until it is edited.

        ``system_prompt`` opens it behind another system prompt; its chunks are then conditioned anew at the next ask, with no
        vision encode. `adopt` brings a branch's state back.
        """
        state = self._state
        if system_prompt is not None and system_prompt != state.system_prompt:
            state = placing.behind(self.engine, state, system_prompt)
        branch = Window.__new__(Window)
        branch._open(self.engine, state.replace(window=uuid.uuid4().hex[:12]), self.eviction, self.retrieval)
        branch._parent = (weakref.ref(self), state.version)
        branch._observers, branch._origin = self._observers, self.id
        self._emit(self._event("fork", other=branch.id, note=system_prompt or ""))
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
            version = max(state.version, theirs.version) + 1
            arrivals = max(state.arrivals, theirs.arrivals)  # ids of dropped edits are not given again
            self._commit(theirs.replace(version=version, arrivals=arrivals, window=self.id), "adopt", other=branch.id)
            self._fidelity = theirs.fidelity.resolve(self.engine.spec.model)

    # -- asking ---------------------------------------------------------------------------------------------------

    def ask(self, query: str, max_tokens: int = 32, **options: Any) -> Answer:
        """Answers ``query`` over the placed chunks.

        Args:
            query: text of the question; its KV is dropped afterwards unless remembered.
            max_tokens: most tokens of the answer.
            **options: ``remember=True`` appends the exchange as a chunk captured from this very pass; ``logprobs=n``
                (-1: whole vocabulary) returns first-token log-probabilities; ``temperature``, ``seed``, ``stop_ids``.

        Raises BudgetExceeded (system prompt + chunks + query + max_tokens), ChunkUnavailable, EngineFailed; the window is then
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

        Kamera, appendix E. A window over its budget is asked as well, up to what the engine takes. Raises UnknownChunk,
        BudgetExceeded beyond that. Cost: two asks; the window is unchanged.
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
            self._assembly.orbit(state, k, sampled, self._fidelity, Work(background=True))
            self._told.append(self._event("prepare_orbit", [state.placed[k].id]))
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
    def restore(
        cls, engine: Engine, state: State | dict[str, Any] | str, *, eviction: Eviction | None = None,
        retrieval: Retrieval | None = None, seed: str | None = None,
    ) -> Window:  # fmt: skip
        """A window from a snapshot (model, dict or JSON), on any engine.

        KV, patches and embeddings are found in the engine's store or recomputed from the sources. On another model the
        chunks are encoded again. With a ``seed`` the same edits give the same placement ids, so that an operation can be
        run again. Raises ChunkUnavailable where content and source are gone, ValueError for a snapshot of a newer format.
        """
        if isinstance(state, str):
            state = State.model_validate_json(state)
        elif isinstance(state, dict):
            state = State.model_validate(state)
        if state.format != 1:
            raise ValueError(f"snapshot format must be 1, got {state.format}; use the ctxwin version that wrote it")
        if not state.window:  # written before windows had ids
            state = state.replace(window=uuid.uuid4().hex[:12])
        window = cls.__new__(cls)
        window._open(engine, placing.rebind(engine, state), eviction, retrieval, seed)
        return window

    def __repr__(self) -> str:
        return f"<Window v{self.version} {len(self._state.placed)} chunks {self.tokens}/{self.budget} tokens>"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _new(self, state: State, chunk: Chunk) -> Placed:
        if not isinstance(chunk, Chunk):
            raise TypeError(
                f"chunk must be a ctxwin.Chunk, got {type(chunk).__name__}; make one with Chunk.text or Chunk.image"
            )
        with self._seeing():
            return placing.placement(self.engine, state, chunk, self._seed)

    @contextmanager
    def _seeing(self) -> Iterator[None]:
        """Counts the vision encodes inside it; what was not lost needs none."""
        before = self.engine.counters.vision_encodes
        try:
            yield
        finally:
            self._encodes += self.engine.counters.vision_encodes - before

    def _back(self, state: State, placement: str) -> Placed:
        """An evicted chunk, counted again: a restored window may run on another engine."""
        back = state.find_evicted(placement)
        encoded = self.engine.encode(back.chunk)
        return back.replace(tokens=encoded.tokens, advance=encoded.advance)
