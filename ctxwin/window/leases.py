"""Leases on the KV that a window's current version needs, followed from version to version."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from ctxwin.window.placed_list import PlacedList

if TYPE_CHECKING:
    from ctxwin.store.spans import SpanRepository
    from ctxwin.window.state import Placed


class Leases:
    """The keys that a window's chunks need, leased as far as they are stored. Not thread-safe.

    Attributes:
        keys: the leased ones.
    """

    def __init__(self, repo: SpanRepository) -> None:
        self._repo = repo
        self.keys: set[str] = set()
        self._placed: PlacedList[Placed] = PlacedList()
        self._uses: Counter[str] = Counter()
        self._unleased: set[str] = set()

    def fork(self) -> Leases:
        """Return leases of another window on what this one has leased. O(keys) in C; the store is not asked."""
        fork = Leases(self._repo)
        fork.keys, fork._placed = self.keys.copy(), self._placed
        fork._uses, fork._unleased = self._uses.copy(), self._unleased.copy()
        self._repo.lease_again(fork.keys)
        return fork

    def follow(self, placed: PlacedList[Placed]) -> None:
        """Lease what these chunks need, also what is stored by now, and release the rest. Cost: of what has changed."""
        leaving, coming = self._placed.difference(placed)
        self._placed = placed
        new = Counter(chain.from_iterable(p.keys for p in coming))
        self._uses.update(new)
        self._unleased.update(new.keys() - self.keys)
        self._uses.subtract(chain.from_iterable(p.keys for p in leaving))
        unused = {key for p in leaving for key in p.keys if not self._uses[key]}
        self._unleased -= unused
        for key in list(self._unleased):
            if self._repo.lease(key):
                self.keys.add(key)
                self._unleased.discard(key)
        for key in unused:
            del self._uses[key]
            if key in self.keys:
                self._repo.release(key)
                self.keys.discard(key)
