"""When to evict, and how much to keep: the grammar that LangChain's users know from `SummarizationMiddleware`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from langchain.agents.middleware.summarization import ContextSize, TriggerClause

Trigger = ContextSize | TriggerClause | Sequence[ContextSize | TriggerClause]
"""``("fraction", 0.8)`` of the model's input, ``("tokens", 3000)`` or ``("messages", 20)``; a dict of thresholds that must all
be met, ``{"tokens": 4000, "messages": 10}``; or a list of either, any of which is enough."""


@dataclass
class Measure:
    """How large a context is; tokens and the limit are looked up only where a threshold needs them.

    Attributes:
        limit: most tokens the model takes, for ``fraction``.
    """

    messages: int
    tokens: Callable[[], int]
    limit: Callable[[], int]

    def of(self, kind: str) -> float:
        """The measure that ``kind`` compares with."""
        if kind == "messages":
            return self.messages
        return self.tokens() / self.limit() if kind == "fraction" else self.tokens()


def clauses(trigger: Trigger | None) -> list[dict[str, float]]:
    """``trigger`` as clauses, any of which is enough; none for None. Raises ValueError for another form."""
    items = trigger if isinstance(trigger, list) else [] if trigger is None else [trigger]
    out = []
    for item in items:
        pairs = item.items() if isinstance(item, Mapping) else [item]
        out.append(dict(checked(pair, "trigger") for pair in pairs))
        if not out[-1]:
            raise ValueError("a trigger must name fraction, tokens or messages, got an empty dict")
    return out


def checked(size: object, name: str) -> ContextSize:
    """``size`` as it is; ValueError where it is not a (kind, number) that makes sense."""
    if isinstance(size, tuple) and len(size) == 2:
        kind, value = size
        whole = type(value) is int
        if (kind == "fraction" and (whole or type(value) is float) and 0 < value <= 1) or (
            kind in ("tokens", "messages") and whole and value > 0
        ):
            return size
    raise ValueError(f'{name} must be ("fraction", 0..1], ("tokens", int > 0) or ("messages", int > 0), got {size!r}')
