"""Which placed tokens an arm computes in context, and computing them.

A choice is a bool tensor ``[B, T]`` over the placed tokens of a group. What share of the work that is
(``extra["recomputed"]``) always means: token-layers that go through the decoder, over those of all placed tokens, the
first chunk's included, though blind reuse has that one exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ctxwin.evals.arms.base import Served
from ctxwin.evals.decoder import Memory
from ctxwin.kv.layout import SpanKV

if TYPE_CHECKING:
    from ctxwin.evals.group import Group


def nothing(group: Group) -> Tensor:
    """No token chosen."""
    return torch.zeros(len(group), group.context_tokens, dtype=torch.bool)


def heads_of_chunks(group: Group, count: int | None) -> Tensor:
    """The first ``count`` tokens (None: all) of every chunk but the first."""
    chosen = nothing(group)
    for place in group.places[1:]:
        chosen[:, place.slot : place.end if count is None else min(place.end, place.slot + count)] = True
    return chosen


def heads_of_pictures(group: Group, count: int | None) -> Tensor:
    """The first ``count`` embeddings (None: all) of every picture and video, wherever it stands in its chunk."""
    chosen = nothing(group)
    for b, item in enumerate(group.items):
        for place, frame in zip(group.places, item.placed, strict=True):
            for media in group.chunks[b][frame].media:
                begin = place.slot + media.offset
                chosen[b, begin : begin + (media.tokens if count is None else min(media.tokens, count))] = True
    return chosen


def quota(share: float, tokens: int) -> int:
    """How many of ``tokens`` a share stands for: the nearest number, halves upwards."""
    return min(tokens, math.floor(share * tokens + 0.5))


def highest(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` highest scores of each row, ascending: ``[B, T]`` to ``[B, count]``; earlier ones win ties."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


def chosen_at(at: Tensor, tokens: int) -> Tensor:
    """The choice of these indices, int64 ``[B, n]``."""
    return torch.zeros(at.shape[0], tokens, dtype=torch.bool).scatter_(1, at.cpu(), True)


def changes(group: Group) -> Tensor:
    """How much each placed token's KV lacks: squared difference of exact and blind over all layers, float64 ``[B, T]``."""
    return torch.stack(
        [
            torch.cat([_apart(e, c) for e, c in zip(exact, blind, strict=True)])
            for exact, blind in zip(group.exact, group.blind, strict=True)
        ]
    )


def attended(group: Group) -> Tensor:
    """What the question's tokens look at in the exact context: attention weights summed over tokens, heads and layers.

    Returns:
        float64 ``[B, T]``. Cost: the exact context, and one pass over the question. No answer is read.
    """
    decoder, lead = group.decoder, group.system_prompt_span.tokens
    scores = torch.zeros(len(group), group.context_tokens, dtype=torch.float64)
    queries = [decoder.query(item.query) for item in group.items]
    for length in sorted({q.tokens for q in queries}):
        some = [b for b, q in enumerate(queries) if q.tokens == length]
        memory = group.memory([group.exact[b] for b in some])
        seen = torch.zeros(len(some), group.context_tokens, dtype=torch.float64)

        def watch(layer: int, weights: Tensor, seen: Tensor = seen) -> None:
            seen += weights[..., lead : lead + group.context_tokens].sum(dim=(1, 2)).to("cpu", torch.float64)

        decoder.append(decoder.tokens([queries[b] for b in some], group.begin), memory, watch)
        scores[some] = seen
    return scores


def recompute(group: Group, rows: Sequence[Sequence[SpanKV]], chosen: Tensor) -> list[list[SpanKV]]:
    """``rows`` with the chosen tokens computed in context, in one step (`Group.recomputed`; MPIC, section 4.1).

    Items of which as many tokens are chosen share a forward.
    """
    out: list[list[SpanKV]] = [list(row) for row in rows]
    for count in sorted(set(chosen.sum(dim=1).tolist())):
        if not count:
            continue
        some = [b for b in range(len(group)) if int(chosen[b].sum()) == count]
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


def served(
    group: Group, rows: Sequence[Sequence[SpanKV]], work: Sequence[float], *, forwards: int = 1
) -> list[Served | None]:
    """What an arm serves that computed ``work[b]`` tokens of each item, see `serving`."""
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
    return Served(
        row,
        stored,
        group.kv_bytes(over),
        computed=math.ceil(work - 1e-9),
        forwards=forwards if work else 0,
        extra={"recomputed": work / group.context_tokens},
    )


def _apart(a: SpanKV, b: SpanKV) -> Tensor:
    """Squared distance of two spans in one frame by token, float64 ``[T]``."""
    return sum(
        ((x.double() - y.double()).pow(2).sum(dim=(0, 2, 3)) for x, y in ((a.k, b.k), (a.v, b.v))), torch.zeros(())
    )
