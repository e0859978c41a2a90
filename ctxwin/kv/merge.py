"""Merged KV: a span in fewer slots than tokens (Elastic Cache, arXiv 2407.18121, section 3.3).

The slots that got the most attention stay as anchors, each layer's own; the KV of all others is averaged into the anchor that
is nearest. Keys are averaged as they lie in the cache, rotated in place (algorithm 1). A mean of rotated keys has no position
of its own, yet turns as all of its tokens do: where a chunk moves, all of them move by the same distance, and turning by that
is linear. So merged KV is relocated like any other.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ctxwin.kv.layout import SpanKV

WEIGHTS_AT_ONCE = 1 << 24
"""Attention weights that are held at once, at most."""
RECENT = 25
"""Newest slots that fixed-point elimination leaves alone (section 4.1, "Implementation Details")."""
LEAST = 2
"""Slots that every merged span keeps: the first and the last token's (the same place)."""


def budget_slots(share: float, tokens: int) -> int:
    """Slots that a budget allows for so many tokens: ``share * tokens``, rounded up as algorithm 1 rounds deletions down."""
    return min(tokens, math.ceil(share * tokens - 1e-9))


def most_important(sums: Tensor, count: int, protected: tuple[int, ...] = ()) -> Tensor:
    """The ``count`` slots of the highest sums ``[..., S]``, ascending, int64 ``[..., count]``; ``protected`` ones come first.

    At equal importance the earlier slot is taken. ``protected`` are indices, negative ones from the end.
    Raises ValueError where ``count`` exceeds the slots or does not hold the protected ones.
    """
    slots = int(sums.shape[-1])
    selected = {p % slots for p in protected} if slots else set()
    if not len(selected) <= count <= slots:
        raise ValueError(f"count must be {len(selected)}..{slots}, got {count}")
    ranked = sums.clone()
    ranked[..., sorted(selected)] = torch.inf
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def bucket_of(anchors: Tensor, slots: int) -> Tensor:
    """The bucket of every slot, int64 ``[..., slots]``: Elastic Cache, equation 2.

    Buckets part at ``floor((t_k + t_k+1) / 2)``, which belongs to the earlier one, so that a slot as near to two anchors
    joins the first. As printed the last bucket begins on that midpoint, too, while all others begin behind it; here every
    slot is in exactly one bucket, and every bucket holds its anchor.

    Args:
        anchors: int64 ``[..., n]``, ascending and distinct, n >= 1.
        slots: number of slots.
    """
    parts = (anchors[..., :-1] + anchors[..., 1:]) // 2
    every = torch.arange(slots, device=anchors.device).expand(*anchors.shape[:-1], slots)
    return torch.searchsorted(parts.contiguous(), every.contiguous())


def bucket_means(tensor: Tensor, buckets: Tensor, count: int) -> Tensor:
    """Numbers averaged over each of ``count`` buckets, head by head: Elastic Cache, equation 3.

    Sums are taken in float32 at least, so a bucket of one slot keeps its numbers bit for bit.

    Args:
        tensor: ``[L, B, H, S, D]``.
        buckets: int64 ``[L, B, S]``, or ``[L, B, H, S]`` where heads differ; none of them empty.

    Returns:
        ``[L, B, H, count, D]``.
    """
    layers, batch, heads, slots, width = tensor.shape
    by_head = buckets if buckets.ndim == 4 else buckets[:, :, None]
    sizes = torch.zeros(*by_head.shape[:3], count, dtype=torch.float32, device=tensor.device)
    sizes.scatter_add_(3, by_head, torch.ones_like(by_head, dtype=torch.float32))
    into = by_head[..., None].expand(layers, batch, heads, slots, width)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    total = torch.zeros(layers, batch, heads, count, width, dtype=wide, device=tensor.device)
    total.scatter_add_(3, into, tensor.to(wide))
    return (total / sizes[..., None]).to(tensor.dtype)


def merged_slots(share: float, tokens: int) -> int:
    """How many slots a chunk of ``tokens`` tokens keeps at a budget of ``share``."""
    return max(budget_slots(share, tokens), min(LEAST, tokens))


