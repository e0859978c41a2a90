"""Survivors: chunks whose KV stands though some of what preceded them has left."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice

import numpy as np

from ctxwin.window.antecedents import Antecedents, Ids, Numbers
from ctxwin.window.state import Placed


@dataclass(frozen=True, eq=False, repr=False)
class Evicted(Ids):
    """The ``length`` ids of ``was`` that are not in ``now``, listed when they are read. ``first``: whether they are its first."""

    was: Antecedents
    now: Antecedents
    length: int
    first: bool = True

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[str]:
        now = () if self.first else set(self.now)
        return islice((placement for placement in self.was if placement not in now), self.length)


class Survival:
    """Test for survivors: chunks preceded by exactly their antecedents minus evicted ones, in the same order.

    An antecedent leaves by an eviction, or by being placed after the chunk. Chunks placed before it later by a recall
    or an insertion (``Placed.unseen``) do not count. O(1) for a chunk of which the first antecedents left; for others O(n)
    simple steps of numpy.

    Args:
        now: the ids of all placed chunks.
    """

    def __init__(self, now: Antecedents) -> None:
        self._now = now

    @cached_property
    def _places(self) -> dict[str, int]:
        return dict(zip(self._now, count(), strict=False))

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers(self._places)

    def of(self, entry: Placed, preceding: Antecedents) -> tuple[Sequence[str], Evicted] | None:
        """Return ``not_attended`` and ``evicted_antecedents`` of a chunk behind ``preceding`` if it survives, else None."""
        if entry.kv is None or entry.kv.lane == "edited":
            return None  # it has none, or only behind another system prompt
        was, now, index = entry.kv.antecedents, self._now, preceding.length
        whole = was.order is now.order and was.whole and now.whole
        if whole and was.end == now.begin + index and was.begin <= now.begin:
            return (), Evicted(was, preceding, now.begin - was.begin)
        places = self._numbers.of(was)
        here = (places >= 0) & (places < index)
        shared = int(np.count_nonzero(here))
        if index - shared > len(entry.unseen) or (was.order is not now.order and (np.diff(places[here]) < 0).any()):
            return None
        fresh: tuple[str, ...] = ()
        if shared < index:
            unseen = {self._places.get(f, -1): f for f in entry.unseen if f not in was}
            fresh = tuple(unseen[place] for place in sorted(unseen) if 0 <= place < index)
            if len(fresh) < index - shared:
                return None
        gone = was.length - shared
        return fresh, Evicted(was, preceding, gone, bool(here[gone:].all()))
