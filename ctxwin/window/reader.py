"""`WindowReader`: the attributes of a window; `ctxwin.window.window` has its edits and questions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.window.answer import Plan, PlanEntry
from ctxwin.window.core import WindowCore
from ctxwin.window.defaults import checked_policy
from ctxwin.window.events import Observer
from ctxwin.window.maintenance import Maintenance
from ctxwin.window.protocols import Batching, Eviction, Retrieval
from ctxwin.window.removed import is_removed
from ctxwin.window.sliding import mark_tokens
from ctxwin.window.state import State


class MovedNames:
    """A window whose unknown attributes say where those that `Maintenance` has can be found."""

    if not TYPE_CHECKING:  # a type checker would take every name for one of a window

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            moved = f"{kind}.{name} has become {kind}.maintenance.{name}"
            unknown = f"{kind!r} object has no attribute {name!r}"
            raise AttributeError(moved if hasattr(Maintenance, name) else unknown, name=name, obj=self)


class WindowReader(MovedNames):
    """The attributes, plan and snapshot of a window."""

    core: WindowCore

    @property
    def eviction(self) -> Eviction:
        """What leaves first when the window makes room."""
        return self._eviction

    @eviction.setter
    def eviction(self, eviction: Eviction) -> None:
        self._eviction = checked_policy("eviction", eviction, "order")
        if self.core.idle is not None:
            self.core.idle.predictor.eviction, self.core.idle.predictor.mark = eviction, self.low_water

    @property
    def retrieval(self) -> Retrieval:
        """What `look_back` brings back."""
        return self._retrieval

    @retrieval.setter
    def retrieval(self, retrieval: Retrieval) -> None:
        self._retrieval = checked_policy("retrieval", retrieval, "choose")

    @property
    def engine(self) -> Engine:
        """The engine that answers; other windows may share it."""
        return self.core.engine

    @property
    def id(self) -> str:
        """Stays over edits and restarts; a fork has its own."""
        return self.core.state.window

    @property
    def parent(self) -> str | None:
        """Id of the window that this one was forked from; None for others."""
        return self.core.parent

    @property
    def system_prompt(self) -> str:
        """The system prompt, fixed for the life of the window."""
        return self.core.state.system_prompt

    @property
    def budget(self) -> int:
        """Most tokens of system prompt, chunks, query and answer together."""
        return self.core.state.budget

    @property
    def low_water(self) -> int | None:
        """Tokens that the window falls to when it is over its budget; None: to the budget, one by one."""
        return self._mark(self.core.state)

    def _mark(self, state: State, reserve_tokens: int = 0) -> int | None:
        if isinstance(self.eviction, Batching):
            return mark_tokens(self.eviction.low_water, state.budget)
        return self.core.mark_of(state, reserve_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of system prompt and placed chunks."""
        return self.core.state.tokens

    @property
    def bytes(self) -> int:
        """KV bytes of system prompt and placed chunks, as they are served, recurrent layers' states included."""
        kv, state = self.engine.spec.kv, self.core.state
        return state.tokens * kv.token_bytes + (1 + len(state.placed)) * kv.state_bytes

    @property
    def version(self) -> int:
        """Changes with every edit; `at` reads an old one."""
        return self.core.state.version

    @property
    def fidelity(self) -> Fidelity:
        """The fidelity in force (``auto`` already resolved)."""
        return self.core.fidelity

    @property
    def maintenance(self) -> Maintenance:
        """What an agent does not need every day: `Maintenance.prefill`, `refresh`, `compress`, `merge` and others."""
        return Maintenance(self.core)

    @property
    def chunks(self) -> tuple[PlanEntry, ...]:
        """Placed chunks in prompt order with id, lane, tokens, start and exactness. Cost: a plan; reads no KV."""
        return self.plan().entries

    @property
    def ids(self) -> tuple[str, ...]:
        """Placement ids in prompt order."""
        return self.core.state.placed.ids

    @property
    def pending(self) -> tuple[str, ...]:
        """Placement ids with edits that wait for a break of the prefix (``lazy=True``), in prompt order."""
        return tuple(p.id for p in self.core.state.placed.pending)

    @property
    def evicted(self) -> tuple[str, ...]:
        """Placement ids that `recall` can bring back, oldest eviction first (the newest 4,096 are kept)."""
        return tuple(p.id for p in self.core.state.evicted if not is_removed(p.chunk))

    def chunk(self, placement: str) -> Chunk:
        """The chunk behind a placed or evicted id; raises UnknownChunk."""
        return self.core.state.find(placement).chunk

    def plan(self, query: str | None = None) -> Plan:
        """Return what the next `ask` would do and cost, per chunk. Reads no KV.

        Args:
            query: the question; its tokens then count, too, as far as the engine's own prefix cache does not hold them from
                when it was asked before. Without it the query comes on top.
        """
        return self.core.plan(query)

    def snapshot(self) -> State:
        """This version as a pydantic model: JSON-able (format 2), a few hundred bytes a chunk, no tensors. O(n)."""
        return self.core.audits.with_fallbacks(self.core.state)

    def check(self) -> None:
        """Assert every invariant of the window; AssertionError prints the state. Cost: a plan."""
        self.core.check()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` with an `Event` after every operation, also of later forks; return a function that ends that
        (forks made before go on calling it).

        It runs in the thread of the operation, once that has taken effect; what it raises is logged and changes nothing.
        """
        return self.core.observe(observer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy` and `pickle`: a copy would edit this window."""
        raise TypeError("a window must be forked or saved, not copied or pickled; take fork() or snapshot()")

    def __repr__(self) -> str:
        return f"<Window v{self.version} {len(self.core.state.placed)} chunks {self.tokens}/{self.budget} tokens>"
