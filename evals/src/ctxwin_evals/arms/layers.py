"""Arms that treat layers differently: which layers reuse, which compute, and for how many tokens."""

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.merge import most_important
from ctxwin.kv.rope import angles, turn
from ctxwin_evals.arms.base import RankedArm, Served, SharedArm
from ctxwin_evals.arms.recall import came_back
from ctxwin_evals.arms.tokens import quota, serve_rows, serving, spans_of
from ctxwin_evals.group import Group
from ctxwin_evals.items import Setting, grouped

_STATES: WeakKeyDictionary[Group, dict[object, Tensor]] = WeakKeyDictionary()
"""Hidden states that `ShallowReuse` stores beside canonicals."""


class Cacheblend(
    SharedArm,
    form="cacheblend:R",
    source="CacheBlend (Yao et al. 2025, arXiv 2405.16444), section 4; LMCache's blender",
    inside=True,
):
    """Tokens are chosen by how far fresh KV is from stored KV; from layer to layer fewer of them go on.

    Layer 0 runs in full: its KV is equal by construction, so it cannot choose. From layer 1 on, as in LMCache's released
    default, tokens whose fresh keys and values differ most (squared) from what is stored take them and go through the layer;
    the others keep what is stored. Of the shrinking set, the paper's gradual filtering, it says that it starts slightly above
    R: here it falls in equal steps from 5/4 R at layer 1 to 3/4 R at the last.

    Layer 0 counts as computed, what is only compared does not. Neither is part of ``renewed``, the share of the KV that is
    replaced, which is what stands beside a patch's bytes. R = 0 runs nothing.
    """

    def serve(self, group: Group) -> list[Served | None]:
        tokens, layers, lead = group.context_tokens, group.decoder.layers, group.system_prompt_span.tokens
        counts = [quota(share, tokens) for share in falling(self.share, layers - 1)]
        if not any(counts):
            return serve_rows(group, group.blind, [0.0] * len(group))
        run, memory = group.decoder.run, group.memory(group.blind)
        at = torch.arange(tokens, device=memory.k.device).expand(len(group), -1)
        hidden = run(group.context, memory, at + lead, layers=range(1))
        for layer, count in zip(range(1, layers), counts, strict=True):
            only = range(layer, layer + 1)
            k, v = memory.k[layer].clone(), memory.v[layer].clone()
            run(group.context.pick(at), memory, at + lead, layers=only, hidden=hidden)
            pairs = (memory.k[layer], k), (memory.v[layer], v)
            changed = torch.stack([(x.double() - y.double()).pow(2).sum(dim=(1, 3)) for x, y in pairs]).sum(dim=0)
            stay = most_important(changed.gather(1, at + lead), count)
            memory.k[layer], memory.v[layer] = k, v
            at = at.gather(1, stay)
            hidden = hidden.gather(1, stay[..., None].expand(-1, -1, hidden.shape[-1]))
            hidden = run(group.context.pick(at), memory, at + lead, layers=only, hidden=hidden)
        work, renewed = (tokens + sum(counts)) / layers, {"renewed": sum(counts) / layers / tokens}
        served = (serving(group, row, work) for row in group.spans(memory))
        return [replace(one, extra=one.extra | renewed) for one in served]


