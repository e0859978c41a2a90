"""Contracts of what a window is given: policies (`ctxwin.policies.base`), libraries, a source of KV, and audits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.engines.base import Engine
    from ctxwin.engines.segments import Encoded, Segment
    from ctxwin.fidelity import Fidelity
    from ctxwin.kv.layout import SpanKV
    from ctxwin.store.spans import SpanRepository
    from ctxwin.window.answer import Disposability
    from ctxwin.window.continuation import ServedMemos
    from ctxwin.window.layout import Work
    from ctxwin.window.state import Placed, State


class WindowView(Protocol):
    """Members of a window that a policy may read; see `ctxwin.Window`."""

    @property
    def engine(self) -> Engine:
        """The engine that answers."""

    @property
    def evicted(self) -> tuple[str, ...]:
        """Placement ids that can be recalled."""

    def chunk(self, placement: str, /) -> Chunk:
        """The chunk of a placement."""

    def snapshot(self) -> State:
        """The window as data."""

    def fork(self) -> Branch:
        """A branch to try something in."""


class Branch(WindowView, Protocol):
    """A fork that a policy may try things on."""

    def evict(self, placement: str, /) -> None:
        """Take a chunk out."""

    def disposable(self, placement: str, query: str, max_tokens: int = ..., /, *, clean: bool = ...) -> Disposability:
        """Test whether the answer to ``query`` is the same without a chunk."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class Eviction(Protocol):
    """Decides which chunks leave a full window first."""

    def order(self, window: WindowView) -> Iterable[str]:
        """Ids of placed chunks in the order in which they should leave.

        It is read only until there is room, so a generator may test chunks as it goes; it is closed afterwards. Pinned
        chunks are skipped, and a chunk that is left out never leaves. During a look back the window is still as it was:
        what comes back is not placed yet, and does not leave.
        """


@runtime_checkable
class Ranking(Protocol):
    """An `Eviction` whose order follows from the window's state alone: what leaves next can then be predicted."""

    def ranked(self, state: State) -> Iterable[str] | None:
        """`Eviction.order` of a window in ``state``, without side effects; None where that cannot be told."""


@runtime_checkable
class Placement(Protocol):
    """Decides where chunks come back; an `Eviction` that has this method, too, is asked."""

    def place(self, window: WindowView, backs: Sequence[Placed]) -> int | None:
        """Index in the window as it is, where evicted chunks come back next to each other; None: where they come back without
        this method, each at its chronological place or at the end of an exact window (`Window.recall`, `Window.look_back`)."""


@runtime_checkable
class Batching(Protocol):
    """An `Eviction` that has a low-water mark, too: a window over its budget falls to it at once."""

    @property
    def low_water(self) -> float:
        """Tokens of system prompt, chunks and what is reserved; a float is a share of the budget."""


class Retrieval(Protocol):
    """Decides which evicted chunks come back for a query."""

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """Ids of evicted chunks to recall for ``query`` (a question, an answer with a tool call, or a picture), best first."""


class LibraryView(Protocol):
    """A library as of one version; see `ctxwin.library`."""

    @property
    def version(self) -> int:
        """Number of the version."""

    def find(self, query: str | Chunk, k: int, engine: Engine) -> list[Chunk]:
        """The best ``k`` chunks at most for ``query``, the best first."""


class Searchable(Protocol):
    """Source of `ctxwin.Window.retrieve`: a `ctxwin.Library`, or an adapter of another search engine."""

    @property
    def name(self) -> str:
        """Name under which a window remembers the version that it opened."""

    def view(self, version: int | None = None, /) -> LibraryView:
        """Return the library as of a version; None: the current one."""


class SpanProvider(Protocol):
    """Source of the KV of chunks: an engine's store, or a forward; see `ctxwin.window.assembly.Assembly`."""

    @property
    def engine(self) -> Engine: ...

    @property
    def repo(self) -> SpanRepository: ...

    @property
    def missing(self) -> set[str]: ...

    def has(self, key: str, /) -> bool: ...

    def know_basis(self, fidelity: Fidelity, /) -> None: ...

    def system_prompt(self, state: State, work: Work, /) -> Segment: ...

    def computed_system_prompt(self, system_prompt: Segment, work: Work, /) -> Segment: ...

    def put(self, key: str, span: SpanKV, encoded: Encoded, **fields: Any) -> None: ...

    def prefill_all(
        self, preceding: Segment, encodeds: Sequence[Encoded], start: int, work: Work, entries: Iterable[Placed], /
    ) -> Iterable[SpanKV]: ...


OnFinding = Callable[[Sequence[str], str, dict[str, float | bool], str], None]
"""Called in the auditor's thread with the finding of an audit: placement ids that fall back to exact, the question, and the
``audit`` and ``note`` of its `Event`."""


@dataclass(frozen=True)
class ServedAnswer:
    """An answer's question, window and fidelity.

    Attributes:
        window, parent: ids.
        state, state_after: the window's state at the question, and after new KV was written back to it.
        strategy: the promoted strategy that served it.
        fidelity: the fidelity in force.
        max_tokens, temperature: of the answer.
        memos: how chunks were served before (`Assembly.memo`).
    """

    window: str
    parent: str | None
    state: State
    state_after: State
    strategy: str | None
    fidelity: Fidelity
    query: str
    max_tokens: int
    temperature: float
    memos: ServedMemos
