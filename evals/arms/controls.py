"""Controls: what an arm's figure is made of. The mask oracle loses conditioning and nothing else, stepwise nothing at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ctxwin.evals.arms.base import PlainArm, Served
from ctxwin.evals.items import Setting

if TYPE_CHECKING:
    from ctxwin.evals.group import Group


@dataclass(frozen=True)
class Oracle(PlainArm):
    """One forward over everything placed in which no chunk sees another one, each at its own positions.

    What this loses against a re-prefill is conditioning and nothing else: no key was moved. Blind reuse, which forms each
    chunk right behind the system prompt and rotates it, must come out the same.
    """

    form: ClassVar[str] = "oracle"
    source: ClassVar[str] = "Kamera, section 2 (the 4-D attention mask), appendix C.4, table 7"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    def serve(self, group: Group) -> list[Served | None]:
        tokens, lead = group.context_tokens, group.system_prompt_span.tokens
        memory = group.behind_system_prompt(len(group)).grown(tokens)
        slots = torch.arange(tokens)
        whose = torch.zeros(tokens, dtype=torch.int64)
        for i, place in enumerate(group.places):
            whose[place.slot : place.end] = i
        own = (whose[:, None] == whose[None]) & (slots[None] <= slots[:, None])
        mask = torch.cat([torch.ones(tokens, lead, dtype=torch.bool), own], 1)
        group.decoder.run(group.context, memory, slots + lead, mask=mask)
        return [Served(row, 0, group.kv_bytes(), tokens, 1) for row in group.spans(memory)]


@dataclass(frozen=True)
class Stepwise(PlainArm):
    """A re-prefill chunk by chunk instead of in one forward: equal by definition, so what differs is arithmetic."""

    form: ClassVar[str] = "stepwise"
    source: ClassVar[str] = "exact; the noise floor of this machine and dtype"
    settings: ClassVar[tuple[Setting, ...]] = ("window",)

    def serve(self, group: Group) -> list[Served | None]:
        memory = group.behind_system_prompt(len(group))
        for place in group.places:
            part = torch.arange(place.slot, place.end).expand(len(group), -1)
            memory, _ = group.decoder.append(group.context.pick(part.to(memory.k.device)), memory)
        tokens = group.context_tokens
        return [Served(row, 0, group.kv_bytes(), tokens, len(group.places)) for row in group.spans(memory)]
