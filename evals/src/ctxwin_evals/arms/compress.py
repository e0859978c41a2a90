"""Arms that hold fewer KV than tokens: Elastic Cache's merging, and eviction by attention (H2O) or by age (local).

By default the placed chunks' exact KV is thinned out before the question comes, which is what a window would hold; the
first token changes. ``@prompt`` is the paper's moment: system prompt, chunks and question are encoded exactly, then thinned
out together, and only the rest of the answer is affected (`Sampling.merge_prompt`). Slots differ by layer.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.merge import merge, merged_slots
from ctxwin_evals.arms.base import SHARE, Arm, Served, SharedArm
from ctxwin_evals.decoder import Memory, concatenated
from ctxwin_evals.elastic import H2O, Elastic, ElasticByHead, ElasticMost, ElasticShared, Local, Policy, Window
from ctxwin_evals.group import Group
from ctxwin_evals.importance import Attended, AttendedByHead

WEIGHTS_AT_ONCE = 1 << 26
"""Attention weights of a layer that are held at once, at most."""

_ATTENTION: WeakKeyDictionary[Group, dict[type[Attended], Tensor]] = WeakKeyDictionary()
"""See `attention_of`; computed once for all arms."""
_HELD: WeakKeyDictionary[Group, dict[Arm, list[Served | None]]] = WeakKeyDictionary()
"""Chunks thinned out before the question came; they are stored in that form, so an ask finds them."""


@dataclass(frozen=True)
class _Compressed(SharedArm, settings=("window",), inside=True, argument=f"(?P<share>{SHARE})(?:@(?P<moment>prompt))?"):
    moment: Literal["window", "prompt"] = "window"

    policy: ClassVar[type[Policy]]

    def serve(self, group: Group) -> list[Served | None]:
        if self.moment == "prompt":
            return self._thin_after_question(group)
        cache = _HELD.setdefault(group, {})
        if self not in cache:
            cache[self] = self._thin_before_question(group)
        return cache[self]

    def _thin_after_question(self, group: Group) -> list[Served | None]:
        """Serve exact chunks, and a policy that thins them out after the question."""
        policy = self.policy(self.share, attention_of(group, self.policy.attention))
        tokens = group.context_tokens
        return [
            Served(row, over=group.kv_bytes(), computed=tokens, forwards=1, policy=policy.of([b]))
            for b, row in enumerate(group.exact)
        ]

    def _thin_before_question(self, group: Group) -> list[Served | None]:
        """Serve thinned-out chunks, the only form that is stored; the system prompt is kept whole."""
        thinned_memory, policy = thinned(self.policy, self.share, group)
        nowhere = torch.zeros(3, thinned_memory.slots, dtype=torch.int64)
        extra = {"kv_share": thinned_memory.slots / group.context_tokens}
        stored, over = group.spec.span_bytes(thinned_memory.slots), group.kv_bytes()
        spans = [thinned_memory.span(b, 0, thinned_memory.slots, nowhere, 0) for b in range(len(group))]
        return [Served([span], stored, over, policy=policy.of([b]), extra=extra) for b, span in enumerate(spans)]


_VARIANTS: dict[str, type[Policy]] = {"max": ElasticMost, "heads": ElasticByHead, "shared": ElasticShared}
_ELASTIC = rf"{_Compressed.argument}(?:\+(?P<by>{'|'.join(_VARIANTS)}))?"


@dataclass(frozen=True)
class ElasticCache(_Compressed, form="elastic:B", source="Elastic Cache, sections 3.2-3.3", argument=_ELASTIC):
    """The chunks' KV merged around the most attended tokens, layer by layer; first and last token are among them. ``+max``: by
    the maximum instead of the sum; ``+heads``: head by head; ``+shared``: alike in all layers."""

    by: str = ""

    @property
    def policy(self) -> type[Policy]:  # type: ignore[override]
        return _VARIANTS.get(self.by, Elastic)


class HeavyHitters(_Compressed, form="h2o:B", source="Elastic Cache, section 4.1 (H2O, Frequency Cache)"):
    """Only the KV of the most attended tokens is kept, layer by layer; the least attended are dropped while generating too."""

    policy: ClassVar[type[Policy]] = H2O


class MostRecent(_Compressed, form="local:B", source="Elastic Cache, section 4.1 (Local Cache)"):
    """Only the KV of the last tokens is kept; the oldest are dropped while generating too. No first tokens are kept as sinks."""

    policy: ClassVar[type[Policy]] = Local


class Merged(SharedArm, form="merged:B", source="Elastic Cache, section 3.3 (chunk by chunk)", settings=("window",)):
    """Each chunk's exact KV merged by itself, by the attention its own tokens give each other: a window's lane ``merged``.

    Unlike `ElasticCache` it is asked of any engine that shows a chunk's attention (`Engine.attended`).
    """

    def serve(self, group: Group) -> list[Served | None]:
        cache = _HELD.setdefault(group, {})
        if self not in cache:
            cache[self] = [self._merged_row(group, b) for b in range(len(group))]
        return cache[self]

    def _merged_row(self, group: Group, b: int) -> Served:
        order, spans = group.items[b].placed, list(group.exact[b])
        engine, row = group.decoder.engine, []
        for i, (frame, place) in enumerate(zip(order, group.places, strict=True)):
            sums = engine.attended(group.segments(b, order[:i], spans[:i]), group.chunks[b][frame], place.start).sums
            row.append(merge(spans[i], sums, merged_slots(self.share, place.tokens)))
        slots = sum(span.tokens for span in row)
        extra = {"kv_share": slots / group.context_tokens}
        return Served(row, group.spec.span_bytes(slots), group.kv_bytes(), extra=extra)


def thinned(kind: type[Policy], share: float, group: Group) -> tuple[Memory, Policy]:
    """The placed chunks' exact KV thinned out before a question comes, and the policy from then on; for the whole group."""
    sums, lead = attention_of(group, kind.attention), group.system_prompt_span.tokens
    tokens, attended = group.context_tokens, kind.attention(sums[..., lead:])
    whole = group.decoder.memory(group.exact)
    compressed = kind(share, sums, Window(lead, tokens, tokens)).compress(whole, attended)
    sums_left = torch.cat([sums[..., :lead], attended.sums], -1)
    return compressed, kind(share, sums_left, Window(lead, tokens, compressed.slots))


