"""What a reorder costs: its chunks are computed again, or copies of what moved are appended to the order before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ctxwin.window.state import State


@dataclass(frozen=True)
class ReorderAdvice:
    """Two ways to serve a new order of chunks whose KV stands in another one. `Window.maintenance.prepare_orbit` is a third.

    Attributes:
        repair: tokens of chunks that the next ask computes.
        copy: the same in the order before (`Window.undo`) with the chunks of ``copied`` appended once more: each chunk then
            stands last where the new order has it. The window grows by as many tokens.
        copied: placement ids, in order.
        cheaper: the way that computes less; ``repair`` where the copies would not fit into the budget.
    """

    repair: int
    copy: int
    copied: tuple[str, ...]
    cheaper: Literal["repair", "copy"]


def reorder_advice(state: State, computed: Mapping[str, int]) -> ReorderAdvice | None:
    """Return the advice for an ask that computes so many tokens of some placements. O(n).

    None where chunks stand as their KV was computed, or nothing is computed that was before.
    """
    repair = sum(computed.values())
    if not any(p.seen for p in reversed(state.placed) if p.id in computed):
        return None
    conditioned = [p for p in state.placed if p.kv is not None and p.kv.antecedents.length]
    last = max(conditioned, key=lambda p: p.kv.antecedents.length if p.kv else 0, default=None)
    if last is None or last.kv is None:
        return None
    places = {placement: i for i, placement in enumerate((*last.kv.antecedents, last.id))}
    known = [(places[p.id], p) for p in state.placed if p.id in places]
    moved = next((i for i, (a, b) in enumerate(pairwise(known), start=1) if b[0] < a[0]), None)
    new = sum(tokens for placement, tokens in computed.items() if placement not in places)
    if moved is None or new == repair:
        return None
    copied = [p for _, p in known[moved:]]
    more = sum(p.tokens for p in copied)
    copy = more + new
    cheaper: Literal["repair", "copy"] = "copy" if copy < repair and state.tokens + more <= state.budget else "repair"
    return ReorderAdvice(repair, copy, tuple(p.id for p in copied), cheaper)
