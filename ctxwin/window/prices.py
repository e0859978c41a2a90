"""What each way of serving a chunk costs, in milliseconds of the engine at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxwin.engines.cost import CostModel, Workload

if TYPE_CHECKING:
    from ctxwin.engines.base import Segment
    from ctxwin.window.lanes import Choice


@dataclass(frozen=True)
class Prices:
    """An engine's measured costs, and where its store keeps things.

    Attributes:
        model: of the engine.
        tier: the tier that holds a key.
    """

    model: CostModel = field(default_factory=CostModel)
    tier: Callable[[str], str] = lambda key: "MemoryStore"

    @property
    def request_ms(self) -> float:
        """One more request to the engine."""
        return self.model.request_ms

    def of(self, choice: Choice, offset: int) -> float:
        """Serving a chunk behind ``offset`` tokens, a request of its own apart."""
        tokens, served = choice.slots, choice.served
        if choice.compute:
            return self.model.forward_ms(tokens, offset)
        patched, again = served.patch is not None, choice.again
        ms = self.model.load_ms(tokens - again, patched)
        if again:
            ms += self.model.forward_ms(again, offset)
        if choice.form_canonical:  # a forward right behind the system prompt comes first
            return ms + self.model.forward_ms(tokens, 0)
        ms += self.model.fetch_ms(self.tier((choice.linked or served).span), tokens)
        return ms + (self.model.fetch_ms(self.tier(served.patch), tokens) if served.patch else 0.0)

    def of_ask(self, choices: Sequence[Choice], requests: int, system_prompt: int, resident: bool, key: str) -> float:
        """An ask up to its first token, the query's own tokens apart.

        Args:
            requests: how many it takes.
            system_prompt: tokens; ``resident``: whether its KV is held, under ``key``.
        """
        model = self.model
        ms = model.library(1, len(choices)) + requests * self.request_ms + sum(c.ms for c in choices)
        if not system_prompt:
            return ms
        if not resident:
            return ms + model.forward_ms(system_prompt, 0)
        return ms + model.load_ms(system_prompt, False) + model.fetch_ms(self.tier(key), system_prompt)


def workload(segments: Iterable[Segment], requests: int) -> Workload:
    """What an engine does for a layout: loads what has KV, and computes the rest in so many requests."""
    asked, offset = Workload(requests), 0
    for segment in segments:
        for part in segment.parts():
            if part.span is None:
                asked.compute(part.tokens, offset)
            elif part.tokens:
                asked.load(part.tokens, part.patch is not None)
            offset += part.tokens
    return asked