def attention_of(group: Group, kind: type[Attended] = Attended) -> Tensor:
    """Attention that system prompt and placed chunks give each other, by slot: float32 ``[L, B, system prompt + context]``.

    Summed over all queries, averaged over heads (section 3.3), or as ``kind`` has it. Cost: an eager pass for each group.
    """
    if group.decoder.window is not None:
        raise UnsupportedModel("sliding layers see by distance, which thinned-out slots do not keep; take another arm")
    cache = _ATTENTION.setdefault(group, {})
    if kind not in cache:
        decoder, batch = group.decoder, len(group)
        tokens = concatenated([decoder.tokens([group.system_prompt] * batch), group.context])
        empty = group.behind_system_prompt(batch)
        memory = Memory(empty.k[:, :, :, :0], empty.v[:, :, :, :0]).grown(tokens.count)
        by_head = memory.k.shape[2:3] if kind is AttendedByHead else ()
        attended = kind(torch.zeros(decoder.layers, batch, *by_head, tokens.count, device=memory.k.device))
        heads = int(decoder.engine.text_model.config.num_attention_heads)
        rows = max(1, WEIGHTS_AT_ONCE // (batch * heads * tokens.count))
        for begin in range(0, tokens.count, rows):
            at = torch.arange(begin, min(begin + rows, tokens.count), device=memory.k.device)
            decoder.run(tokens.pick(at[None].expand(batch, -1)), memory, at, watch=attended.watch)
        cache[kind] = attended.sums
    return cache[kind]
