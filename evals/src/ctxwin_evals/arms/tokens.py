"""Arms that compute some tokens in context and reuse the others unchanged: the token axis.

All start from the same relocated KV, and what they compute sees everything before it, layer by layer (their strongest
form; Kamera, section 6). After a slide they build on canonicals, as `blind` does: these papers store chunks alone.

A choice is a bool tensor ``[B, T]`` over the placed tokens of a group. Its share of the work (``extra["recomputed"]``) is of
token-layers that go through the decoder, over those of all placed tokens, the first chunk's included.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ctxwin.kv.layout import SpanKV
from ctxwin.kv.merge import most_important
from ctxwin_evals.arms.base import Arm, CountedArm, Served, SharedArm
from ctxwin_evals.decoder import Memory
from ctxwin_evals.group import Group
from ctxwin_evals.items import grouped


class _Recomputing(Arm):
    """Chosen tokens are computed in context in a single step, the rest is blind.

    An engine that is only asked computes them in the request that asks, as a window's lane ``partial`` does.
    """

    @abstractmethod
    def chosen(self, group: Group) -> Tensor:
        """Return the mask of placed tokens to compute: bool ``[B, T]``."""

    def base(self, group: Group) -> list[list[SpanKV]]:
        """Return the memory before these tokens are computed."""
        return group.blind

    def serve(self, group: Group) -> list[Served | None]:
        chosen, rows = self.chosen(group), self.base(group)
        if group.embeds:
            return serve_rows(group, recompute(group, rows, chosen), chosen.sum(dim=1).tolist())
        runs = [[runs_of(mask[p.slot : p.end]) for p in group.places] for mask in chosen]
        served = (serving(group, row, int(mask.sum())) for row, mask in zip(rows, chosen, strict=True))
        return [replace(one, recompute=recompute) for one, recompute in zip(served, runs, strict=True)]


class FirstK(CountedArm, _Recomputing, form="first_k:K", source="Kamera, section 4 and appendix C.3 (first-k carve)"):
    """The first k tokens of every chunk but the first are computed in context, the rest is blind."""

    def chosen(self, group: Group) -> Tensor:
        chosen = torch.zeros(len(group), group.context_tokens, dtype=torch.bool)
        for place in group.places[1:]:
            chosen[:, place.slot : place.end if self.count is None else min(place.end, place.slot + self.count)] = True
        return chosen


class Epic(FirstK, form="epic:K", source="EPIC (Hu et al. 2025, arXiv 2410.15332): LegoLink"):
    """LegoLink: the rule of `FirstK`, up to k = 32, which EPIC states for chunks of text; a chunk of pictures is one here."""


class Mpic(
    CountedArm,
    _Recomputing,
    form="mpic:K",
    source="MPIC, sections 4.1 (selective attention, dummy cache) and 4.2 (MPIC-k)",
):
    """All text tokens, and the first k tokens of every picture, are computed in context in a single step; 32 in the paper.

    Text, that of the first chunk too, has no stored KV: a dummy cache of zeros stands in its slots until they are written.
    """

    dummy: ClassVar[float] = 0.0

    def chosen(self, group: Group) -> Tensor:
        return ~group.pictured() | group.pictured(self.count)

    def base(self, group: Group) -> list[list[SpanKV]]:
        rows = []
        for row, pictured in zip(group.blind, group.pictured(), strict=True):
            spans = []
            for span, place in zip(row, group.places, strict=True):
                text = ~pictured[place.slot : place.end][None, :, None, None]
                k, v = (x.masked_fill(text, self.dummy) for x in (span.k, span.v))
                spans.append(SpanKV(k, v, span.positions, span.start))
            rows.append(spans)
        return rows


class FullReuse(Arm, form="full-reuse", source="MPIC, sections 2.2 and 5.2 (full reuse, as Prompt Cache)", inside=True):
    """Two steps: the text's KV without any picture, then pictures are linked in between; no picture token is computed.

    In the first step text tokens stand at their places and see the system prompt and the text before them. ``forwards`` counts
    the second step too, here the question's pass, which sees everything; in the paper only the first output token does.
    """

    def serve(self, group: Group) -> list[Served | None]:
        lead, text = group.system_prompt_span.tokens, ~group.pictured()
        rows = [list(row) for row in group.blind]
        for b in range(len(group)):
            at = text[b].nonzero()[:, 0] + lead
            memory = group.memory([group.blind[b]])
            visible = torch.cat([torch.ones(lead, dtype=torch.bool), text[b]])
            tokens = group.context.of([b])
            some = tokens.pick((at - lead)[None].to(tokens.embeds.device))
            group.decoder.run(some, memory, at, mask=visible & (torch.arange(memory.slots) <= at[:, None]))
            rows[b] = spans_of(group, memory, [b])[0]
        return serve_rows(group, rows, text.sum(dim=1).tolist(), forwards=2)


class CacheblendOracle(
    SharedArm,
    _Recomputing,
    form="cacheblend-oracle:R",
    source="Kamera, section 4 ('Diffuse across tokens': selection by true deficit)",
):
    """The share of placed tokens whose KV is furthest off, over all layers: the best that selection by deviation could do."""

    def chosen(self, group: Group) -> Tensor:
        return _highest_share(changes(group), self.share)


class Quest(
    SharedArm,
    _Recomputing,
    form="quest:R",
    source="Kamera, appendix C.3, table 6 (oracle query-aware recompute, Quest-style)",
    inside=True,
):
    """The share of placed tokens that the question attends to most, in the exact context; no answer is read.

    Attention weights are summed over the question's tokens, heads and layers. Quest itself reads pages by bounds on the
    same weights; this is what it approximates.
    """

    def chosen(self, group: Group) -> Tensor:
        return _highest_share(attended(group), self.share)


def _highest_share(scores: Tensor, share: float) -> Tensor:
    at = most_important(scores, quota(share, scores.shape[1])).cpu()
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, at, True)


def runs_of(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """The ranges of consecutive True places of a mask ``[T]``."""
    edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def quota(share: float, tokens: int) -> int:
    """How many of ``tokens`` a share stands for: the nearest number, halves upwards."""
    return min(tokens, math.floor(share * tokens + 0.5))


def changes(group: Group) -> Tensor:
    """How far each placed token's KV is off: squared difference of exact and blind over all layers, float64 ``[B, T]``."""
    pairs = (zip(exact, blind, strict=True) for exact, blind in zip(group.exact, group.blind, strict=True))
    parts = ([((e.k, b.k), (e.v, b.v)) for e, b in row] for row in pairs)
    squared = (
        [[(x.double() - y.double()).pow(2).sum(dim=(0, 2, 3)) for x, y in both] for both in row] for row in parts
    )
    return torch.stack([torch.cat([k + v for k, v in row]) for row in squared])


