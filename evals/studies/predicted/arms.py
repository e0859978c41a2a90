"""The arms of this study: patches with predicted coefficients, and patches that were formed behind other neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ctxwin.evals.arms.base import RankedArm, Served
from ctxwin.evals.decoder import concatenated
from ctxwin.evals.group import Group
from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.rope import turn

from .contexts import Contexts, contexts_of
from .predictor import Predictor


@dataclass(frozen=True)
class Predicted(
    RankedArm,
    form="predicted:M",
    source="issue 12, item 5: coefficients predicted from stored features",
    settings=("window",),
):
    """Every chunk but the first: canonical and a patch over the shared basis whose coefficients are predicted.

    Nothing was ever formed behind these neighbours. ``work`` of a sample is the predictor's share of the multiply-adds of a
    re-prefill of what is placed; ``residual`` the largest expected error of a chunk, see `Prediction`.
    """

    spelled: str
    predictor: Predictor = field(compare=False)

    def serve(self, group: Group) -> list[Served | None]:
        contexts = contexts_of(group)
        made = self.predictor.predict(contexts)
        k, spec = turn(group.spec.rope, made.k, contexts.local), group.spec
        reference = torch.ones(spec.layers, dtype=torch.float64)
        figures = {"work": self._work(group, contexts)}
        served: list[Served | None] = []
        for b in range(len(group)):
            row, stored, expected = [group.blind[b][0]], 0, [0.0]
            for i in range(1, len(group.places)):
                at = contexts.chunk == i
                lost = Deficit(k[b][:, at], made.v[b][:, at], reference, 0.0)
                patch = group.compressed(lost, self.size, (self.spelled, b, i))
                row.append(group.patched(group.canonical[b][i], patch, i))
                stored += patch.nbytes
                expected.append(float(made.residual[b, at].mean()))
            places = range(1, len(row))
            served.append(Served(row, stored, group.kv_bytes(places), extra={**figures, "residual": max(expected)}))
        return served

    def _work(self, group: Group, contexts: Contexts) -> float:
        at, lead = contexts.later, contexts.system_k.shape[1]
        slots = torch.arange(len(at)) + 1.0
        first = torch.tensor([group.places[i].slot for i in contexts.chunk.tolist()])
        whole = prefill_work(group, len(at), lead + float(slots.mean()))
        if not at.any():
            return 0.0
        seen, alone = float(slots[at].mean()) + lead, float((slots - first)[at].mean()) + lead
        return self.predictor.work(int(at.sum()), seen, alone) / whole


class Elsewhere(
    RankedArm, form="elsewhere:M", source="Kamera, section 5 (a stale patch at turnover 1)", settings=("window",)
):
    """Every chunk but the first: canonical and the patch that was formed behind another item's chunks."""

    def serve(self, group: Group) -> list[Served | None]:
        if len(group) < 2:
            return [None] * len(group)
        rows = [[row[0]] for row in group.blind]
        stored = [0] * len(group)
        for i in range(1, len(group.places)):
            for b, met in enumerate(_behind_others(group, i)):
                lost = deficit(met, group.canonical[b][i], group.spec)
                patch = group.compressed(lost, self.size, ("elsewhere", b, i))
                rows[b].append(group.patched(group.canonical[b][i], patch, i))
                stored[b] += patch.nbytes
        over = group.kv_bytes(range(1, len(group.places)))
        return [Served(row, nbytes, over) for row, nbytes in zip(rows, stored, strict=True)]


def _behind_others(group: Group, place: int) -> Iterator[SpanKV]:
    """The chunk at a place of every item, conditioned on what the next item has in front of it."""
    count, parts = len(group), []
    for i, where in enumerate(group.places[: place + 1]):
        lenders = [b if i == place else (b + 1) % count for b in range(count)]
        some = [group.tokens(group.items[lender].placed[i]).of([lender]) for lender in lenders]
        parts.append(concatenated(some, items=True).moved(where.start))
    memory, _ = group.decoder.append(concatenated(parts), group.behind_system_prompt(count))
    lead, where = group.system_prompt_span.tokens, group.places[place]
    for b, item in enumerate(group.items):
        positions = group.position_rows(item.placed[place])
        yield memory.span(b, lead + where.slot, lead + where.end, positions, where.start)


def prefill_work(group: Group, tokens: int, seen: float) -> float:
    """Multiply-adds of a forward over ``tokens`` that see ``seen`` slots on average."""
    text, spec = group.decoder.engine.text_model, group.spec
    heads = text.config.num_attention_heads
    total = 0.0
    for layer in text.layers:
        total += sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        total += heads * seen * (spec.k_dim + spec.v_dim)
    return tokens * total
