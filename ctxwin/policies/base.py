"""The contracts of policies: what leaves a full window, what comes back into it, and what they may read of it.

A policy is deterministic, `ByCost` apart, which follows measured prices. It reads the window, its engine and what their
store holds, never a clock or a random number, and it breaks ties by arrival: the same window loses the same chunks when an
operation is run again (a replayed checkpoint, a resumed thread, a second process). Its methods run while the window is being
edited, so they must not edit it themselves; a fork is theirs to edit and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.engines.base import Engine
    from ctxwin.window.answer import Disposability
    from ctxwin.window.state import Placed, State


class WindowView(Protocol):
    """What a policy may read of a window; see `ctxwin.Window` for each."""

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
        """Takes a chunk out."""

    def disposable(self, placement: str, query: str, max_tokens: int = ..., /, *, clean: bool = ...) -> Disposability:
        """Whether the answer to ``query`` is the same without a chunk."""

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
class Placement(Protocol):
    """Decides where chunks come back; an `Eviction` that has this method, too, is asked."""

    def place(self, window: WindowView, backs: Sequence[Placed]) -> int | None:
        """Index in the window as it is, where evicted chunks come back next to each other; None: each at its chronological
        place."""


class Retrieval(Protocol):
    """Decides which evicted chunks come back for a query."""

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """Ids of evicted chunks to recall for ``query`` (a question, an answer with a tool call, or a picture), best first."""


class LibraryView(Protocol):
    """A library as of one version; see `ctxwin.library`."""

    @property
    def version(self) -> int:
        """Which one."""

    def find(self, query: str | Chunk, k: int, engine: Engine) -> list[Chunk]:
        """The best ``k`` chunks at most for ``query``, the best first."""


class Searchable(Protocol):
    """What `ctxwin.Window.retrieve` draws from: a `ctxwin.Library`, or an adapter of somebody else's search."""

    @property
    def name(self) -> str:
        """Under which a window remembers the version that it opened."""

    def view(self, version: int | None = None, /) -> LibraryView:
        """As of a version; None: as it is now."""
