"""The trigger grammar that LangChain's users know from `SummarizationMiddleware`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["fraction", "tokens", "messages"]
Size = tuple[Kind, float]
"""``("fraction", 0.8)`` of the model's input, ``("tokens", 3000)`` or ``("messages", 20)``."""
Clause = Mapping[str, float]
"""Thresholds that must all be met: ``{"tokens": 4000, "messages": 10}``."""
Trigger = Size | Clause | Sequence[Size | Clause]
"""One threshold, several that must all be met, or a list of which any is enough."""


@dataclass
class Measure:
    """How large a context is; tokens and the limit are looked up only where a threshold needs them.

    Attributes:
        limit: most tokens the model takes, for ``fraction``.
    """

    messages: int
    tokens: Callable[[], int]
    limit: Callable[[], int]

    def reached(self, clause: Clause) -> bool:
        """Whether every threshold of ``clause`` is met."""
        return all(self.of(kind) >= value for kind, value in clause.items())

    def of(self, kind: str) -> float:
        """The measure that ``kind`` compares with."""
        if kind == "messages":
            return self.messages
        return self.tokens() / self.limit() if kind == "fraction" else self.tokens()


def clauses(trigger: Trigger | None) -> list[Clause]:
    """``trigger`` as clauses, any of which is enough; none for None. Raises ValueError for another form."""
    if trigger is None:
        return []
    if isinstance(trigger, tuple) and len(trigger) == 2 and isinstance(trigger[0], str):
        return [dict([checked(trigger, "trigger")])]
    items = [trigger] if isinstance(trigger, Mapping) else list(trigger)
    out: list[Clause] = []
    for item in items:
        pairs = list(item.items()) if isinstance(item, Mapping) else [item]
        if not pairs:
            raise ValueError("a trigger must name fraction, tokens or messages, got an empty dict")
        out.append(dict(checked(pair, "trigger") for pair in pairs))
    return out


def checked(size: object, name: str) -> Size:
    """``size`` as it is; ValueError where it is no (kind, number) that makes sense."""
    if isinstance(size, tuple) and len(size) == 2:
        kind, value = size
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "fraction" and number and 0 < value <= 1:
            return size
        if kind in ("tokens", "messages") and isinstance(value, int) and number and value > 0:
            return size
    raise ValueError(f'{name} must be ("fraction", 0..1], ("tokens", int > 0) or ("messages", int > 0), got {size!r}')
