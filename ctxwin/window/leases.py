"""Leases on the KV that the current versions of a window and of its forks need."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from itertools import chain, compress, repeat
from operator import eq, not_
from typing import TYPE_CHECKING

from ctxwin.window.placed_list import Content, PlacedList, difference

if TYPE_CHECKING:
    from ctxwin.store.spans import SpanRepository
    from ctxwin.window.state import Placed


class Leases:
    """The keys that the chunks of a window and its forks need, leased once as far as they are stored. Thread-safe.

    Counted are the windows at each list of chunks, the lists that have each block, and the uses of each key in blocks, so that a
    fork adds to one number, and an edit changes those of what it changes.

    Attributes:
        keys: the leased ones.
    """

    def __init__(self, repo: SpanRepository) -> None:
        self.keys: set[str] = set()
        self._repo, self._lock = repo, threading.Lock()
        self._windows: Counter[int] = Counter()  # by the identity of their list
        self._lists: dict[int, tuple[PlacedList[Placed], frozenset[Content]]] = {}
        self._blocks: Counter[Content] = Counter()
        self._uses: Counter[str] = Counter()
        self._unleased: set[str] = set()

    def follow(self, window_list: list[PlacedList[Placed]], chunks: PlacedList[Placed]) -> None:
        """Lease what a window's chunks need, also what is stored by now, and release what no window here needs any more.

        Args:
            window_list: the list that the window followed last, alone; replaced by ``chunks``.

        Cost: of what has changed, and a step in C for each block of a list that was another window's, too.
        """
        self._repo.release_abandoned()
        self._replace(window_list, chunks)

    def abandon(self, window_list: list[PlacedList[Placed]]) -> None:
        """Release later what a window followed that was never closed; see `LeaseCounts.abandon`."""
        self._repo.abandon(partial(self._replace, window_list, PlacedList()))

    def windows(self, key: str) -> int:
        """Return how many of these windows need ``key``. O(chunks of all)."""
        with self._lock:
            needing = (i for i, (_, some) in self._lists.items() if any(key in p.keys for b in some for p in b.entries))
            return sum(map(self._windows.__getitem__, needing))

    def _replace(self, window_list: list[PlacedList[Placed]], chunks: PlacedList[Placed]) -> None:
        with self._lock:
            leaving, coming = difference(*self._blocks_changed(window_list[0], chunks))
            window_list[0] = chunks
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

    def _blocks_changed(self, old: PlacedList[Placed], new: PlacedList[Placed]) -> tuple[set[Content], set[Content]]:
        """Count a window at ``new``, not at ``old``; return the blocks that no list has now, and those that none had before."""
        leaving: frozenset[Content] = frozenset()
        coming: frozenset[Content] = frozenset()
        if new and new is not old:
            self._windows[id(new)] += 1
            if id(new) not in self._lists:
                coming = new.contents
                self._lists[id(new)] = new, coming
        if old and new is not old:
            self._windows[id(old)] -= 1
            if not self._windows[id(old)]:
                del self._windows[id(old)]
                _, leaving = self._lists.pop(id(old))
        additions, removals = coming - leaving, leaving - coming
        self._blocks.update(additions)
        self._blocks.subtract(removals)
        unused = {*compress(removals, map(not_, map(self._blocks.get, removals)))}
        for block in unused:
            del self._blocks[block]
        return unused, {*compress(additions, map(eq, map(self._blocks.get, additions), repeat(1)))}
