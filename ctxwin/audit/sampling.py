"""`Sampler`: random choice of answers to audit and of asks on which strategies are tried, so that no pattern escapes."""

import random
import threading
from collections.abc import Hashable

from ctxwin.store.lru import LRUCache

FIRST = 50
"""The n-th answer of a kind is audited with a probability of at least about this over n: half of them around the 50th."""
SPARSE = 2
"""The n-th layout of a unit that a strategy would have served is a trial with a probability of this over n."""
_MAX_KEYS = 4096


class Sampler:
    """Draws of one process, from one generator. Thread-safe.

    Args:
        seed: of the generator; None: chosen by the system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._kinds: LRUCache[int] = LRUCache(_MAX_KEYS)
        self._layouts: LRUCache[int] = LRUCache(_MAX_KEYS)
        self._first: LRUCache[str] = LRUCache(_MAX_KEYS)

    def draw(self, rate: float) -> bool:
        """Return True for a share ``rate`` of the calls."""
        with self._lock:
            return self._random.random() < rate

    def rate(self, kind: Hashable, least: float) -> float:
        """Return the share of the next answers of a kind to audit: 1 at first, decreasing, never less than ``least``.

        A kind is a strategy since its promotion, and a shape of layout and question (`WindowAudit.submit`). More is therefore
        audited after a promotion, and new kinds start at 1 when the mix of asks changes.
        """
        with self._lock:
            return max(least, FIRST / (FIRST + _count(self._kinds, kind) - 1)) if least else 0.0

    def is_trial(self, strategy: Hashable, unit: str, question: str) -> bool:
        """Return True if a strategy is tried on an ask of a unit: often on the first asks and less later, so that the few
        trials that count (`evidence.UNIT_TRIALS`) reach far into a long window.

        A question that another unit asked over the same chunks (``question``: their digest) is no trial: otherwise a test that
        runs repeatedly would be many units.
        """
        with self._lock:
            first = self._first.get_or_build((strategy, question), lambda: unit)
            return first == unit and self._random.random() * _count(self._layouts, (strategy, unit)) < SPARSE


def _count(counts: LRUCache[int], key: Hashable) -> int:
    count = (counts.get(key) or 0) + 1
    counts.put(key, count, 1)
    return count
