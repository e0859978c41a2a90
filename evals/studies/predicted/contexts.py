"""Contexts as tensors: what is stored of every chunk, where it stands, and what it lost.

Keys, queries and deficits stand in a position-free frame, without any rotation, so that equal content looks alike wherever it
stands in its chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctxwin.evals.decoder import concatenated
from ctxwin.evals.group import Group
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.rope import angles, turn


@dataclass(frozen=True)
class Contexts:
    """B contexts of one layout, S placed tokens each, on a model of L layers.

    Attributes:
        k, v: canonicals ``[B, L, S, H, D]``.
        system_k, system_v: the system prompt ``[L, T, H, D]``, rotated in place.
        angles: of every placed token in place, float64 ``[S, D / 2]``; ``local``: at its chunk's own origin.
        chunk: int64 ``[S]``, which chunk a token belongs to. The first one's canonical is exact.
        q: queries of the canonicals' own forwards ``[B, L, S, Hq, D]``; None where nobody asked for them.
        lost_k, lost_v: exact minus canonical, as ``k`` and ``v``; None where nobody computed the exact KV.
    """

    spec: KVSpec
    k: Tensor
    v: Tensor
    system_k: Tensor
    system_v: Tensor
    angles: Tensor
    local: Tensor
    chunk: Tensor
    q: Tensor | None = None
    lost_k: Tensor | None = None
    lost_v: Tensor | None = None

    @property
    def later(self) -> Tensor:
        """Which tokens have chunks in front: bool ``[S]``."""
        return self.chunk > 0

    @property
    def lost(self) -> tuple[Tensor, Tensor]:
        """(keys, values) that canonicals lack; ValueError where nobody computed them."""
        if self.lost_k is None or self.lost_v is None:
            raise ValueError("contexts must be made with taught=True to say what chunks lost")
        return self.lost_k, self.lost_v

    @property
    def taught_queries(self) -> Tensor:
        """`q`; ValueError where nobody asked for them."""
        if self.q is None:
            raise ValueError("contexts must be made with taught=True to have queries")
        return self.q

    def own(self, layer: int) -> Tensor:
        """A layer's canonical keys and values: ``[B, S, H * (k_dim + v_dim)]``."""
        return torch.cat([self.k[:, layer].flatten(2), self.v[:, layer].flatten(2)], -1)


def contexts_of(group: Group, *, taught: bool = False) -> Contexts:
    """The placed chunks of a group, whose canonicals are formed where they do not exist yet.

    Args:
        group: of a model with full rotary keys and queries that are ``q_proj``'s output, rotated.
        taught: also queries and what chunks lost, to fit on: a forward over each chunk and one over all that is placed.
    """
    rope, order = group.spec.rope, group.items[0].placed
    local = torch.cat([group.position_rows(frame) for frame in order], 1)
    starts = torch.cat([torch.full((place.tokens,), place.start) for place in group.places])
    chunk = torch.cat([torch.full((place.tokens,), i) for i, place in enumerate(group.places)])
    here, own = angles(rope, local + starts), angles(rope, local)
    k, v = _joined(group.canonical)
    k = turn(rope, k, -own)
    system = group.system_prompt_span
    known = group.spec, k, v, system.k.float(), system.v.float(), here, own, chunk
    if not taught:
        return Contexts(*known)
    exact_k, exact_v = _joined(group.exact)
    lost_k, lost_v = turn(rope, exact_k, -here) - k, exact_v - v
    return Contexts(*known, _queries(group), lost_k, lost_v)


def _joined(rows: Sequence[Sequence[Any]]) -> tuple[Tensor, Tensor]:
    """Spans by item and place as ``[B, L, S, H, D]``, keys and values."""
    k, v = (torch.stack([torch.cat([getattr(s, n) for s in row], 1) for row in rows]).float() for n in ("k", "v"))
    return k, v


def _queries(group: Group) -> Tensor:
    """Queries of every placed chunk alone behind the system prompt: ``[B, L, S, Hq, D]``, not rotated."""
    parts = []
    for i in range(len(group.places)):
        rows = [group.tokens(item.placed[i]).of([b]) for b, item in enumerate(group.items)]
        alone = concatenated(rows, items=True).moved(group.system_prompt.advance)
        with _watched(group.decoder.engine.text_model.layers) as seen:
            group.decoder.append(alone, group.behind_system_prompt(len(rows)))
        made = torch.stack(seen, 1)
        parts.append(made.view(*made.shape[:3], -1, group.spec.k_dim))
    return torch.cat(parts, 2).float().cpu()


@contextmanager
def _watched(layers: Sequence[Any]) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    hooks = [layer.self_attn.q_proj.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def readouts(contexts: Contexts, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What attention reads in context beyond what it reads alone, at one layer: ``[B, S, Hq * D_v]``.

    The layer's attention once over everything in front and once over the system prompt and the own chunk only; what they
    differ by is all that neighbours can contribute there.

    Args:
        contexts: where tokens stand.
        layer: whose KV this is.
        q: queries ``[B, S, Hq, D]``; ``k``, ``v``: ``[B, S, H, D]``, not rotated.
    """
    lead, s, rope = contexts.system_k.shape[1], q.shape[1], contexts.spec.rope
    turned_q, turned_k = turn(rope, q, contexts.angles), turn(rope, k, contexts.angles)

    def behind(system: Tensor, own: Tensor) -> Tensor:
        return torch.cat([system[None].expand(len(q), -1, -1, -1), own], 1).transpose(1, 2)

    keys, values = behind(contexts.system_k[layer], turned_k), behind(contexts.system_v[layer], v)
    grouped = turned_q.view(len(q), s, k.shape[2], -1, q.shape[-1]).permute(0, 2, 3, 1, 4)  # [B, H, Hq / H, S, D]
    logits = grouped @ keys[:, :, None].transpose(-1, -2) / q.shape[-1] ** 0.5
    system = torch.ones(s, lead, dtype=torch.bool)
    causal = torch.arange(s)[None] <= torch.arange(s)[:, None]
    same = contexts.chunk[None] == contexts.chunk[:, None]
    whole, alone = (
        logits.masked_fill(~torch.cat([system, mask], 1), float("-inf")).softmax(-1) @ values[:, :, None]
        for mask in (causal, causal & same)
    )
    beyond: Tensor = whole - alone
    return beyond.permute(0, 3, 1, 2, 4).flatten(2)
