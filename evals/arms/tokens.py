"""Arms that compute some tokens in context and reuse the others as they are: the token axis.

All get the same relocated KV, and what they compute sees everything in front of it, layer by layer (their strongest
form; Kamera, section 6). Shares are of all placed tokens, see `ctxwin.evals.arms.select`. After a slide they stand on
canonicals, as `blind` does, and not on survivors: these papers store chunks alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ctxwin.evals.arms.base import Arm, CountedArm, PlainArm, Served, SharedArm
from ctxwin.evals.arms.select import (
    attended,
    changes,
    chosen_at,
    heads_of_chunks,
    heads_of_pictures,
    highest,
    quota,
    recompute,
    served,
    spans_of,
)
from ctxwin.evals.items import Setting
from ctxwin.kv.layout import SpanKV

if TYPE_CHECKING:
    from ctxwin.evals.group import Group


@dataclass(frozen=True)
class _Recomputing(Arm):
    """Chosen tokens are computed in context in a single step, the rest is blind."""

    settings: ClassVar[tuple[Setting, ...]] = ("window", "slide")

    @abstractmethod
    def chosen(self, group: Group) -> Tensor:
        """Which placed tokens are computed: bool ``[B, T]``."""

    def base(self, group: Group) -> list[list[SpanKV]]:
        """What stands in the slots before."""
        return group.blind

    def serve(self, group: Group) -> list[Served | None]:
        chosen = self.chosen(group)
        return served(group, recompute(group, self.base(group), chosen), chosen.sum(dim=1).tolist())


@dataclass(frozen=True)
class FirstK(CountedArm, _Recomputing):
    """The first k tokens of every chunk but the first are computed in context, the rest is blind."""

    form: ClassVar[str] = "first_k:K"
    source: ClassVar[str] = "Kamera, section 4 and appendix C.3 (first-k carve)"

    def chosen(self, group: Group) -> Tensor:
        return heads_of_chunks(group, self.count)


@dataclass(frozen=True)
class Epic(FirstK):
    """LegoLink: the first k tokens of every chunk but the first are computed in context; k is fixed, up to 32.

    The same rule as `FirstK`, and the same figures: Kamera's carve is LegoLink on pictures. EPIC states it for text
    chunks and does not say how a chunk of several pictures counts; here a chunk is a chunk.
    """

    form: ClassVar[str] = "epic:K"
    source: ClassVar[str] = "EPIC (Hu et al. 2025, arXiv 2410.15332): LegoLink"


@dataclass(frozen=True)
class Mpic(CountedArm, _Recomputing):
    """All text tokens, and the first k tokens of every picture, are computed in context in a single step.

    Text has no stored KV: a dummy cache of zeros stands in its slots until they are written. Chunks without pictures are
    wholly computed, and so is the text of the first chunk. The paper's default is 32 (MPIC-32).
    """

    form: ClassVar[str] = "mpic:K"
    source: ClassVar[str] = "MPIC, sections 4.1 (selective attention, dummy cache) and 4.2 (MPIC-k)"
    dummy: ClassVar[float] = 0.0

    def chosen(self, group: Group) -> Tensor:
        return ~group.pictured | heads_of_pictures(group, self.count)

    def base(self, group: Group) -> list[list[SpanKV]]:
        rows = []
        for row, pictured in zip(group.blind, group.pictured, strict=True):
            spans = []
            for span, place in zip(row, group.places, strict=True):
                text = ~pictured[place.slot : place.end][None, :, None, None]
                k, v = (x.masked_fill(text, self.dummy) for x in (span.k, span.v))
                spans.append(SpanKV(k, v, span.positions, span.start))
            rows.append(spans)
        return rows


@dataclass(frozen=True)
class FullReuse(PlainArm):
    """Two steps: the text's KV without any picture, then pictures linked between; no picture token is computed.

    In the first step text tokens stand at their places and see the system prompt and the text in front of them, as no picture
    has been concatenated yet. ``forwards`` counts the second step too, which here is the question's pass: the question
    sees everything, while the paper leaves that to the first output token (this is the stronger form).
    """

    form: ClassVar[str] = "full-reuse"
    source: ClassVar[str] = "MPIC, sections 2.2 and 5.2 (full reuse, as Prompt Cache)"
    settings: ClassVar[tuple[Setting, ...]] = ("window", "slide")

    def serve(self, group: Group) -> list[Served | None]:
        lead, text = group.system_prompt_span.tokens, ~group.pictured
        rows = [list(row) for row in group.blind]
        for b in range(len(group)):
            at = text[b].nonzero()[:, 0] + lead
            memory = group.memory([group.blind[b]])
            seen = torch.cat([torch.ones(lead, dtype=torch.bool), text[b]])
            tokens = group.context.of([b])
            some = tokens.pick((at - lead)[None].to(tokens.embeds.device))
            group.decoder.run(some, memory, at, mask=seen & (torch.arange(memory.slots) <= at[:, None]))
            rows[b] = spans_of(group, memory, [b])[0]
        return served(group, rows, text.sum(dim=1).tolist(), forwards=2)


@dataclass(frozen=True)
class CacheblendOracle(SharedArm, _Recomputing):
    """The share of placed tokens whose KV lacks most, over all layers: the best a selection by deviation could know."""

    form: ClassVar[str] = "cacheblend-oracle:R"
    source: ClassVar[str] = "Kamera, section 4 ('Diffuse across tokens': selection by true deficit)"

    @property
    def found(self) -> tuple[str, ...]:
        return ("exact",)

    def chosen(self, group: Group) -> Tensor:
        return _highest_share(changes(group), self.share)


@dataclass(frozen=True)
class Quest(SharedArm, _Recomputing):
    """The share of placed tokens that the question attends to most, in the exact context; no answer is read.

    Attention weights are summed over the question's tokens, heads and layers. Quest itself reads pages by bounds on the
    same weights; this is what it approximates.
    """

    form: ClassVar[str] = "quest:R"
    source: ClassVar[str] = "Kamera, appendix C.3, table 6 (oracle query-aware recompute, Quest-style)"

    @property
    def found(self) -> tuple[str, ...]:
        return ("exact",)

    def chosen(self, group: Group) -> Tensor:
        return _highest_share(attended(group), self.share)


def _highest_share(scores: Tensor, share: float) -> Tensor:
    tokens = scores.shape[1]
    return chosen_at(highest(scores, quota(share, tokens)), tokens)
