"""`PlacedList`: placements in prompt order, as a persistent list with an edit's look-ups.

A list is a row of blocks of at most 32 placements, each with the facts that edits ask for. An edit makes anew the blocks in which
something changes and copies pointers to the others: for n placements it takes O(n / 32) steps in C, some tens of nanoseconds
each, and Python only for what it changes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, chain, compress, count, filterfalse, repeat
from operator import add, attrgetter, contains, ge, gt, is_not, itemgetter, mul, not_, or_
from typing import Any, TypeVar, get_args, overload

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ctxwin.window.antecedents import Antecedents, Order

P = TypeVar("P")
"""`ctxwin.window.state.Placed`, whose module imports this one."""
SIZE = 32
"""Most placements of a block."""
_FIELDS = attrgetter("id", "tokens", "arrival", "read", "pending", "unseen", "kv")
_NAMES, _UNSEEN, _IDS, _COUNT = map(attrgetter, ("names", "unseen", "ids", "size"))
_ENTRIES, _CONTENT = attrgetter("entries"), attrgetter("content")
_RUN, _BEGIN, _END = map(attrgetter, ("run", "begin", "end"))
_FRONT = attrgetter("antecedents.order", "antecedents.version", "antecedents.begin", "antecedents.end")
_first, _last = itemgetter(0), itemgetter(-1)

Notes = tuple[str | frozenset[str], ...]
"""What the placements of a block have not seen since, and, as sets, what left of that which they had not seen before."""


class Content:
    """The placements of a block, which keep their store keys whatever they have not seen. Equal to itself alone."""

    __slots__ = ("entries",)

    def __init__(self, entries: tuple[Any, ...]) -> None:
        self.entries = entries


class Block:
    """Placements that follow one another. Equal to itself alone.

    Attributes:
        content: that of the block that it follows from, where only what was not seen differs.
        names: their ids; unseen: those that one of them has not seen.
        latest: the newest arrival.
        reads: when each was read, its arrival and its id, the least recently read first.
        run: the one order and version that the KV of all was conditioned on, from ``begin`` to ``end`` at least, or None.
    """

    __slots__ = (
        "begin", "content", "end", "entries", "ids", "latest", "names", "pending", "reads", "run", "size", "tokens", "unseen",
    )  # fmt: skip

    def __init__(self, entries: Sequence[Any], content: Content | None = None) -> None:
        self.entries, self.size = tuple(entries), len(entries)
        self.content = content or Content(self.entries)
        ids, tokens, arrivals, reads, pending, unseen, kvs = zip(*map(_FIELDS, entries), strict=True)
        self.ids: tuple[str, ...] = ids
        self.names, self.unseen = frozenset(ids), frozenset(chain.from_iterable(unseen))
        self.tokens, self.latest, self.pending = sum(tokens), max(arrivals), any(pending)
        self.reads = sorted(zip(reads, arrivals, ids, strict=True))
        self.run: tuple[Order, int] | None = None
        self.begin = self.end = 0
        if all(kvs):
            orders, versions, begins, ends = zip(*map(_FRONT, kvs), strict=True)
            run, *others = {*zip(orders, versions, strict=True)}
            self.run, self.begin, self.end = None if others else run, max(begins), min(ends)

    def with_unseen(self, notes: Notes) -> tuple[Any, ...]:
        """Return the placements behind what was placed in front of them, and what left, since."""
        return (*_noted(self.entries, notes),) if notes else self.entries


def _noted(entries: Sequence[Any], notes: Notes) -> Iterator[Any]:
    new = tuple(note for note in notes if isinstance(note, str))
    gone = {*chain.from_iterable(note for note in notes if not isinstance(note, str))}
    for p in entries:
        unseen = (*filterfalse(gone.__contains__, p.unseen), *new)
        yield p if unseen == p.unseen else p.replace(unseen=unseen)


def _meeting(ids: Set[str], sets: Iterable[frozenset[str]]) -> Iterator[bool]:
    """Yield whether each of the sets has one of ``ids``."""
    return map(not_, map(ids.isdisjoint, sets))


def _cut(entries: Sequence[Any], *, full: bool) -> list[Block]:
    """Return blocks of ``entries``: full ones and a rest, or ones of about the same size, which leave room to insert."""
    size = SIZE if full else -(-len(entries) // -(-len(entries) // SIZE or 1)) or 1
    return [Block(entries[i : i + size]) for i in range(0, len(entries), size)]


class PlacedList(Sequence[P]):
    """An immutable list of placements, equal to the tuple of them.

    What an insertion puts in front of others, and what leaves there again, is noted beside their blocks, and written into
    `Placed.unseen` when they are next read in order, as an ask does.
    """

    def __init__(self, blocks: Sequence[Block] = (), late: Sequence[Notes] = ()) -> None:
        # One attribute, so that a thread that reads meanwhile sees both of one kind.
        self._parts = tuple(blocks), tuple(late) or ((),) * len(blocks)
        self._ends: tuple[int, ...] = (*accumulate(map(_COUNT, blocks)),)
        if len(blocks) > 8 + 2 * len(self) // SIZE:  # edits left many small ones
            self._parts = PlacedList.of(self)._parts
            self._ends = (*accumulate(map(_COUNT, self._parts[0])),)

    @classmethod
    def of(cls, entries: Iterable[P]) -> PlacedList[P]:
        """Return a list of ``entries``. O(n)."""
        return cls(_cut((*entries,), full=True))

    @property
    def _blocks(self) -> tuple[Block, ...]:
        blocks, late = self._parts
        if any(late):
            pairs = zip(blocks, late, strict=True)
            blocks = tuple(Block(b.with_unseen(notes), b.content) if notes else b for b, notes in pairs)
            self._parts = blocks, ((),) * len(blocks)
        return blocks

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[P]:
        return chain.from_iterable(map(_ENTRIES, self._blocks))

    def __reversed__(self) -> Iterator[P]:
        return chain.from_iterable(map(reversed, map(_ENTRIES, reversed(self._blocks))))

    @overload
    def __getitem__(self, index: int) -> P: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[P, ...]: ...

    def __getitem__(self, index: Any) -> Any:
        """Return a placement in O(log n), or a tuple of some in O(n)."""
        if isinstance(index, slice):
            return (*self,)[index]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"index must be in {-len(self)}..{len(self) - 1}, got {index}")
        block, (blocks, late) = bisect_right(self._ends, at), self._parts
        entry = blocks[block].entries[at - self._ends[block]]  # counted from its end
        return next(_noted([entry], late[block])) if late[block] else entry

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Sequence) and (*self,) == (*other,))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr((*self,))

    @property
    def ids(self) -> tuple[str, ...]:
        """The placement ids in order."""
        return (*chain.from_iterable(map(_IDS, self._parts[0])),)

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return sum(map(attrgetter("tokens"), self._parts[0]))

    @property
    def pending(self) -> list[P]:
        """The placements that lazy edits wait for."""
        waiting = compress(zip(*self._parts, strict=True), map(attrgetter("pending"), self._parts[0]))
        return [p for block, late in waiting for p in block.with_unseen(late) if p.pending]

    def place_of(self, placement: str) -> int | None:
        """Return the index of a placement id; None where there is none."""
        blocks = self._parts[0] if isinstance(placement, str) else ()  # a list of ids, say, has no hash
        at = next(compress(count(), map(contains, map(_NAMES, blocks), repeat(placement))), None)
        return None if at is None else self._ends[at] - blocks[at].size + blocks[at].ids.index(placement)

    def get(self, placement: str) -> P | None:
        """Return the placement of this id; None where there is none."""
        at = self.place_of(placement)
        return None if at is None else self[at]

    def having(self, ids: Set[str]) -> list[P]:
        """Return the placements of these ids, in order."""
        some = compress(zip(*self._parts, strict=True), _meeting(ids, map(_NAMES, self._parts[0])))
        return [p for block, late in some for p in block.with_unseen(late) if p.id in ids]

    def place_behind(self, arrival: int) -> int:
        """Return the index of the first placement that arrived later; that behind the last one where there is none."""
        blocks = self._parts[0]
        later = map(gt, map(attrgetter("latest"), blocks), repeat(arrival))
        at = next(compress(count(), later), None)
        if at is None:
            return len(self)
        arrivals = (p.arrival > arrival for p in blocks[at].entries)
        return self._ends[at] - blocks[at].size + next(compress(count(), arrivals))

    def absorbed_until(self, placement: str, begin: int) -> int:
        """Return an index from ``begin`` on up to which the KV of all has absorbed ``placement``; of more, perhaps."""
        first = bisect_right(self._ends, begin)
        blocks = self._parts[0][first:]
        if blocks:
            blocks = Block(blocks[0].entries[begin - self._ends[first] :]), *blocks[1:]
        runs = [*map(_RUN, blocks)]
        known = (r for r in {*runs} if r and placement in Antecedents(r[0], length=0, version=r[1]))
        at = [*map({r: r[0].places[placement] for r in known}.get, runs, repeat(-1))]
        lacking = map(or_, map(gt, map(_BEGIN, blocks), at), map(ge, at, map(_END, blocks)))
        until: int = next(compress(accumulate(map(_COUNT, blocks), initial=begin), lacking), len(self))
        return until

    def least_recently_read(self) -> Iterator[str]:
        """Yield ids by `Placed.read`, the oldest arrival first among equals."""
        rows = [*map(attrgetter("reads"), self._parts[0])]
        heap = [*zip(map(_first, rows), count(), repeat(1))]
        heapify(heap)
        while heap:
            least, row, following = heap[0]
            yield least[-1]
            if following < len(rows[row]):
                heapreplace(heap, (rows[row][following], row, following + 1))
            else:
                heappop(heap)

    def splice(self, begin: int, end: int, entries: Iterable[P] = (), late: tuple[str, ...] = ()) -> PlacedList[P]:
        """Return the list with ``entries`` in place of those from ``begin`` up to ``end``; what follows has not seen ``late``."""
        (blocks, lates), ends = self._parts, self._ends
        first = bisect_right(ends, begin)
        if first and first == len(blocks) and blocks[-1].size < SIZE:
            first -= 1
        last = max(first, bisect_left(ends, end)) + 1
        offset = ends[first - 1] if first else 0
        touched = [*chain.from_iterable(map(Block.with_unseen, blocks[first:last], lates[first:last]))]
        preceding, following = [*touched[: begin - offset], *entries], touched[end - offset :]
        rest, rest_late = blocks[last:], lates[last:]
        if late and len(following) > SIZE // 4:
            rest, rest_late, following = (Block(following), *rest), ((), *rest_late), []
        if late:
            following = [p.replace(unseen=(*p.unseen, *late)) for p in following]
            rest_late = (*map(add, rest_late, repeat(late)),)
        new = _cut([*preceding, *following], full=not rest)
        return PlacedList((*blocks[:first], *new, *rest), (*lates[:first], *repeat((), len(new)), *rest_late))

    def newest(self, most: int) -> PlacedList[P]:
        """Return the list of its last placements, so many at most."""
        return self.splice(0, len(self) - most) if most < len(self) else self

    def without(self, ids: Iterable[str]) -> PlacedList[P]:
        """Return the list without these ids, also where others have not seen them."""
        gone, (blocks, late) = frozenset(ids), self._parts
        others: Any = partial(filterfalse, {*gone, gone}.__contains__)
        if any(late):
            late = (*map(tuple, map(others, late)),)
        stale = _meeting(gone, map(_UNSEEN, blocks))
        placed = PlacedList[P](blocks, (*map(add, late, map(mul, repeat((gone,)), stale)),))
        return placed._updated(_meeting(gone, map(_NAMES, blocks)), lambda entry: None if entry.id in gone else entry)

    def changed(self, ids: Set[str], **changes: Any) -> PlacedList[P]:
        """Return the list with these fields of these placements changed."""
        touched = _meeting(ids, map(_NAMES, self._parts[0]))
        return self._updated(touched, lambda entry: entry.replace(**changes) if entry.id in ids else entry)

    def read_until(self, version: int) -> PlacedList[P]:
        """Return the list where nothing was read behind ``version``."""

        def until(entry: Any) -> Any:
            return entry.replace(read=version) if entry.read > version else entry

        newest = map(_first, map(_last, map(attrgetter("reads"), self._parts[0])))
        return self._updated(map(gt, newest, repeat(version)), until)

    def _updated(self, touched: Iterable[object], change: Callable[[Any], P | None]) -> PlacedList[P]:
        """Return the list with what ``change`` makes of the placements in blocks that are ``touched``; it drops None."""
        blocks, late = self._parts
        new: list[Block | None] = [*blocks]
        lates = [*late]
        for at in compress(count(), touched):
            entries = [p for p in map(change, blocks[at].with_unseen(late[at])) if p is not None]
            new[at], lates[at] = Block(entries) if entries else None, ()
        return PlacedList([*filter(None, new)], [*compress(lates, new)])

    def followed_by(self, entries: Iterable[P]) -> PlacedList[P]:
        """Return a list of ``entries`` that shares the blocks in which they are the same objects at the same places. O(n)."""
        items, blocks, at = (*entries,), list[Block](), 0
        for block in self._blocks:
            some = items[at : at + block.size]
            same = len(some) == block.size and not any(map(is_not, some, block.entries))
            blocks += [block] if same else _cut(some, full=True)
            at += len(some)
        return PlacedList([*blocks, *_cut(items[at:], full=True)])

    @property
    def contents(self) -> frozenset[Content]:
        """The contents of its blocks."""
        return frozenset(map(_CONTENT, self._parts[0]))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def checked(value: Any, listed: Callable[[Any], tuple[P, ...]]) -> PlacedList[P]:
            return value if isinstance(value, cls) else cls.of(listed(value))

        entry = handler.generate_schema(get_args(source)[0])
        return core_schema.no_info_wrap_validator_function(
            checked, core_schema.tuple_schema([entry], variadic_item_index=0)
        )


def difference(ours: Set[Content], theirs: Set[Content]) -> tuple[list[Any], list[Any]]:
    """Return the placements, as objects, that only ``ours`` have, and those that only ``theirs`` have. Not in order."""
    only, rest = ([*chain.from_iterable(map(_ENTRIES, some))] for some in (ours - theirs, theirs - ours))
    by_id, rest_by_id = (dict(zip(map(id, some), some, strict=True)) for some in (only, rest))
    keys, rest_keys = by_id.keys() - rest_by_id.keys(), rest_by_id.keys() - by_id.keys()
    return [*map(by_id.__getitem__, keys)], [*map(rest_by_id.__getitem__, rest_keys)]


def unshared(olds: Sequence[PlacedList[Any]], news: Sequence[PlacedList[Any]]) -> int:
    """Return how many objects only some lists have, and others have not, once all of them were read in order."""
    ours, theirs = (set().union(*(zip(*one._parts, strict=True) for one in some)) for some in (olds, news))
    (only, changing), (rest, _) = map(_objects, (ours - theirs, theirs - ours))
    return len(only - rest) + changing


def _objects(parts: Iterable[tuple[Block, Notes]]) -> tuple[set[int], int]:
    """Return the identities of placements that stay the same once they are read in order, and the number of the others."""
    blocks, late = zip(*parts, strict=True) if parts else ((), ())
    same = chain.from_iterable(map(_ENTRIES, compress(blocks, map(not_, late))))
    return {*map(id, same)}, sum(map(_COUNT, compress(blocks, late)))
