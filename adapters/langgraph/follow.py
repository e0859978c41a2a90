"""A window brought up to date with a conversation: new messages arrive, edited and removed ones leave.

What the window's policy has evicted stays out, for a window holds the newest part of a conversation and not all of it. What
other nodes have placed stays where it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxwin.chunk import Chunk
from ctxwin.policies.base import Eviction, Retrieval, WindowView

if TYPE_CHECKING:
    from ctxwin.window.window import Window


def follow(
    window: Window, chunks: Sequence[Chunk], *, removed: Collection[str] = (), others: Collection[str] = ()
) -> list[str]:
    """Places the chunks of a conversation that ``window`` has not seen; evicts placed ones that are not in it.

    Chunks are recognised by content; of equal ones the earlier arrival is the earlier one. A chunk that the window's policy
    has evicted stays evicted. What is placed of the conversation stands in the order of ``chunks`` afterwards.

    Args:
        removed: placements that an earlier call took out; they come back if they are in ``chunks`` again.
        others: placements that are not of the conversation.

    Returns the placements that are not in the conversation any more. Raises like `Window.append`; edits made before the
    error stay. Cost: encoding what is new.
    """
    state = window.snapshot()
    mine = [p for p in (*state.placed, *state.evicted) if p.id not in others]
    known: defaultdict[str, list[str]] = defaultdict(list)
    for p in sorted(mine, key=lambda p: (p.id in removed, p.arrival), reverse=True):
        known[p.chunk_id].append(p.id)
    names: list[str | None] = [known[chunk.id].pop() if known[chunk.id] else None for chunk in chunks]
    gone = [placement for rest in known.values() for placement in rest]
    for placement in gone:
        if placement in window.ids:
            window.evict(placement)
    tail = max((i + 1 for i, name in enumerate(names) if name is not None), default=0)  # all behind it is new
    held, back = set(window.ids), set(window.evicted)
    for i, (chunk, name) in enumerate(zip(chunks[:tail], names[:tail], strict=True)):
        if name is None or (name in removed and name not in held):
            behind = set(names[i + 1 :])
            at = next((k for k, placement in enumerate(window.ids) if placement in behind), len(window.ids))
            if name is None or name not in back:  # the window remembers so many evictions and no more
                names[i] = window.insert(at, chunk)
            else:
                window.recall(name, at)
    names[tail:] = window.extend(chunks[tail:])
    rank = {name: i for i, name in enumerate(names)}
    order = iter(sorted((i for i in window.ids if i in rank), key=rank.__getitem__))
    window.reorder([next(order) if placement in rank else placement for placement in window.ids])
    return gone


@dataclass(frozen=True)
class Without:
    """``retrieval``, but never what is no longer part of the conversation."""

    retrieval: Retrieval
    removed: frozenset[str]

    def choose(self, window: WindowView, query: str | Chunk) -> Iterable[str]:
        """What ``retrieval`` picks, less what was removed."""
        return [placement for placement in self.retrieval.choose(window, query) if placement not in self.removed]


@dataclass(frozen=True)
class Sparing:
    """``eviction``, but never what the question is about."""

    eviction: Eviction
    spared: frozenset[str]

    def order(self, window: WindowView) -> Iterator[str]:
        """The order of ``eviction``, less what is spared."""
        order = self.eviction.order(window)
        try:
            yield from (placement for placement in order if placement not in self.spared)
        finally:
            if isinstance(order, Generator):
                order.close()  # now, not when it is collected: it may hold a fork
