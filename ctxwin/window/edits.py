"""Pure functions from one window state to the next: what the methods of `Window` are made of."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from itertools import permutations
from random import Random
from typing import Any

from ctxwin.errors import BudgetExceeded
from ctxwin.window.state import Placed, State, provenance_of, span_key

# Evicted chunks a window remembers; the oldest are dropped, so that an endless stream stays bounded.
MAX_EVICTED = 4096
MAX_ORDERS = 1024
"""Most orders that an orbit patch is formed from."""


def checked_index(index: int, length: int) -> int:
    """``index`` as 0..length, negative ones counted from the end like ``list.insert``'s; ValueError outside."""
    if not isinstance(index, int) or isinstance(index, bool) or not -length <= index <= length:
        raise ValueError(f"index must be an int in {-length}..{length}, got {index!r}")
    return index + length if index < 0 else index


def as_one_version(before: State, after: State) -> State:
    """``after``, several edits of ``before`` that are to be one, with the version behind it."""
    version = before.version + 1
    if after.version <= version:
        return after
    placed = tuple(p.replace(read=version) if p.read > version else p for p in after.placed)
    return after.replace(version=version, placed=placed)


def appended(state: State, placed: Placed) -> State:
    """``placed`` behind everything."""
    return state.edited(arrivals=state.arrivals + 1, placed=(*state.placed, placed))


def inserted(state: State, placed: Placed, index: int, *, repair: bool = False) -> State:
    """``placed`` at ``index``; what stands behind and lacks it keeps its KV without having seen it, or is to be re-formed."""
    lacking = lacking_of(placed.id, state.placed[index:]) if repair else set()

    def beside(p: Placed) -> Placed:
        if repair:
            return p.replace(kv=None, unseen=()) if p.id in lacking else p
        return p.replace(unseen=tuple(dict.fromkeys((*p.unseen, placed.id))))

    return state.replace(placed=(*state.placed[:index], placed, *map(beside, state.placed[index:])))


def lacking_of(placement: str, behind: Sequence[Placed]) -> set[str]:
    """Whose KV lacks a chunk that comes in front of ``behind``: those that never absorbed it, and, by the edges of the cascade
    graph, those that absorbed one of them.

    What absorbed it before it left, and nothing that lacks it, still holds it.
    """
    lacking: set[str] = set()
    for p in behind:
        if p.kv is None or placement not in p.kv.antecedents or any(one in p.kv.antecedents for one in lacking):
            lacking.add(p.id)
    return lacking


def recalled(state: State, back: Placed, at: int | None, *, repair: bool = False) -> tuple[State, int]:
    """``back``, which was evicted, at index ``at`` (None: before the first chunk that arrived later); and that index.

    What it was allowed not to see where it last stood counts no more: it needs what is in front of it now.
    """
    if at is None:
        at = next((i for i, p in enumerate(state.placed) if p.arrival > back.arrival), len(state.placed))
    at = checked_index(at, len(state.placed))
    left = tuple(p for p in state.evicted if p.id != back.id)
    back = back.replace(read=state.version + 1, reads=back.reads + 1, unseen=())
    return inserted(state, back, at, repair=repair).edited(evicted=left), at


def looked_back(state: State, backs: Sequence[Placed], at: int | None = None) -> State:
    """``backs``, which were evicted, at index ``at`` next to each other, the oldest first (None: each at its chronological
    place). All of them see what is in front of them now.

    Without that, one that is put back later would be unseen by another of them behind it, depending on their order.
    """
    for i, back in enumerate(sorted(backs, key=lambda b: b.arrival)):
        state, _ = recalled(state, back, None if at is None else at + i)
    ids = {p.id for p in backs}
    return state.replace(placed=tuple(p.replace(unseen=()) if p.id in ids else p for p in state.placed))


def reordered(state: State, ids: Sequence[str]) -> State:
    """In the order ``ids``. What moves behind a chunk is no longer unseen by it: should it move back, it is absorbed."""
    by_id = {p.id: p for p in state.placed}
    placed = []
    for i, placement in enumerate(ids):
        p = by_id[placement]
        placed.append(p.replace(unseen=tuple(u for u in p.unseen if u in ids[:i])) if p.unseen else p)
    return state.edited(placed=tuple(placed))


