"""Antecedents: the chunks that preceded a chunk when its KV was computed. O(n) for n chunks, in memory and as JSON.

As JSON a state has one list ``ids`` of placement ids, and the antecedents of each chunk are ``[begin, length]``: a slice of
it. Lists of ids would be O(n^2), too many to be written after every edit of a long window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Order:
    """Placement ids in prompt order, shared by all chunks that were conditioned on a prefix of them."""

    def __init__(self, ids: Iterable[str]) -> None:
        self.ids = tuple(ids)

    @cached_property
    def places(self) -> dict[str, int]:
        """Index by id."""
        return {placement: i for i, placement in enumerate(self.ids)}


class Antecedents(Sequence[str]):
    """The ids that preceded a chunk when its KV was computed: the first ``length`` of an order.

    Chunks that were computed together share one `Order`, so n of them take O(n) memory. As JSON it is a list.
    """

    __slots__ = ("length", "order")

    def __init__(self, ids: Iterable[str] | Order = (), length: int | None = None) -> None:
        self.order = ids if isinstance(ids, Order) else Order(ids)
        self.length = len(self.order.ids) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.order.ids[: self.length][index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.order.ids[: self.length])

    def __contains__(self, placement: object) -> bool:
        return self.order.places.get(placement, self.length) < self.length  # type: ignore[call-overload, no-any-return]

    def __eq__(self, other: object) -> bool:
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
    for name, antecedents in fronts.items():
        for chunk, front in zip(data.get(name, ()), antecedents, strict=False):  # none where they are left out
            if front is None or not chunk.get("kv"):
                continue
            begin = places.get(front[0], len(ids)) if front else 0
            shared = len(ids[begin : begin + len(front)])
            if ids[begin : begin + shared] != list(front[:shared]):  # another order of the same chunks
                begin, shared = len(ids), 0
            for placement in front[shared:]:
                places[placement] = len(ids)
                ids.append(placement)
            chunk["kv"]["antecedents"] = [begin, len(front)]
            data["ids"] = ids
    return data


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
    orders = {begin: Order(ids[begin : begin + length]) for begin, length in longest.items()}
    unpacked = {name: value for name, value in data.items() if name != "ids"}
    for name in ("placed", "evicted"):
        if isinstance(chunks := data.get(name), list | tuple):
            unpacked[name] = list(chunks)
    for (name, i), (begin, length) in _slices(data):
        chunk = unpacked[name][i]
        unpacked[name][i] = {**chunk, "kv": {**chunk["kv"], "antecedents": Antecedents(orders[begin], length)}}
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
