"""What differs between two lists of the same objects, compared by identity and in C."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not
from typing import TypeVar

T = TypeVar("T")


def common_front(old: Sequence[T], new: Sequence[T]) -> int:
    """Return how many first elements two lists have in common."""
    return next(compress(count(), map(is_not, old, new)), min(len(old), len(new)))


def changed(old: Sequence[T], new: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return what stands between the common beginning and the common end of two lists: of the first, and of the second."""
    front, limit = common_front(old, new), min(len(old), len(new))
    back = next(compress(count(), map(is_not, reversed(old), reversed(new))), limit)
    back = min(back, limit - front)
    return old[front : len(old) - back], new[front : len(new) - back]
