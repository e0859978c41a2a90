"""Edits of what precedes a chunk, on indices: the perturbations of Kamera, section 5 and appendix D.

Each takes the preceding chunks in order, others that may come in, a generator and an amount, and returns the chunks that
precede it then. Generated tasks and the protocols over data sets share them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import factorial

import numpy as np

Edit = Callable[[Sequence[int], Sequence[int], np.random.Generator, int], tuple[int, ...]]
"""(preceding, others, generator, amount) -> preceding after the edit."""


@dataclass(frozen=True)
class Amount:
    """Amount of an edit, the part of a task's or protocol's name after ``@``.

    Attributes:
        listed: the amounts that there are; of shares, those that `ctxwin_evals.tasks.task_names` lists.
        share: any share 0..1 is taken.
    """

    what: str
    listed: tuple[float, ...] = ()
    share: bool = False


def amount_in(name: str, amount: Amount | None) -> float:
    """The amount that a name says, 0 where it takes none; ValueError that says what it must be."""
    kind, at, text = name.partition("@")
    if amount is None:
        if at:
            raise ValueError(f"{kind} must be named without an amount, got {name!r}")
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value <= 1 if amount.share else value in amount.listed):
        allowed = "0..1" if amount.share else ", ".join(f"{x:g}" for x in amount.listed)
        raise ValueError(f"{amount.what} must be {allowed}, got {name!r}")
    return value


def reordered(front: Sequence[int], others: Sequence[int], rng: np.random.Generator, amount: int) -> tuple[int, ...]:
    """Another order of the same chunks. Raises ValueError for fewer than two."""
    if len(front) < 2:
        raise ValueError(f"front must hold at least 2 chunks to have another order, got {len(front)}")
    while True:
        order = tuple(front[int(i)] for i in rng.permutation(len(front)))
        if order != tuple(front):
            return order


def duplicated(front: Sequence[int], others: Sequence[int], rng: np.random.Generator, amount: int) -> tuple[int, ...]:
    """One chunk is dropped, and its neighbour stands there as well. Raises ValueError for fewer than two."""
    if len(front) < 2:
        raise ValueError(f"front must hold at least 2 chunks to double one for another, got {len(front)}")
    index = int(rng.integers(len(front)))
    edited = list(front)
    edited[index] = front[index - 1] if index else front[1]
    return tuple(edited)


def replaced(front: Sequence[int], others: Sequence[int], rng: np.random.Generator, amount: int) -> tuple[int, ...]:
    """``amount`` chunks at random places become others, in place; all of them where ``amount`` is larger."""
    n = min(amount, len(front))
    edited = list(front)
    for place, new in zip(sorted(int(i) for i in rng.permutation(len(front))[:n]), _first(others, n), strict=True):
        edited[place] = new
    return tuple(edited)


def shortened(front: Sequence[int], others: Sequence[int], rng: np.random.Generator, amount: int) -> tuple[int, ...]:
    """The leading chunk is gone."""
    return tuple(front[1:])


def preceded(front: Sequence[int], others: Sequence[int], rng: np.random.Generator, amount: int) -> tuple[int, ...]:
    """``amount`` others come before everything: all distances among what was there remain the same.

    That is how excess context is position-matched here: keys are rotated relative to each other, so a patch formed without
    the others stands as far from the antecedents it knows as before.
    """
    return (*_first(others, amount), *front)


def scattered(front: Sequence[int], others: Sequence[int], rng: np.random.Generator, amount: int) -> tuple[int, ...]:
    """``amount`` others come between the chunks and after them (a true superset): what was there moves apart."""
    edited = list(front)
    for new in _first(others, amount):
        edited.insert(int(rng.integers(1, len(edited) + 1)) if edited else 0, new)
    return tuple(edited)


def _first(others: Sequence[int], count: int) -> Sequence[int]:
    if len(others) < count:
        raise ValueError(f"others must hold at least {count} chunks, got {len(others)}")
    return others[:count]


def other_orders(frames: Sequence[int], count: int, *seed: int) -> list[tuple[int, ...]]:
    """Up to ``count`` orders of ``frames`` other than the given one, drawn by a seed; all of them where there are no more."""
    identity, n = tuple(frames), len(frames)
    if factorial(n) - 1 <= count:
        return [p for p in permutations(identity) if p != identity]
    rng = np.random.default_rng(seed)
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < count:
        order = tuple(identity[int(i)] for i in rng.permutation(n))
        if order != identity:
            chosen[order] = None
    return list(chosen)
