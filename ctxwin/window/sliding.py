"""How far a full window falls: a low-water mark, what one costs, and which one is best.

In an exact window all chunks after an evicted one are computed again. Sliding one by one pays that at every ask; a window
that falls to a mark pays it once, and its prefix then stands still until it is full again.
"""

import math
from dataclasses import dataclass


def mark_tokens(mark: float, budget: int, name: str = "low_water") -> int:
    """Return a low-water mark in tokens: an int is taken as is, a float is a share of ``budget``.

    Raises ValueError out of range, with the argument's ``name``.
    """
    if isinstance(mark, bool) or not isinstance(mark, int | float):
        raise ValueError(f"{name} must be a share in (0, 1) or tokens in 1..{budget}, got {mark!r}")
    tokens = mark if isinstance(mark, int) else max(1, int(mark * budget)) if 0 < mark < 1 else 0
    if not 0 < tokens <= budget:
        raise ValueError(f"{name} must be a share in (0, 1) or tokens in 1..{budget}, got {mark!r}")
    return tokens


@dataclass(frozen=True)
class SlidingCost:
    """Cost of an exact window in which every ask brings one chunk of the same size.

    Attributes:
        low_water: the mark, in tokens.
        kept: chunks that stay when it slides, the new one included; most: chunks at most.
        cycle: asks from one slide to the next.
        tokens: prompt tokens that run a forward, an ask.
        occupancy: chunks that an ask sees, on average, as a share of ``most``.
    """

    low_water: int
    kept: int
    most: int
    cycle: int
    tokens: float
    occupancy: float


def sliding_cost(budget: int, low_water: float, chunk: int, *, system_prompt: int = 0, query: int = 0) -> SlidingCost:
    """Return the cost of a mark for sizes in tokens.

    ``most`` chunks fit. A slide leaves ``kept``, all of which move and are computed; the next ``most - kept`` asks compute
    their new chunk alone. So a cycle of ``most - kept + 1`` asks computes ``most`` chunks and each time the query. With
    ``low_water=budget`` a window slides one by one.

    Raises ValueError for sizes that do not fit.
    """
    least = system_prompt + query + chunk
    if chunk < 1 or system_prompt < 0 or query < 0 or least > budget:
        raise ValueError(
            f"a chunk of at least a token, system prompt and query must fit the budget of {budget} tokens, got {least}"
        )
    mark = mark_tokens(low_water, budget)
    most = (budget - system_prompt - query) // chunk
    remaining = min(most, max(1, (mark - system_prompt - query) // chunk))
    cycle = most - remaining + 1
    return SlidingCost(mark, remaining, most, cycle, most * chunk / cycle + query, (remaining + most) / 2 / most)


def best_low_water(
    budget: int, chunk: int, *, system_prompt: int = 0, query: int = 0, occupancy: float = 0.75
) -> SlidingCost:
    """Return the cheapest mark with which asks see, on average, at least a share ``occupancy`` of the chunks that fit.

    A lower mark always computes less and shows less, so it is the lowest one that shows enough. Raises ValueError for sizes
    that do not fit and for a share outside of (0, 1].
    """
    if not 0 < occupancy <= 1:
        raise ValueError(f"occupancy must be a share in (0, 1], got {occupancy!r}")
    most = sliding_cost(budget, budget, chunk, system_prompt=system_prompt, query=query).most
    remaining = max(1, math.ceil(2 * most * occupancy) - most)
    mark = min(budget, system_prompt + query + remaining * chunk)
    return sliding_cost(budget, mark, chunk, system_prompt=system_prompt, query=query)


def own_mark(budget: int, tokens: int, chunks: int, *, system_prompt: int, query: int) -> int | None:
    """Return the mark of ``Window(low_water="auto")`` with so many chunks of these tokens: the cheapest with which asks see, on
    average, three quarters of the chunks that fit; None where not one fits."""
    size = max(1, round(tokens / max(1, chunks)))
    if system_prompt + query + size > budget:
        return None
    return best_low_water(budget, size, system_prompt=system_prompt, query=query).low_water


@dataclass(frozen=True)
class SlidingAdvice:
    """Saving of a low-water mark for an exact window that slides one by one, by the sizes of its chunks.

    Attributes:
        one_by_one: tokens of chunks that run a forward, an ask, as it slides.
        halved: the cost with a mark at half of what it places now.
    """

    one_by_one: float
    halved: SlidingCost

    @property
    def saved(self) -> int:
        """Tokens saved per ask, on average over a cycle."""
        return round(self.one_by_one - self.halved.tokens)


def sliding_advice(tokens: int, chunks: int, system_prompt: int) -> SlidingAdvice | None:
    """Return the advice for a full window with so many chunks of these tokens; None if it has too few of them."""
    if chunks < 4:
        return None
    size = max(1, round(tokens / chunks))
    budget = system_prompt + size * chunks
    one_by_one = sliding_cost(budget, budget, size, system_prompt=system_prompt)
    mark = system_prompt + size * -(-chunks // 2)
    return SlidingAdvice(one_by_one.tokens, sliding_cost(budget, mark, size, system_prompt=system_prompt))
