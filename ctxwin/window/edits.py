"""Pure functions from one window state to the next, on which the methods of `Window` are built."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from ctxwin.errors import BudgetExceeded
from ctxwin.validation import check_integer
from ctxwin.window.events import Op
from ctxwin.window.placed_list import PlacedList
from ctxwin.window.state import Placed, State, provenance_of, span_key

# Evicted chunks a window remembers; the oldest are dropped, so that an endless stream stays bounded.
MAX_EVICTED = 4096
_FEW = 64
"""Chunks of an order that are looked up one by one, before all are listed."""


def normalize_index(index: int, length: int) -> int:
    """Return ``index`` in 0..length; negative ones count from the end as in ``list.insert``. Raises ValueError outside."""
    check_integer("index", index, -length, length)
    return index + length if index < 0 else index


def merge_versions(previous: State, after: State) -> State:
    """Return ``after``, which several edits made of ``previous``, as the version that follows ``previous``."""
    version = previous.version + 1
    if after.version <= version:
        return after
    return after.replace(version=version, placed=after.placed.read_until(version))


def append(state: State, entry: Placed) -> State:
    """Return the state with ``entry`` appended."""
    end = len(state.placed)
    return state.edited(arrivals=state.arrivals + 1, placed=state.placed.splice(end, end, [entry]))


def insert(state: State, entry: Placed, index: int, *, repair: bool = False) -> State:
    """Return the state with ``entry`` at ``index``. Later chunks keep their KV without having attended to it, unless ``repair``:
    then stale ones lose theirs."""
    if not repair:
        return state.replace(placed=state.placed.splice(index, index, [entry], late=(entry.id,)))
    stale = stale_dependents(entry.id, state.placed, index)
    return state.replace(placed=state.placed.changed(stale, kv=None, unseen=()).splice(index, index, [entry]))


def stale_dependents(placement: str, placed: PlacedList[Placed], begin: int = 0) -> set[str]:
    """Return the ids from index ``begin`` on whose KV is stale once ``placement`` precedes them: chunks that never absorbed it
    and, by the edges of the cascade graph, chunks that absorbed one of those.

    A chunk that absorbed it before it left, and no stale chunk, is not stale. Cost: of what follows the first one that is.
    """
    stale: set[str] = set()
    for p in placed[placed.absorbed_until(placement, begin) :]:
        if p.kv is None or placement not in p.kv.antecedents or not stale.isdisjoint(p.kv.antecedents):
            stale.add(p.id)
    return stale


def recall(state: State, back: Placed, at: int | None, *, repair: bool = False) -> tuple[State, int]:
    """Return the state with evicted ``back`` at index ``at`` (None: before the first chunk that arrived later), and that index.

    Its former ``unseen`` is dropped: it must absorb all that precedes it now.
    """
    if at is None:
        at = state.placed.place_behind(back.arrival)
    at = normalize_index(at, len(state.placed))
    evicted = state.evicted.without([back.id])
    back = back.replace(read=state.version + 1, reads=back.reads + 1, unseen=(), tail=False)
    return insert(state, back, at, repair=repair).edited(evicted=evicted), at


def look_back(state: State, backs: Sequence[Placed], at: int | None = None, *, tail: bool = False) -> State:
    """Return the state with the evicted ``backs`` at index ``at`` next to each other, the oldest first (None: each at its
    chronological place). All of them must absorb what precedes them now.

    Otherwise one restored later would be unseen by an earlier one that follows it, depending on their order. ``tail``: see
    `Placed`.
    """
    for i, back in enumerate(sorted(backs, key=lambda b: b.arrival)):
        state, _ = recall(state, back, None if at is None else at + i)
    return state.replace(placed=state.placed.changed({back.id for back in backs}, unseen=(), tail=tail))


def free_tail(state: State) -> list[Placed]:
    """Return the unpinned chunks that a look back placed at the end and that nothing computed follows, the last first: the
    prefix stands without them."""
    tail: list[Placed] = []
    for entry in reversed(state.placed):
        if entry.tail and not entry.pinned:
            tail.append(entry)
        elif entry.kv is not None:
            break
    return tail


def reorder(state: State, ids: Sequence[str]) -> State:
    """Return the state in the order ``ids``. A chunk that moves after another is no longer unseen by it: if it moves back, it is
    absorbed."""
    by_id, places = {p.id: p for p in state.placed}, {placement: i for i, placement in enumerate(ids)}
    entries = []
    for i, placement in enumerate(ids):
        p = by_id[placement]
        if p.unseen or p.tail or "insert" in p.pending:
            pending = {edit: detail for edit, detail in p.pending.items() if edit != "insert"}
            p = p.replace(unseen=tuple(u for u in p.unseen if places.get(u, i) < i), tail=False, pending=pending)
        entries.append(p)
    return state.edited(placed=tuple(entries))


def first_break(previous: State, after: State) -> int | None:
    """Return the index of the first chunk of ``after`` that is another one than in ``previous``, from where on exact KV must be
    computed again; None where the prefix stands. Another view of a chunk is none: it may be taken back to the same bytes."""
    pairs = enumerate(zip(previous.placed, after.placed, strict=False))
    return next((i for i, (old, new) in pairs if old.id != new.id), None)


def add_pending(state: State, placement: str, edit: Literal["evict", "toggle", "insert"]) -> State:
    """Return the state in which ``edit`` of a placed chunk waits. Raises UnknownChunk."""
    return update_entry(state, placement, pending={**state.placed[state.index(placement)].pending, edit: ""})


def drop_pending(state: State, placement: str, edit: Literal["evict", "toggle", "insert"]) -> State:
    """Return the state in which ``edit`` of a placed chunk waits no longer. Raises UnknownChunk."""
    waiting = state.placed[state.index(placement)].pending
    return update_entry(state, placement, pending={key: value for key, value in waiting.items() if key != edit})


def pending_evictions(state: State) -> list[Placed]:
    """Return the chunks whose eviction waits for a break of the prefix."""
    return [p for p in state.placed.pending if "evict" in p.pending]


Applied = tuple[Op, list[str], str]
"""A lazy edit that was applied: operation, ids and note of its event."""


def apply_pending(state: State, start: int = 0) -> tuple[State, list[Applied]]:
    """Return the state behind its lazy edits of places from ``start`` on, and what they did.

    An inserted chunk stays at the end where the chunk that it was to go before has left.
    """
    done: list[Applied] = []
    if leaving := pending_evictions(state.replace(placed=state.placed[start:])):
        state = evict(state, leaving)
        done.append(("evict", [p.id for p in leaving], ""))
    order = [p.id for p in state.placed]
    preceding = order[:start]
    for entry in state.placed:
        anchor = entry.pending.get("insert")
        if anchor is not None and anchor not in preceding:
            state = drop_pending(state, entry.id, "insert")
            if anchor in order:
                order.remove(entry.id)
                order.insert(order.index(anchor), entry.id)
    if order != [p.id for p in state.placed]:
        by_id = {p.id: p for p in state.placed}
        moved = (p.replace(tail=by_id[p.id].tail, pending=by_id[p.id].pending) for p in reorder(state, order).placed)
        state = state.edited(placed=tuple(moved))
        done.append(("reorder", order, ""))
    for entry in state.placed[start:]:
        if "toggle" in entry.pending:
            state = drop_pending(state, entry.id, "toggle")
            state = update_entry(state, entry.id, conditioned=not entry.conditioned)
            done.append(("toggle", [entry.id], ("conditioned", "clean")[entry.conditioned]))
    return state, done


def apply_if_broken(previous: State, after: State) -> tuple[State, list[Applied]]:
    """Return ``after``, behind those of its lazy edits that stand where the prefix of ``previous`` is broken, and what they did.

    What waits in front of the break goes on waiting: there the prefix stands.
    """
    start = first_break(previous, after) if after.placed.pending else None
    return (after, []) if start is None else apply_pending(after, start)


def update_entry(state: State, placement: str, **changes: Any) -> State:
    """Return the state with fields of one placed chunk changed. Raises UnknownChunk if it is not placed."""
    i = state.index(placement)
    return state.edited(placed=state.placed.splice(i, i + 1, [state.placed[i].replace(**changes)]))


def evict(state: State, leaving: Sequence[Placed]) -> State:
    """Return the state without ``leaving``, which can be recalled."""
    departed = (
        p.replace(conditioned=p.conditioned != ("toggle" in p.pending), pending={}) if p.pending else p for p in leaving
    )
    end = len(state.evicted)
    evicted = state.evicted.splice(end, end, departed).newest(MAX_EVICTED)
    # A chunk that leaves is no longer unseen: how and where it comes back decides.
    return state.edited(placed=state.placed.without(p.id for p in leaving), evicted=evicted)


def forget(state: State, target: Placed) -> State:
    """Return the state without ``target`` and without any KV that may carry something of it, directly or through others."""

    def clean(entry: Placed) -> Placed:
        kv = entry.kv
        canonical = span_key(provenance_of(state.system_prompt_key, entry.chunk_id))
        # A removal patch lies over KV that absorbed what it removes.
        over_survivor = kv is not None and kv.patch is not None and kv.span != canonical
        if kv and (over_survivor or kv.carries(target.id, target.arrival)):
            return entry.replace(kv=None, unseen=())
        kv = kv and kv.model_copy(update={"base": None})
        return entry.replace(kv=kv, unseen=tuple(u for u in entry.unseen if u != target.id))

    placed, evicted = (tuple(clean(p) for p in some if p.id != target.id) for some in (state.placed, state.evicted))
    return state.edited(placed=placed, evicted=evicted)


def leaving_for_budget(
    state: State,
    order: Iterable[str],
    reserve_tokens: int = 0,
    *,
    stay: Collection[str] = (),
    mark: int | None = None,
    tail: Sequence[Placed] = (),
    exact: bool = False,
) -> list[Placed]:
    """Return the chunks whose eviction brings the window with ``reserve_tokens`` free within its budget.

    ``tail`` leaves first, and alone if that is enough; else what waits for its eviction, from the last one on, if that is enough;
    else others in this order, which is read no further than needed, with what waits behind the foremost of them. Then the window
    falls on to ``mark`` tokens (default: its own low-water mark), as far as chunks may leave and one of them is left. Pinned
    chunks and ``stay`` stay. Raises BudgetExceeded where even all of it is not enough.

    Args:
        exact: True for a window that is: it falls to its mark, too, where that computes fewer tokens for each one that is freed
            than evictions that wait.
    """
    check_integer("reserve_tokens", reserve_tokens, 0)
    excess = state.tokens + reserve_tokens - state.budget
    if mark is None and state.low_water != "auto":
        mark = state.low_water
    leaving: list[Placed] = []
    for entry in tail:
        if excess > 0 and entry.id not in stay:
            leaving.append(entry)
            excess -= entry.tokens
    if excess <= 0:
        return leaving
    out = {p.id for p in leaving}
    state = state.replace(placed=state.placed.without(out)) if out else state
    waiting = [p for p in reversed(pending_evictions(state)) if p.id not in stay]
    alone = [waiting[:n] for n, tokens in enumerate(accumulate(p.tokens for p in waiting), 1) if tokens >= excess]
    if alone and (mark is None or not exact):
        return [*leaving, *alone[0]]
    further = 0 if mark is None else max(0, state.budget - mark)
    fall = _fall(state, order, {*out, *stay}, excess, further, waiting)
    needed = state.budget + excess - sum(p.tokens for p in fall)
    if needed <= state.budget:
        alone.append(fall)
    if not alone:
        raise BudgetExceeded(
            f"what must stay (pinned and recalled chunks, a question's own pictures) and the reserved tokens must fit the budget "
            f"of {state.budget} tokens, got {needed}; unpin some, show less at once, reserve less or raise the budget",
            needed=needed,
            budget=state.budget,
        )
    cheapest = min(alone, key=partial(_tokens_computed, state)) if len(alone) > 1 else alone[0]
    return [*leaving, *cheapest]


def _fall(
    state: State, order: Iterable[str], excluded: Collection[str], excess: int, further: int, waiting: Sequence[Placed]
) -> list[Placed]:
    """Return what leaves in this order until ``excess`` tokens are free, and ``further`` ones as far as a chunk is left.

    What waits (the last first) leaves with it behind the foremost one, and in front of that where the excess needs it.
    """
    places = {p.id: i for i, p in enumerate(state.placed)} if waiting else {}
    foremost = count = len(state.placed)
    leaving: dict[str, Placed] = {}
    with closing(free_in_order(state, order, excluded)) as free:
        for entry in free:
            if excess <= 0 and len(leaving) + 1 >= count:
                break
            foremost = min(foremost, places.get(entry.id, 0))
            for one in (entry, *(p for p in waiting if places[p.id] > foremost)):
                if one.id not in leaving:
                    leaving[one.id] = one
                    excess -= one.tokens
            if excess <= -further:
                break
    for one in waiting:
        if excess > 0 and one.id not in leaving:
            leaving[one.id] = one
            excess -= one.tokens
    return list(leaving.values())


def _tokens_computed(state: State, leaving: Sequence[Placed]) -> float:
    """Return how many tokens an exact window computes without ``leaving`` for each one that this frees."""
    out = {p.id for p in leaving}
    first = next(i for i, p in enumerate(state.placed) if p.id in out)
    return sum(p.tokens for p in state.placed[first:] if p.id not in out) / sum(p.tokens for p in leaving)


def free_in_order(state: State, order: Iterable[str], stay: Iterable[str] = ()) -> Generator[Placed]:
    """Yield the unpinned placed chunks that ``order`` names, each once, without ``stay``. Raises UnknownChunk for other ids."""
    excluded, by_id = set(stay), dict[str, Placed]()
    try:
        for i, placement in enumerate(order):
            if placement in excluded:
                continue
            if i == _FEW:
                by_id = {p.id: p for p in state.placed}
            entry = by_id.get(placement) or state.placed[state.index(placement)]
            if not entry.pinned:
                excluded.add(placement)
                yield entry
    finally:
        if isinstance(order, Generator):
            order.close()  # now, not when it is collected: it may hold a fork
