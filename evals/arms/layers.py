"""Arms that treat layers differently: which layers reuse, which compute, and for how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ctxwin.evals.arms.base import Served, SharedArm
from ctxwin.evals.arms.select import highest, quota, served
from ctxwin.evals.items import Setting

if TYPE_CHECKING:
    from ctxwin.evals.decoder import Memory
    from ctxwin.evals.group import Group

WINDOW: tuple[Setting, ...] = ("window", "slide")


@dataclass(frozen=True)
class Cacheblend(SharedArm):
    """Tokens are chosen by how far fresh KV is from stored KV, and fewer of them go on from layer to layer.

    Layer 0 runs in full: its KV are equal by construction (embeddings and a rotation), so it cannot choose. From layer
    1 on, fresh KV of the tokens that are still in are compared with the stored ones (squared difference, keys and
    values), those that differ most stay, take their fresh KV and go through the layer; the others keep what is stored.
    Layer 1 as the first to decide is the authors' released default (LMCache, check layers 1, ratio 0.15), which then
    goes on with one set; the shrinking set is the paper's gradual filtering. Of that schedule the paper says that it
    starts slightly above R and falls: here in equal steps from 5/4 R at layer 1 to 3/4 R at the last, R on average.

    The fresh keys and values that are only compared are not counted as computed; layer 0 is. R = 0 runs nothing.
    """

    form: ClassVar[str] = "cacheblend:R"
    source: ClassVar[str] = "CacheBlend (Yao et al. 2025, arXiv 2405.16444), section 4; LMCache's blender"
    settings: ClassVar[tuple[Setting, ...]] = WINDOW

    def serve(self, group: Group) -> list[Served | None]:
        tokens, layers, lead = group.context_tokens, group.decoder.layers, group.header_span.tokens
        counts = [quota(share, tokens) for share in falling(self.share, layers - 1)]
        if not any(counts):
            return served(group, group.blind, [0.0] * len(group))
        run, memory = group.decoder.run, group.memory(group.blind)
        at = torch.arange(tokens, device=memory.k.device).expand(len(group), -1)
        hidden = run(group.context, memory, at + lead, layers=range(1))
        for layer, count in zip(range(1, layers), counts, strict=True):
            only = range(layer, layer + 1)
            k, v = memory.k[layer].clone(), memory.v[layer].clone()
            run(group.context.pick(at), memory, at + lead, layers=only, hidden=hidden)
            stay = highest(_moved(memory, layer, k, v).gather(1, at + lead), count)
            memory.k[layer], memory.v[layer] = k, v
            at = at.gather(1, stay)
            hidden = hidden.gather(1, stay[..., None].expand(-1, -1, hidden.shape[-1]))
            hidden = run(group.context.pick(at), memory, at + lead, layers=only, hidden=hidden)
        return served(group, group.spans(memory), [(tokens + sum(counts)) / layers] * len(group))


def falling(share: float, steps: int) -> list[float]:
    """``steps`` shares in equal steps around ``share``, which is their mean: from 5/4 of it to 3/4, within 0..1."""
    width = min(share / 4, 1 - share)
    return (
        (share + torch.linspace(width, -width, steps, dtype=torch.float64)).tolist() if steps > 1 else [share] * steps
    )


def _moved(memory: Memory, layer: int, k: Tensor, v: Tensor) -> Tensor:
    """Squared distance of a layer's KV from (k, v) by slot: float64 ``[B, S]``."""
    pairs = ((memory.k[layer], k), (memory.v[layer], v))
    return torch.stack([(x.double() - y.double()).pow(2).sum(dim=(1, 3)) for x, y in pairs]).sum(dim=0)
