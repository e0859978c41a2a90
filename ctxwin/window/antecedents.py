"""Antecedents: the chunks that preceded a chunk when its KV was computed. O(n) for n chunks, in memory and as JSON.

A window's chunks share one `Order` of placement ids, which goes on with each chunk that is appended. Antecedents are a run of it
in one of its versions, which differ by ids that left from between others: O(n) in a stream, too, where every chunk is computed
behind other ones than the one before it. Lists of ids would be O(n^2), too many to be written after every edit of a long window.

As JSON a state has a list ``orders``, each with its ids and the indices of those that left, or came back, one after another.
Antecedents are ``[order, begin, end, version]``: what stands from ``begin`` up to ``end`` after the first ``version`` of these
steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, count, repeat
from operator import itemgetter
from typing import Any

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_SPARE = 64
"""Ids, and versions, that an order may have beyond twice the ids of a window."""
_growing = threading.Lock()


class Order:
    """Placement ids in prompt order, of which chunks were conditioned on runs. It grows at its end alone.

    Version 0 has all of its ids. Every other one has one id more or less than an earlier version, from which it follows, so
    that windows that were forked share an order, too. Thread-safe.

    Attributes:
        places: index by id; repeats: whether an id stands here twice, as a snapshot from anybody may have it.
        versions: of each, the version from which it follows and the index of the id that left or came back.
    """

    def __init__(self, ids: Iterable[str] = (), steps: Iterable[int] = ()) -> None:
        self.ids = list(ids)
        self.places = dict(zip(self.ids, count(), strict=False))
        self.repeats = len(self.places) < len(self.ids)
        self.versions = [(0, 0), *zip(count(), steps, strict=False)]
        self._following = dict(zip(self.versions[1:], count(1), strict=False))
        self._masks: list[tuple[int, bytearray]] = [(0, bytearray())]

    def path(self, start: int, end: int) -> list[int]:
        """Return the indices whose ids leave or come back between two versions; an index twice does neither."""
        steps: list[int] = []
        while start != end:
            start, end = min(start, end), max(start, end)
            end, step = self.versions[end]
            steps.append(step)
        return steps

    def members(self, version: int) -> bytearray:
        """Return 1 for each id that a version has, 0 for the others; not to be changed. Cost: of the way from the nearest
        version that was asked for before, and a copy."""
        near, mask = min(self._masks, key=lambda other: abs(other[0] - version))
        others = [(v, m) for v, m in self._masks if m is not mask]
        if near != version or len(mask) < len(self.ids):
            others, mask = [(near, mask), *others], mask + b"\1" * (len(self.ids) - len(mask))
            for index in self.path(near, version):
                mask[index] ^= 1
        self._masks = [(version, mask), *(k for k in others if k[0] != version)][:4]
        return mask

    def run(self, version: int, ids: list[str]) -> Antecedents | None:
        """Return ``ids`` as a run of the version that has just these, appending those that are new; None where they stand in
        another order here.

        None as well once more than half of it would have left: it must not grow forever. Cost: a comparison of the ids, and a
        version for each id that has left or come back since ``version``.
        """
        with _growing:
            size, begin = len(self.ids), self.places.get(ids[0], -1)
            known = self.ids[begin : begin + len(ids)]
            new = ids[len(known) :]
            has_grown = not new or (size + len(new) <= 2 * len(ids) + _SPARE and self.places.keys().isdisjoint(new))
            if not version and not self.repeats and begin >= 0 and has_grown and known + new == ids:
                self.places.update(zip(new, count(size), strict=False))
                self.ids += new
                return Antecedents(self, begin, begin + len(ids), len(ids))
            places = np.array([*map(self.places.get, ids, repeat(size))])
            shared = int(np.count_nonzero(places < size))
            in_order = bool((np.diff(places[:shared]) > 0).all() and (places[shared:] == size).all())
            if not shared or not in_order or self.repeats:
                return None
            new = ids[shared:]
            end = size if new else int(places[-1]) + 1
            members = np.zeros(end - begin, dtype=bool)
            members[places[:shared] - begin] = True
            steps = (begin + np.flatnonzero(members != Antecedents(self, begin, end, 0, version).members)).tolist()
            grown = max(size + len(new), len(self.versions) + len(steps)) if new or steps else 0
            if grown > 2 * len(ids) + _SPARE:
                return None
            for step in steps:
                following = self._following.setdefault((version, step), len(self.versions))
                if following == len(self.versions):
                    self.versions.append((version, step))
                version = following
            self.places.update(zip(new, count(size), strict=False))
            self.ids += new
        return Antecedents(self, begin, end + len(new), len(ids), version)


class Ids(Sequence[str]):
    """Ids that are listed when they are read; equal to the tuple of them."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Antecedents(Ids):
    """The ids that preceded a chunk when its KV was computed: those of a version of an order from ``begin`` up to ``end``.

    Chunks of one window share one `Order`, so n of them take O(n) memory. As JSON it is a list.
    """

    __slots__ = ("begin", "end", "length", "order", "version")

    def __init__(
        self, ids: Iterable[str] | Order = (), begin: int = 0, end: int = -1, length: int = -1, version: int = 0
    ) -> None:
        self.order = ids if isinstance(ids, Order) else Order(ids)
        self.begin, self.version = begin, version
        self.end = len(self.order.ids) if end < 0 else end
        self.length = self.end - begin if length < 0 else length

    @property
    def run(self) -> tuple[Order, int, int]:
        """What names them, beside how many they are: order, begin and version."""
        return self.order, self.begin, self.version

    @property
    def whole(self) -> bool:
        """True if nothing has left from between them."""
        return self.length == self.end - self.begin

    @property
    def members(self) -> np.ndarray:
        """Of each id of the order from ``begin`` up to ``end`` whether it is one of these."""
        return np.frombuffer(self.order.members(self.version), dtype=bool)[self.begin : self.end]

    def through(self, last: str, length: int) -> Antecedents:
        """Return the first ``length`` ids of this version, which end with ``last``."""
        end = self.order.places.get(last, self.end - 1) + 1
        return Antecedents(self.order, self.begin, end, length, self.version)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[str]:
        ids = self.order.ids[self.begin : self.end]
        return iter(ids) if self.whole else compress(ids, self.order.members(self.version)[self.begin : self.end])

    def __contains__(self, placement: object) -> bool:
        if self.order.repeats:
            return placement in tuple(self)
        place = self.order.places.get(placement, -1) if isinstance(placement, str) else -1
        return self.begin <= place < self.end and (self.whole or bool(self.order.members(self.version)[place]))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Antecedents):
            if other.length != self.length:
                return False
            if other.run == self.run:
                return True
        return super().__eq__(other)

    __hash__ = Ids.__hash__

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def checked(value: Any) -> Antecedents:
            if isinstance(value, cls):
                return value
            if not isinstance(value, list | tuple) or not all(isinstance(i, str) for i in value):
                raise ValueError(f"antecedents must be a list of placement ids, got {value!r}"[:200])
            return cls(value)

        ids = core_schema.list_schema()  # or the numbers of a run, in a snapshot
        listed = core_schema.plain_serializer_function_ser_schema(list, return_schema=ids)
        return core_schema.no_info_plain_validator_function(checked, serialization=listed, json_schema_input_schema=ids)


