"""Cost of each lane of a chunk, in milliseconds of the engine in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ctxwin.engines.cost import CostModel, Workload

if TYPE_CHECKING:
    from ctxwin.engines.segments import Segment
    from ctxwin.window.choice import Choice


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
        """Cost of one more request to the engine."""
        return self.model.request_ms

    def of(self, choice: Choice, offset: int) -> float:
        """Return the cost of serving a chunk after ``offset`` tokens, without a request of its own."""
        tokens, conditioning = choice.slots, choice.conditioning
        if choice.compute:
            return self.model.forward_ms(tokens, offset)
        patched, recomputed = conditioning.patch is not None, choice.recomputed_tokens
        ms = self.model.load_ms(tokens - recomputed, patched)
        if recomputed:
            ms += self.model.forward_ms(recomputed, offset)
        if choice.form_canonical:  # a forward right behind the system prompt comes first
            return ms + self.model.forward_ms(tokens, 0)
        ms += self.model.fetch_ms(self.tier((choice.partial_base or conditioning).span), tokens)
        return ms + (self.model.fetch_ms(self.tier(conditioning.patch), tokens) if conditioning.patch else 0.0)

    def of_load(self, tokens: int, tier: str, patch_tier: str = "") -> float:
        """Return the cost of serving a span of ``tier``, with a patch of ``patch_tier`` if there is one."""
        ms = self.model.load_ms(tokens, bool(patch_tier)) + self.model.fetch_ms(tier, tokens)
        return ms + (self.model.fetch_ms(patch_tier, tokens) if patch_tier else 0.0)

    def of_ask(self, chunks: Sequence[float], requests: int, system_prompt: int, resident: bool, key: str) -> float:
        """Return the cost of an ask up to its first token, without the query's own tokens.

        Args:
            chunks: the price of each.
            requests: how many it takes.
            system_prompt: tokens; ``resident``: whether its KV is held, under ``key``.
        """
        model = self.model
        ms = model.library(1, len(chunks)) + requests * self.request_ms + sum(chunks)
        if not system_prompt:
            return ms
        if not resident:
            return ms + model.forward_ms(system_prompt, 0)
        return ms + model.load_ms(system_prompt, False) + model.fetch_ms(self.tier(key), system_prompt)


def workload(segments: Iterable[Segment], requests: int, loads: Workload | None = None) -> Workload:
    """Return an engine's work for a layout: loads of segments with KV, forwards over the others in so many requests; and
    ``loads``, of others that stand in front of all that is computed."""
    work = replace(loads or Workload(), requests=requests)
    offset = work.loaded
    for segment in segments:
        for part in segment.parts() if segment.recompute else (segment,):
            tokens = len(part.encoded.token_ids)
            if part.cached or part.span is not None:
                if tokens and not part.cached:
                    work.load(tokens, part.patch is not None)
            else:
                work.compute(tokens, offset)
            offset += tokens
    return work
