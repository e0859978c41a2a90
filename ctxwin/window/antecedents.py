"""Antecedents: the chunks that preceded a chunk when its KV was computed. O(n) for n chunks, in memory and as JSON.

A window's chunks share one `Order`, which goes on with each chunk that is appended, and antecedents are a run of it: O(n) in a
stream, too, where every chunk is computed behind other ones than the one before it. As JSON a state has one list ``ids`` of
placement ids, and the antecedents of each chunk are ``[begin, length]``: a slice of it. Lists of ids would be O(n^2), too many
to be written after every edit of a long window.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_SPARE = 64
"""Ids that an order may have beyond twice those of a window."""
_growing = threading.Lock()


class Order:
    """Placement ids in prompt order, each once, of which chunks were conditioned on runs. It grows at its end alone.

    Windows that were forked share it until they differ, so it is thread-safe.

    Attributes:
        places: index by id.
    """

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self.ids: list[str] = []
        self.places: dict[str, int] = {}
        self.extend(list(ids))

    def extend(self, ids: Sequence[str]) -> None:
        """Append ``ids``."""
        self.places.update(zip(ids, range(len(self.ids), len(self.ids) + len(ids)), strict=True))
        self.ids += ids

    def run(self, begin: int, ids: list[str]) -> Antecedents | None:
        """Return ``ids`` as the run that begins here, and append those behind the end; None where other ids stand there.

        None as well for ids that it has elsewhere, and once more than half of it would have left: it must not grow forever.
        Cost: a comparison of the ids.
        """
        with _growing:
            known = self.ids[begin : begin + len(ids)]
            new = ids[len(known) :]
            if known != ids[: len(known)]:
                return None
            if new:
                too_long = len(self.ids) + len(new) > 2 * len(ids) + _SPARE
                if too_long or not self.places.keys().isdisjoint(new):
                    return None
                self.extend(new)
        return Antecedents(self, begin, len(ids))


class Antecedents(Sequence[str]):
    """The ids that preceded a chunk when its KV was computed: ``length`` ids of an order from ``begin`` on.

    Chunks of one window share one `Order`, so n of them take O(n) memory. As JSON it is a list.
    """

    __slots__ = ("begin", "length", "order")

    def __init__(self, ids: Iterable[str] | Order = (), begin: int = 0, length: int | None = None) -> None:
        self.order = ids if isinstance(ids, Order) else Order(ids)
        self.begin = begin
        self.length = len(self.order.ids) - begin if length is None else length

    @property
    def end(self) -> int:
        """Index in the order behind the last one."""
        return self.begin + self.length

    def place(self, placement: str) -> int:
        """Return the index of an id; -1 where it is none of these."""
        place = self.order.places.get(placement, -1) - self.begin
        return place if 0 <= place < self.length else -1

    def starts_with(self, ids: Sequence[str]) -> bool:
        """Return True if these are the first ones. O(1) for a run of the same order."""
        if isinstance(ids, Antecedents) and (ids.order, ids.begin) == (self.order, self.begin):
            return ids.length <= self.length
        return tuple(self)[: len(ids)] == tuple(ids)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        where = range(self.begin, self.end)[index]
        return self.order.ids[where] if isinstance(where, int) else tuple(map(self.order.ids.__getitem__, where))

    def __iter__(self) -> Iterator[str]:
        return iter(self.order.ids[self.begin : self.end])

    def __contains__(self, placement: object) -> bool:
        return isinstance(placement, str) and self.place(placement) >= 0

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Antecedents) and other.order is self.order:
            return other.length == self.length and (other.begin == self.begin or not self.length)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def checked(value: Any) -> Antecedents:
            if isinstance(value, cls):
                return value
            if not isinstance(value, list | tuple) or not all(isinstance(i, str) for i in value):
                raise ValueError(f"antecedents must be a list of placement ids, got {value!r}"[:200])
            return cls(value)

        listed = core_schema.plain_serializer_function_ser_schema(list)
        return core_schema.no_info_plain_validator_function(checked, serialization=listed)


def pack(data: dict[str, Any], fronts: Mapping[str, Sequence[Antecedents | None]]) -> dict[str, Any]:
    """Return a dumped state with its antecedents as slices.

    Args:
        data: the state as it is dumped; changed in place.
        fronts: of each ``placed`` and of each ``evicted`` chunk; None for one without KV.
    """
    ids: list[str] = []
    places: dict[str, int] = {}
    extents: dict[Order, tuple[int, int]] = {}
    slots: list[tuple[dict[str, Any], Antecedents]] = []
    for name, antecedents in fronts.items():
        for chunk, front in zip(data.get(name, ()), antecedents, strict=False):  # none where they are left out
            if front is not None and chunk.get("kv"):
                slots.append((chunk["kv"], front))
                begin, end = extents.get(front.order, (front.begin, front.end)) if front else (0, 0)
                if front:
                    extents[front.order] = min(begin, front.begin), max(end, front.end)
    shifts = {order: _add(ids, places, order.ids[begin:end]) - begin for order, (begin, end) in extents.items()}
    for kv, front in slots:
        kv["antecedents"] = [shifts[front.order] + front.begin if front else 0, len(front)]
        data["ids"] = ids
    return data


def _add(ids: list[str], places: dict[str, int], run: list[str]) -> int:
    """Return where ``run`` stands in ``ids``, as a part of it or behind it; ``places``: the last index of each id."""
    begin = places.get(run[0], len(ids))
    shared = len(ids[begin : begin + len(run)])
    if ids[begin : begin + shared] != run[:shared]:  # another order of the same chunks
        begin, shared = len(ids), 0
    for placement in run[shared:]:
        places[placement] = len(ids)
        ids.append(placement)
    return begin


def count(data: Any) -> int:
    """Return the total number of antecedent ids in the JSON of a state, which is what `unpack` will hold."""
    lengths = (front[1] for _, front in _slices(data)) if isinstance(data, dict) else ()
    return sum(length for length in lengths if isinstance(length, int))


def unpack(data: dict[str, Any]) -> dict[str, Any]:
    """Return the dict that `pack` was given, with `Antecedents`. Raises ValueError for a malformed slice.

    Cost: O(`count`). Bound it before unpacking states from untrusted sources.
    """
    ids = data["ids"]
    if not isinstance(ids, list | tuple) or not all(isinstance(i, str) for i in ids):
        raise ValueError("ids must be a list of placement ids; send the snapshot as its window gave it")
    longest: dict[int, int] = {}
    for _, (begin, length) in _slices(data):
        if not (type(begin) is type(length) is int and 0 <= begin <= begin + length <= len(ids)):
            raise ValueError(f"antecedents must be a slice of {len(ids)} ids, got {[begin, length]!r}"[:200])
        longest[begin] = max(length, longest.get(begin, 0))
    runs: dict[int, tuple[Order, int]] = {}  # by where they begin: an order, and its index in it
    order, first, end = Order(), 0, 0
    for begin, length in sorted(longest.items()):
        more = ids[end : begin + length]
        too_long = begin + length - first > 2 * length + _SPARE
        if too_long or not order.places.keys().isdisjoint(more) or len(set(more)) < len(more):
            order, first, end, more = Order(), begin, begin, ids[begin : begin + length]
        order.extend(more)
        end = max(end, begin + length)
        runs[begin] = order, begin - first
    unpacked = {name: value for name, value in data.items() if name != "ids"}
    for name in ("placed", "evicted"):
        if isinstance(chunks := data.get(name), list | tuple):
            unpacked[name] = list(chunks)
    for (name, i), (begin, length) in _slices(data):
        chunk = unpacked[name][i]
        unpacked[name][i] = {**chunk, "kv": {**chunk["kv"], "antecedents": Antecedents(*runs[begin], length)}}
    return unpacked


def _slices(data: dict[str, Any]) -> Iterator[tuple[tuple[str, int], Sequence[Any]]]:
    """Yield the position (list name, index) and the ``[begin, length]`` pair of each chunk's antecedents."""
    for name in ("placed", "evicted"):
        chunks = data.get(name)
        for i, chunk in enumerate(chunks if isinstance(chunks, list | tuple) else ()):
            kv = chunk.get("kv") if isinstance(chunk, dict) else None
            front = kv.get("antecedents") if isinstance(kv, dict) else None
            if isinstance(front, list | tuple) and len(front) == 2 and not isinstance(front[0], str):
                yield (name, i), front
