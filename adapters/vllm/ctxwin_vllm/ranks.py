"""KV heads and layers on ranks: one rank's share of a span, and a span from the shares of all ranks.

The store has no notion of ranks: a span has all layers and KV heads. A worker loads and captures its share: the layers of its
pipeline stage, and of these the heads of its tensor-parallel rank. Tokens, positions and block ids are the same on every
rank.
"""

from collections.abc import Sequence

import torch


def own_heads(heads: int, rank: int, size: int) -> slice:
    """Return the KV heads that vLLM keeps on one rank: an equal share, or one head on several ranks where there are fewer.

    Latent attention (MLA) has one, which every rank holds whole. Raises ValueError where neither of ``heads`` and the
    group's ``size`` divides the other, which vLLM refuses as well.
    """
    if heads < 1 or size < 1:
        raise ValueError(f"heads and ranks must be at least 1, got {heads} heads and {size} ranks")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}), got {rank}")
    if heads % size and size % heads:
        raise ValueError(
            f"KV heads must be a multiple of the ranks or divide them, got {heads} heads and {size} ranks; "
            "set tensor_parallel_size accordingly"
        )
    if heads >= size:
        share = heads // size
        return slice(rank * share, (rank + 1) * share)
    head = rank // (size // heads)  # vLLM puts the copies of a head on neighbouring ranks
    return slice(head, head + 1)


def gather(parts: Sequence[torch.Tensor], heads: int) -> torch.Tensor:
    """Return all KV heads of a span ``[L, T, heads, D]`` from what the ranks captured of it; a single part is not copied.

    Args:
        parts: ``[L, T, h, D]`` of rank 0, 1, ...; h as in `own_heads`. Of a head that several ranks hold, the first copy
            counts: all are computed from the same weights and activations.
        heads: KV heads of the model.

    Raises:
        ValueError: parts that are not the shares of ``heads`` heads of one span.
    """
    if not parts:
        raise ValueError("the parts of at least one rank are needed, got none")
    size = len(parts)
    layers, tokens, _, dim = parts[0].shape
    shares, until = [], 0
    for rank, part in enumerate(parts):
        head_range = own_heads(heads, rank, size)
        want = (layers, tokens, head_range.stop - head_range.start, dim)
        if tuple(part.shape) != want or part.dtype != parts[0].dtype:
            got = f"{part.dtype} {tuple(part.shape)}"
            raise ValueError(f"rank {rank} of {size} must hold {parts[0].dtype} {want}, got {got}")
        if head_range.start == until:  # else a copy of the previous head
            shares.append(part)
            until = head_range.stop
    return shares[0] if len(shares) == 1 else torch.cat(shares, dim=2)


def gather_stages(parts: Sequence[torch.Tensor], heads: int, stages: int) -> torch.Tensor:
    """As `gather`, of a pipeline: ``parts`` of all ranks of its first stage, then of the next, whose layers follow."""
    size = len(parts) // stages
    stage_spans = [gather(parts[at : at + size], heads) for at in range(0, len(parts), size)]
    return stage_spans[0] if stages == 1 else torch.cat(stage_spans)
