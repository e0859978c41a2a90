"""Survivors: chunks whose KV stands though some of what preceded them has left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from ctxwin.window.antecedents import Antecedents, Order
from ctxwin.window.state import Placed


class Survival:
    """Test for survivors: chunks preceded by exactly their antecedents minus evicted ones, in the same order.

    An antecedent leaves by an eviction, or by being placed after the chunk. Chunks placed before it later by a recall
    or an insertion (``Placed.unseen``) do not count. Chunks that were conditioned together share an `Order` and are judged by
    running sums over it, so that a window of n chunks takes O(n); O(n^2) simple steps where what they absorbed went behind.

    Args:
        now: the ids of all placed chunks.
    """

    def __init__(self, now: Antecedents) -> None:
        self._now = now
        self._compared: dict[Order, _Comparison] = {}

    def of(self, entry: Placed, index: int) -> tuple[Sequence[str], Sequence[str]] | None:
        """Return ``not_attended`` and ``evicted_antecedents`` of the chunk at ``index`` if it survives, else None."""
        if entry.kv is None or entry.kv.lane == "edited":
            return None  # it has none, or only behind another system prompt
        was, now = entry.kv.antecedents, self._now
        if was.order is now.order and was.end == now.begin + index and was.begin <= now.begin:
            return (), Antecedents(was.order, was.begin, now.begin - was.begin)  # the first have left
        if was.order not in self._compared:
            self._compared[was.order] = _Comparison(was.order, now)
        comparison = self._compared[was.order].front(was, index, len(entry.unseen))
        if comparison is None:
            return None
        shared, missing = comparison
        fresh: tuple[str, ...] = ()
        if shared < index:
            places = {now.place(f): f for f in entry.unseen if f not in was}
            fresh = tuple(places[place] for place in sorted(places) if 0 <= place < index)
            if len(fresh) < index - shared:
                return None
        return fresh, missing


class _Comparison:
    """Comparison of an earlier order with the present one."""

    def __init__(self, was: Order, now: Antecedents) -> None:
        self._ids = list(was.ids)
        self._places = np.array([now.place(placement) for placement in self._ids], dtype=np.int64)
        standing = self._places[self._places >= 0].tolist()
        # By how many ids of the earlier order count: how many of those are placed. And by how many of the placed ones count: the
        # place of the next, and how often one of them stands behind the next one.
        self._left = [0, *np.cumsum(self._places >= 0).tolist()]
        self._standing, self._turns = standing, [0, 0, *accumulate(int(a > b) for a, b in pairwise(standing))]
        self._gone = Order(p for p, place in zip(self._ids, self._places, strict=True) if place < 0)

    def front(self, was: Antecedents, index: int, most: int) -> tuple[int, Sequence[str]] | None:
        """Return how many of an earlier run's ids precede ``index``, and the others; None if the order differs, or if more than
        ``most`` other chunks precede it."""
        begin, end = self._left[was.begin], self._left[was.end]
        shared, gone = end - begin, was.length - (end - begin)
        if not shared or (self._turns[end] == self._turns[begin + 1] and self._standing[end - 1] < index):
            if index - shared > most:
                return None
            if self._left[was.begin + gone] == begin:  # the first ones
                return shared, Antecedents(was.order, was.begin, gone)
            return shared, Antecedents(self._gone, was.begin - begin, gone)
        places = self._places[was.begin : was.end]
        here = (places >= 0) & (places < index)
        shared = int(np.count_nonzero(here))
        if index - shared > most or (np.diff(places[here]) < 0).any():
            return None
        return shared, tuple(self._ids[was.begin + i] for i in np.flatnonzero(~here))
