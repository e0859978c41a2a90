"""What a user of a prefix cache does today: exact KV of what they place, computed behind the longest known prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from ctxwin.baselines.policies import POLICIES, Policy, PrefixUser
from ctxwin.evals.arms.base import Arm, Served
from ctxwin.evals.arms.recall import came_back
from ctxwin.evals.items import Item, Setting
from ctxwin.kv.layout import SpanKV

if TYPE_CHECKING:
    from ctxwin.evals.group import Group


@dataclass(frozen=True)
class Prefix(
    Arm,
    form="prefix:naive|trim|append",
    argument=f"(?P<habit>{'|'.join(POLICIES)})",
    source="MPIC, section 2.2 and appendix A.3 (prefix caching); vLLM's automatic prefix caching",
    settings=("slide", "recall"),
):
    """Prefix caching (vLLM, SGLang): the KV of the longest prefix placed before is there, the rest is computed.

    Habits:
        naive: exactly what the item places, in its order.
        trim: the window is full when a chunk comes in, so its older half leaves for good: the newer half of what would be
            held (rounded up) is placed, and always what came back. This is the turn that trims; the turns until the
            window is full again would only append.
        append: what came back stands behind everything that stayed, whatever its old place (recalls; in a slide nothing
            comes back, and items are unscored).

    Their context may differ from the reference's, and the question then stands behind theirs: its answers, truth and KL
    are part of the figure. Besides the system prompt, the cache knows what was placed before and, in a recall, what stayed, which
    was placed without the chunk. Prefixes are counted in whole chunks; engines count blocks of tokens. ``encodes`` are pictures
    among what is computed that were never placed before: vLLM keeps vision embeddings of the others in its encoder
    cache. ``entered`` of a sample counts all pictures that enter the forward; ``context`` is what is placed over what the
    item places, in tokens.
    """

    habit: Policy
    setting: Setting = "slide"

    def on(self, setting: Setting) -> Prefix:
        return replace(self, setting=setting)

    def serve(self, group: Group) -> list[Served | None]:
        orders = {b: order for b, item in enumerate(group.items) if (order := self.order(item)) is not None}
        spans = _exact(group, orders)
        return [self._served(group, b, orders[b], spans[b]) if b in orders else None for b in range(len(group))]

    def prepared(self, group: Group) -> Callable[[], Served | None]:
        """The known prefix is in its slots beforehand; the call computes what follows it."""
        (served,), order = self.serve(group), self.order(group.items[0])
        if served is None or order is None:
            return lambda: None
        known, places = self._known(group.items[0], order), group.layout(order)
        if known == len(order):
            return lambda: served
        tokens, slot = group.row([order]), places[known].slot
        fresh = tokens.pick(torch.arange(slot, tokens.count, device=tokens.embeds.device)[None])

        def again() -> Served:
            memory, _ = group.decoder.append(fresh, group.memory([served.spans[:known]]))
            return replace(served, spans=group.placed_spans(memory, 0, order))

        return again

    def order(self, item: Item) -> tuple[int, ...] | None:
        """What this user places; None where the habit is meaningless."""
        back = self._back(item)
        if self.habit == "naive":
            return item.placed
        if self.habit == "append" and back is None:
            return None
        # By place. In a slide the prompt still holds the chunk that left (-1), and the newest comes in.
        last = len(item.placed) - 1
        held = list(range(-1, last)) if back is None else [i for i in range(last + 1) if i != back]
        new, full = last if back is None else back, len(held)
        user = PrefixUser(self.habit, held)
        if self.habit == "append":
            user.place(new)
        else:
            user.arrive(new, lambda held: len(held) <= full, before=range(new + 1, last + 1), drop=(full + 1) // 2)
        return tuple(item.placed[i] for i in user.held)

    def known(self, item: Item) -> list[tuple[int, ...]]:
        """The orders in which chunks were placed before."""
        back = self._back(item)
        return [item.before] if back is None else [item.before, item.placed[:back] + item.placed[back + 1 :]]

    def _known(self, item: Item, order: tuple[int, ...]) -> int:
        """Chunks of the longest known prefix of an order."""
        return max(
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(order, one, strict=False)))
            for one in self.known(item)
        )

    def _back(self, item: Item) -> int | None:
        """The place of the chunk that came back; None in a slide."""
        return came_back(item) if self.setting == "recall" else None

    def _served(self, group: Group, b: int, order: tuple[int, ...], row: Sequence[SpanKV]) -> Served:
        item, chunks, places = group.items[b], group.chunks[b], group.layout(order)
        before, fresh = self.known(item), order[self._known(item, order) :]
        seen = {frame for one in before for frame in one}
        computed = sum(chunks[frame].tokens for frame in fresh)
        return Served(
            row,
            over=sum(group.spec.span_bytes(p.tokens) for p in places),
            computed=computed,
            forwards=int(computed > 0),
            encodes=sum(len(chunks[frame].media) for frame in fresh if frame not in seen),
            begin=places[-1].start + chunks[order[-1]].advance,
            extra={
                "recomputed": computed / group.context_tokens,
                "entered": float(sum(len(chunks[frame].media) for frame in fresh)),
                "context": places[-1].end / group.context_tokens,
            },
        )


def _exact(group: Group, orders: dict[int, tuple[int, ...]]) -> dict[int, Sequence[SpanKV]]:
    """Exact KV of these orders; those of one layout share a forward, and what the items place is the reference's."""
    found: dict[int, Sequence[SpanKV]] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for b, order in orders.items():
        if order == group.items[b].placed:
            found[b] = group.exact[b]
        else:
            alike.setdefault(tuple(group.layout(order)), []).append(b)
    for some in alike.values():
        found |= dict(zip(some, group.prefilled([orders[b] for b in some], some), strict=True))
    return found
