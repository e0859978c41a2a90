"""Edits of what stands in front of a chunk, on indices: the perturbations of Kamera, section 5 and appendix D.

Each takes the chunks in front in order, others that may come in, and a generator, and gives the chunks then in front.
Generated tasks and the protocols over data sets share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from math import factorial

import numpy as np

Edit = Callable[[Sequence[int], Sequence[int], np.random.Generator], tuple[int, ...]]
"""(in front, others, generator) -> then in front."""


def reordered(front: Sequence[int], others: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
    """Another order of the same chunks. Raises ValueError for fewer than two."""
    if len(front) < 2:
        raise ValueError(f"front must hold at least 2 chunks to have another order, got {len(front)}")
    while True:
        order = tuple(front[int(i)] for i in rng.permutation(len(front)))
        if order != tuple(front):
            return order


def duplicated(front: Sequence[int], others: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
    """One chunk is dropped and its neighbour stands there, too. Raises ValueError for fewer than two."""
    if len(front) < 2:
        raise ValueError(f"front must hold at least 2 chunks to double one for another, got {len(front)}")
    gone = int(rng.integers(len(front)))
    made = list(front)
    made[gone] = front[gone - 1] if gone else front[1]
    return tuple(made)


def replaced(count: int) -> Edit:
    """``count`` chunks at random places become others, in place; as many as there are where ``count`` is larger."""

    def edit(front: Sequence[int], others: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
        n = min(count, len(front))
        _enough(others, n)
        made = list(front)
        for place, new in zip(sorted(int(i) for i in rng.permutation(len(front))[:n]), others, strict=False):
            made[place] = new
        return tuple(made)

    return edit


def replaced_share(share: float) -> Edit:
    """As `replaced`, a share of them, rounded half up."""

    def edit(front: Sequence[int], others: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
        return replaced(int(np.floor(share * len(front) + 0.5)))(front, others, rng)

    return edit


def preceded(count: int) -> Edit:
    """``count`` others stand in front of everything: all distances among what was there stay as they were.

    That is how excess context is position-matched here: keys are rotated relative to each other, so a patch formed without
    the others stands as far from the antecedents it knows as before.
    """

    def edit(front: Sequence[int], others: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
        _enough(others, count)
        return (*others[:count], *front)

    return edit


def scattered(count: int) -> Edit:
    """``count`` others stand between the chunks and behind them (a true superset): what was there moves apart."""

    def edit(front: Sequence[int], others: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
        _enough(others, count)
        made = list(front)
        for new in others[:count]:
            made.insert(int(rng.integers(1, len(made) + 1)) if made else 0, new)
        return tuple(made)

    return edit


def other_order(count: int, turn: int, orders: int, seed: int) -> tuple[int, ...]:
    """The ``turn``-th of ``orders`` orders of 0..count-1 other than ascending; sampled where there are more.

    Raises ValueError where there are fewer.
    """
    most = factorial(count) - 1
    if not 0 <= turn < orders <= most:
        raise ValueError(f"turn must be 0..{min(orders, most) - 1} of {count} chunks' {most} other orders, got {turn}")
    ascending = tuple(range(count))
    if orders == most:
        return [p for p in permutations(ascending) if p != ascending][turn]
    rng = np.random.default_rng((0x7065726D, count, seed))
    found: dict[tuple[int, ...], None] = {}
    while len(found) <= turn:
        order = tuple(int(i) for i in rng.permutation(count))
        if order != ascending:
            found[order] = None
    return list(found)[turn]


def _enough(others: Sequence[int], count: int) -> None:
    if len(others) < count:
        raise ValueError(f"others must hold at least {count} chunks, got {len(others)}")
