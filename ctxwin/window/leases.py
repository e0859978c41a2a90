"""Leases on the KV that the current versions of a window and of its forks need."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
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

    Counted are the windows at each list of chunks (by identity), the lists that have each block, and the uses of each key in
    blocks, so that a fork adds one entry, and an edit changes the counts of what it changes.

    Attributes:
        keys: the leased ones.
    """

    def __init__(self, repo: SpanRepository) -> None:
        self.keys: set[str] = set()
        self._repo, self._lock = repo, threading.Lock()
        self._windows: defaultdict[int, dict[int, list[PlacedList[Placed]]]] = defaultdict(dict)
        self._blocks: Counter[Content] = Counter()
        self._uses: Counter[str] = Counter()
        self._unleased: set[str] = set()
        self._torn = False  # true in a change, and behind one that an interrupt ended

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
            counts = ((len(some), next(iter(some.values()))[0]) for some in self._windows.values())
            return sum(count for count, chunks in counts if any(key in p.keys for p in chunks))

    def _replace(self, window_list: list[PlacedList[Placed]], chunks: PlacedList[Placed]) -> None:
        with self._lock:
            torn, self._torn = self._torn, True
            if torn:
                self._count_anew()
            leaving, coming = difference(*self._move(window_list, chunks))
            new = Counter(chain.from_iterable(p.keys for p in coming))
            self._uses.update(new)
            self._unleased.update(new.keys() - self.keys)
            self._uses.subtract(chain.from_iterable(p.keys for p in leaving))
            released = chain(self.keys if torn else (), chain.from_iterable(p.keys for p in leaving))
            unused = {key for key in released if not self._uses[key]}
            self._unleased -= unused
            for key in list(self._unleased):
                if self._repo.lease(key):
                    self.keys.add(key)
                    self._unleased.discard(key)
            for key in unused:
                del self._uses[key]
                if key in self.keys:
                    self.keys.discard(key)  # first: an interrupt may leave a lease too many, and never one too few
                    self._repo.release(key)
            self._torn = False

    def _count_anew(self) -> None:
        """Count again what an interrupt left half counted. O(chunks of all)."""
        windows = [window for some in self._windows.values() for window in some.values() if window[0]]
        counted: defaultdict[int, dict[int, list[PlacedList[Placed]]]] = defaultdict(dict)
        for window in windows:
            counted[id(window[0])][id(window)] = window
        self._windows, lists = counted, {id(window[0]): window[0] for window in windows}
        self._blocks = Counter(chain.from_iterable(chunks.contents for chunks in lists.values()))
        self._uses = Counter(key for block in self._blocks for p in block.entries for key in p.keys)
        self._unleased = self._uses.keys() - self.keys

    def _move(self, window: list[PlacedList[Placed]], new: PlacedList[Placed]) -> tuple[set[Content], set[Content]]:
        """Count a window at ``new``, not where it was; return the blocks that no list has now, and those that none had before."""
        old, leaving, coming = window[0], frozenset[Content](), frozenset[Content]()
        if new and new is not old:
            coming = coming if id(new) in self._windows else new.contents
            self._windows[id(new)][id(window)] = window
        window[0] = new  # counted at both until then
        if old and new is not old:
            del self._windows[id(old)][id(window)]
            if not self._windows[id(old)]:
                del self._windows[id(old)]
                leaving = old.contents
        additions, removals = coming - leaving, leaving - coming
        self._blocks.update(additions)
        self._blocks.subtract(removals)
        unused = {*compress(removals, map(not_, map(self._blocks.get, removals)))}
        for block in unused:
            del self._blocks[block]
        return unused, {*compress(additions, map(eq, map(self._blocks.get, additions), repeat(1)))}