@dataclass(frozen=True)
class ShallowReuse(
    SharedArm,
    form="layers:F",
    source="Kamera, appendix C.3 and C.4, table 8 (layer re-prefill), appendix D (deep re-prefill)",
    inside=True,
    settings=("window", "slide", "recall"),
):
    """The first share of the layers reuses stored KV, the rest is computed in context for all tokens.

    What enters the first computed layer are the hidden states of the chunk's forward alone, stored beside its canonical
    (``stored`` counts them in bf16). 0 is re-prefill, 1 blind reuse. KV of the first computed layer follows from these states
    alone and remains the canonical's: context comes in from the next layer on, so reusing all layers but one is blind as
    well. The first chunk is exact and not computed. In a recall everything in front is exact, and only the chunk that came
    back is treated this way.
    """

    setting: Setting = "window"

    def serve(self, group: Group) -> list[Served | None]:
        out: dict[int, Served] = {}
        for places, some in grouped(range(len(group)), lambda b: self._places(group, b)).items():
            out |= self._batch(group, places, some)
        return [out[b] for b in range(len(group))]

    def _places(self, group: Group, b: int) -> tuple[int, ...]:
        """Places of the chunks that are reused."""
        if self.setting != "recall":
            return tuple(range(1, len(group.places)))
        return (came_back(group.items[b]),)

    def _batch(self, group: Group, places: tuple[int, ...], some: list[int]) -> dict[int, Served]:
        decoder, lead = group.decoder, group.system_prompt_span.tokens
        reused = quota(self.share, decoder.layers)
        base = [list(group.blind[b] if self.setting != "recall" else group.exact[b]) for b in some]
        for row, b in zip(base, some, strict=True):
            for i in places:
                row[i] = group.blind[b][i]
        tokens = sum(group.places[i].tokens for i in places)
        stored, work = 0, 0.0
        if reused < decoder.layers and tokens:
            states = [self._states(group, i, some, reused) for i in places] if reused else []
            at = torch.cat([torch.arange(group.places[i].slot, group.places[i].end) for i in places])
            memory, context = group.memory(base), group.context.of(some)
            picked = context.pick(at.to(context.embeds.device).expand(len(some), -1))
            rest = range(reused, decoder.layers)
            decoder.run(picked, memory, at + lead, layers=rest, hidden=torch.cat(states, 1) if states else None)
            base = spans_of(group, memory, some)
            stored = tokens * int(context.embeds.shape[-1]) * 2 if reused else 0
            work = tokens * len(rest) / decoder.layers
        return {b: serving(group, row, work, stored=stored, over=places) for b, row in zip(some, base, strict=True)}

    def _states(self, group: Group, place: int, some: list[int], layers: int) -> Tensor:
        """Hidden states after the first ``layers`` of the chunks at a place, formed after the system prompt alone."""
        cache, key = _STATES.setdefault(group, {}), (place, tuple(some), layers)
        if key not in cache:
            alone = group.row([(group.items[b].placed[place],) for b in some], some)
            memory = group.behind_system_prompt(len(some)).grown(alone.count)
            at = torch.arange(memory.slots - alone.count, memory.slots)
            cache[key] = group.decoder.run(alone, memory, at, layers=range(layers))
        return cache[key]


class LowRankKeys(
    RankedArm, form="lowrank-k:M", source="Kamera, appendix C.3, table 6 (low-rank-K reconstruction, ShadowKV-style)"
):
    """Keys of every chunk but the first are the best rank-M approximation of the conditioned ones; values are canonical.

    Keys are de-rotated token by token, where they are of lowest rank, and decomposed by layer over all heads; both factors
    are kept, in the patches' dtype. ShadowKV fetches exact values; reused ones carry no conditioning, as this arm shows.
    """

    def serve(self, group: Group) -> list[Served | None]:
        places, out = range(1, len(group.places)), []
        for exact, blind in zip(group.exact, group.blind, strict=True):
            row, stored = [blind[0]], 0
            for i in places:
                k, size = low_rank_keys(exact[i], group.spec, self.size, group.patcher.dtype)
                row.append(replace(blind[i], k=k))
                stored += size
            out.append(Served(row, stored, group.kv_bytes(places)))
        return list(out)


def low_rank_keys(span: SpanKV, spec: KVSpec, rank: int | None, dtype: torch.dtype) -> tuple[Tensor, int]:
    """(keys rotated as the span's, bytes of the factors): each layer's de-rotated keys at ``rank`` (None: full).

    Full rank, or more than there is, keeps the keys themselves.
    """
    turns = angles(spec.rope, span.positions + span.start)
    flat = turn(spec.rope, span.k.double(), -turns).flatten(2)
    if rank is None or rank >= min(flat.shape[1:]):
        keys, size = flat.to(dtype), flat.numel()
    else:
        u, s, vh = torch.linalg.svd(flat, full_matrices=False)
        left_factor, right_factor = (u * s[:, None])[..., :rank].to(dtype), vh[:, :rank].to(dtype)
        keys, size = left_factor.double() @ right_factor.double(), left_factor.numel() + right_factor.numel()
    return turn(spec.rope, keys.double().view(span.k.shape), turns).to(span.k.dtype), size * dtype.itemsize


def falling(share: float, steps: int) -> list[float]:
    """``steps`` shares in equal steps around ``share``, which is their mean: from 5/4 of it to 3/4, within 0..1."""
    width = min(share / 4, 1 - share) * (steps > 1)
    return (share + torch.linspace(width, -width, steps, dtype=torch.float64)).tolist()
