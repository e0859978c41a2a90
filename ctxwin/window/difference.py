"""Difference between two texts of a window, for lane ``edited``.

A difference is one range of tokens: what two texts have in common at their beginning and at their end lies outside. It is
taken over everything that KV stands on. KV computed behind edited chunks has absorbed their text as well as its own, so its
difference covers both, and many small edits cannot add up to a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Difference(NamedTuple):
    """Tokens before a chunk that its KV, or KV it stands on, saw otherwise.

    Attributes:
        begin, end: range in the prompt.
        tokens: most tokens that one of the texts has there.
    """

    begin: int
    end: int
    tokens: int

    def covering(self, other: Difference | None) -> Difference:
        """Return the difference that contains both; outside of each all of its texts agree."""
        if other is None:
            return self
        begin, end = min(self.begin, other.begin), max(self.end, other.end)
        tokens = max(d.tokens + (end - begin) - (d.end - d.begin) for d in (self, other))
        return Difference(begin, end, tokens)


class Change(NamedTuple):
    """Replacement of the tokens ``begin`` to ``end`` of a text by ``shift`` more of them."""

    begin: int
    end: int
    shift: int

    @classmethod
    def between(cls, old: Sequence[int], new: Sequence[int], offset: int = 0) -> Change:
        """Return the change from ``old`` to ``new``, which begin after ``offset`` tokens."""
        a, b = np.asarray(old, np.int64), np.asarray(new, np.int64)
        first = _common(a, b)
        last = _common(a[first:][::-1], b[first:][::-1])
        return cls(offset + first, offset + len(a) - last, len(b) - len(a))

    def applied_to(self, difference: Difference | None) -> Difference:
        """Return the difference after this change, in the text after it, of KV that had ``difference`` before it."""
        size = self.end - self.begin
        if difference is not None and not size and not self.shift:
            return difference
        whole = Difference(self.begin, self.end, max(size, size + self.shift)).covering(difference)
        return whole._replace(end=whole.end + self.shift)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many tokens ``a`` and ``b`` have in common at the beginning."""
    n = min(len(a), len(b))
    unequal = np.flatnonzero(a[:n] != b[:n])
    return int(unequal[0]) if len(unequal) else n