def buckets_of(attended: Tensor, count: int) -> Tensor:
    """The bucket of every slot by layer, int64 ``[L, 1, S]``, around ``count`` anchors; the first and last slot are among them.

    Args:
        attended: attention that each slot got, by layer: ``[L, S]``.
    """
    return bucket_of(most_important(attended[:, None], count, (0, -1)), int(attended.shape[-1]))


def merge(span: SpanKV, attended: Tensor, count: int) -> SpanKV:
    """``span`` in ``count`` slots, in the same frame; stage outputs do not survive that.

    The slots carry the positions of the first ``count`` tokens, which say by how much they turn, not where they stand.

    Args:
        attended: attention that each token got, by layer: float32 ``[L, T]``; see `attention_sums`.
        count: of 2 (or all, of a shorter span) to all of its tokens.

    Raises:
        ValueError: shapes or a count that do not fit. Cost: a pass over the KV.
    """
    if tuple(attended.shape) != (span.k.shape[0], span.tokens):
        raise ValueError(f"attended must be {(span.k.shape[0], span.tokens)}, got {tuple(attended.shape)}")
    buckets = buckets_of(attended, count)

    def mean(rows: Tensor) -> Tensor:
        return bucket_means(rows.transpose(1, 2)[:, None], buckets.to(rows.device), count)[:, 0].transpose(1, 2)

    k, v = mean(span.k).contiguous(), mean(span.v).contiguous()
    return replace(span, k=k, v=v, positions=span.positions[:, :count].clone(), outputs={})


@dataclass
class FixedPoint:
    """Slots that an answer keeps while it is generated: fixed-point elimination, algorithm 1.

    Whatever ``every`` is, the same slots are kept: it says how many tokens pass before the others really go.

    Attributes:
        share: share of all tokens, the prompt's and the answer's, that may be kept.
        tokens: tokens so far, at first the prompt's.
        slots: slots that they take.
        head: first slots that stay.
        every: tokens between two eliminations.
        least: slots below which none goes; by default those of the prompt.
    """

    share: float
    tokens: int
    slots: int
    head: int
    every: int
    least: int = 0

    def __post_init__(self) -> None:
        self.least, self._logical, self._added = self.least or self.slots, list(range(self.slots)), 0

    def append(self, count: int) -> list[int] | None:
        """Take in the slots of ``count`` tokens; return the slots to keep, ascending, where others are to go now."""
        slots = self._logical
        for _ in range(count):
            slots.append(self.slots)
            self.slots += 1
            self.tokens += 1
            if len(slots) > max(self.least, budget_slots(self.share, self.tokens)):
                del slots[min(max(len(slots) - 1 - RECENT, self.head, 1), len(slots) - 1)]
        self._added += count
        if self._added % self.every or len(slots) == self.slots:
            return None
        self._logical, self.slots = list(range(len(slots))), len(slots)
        return slots


def attention_sums(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention that tokens got from the last T of them, float32 ``[S]``: summed over queries, averaged over heads.

    The layer-wise sum of section 3.3, ``I_n^i = 1/K sum_j sum_m A_mn^ij``, of one layer. Causal: the last T of the S keys are
    the queries' own tokens.

    Args:
        queries: ``[T, H, D]``, rotated; keys: ``[S, H_kv, D]``; H a multiple of H_kv.
        scale: what scores are multiplied by.

    Cost: one matrix product, in blocks of rows.
    """
    count, heads, _ = queries.shape
    total, groups = int(keys.shape[0]), heads // int(keys.shape[1])
    wide = keys.float().repeat_interleave(groups, dim=1).permute(1, 2, 0)  # [H, D, S]
    got = torch.zeros(total, device=keys.device)
    rows = max(1, WEIGHTS_AT_ONCE // (heads * total))
    for begin in range(0, count, rows):
        block = queries[begin : begin + rows].float().transpose(0, 1)
        scores = block @ wide * scale
        last = total - count + begin + torch.arange(block.shape[1], device=keys.device)
        scores.masked_fill_(torch.arange(total, device=keys.device) > last[:, None], -torch.inf)
        got += scores.softmax(dim=-1).sum(dim=(0, 1)) / heads
    return got