def attended(group: Group) -> Tensor:
    """Return the attention of the question to the exact context, summed over tokens, heads and layers.

    Returns:
        float64 ``[B, T]``. Cost: the exact context, and one pass over the question. No answer is read.
    """
    decoder, lead = group.decoder, group.system_prompt_span.tokens
    scores = torch.zeros(len(group), group.context_tokens, dtype=torch.float64)
    queries = [decoder.query(item.query) for item in group.items]
    for some in grouped(range(len(group)), lambda b: queries[b].tokens).values():
        memory = group.memory([group.exact[b] for b in some])
        sums = torch.zeros(len(some), group.context_tokens, dtype=torch.float64)

        def watch(layer: int, weights: Tensor, sums: Tensor = sums) -> None:
            sums += weights[..., lead : lead + group.context_tokens].sum(dim=(1, 2)).to("cpu", torch.float64)

        decoder.append(decoder.tokens([queries[b] for b in some], group.begin), memory, watch)
        scores[some] = sums
    return scores


def recompute(group: Group, rows: Sequence[Sequence[SpanKV]], chosen: Tensor) -> list[list[SpanKV]]:
    """``rows`` with the chosen tokens computed in context, in one step (MPIC, section 4.1).

    Items of which as many tokens are chosen share a forward.
    """
    out: list[list[SpanKV]] = [list(row) for row in rows]
    counts = chosen.sum(dim=1).tolist()
    for some in grouped((b for b, count in enumerate(counts) if count), lambda b: counts[b]).values():
        at = torch.stack([chosen[b].nonzero()[:, 0] for b in some])
        memory = group.memory([rows[b] for b in some])
        tokens = group.context.of(some)
        group.decoder.run(tokens.pick(at.to(tokens.embeds.device)), memory, at + group.system_prompt_span.tokens)
        for b, row in zip(some, spans_of(group, memory, some), strict=True):
            out[b] = row
    return out


def spans_of(group: Group, memory: Memory, some: Sequence[int]) -> list[list[SpanKV]]:
    """The placed chunks of a memory of some items, by item and place."""
    return [group.placed_spans(memory, i, group.items[b].placed) for i, b in enumerate(some)]


def serve_rows(
    group: Group, rows: Sequence[Sequence[SpanKV]], work: Sequence[float], *, forwards: int = 1
) -> list[Served | None]:
    """Return the entries of an arm that computed ``work[b]`` tokens of each item, see `serving`."""
    return [serving(group, row, work[b], forwards=forwards) for b, row in enumerate(rows)]


def serving(
    group: Group,
    row: Sequence[SpanKV],
    work: float,
    *,
    forwards: int = 1,
    stored: int = 0,
    over: Iterable[int] | None = None,
) -> Served:
    """One item's row for which ``work`` tokens went through all layers, or as many token-layers over the layers.

    ``stored`` are bytes kept beside the KV of the places ``over`` (all by default).
    """
    computed, extra = math.ceil(work - 1e-9), {"recomputed": work / group.context_tokens}
    forwards = forwards if work else 0
    return Served(row, stored, group.kv_bytes(over), computed=computed, forwards=forwards, extra=extra)
