"""`Event`: what a window tells its observers after every operation (see `Window.observe`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from ctxwin.window.answer import Answer
    from ctxwin.window.state import State

_Edit = Literal[
    "append", "insert", "evict", "forget", "slide", "recall", "look_back", "reorder", "toggle", "pin", "touch", "merge"
]
_Whole = Literal["fork", "adopt", "undo", "ask", "audit", "disposable", "prepare_orbit", "refresh", "compress", "close"]
Op = Literal[_Edit, _Whole]
EDITS: frozenset[str] = frozenset(get_args(_Edit))
"""Operations on a window's chunks."""


@dataclass(frozen=True)
class Event:
    """One operation that took effect. Failed operations change nothing and tell nothing.

    Attributes:
        window: id of the window; parent: of the window it was forked from.
        version: after the operation.
        ids: placements concerned: what arrived, left, came back or was switched, in order.
        state: after the operation; immutable.
        lanes: for ``ask``, lane by placement id as it was served.
        query, answer: of ``ask`` (``ids`` names what was remembered); ``disposable`` and ``audit`` have the query only.
        ended: of ``ask``: the model ended the answer; False where its limit, a stop text or its caller did.
        audit: of ``audit``, which comes in a thread of its own, later than the ask: KL by reference (``window``, ``stream``),
            and the ``harm`` from 0 to 1 (`ctxwin.audit.harm`); ``ids`` names the chunks that fell back to exact.
        other: id of the other window of ``fork`` and ``adopt`` (the branch).
        note: a detail, in words for ``audit``: ``clean`` or ``conditioned`` of a toggle, ``pinned`` or ``free`` of a pin,
            ``disposable`` or ``needed``, the other system prompt of a fork, the slots of a merged chunk.
        seconds: how long it took.
    """

    window: str
    op: Op
    version: int
    state: State
    ids: tuple[str, ...] = ()
    parent: str | None = None
    lanes: dict[str, str] | None = None
    query: str | None = None
    answer: Answer | None = None
    ended: bool = False
    audit: dict[str, float | bool] | None = None
    other: str | None = None
    note: str = ""
    seconds: float = 0.0


Observer = Callable[[Event], None]