class Numbers:
    """Numbers by placement id, read for a run at once."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers, self._orders = numbers, dict[Order, np.ndarray]()

    def of(self, run: Antecedents) -> np.ndarray:
        """Return the number of each id, -1 where it has none."""
        if run.order not in self._orders:
            self._orders[run.order] = np.array([self._numbers.get(placement, -1) for placement in [*run.order.ids]])
        numbers = self._orders[run.order][run.begin : run.end]
        return numbers if run.whole else numbers[run.members]


def pack(data: dict[str, Any], antecedents: Mapping[str, Sequence[Antecedents | None]]) -> dict[str, Any]:
    """Return a dumped state with its antecedents as runs of orders.

    Args:
        data: the state as it is dumped; changed in place.
        antecedents: of each ``placed`` and of each ``evicted`` chunk; None for one without KV.
    """
    runs: dict[Order, list[tuple[dict[str, Any], Antecedents]]] = {}
    for name, listed in antecedents.items():
        for chunk, run in zip(data.get(name, ()), listed, strict=False):  # none where they are left out
            if run and chunk.get("kv"):
                runs.setdefault(run.order, []).append((chunk["kv"], run))
    for order, conditioned in runs.items():
        begin, end = min(run.begin for _, run in conditioned), max(run.end for _, run in conditioned)
        last, steps, numbers = 0, list[int](), dict[int, int]()
        for version in sorted({run.version for _, run in conditioned}):
            steps += [step - begin for step in order.path(last, version) if begin <= step < end]
            last, numbers[version] = version, len(steps)
        orders = data.setdefault("orders", [])
        for kv, run in conditioned:
            kv["antecedents"] = [len(orders), run.begin - begin, run.end - begin, numbers[run.version]]
        orders.append([order.ids[begin:end], steps])
    return data


def unpack(data: dict[str, Any]) -> dict[str, Any]:
    """Return the dict that `pack` was given, with `Antecedents`. Raises ValueError for a malformed one."""
    listed = data["orders"]
    orders = list(map(_order, listed if isinstance(listed, list | tuple) else [listed]))
    unpacked = {name: value for name, value in data.items() if name != "orders"}
    runs = []
    for name in ("placed", "evicted"):
        chunks = unpacked[name] = list(data[name]) if isinstance(data.get(name), list | tuple) else data.get(name, ())
        for i, chunk in enumerate(chunks if isinstance(chunks, list) else ()):
            kv = chunk.get("kv") if isinstance(chunk, dict) else None
            packed = kv.get("antecedents") if isinstance(kv, dict) else None
            if isinstance(packed, list | tuple) and len(packed) == 4 and not isinstance(packed[0], str):
                runs.append((_bounds(packed, orders), chunks, i))
    for (order, version, begin, end), chunks, i in sorted(runs, key=itemgetter(0)):
        length = orders[order].members(version).count(1, begin, end)
        kv = {**chunks[i]["kv"], "antecedents": Antecedents(orders[order], begin, end, length, version)}
        chunks[i] = {**chunks[i], "kv": kv}
    return unpacked


def _order(order: Any) -> Order:
    ids, steps = order if isinstance(order, list | tuple) and len(order) == 2 else (order, order)
    lists = isinstance(ids, list | tuple) and isinstance(steps, list | tuple) and all(isinstance(i, str) for i in ids)
    if not lists or not all(type(i) is int and 0 <= i < len(ids) for i in steps):
        raise ValueError("an order must have ids, and indices of some of them; send the snapshot as its window gave it")
    return Order(ids, steps)


def _bounds(packed: Sequence[Any], orders: Sequence[Order]) -> tuple[int, int, int, int]:
    """Return order, version, begin and end of antecedents."""
    if all(type(i) is int for i in packed):
        order, begin, end, version = packed
        source = orders[order] if 0 <= order < len(orders) else Order()
        if 0 <= version < len(source.versions) and 0 <= begin <= end <= len(source.ids) and source.ids:
            return order, version, begin, end
    raise ValueError(f"antecedents must be a run of an order of the snapshot, got {packed!r}"[:200])