def changed(state: State, placement: str, **changes: Any) -> State:
    """With fields of one placed chunk changed; UnknownChunk where it is not placed."""
    i = state.index(placement)
    return state.edited(placed=(*state.placed[:i], state.placed[i].replace(**changes), *state.placed[i + 1 :]))


def evicted(state: State, leaving: Sequence[Placed]) -> State:
    """Without ``leaving``, which can be recalled."""
    out = {p.id for p in leaving}
    gone = (*state.evicted, *leaving)[-MAX_EVICTED:]
    # What leaves is no longer unseen: should it come back, that depends on how and where.
    kept = tuple(p.replace(unseen=tuple(u for u in p.unseen if u not in out)) for p in state.placed if p.id not in out)
    return state.edited(placed=kept, evicted=gone)


def forgotten(state: State, gone: Placed) -> State:
    """Without ``gone`` and without any KV that may carry something of it, directly or through what it was served behind."""

    def clean(placed: Placed) -> Placed:
        kv = placed.kv
        canonical = span_key(provenance_of(state.system_prompt_key, placed.chunk_id))
        # A removal patch lies over KV that absorbed what it removes.
        over_survivor = kv is not None and kv.patch is not None and kv.span != canonical
        if kv and (over_survivor or kv.carries(gone.id, gone.arrival)):
            return placed.replace(kv=None, unseen=())
        kv = kv and kv.model_copy(update={"base": None})
        return placed.replace(kv=kv, unseen=tuple(u for u in placed.unseen if u != gone.id))

    return state.edited(
        placed=tuple(clean(p) for p in state.placed if p.id != gone.id),
        evicted=tuple(clean(p) for p in state.evicted if p.id != gone.id),
    )


def leaving_for_budget(
    state: State, order: Iterable[str], reserve_tokens: int = 0, *, stay: Iterable[str] = ()
) -> list[Placed]:
    """The chunks whose eviction, in this order, brings the window with ``reserve_tokens`` tokens free within its budget.

    ``order`` is read no further than needed. Pinned chunks and ``stay`` stay. Raises BudgetExceeded where even all of it is not
    enough.
    """
    excess = state.tokens + reserve_tokens - state.budget
    leaving: list[Placed] = []
    if excess > 0:
        with closing(free_in_order(state, order, stay)) as free:
            for placed in free:
                leaving.append(placed)
                excess -= placed.tokens
                if excess <= 0:
                    break
    if excess > 0:
        needed = state.budget + excess
        raise BudgetExceeded(
            f"what must stay (pinned and recalled chunks, a question's own pictures) and the reserved tokens must fit the budget "
            f"of {state.budget} tokens, got {needed}; unpin some, show less at once, reserve less or raise the budget",
            needed=needed,
            budget=state.budget,
        )
    return leaving


def free_in_order(state: State, order: Iterable[str], stay: Iterable[str] = ()) -> Generator[Placed]:
    """The unpinned placed chunks that ``order`` names, each once, without ``stay``; UnknownChunk for others."""
    taken, by_id = set(stay), {p.id: p for p in state.placed}
    try:
        for placement in order:
            placed = by_id.get(placement) or state.placed[state.index(placement)]
            if not placed.pinned and placement not in taken:
                taken.add(placement)
                yield placed
    finally:
        if isinstance(order, Generator):
            order.close()  # now, not when it is collected: it may hold a fork


def sampled_orders(k: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Up to ``count`` distinct permutations of ``range(k)``: all of them where there are fewer."""
    rng = Random(seed)
    if k <= 7:
        every = list(permutations(range(k)))
        rng.shuffle(every)
        return every[:count]
    # So many that a few draws more find as many distinct ones: `MAX_ORDERS` is far below 8!.
    seen: dict[tuple[int, ...], None] = {}
    while len(seen) < count:
        seen[tuple(rng.sample(range(k), k))] = None
    return list(seen)
