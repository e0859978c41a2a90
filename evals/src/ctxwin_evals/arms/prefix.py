"""Arms of prefix caching: exact KV of the placed chunks, computed after the longest cached prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ctxwin.baselines.policies import POLICIES, Policy, PrefixUser
from ctxwin.kv.layout import SpanKV
from ctxwin_evals.arms.base import Arm, Served
from ctxwin_evals.arms.recall import came_back
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item, Setting, grouped


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
            held (rounded up) is placed, and always what came back. Later turns, until it is full again, would only append.
        append: what came back stands after everything that stayed (recalls; items of a slide are unscored).

    Where their context differs from the reference's, the question stands after theirs. Besides the system prompt, the cache knows
    what was placed before and, in a recall, what stayed, in whole chunks; engines count blocks of tokens. ``encodes`` are
    pictures among what is computed that were never placed before: vLLM keeps vision embeddings of the others. ``entered`` of a
    sample counts all pictures that enter the forward; ``context`` is what is placed over what the item places, in tokens.
    """

    habit: Policy
    setting: Setting = "slide"

    def serve(self, group: Group) -> list[Served | None]:
        orders = {b: order for b, item in enumerate(group.items) if (order := self.order(item)) is not None}
        spans = _exact(group, orders)
        return [self._serve_row(group, b, orders[b], spans[b]) if b in orders else None for b in range(len(group))]

    def order(self, item: Item) -> tuple[int, ...] | None:
        """Return the order in which this user places chunks; None where the habit is meaningless."""
        back = self._back(item)
        if self.habit == "naive":
            return item.placed
        if self.habit == "append" and back is None:
            return None
        # By place. In a slide the prompt still holds the chunk that left (-1), and the newest comes in.
        last = len(item.placed) - 1
        frames = list(range(-1, last)) if back is None else [i for i in range(last + 1) if i != back]
        new, full = last if back is None else back, len(frames)
        user = PrefixUser(self.habit, frames)
        if self.habit == "append":
            user.place(new)
        else:
            user.arrive(new, lambda frames: len(frames) <= full, before=range(new + 1, last + 1), drop=(full + 1) // 2)
        return tuple(item.placed[i] for i in user.held)

    def cached_orders(self, item: Item) -> list[tuple[int, ...]]:
        """Return the orders in which chunks were placed before."""
        back = self._back(item)
        return [item.before] if back is None else [item.before, item.placed[:back] + item.placed[back + 1 :]]

    def _back(self, item: Item) -> int | None:
        """The place of the chunk that came back; None in a slide."""
        return came_back(item) if self.setting == "recall" else None

    def _serve_row(self, group: Group, b: int, order: tuple[int, ...], row: Sequence[SpanKV]) -> Served:
        item, chunks, places = group.items[b], group.chunks[b], group.layout(order)
        earlier = self.cached_orders(item)
        pairs = (zip(order, one, strict=False) for one in earlier)
        fresh = order[max(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both)) for both in pairs) :]
        encoded_frames = {frame for one in earlier for frame in one}
        computed, entered = sum(chunks[i].tokens for i in fresh), sum(len(chunks[i].media) for i in fresh)
        total = group.context_tokens
        return Served(
            row,
            over=sum(group.spec.span_bytes(p.tokens) for p in places),
            computed=computed,
            forwards=int(computed > 0),
            encodes=sum(len(chunks[frame].media) for frame in fresh if frame not in encoded_frames),
            begin=places[-1].start + chunks[order[-1]].advance,
            extra={"recomputed": computed / total, "entered": float(entered), "context": places[-1].end / total},
        )


def _exact(group: Group, orders: dict[int, tuple[int, ...]]) -> dict[int, Sequence[SpanKV]]:
    """Exact KV of these orders; those of one layout share a forward, and what the items place is the reference's."""
    rows = {b: group.exact[b] for b, order in orders.items() if order == group.items[b].placed}
    others = [b for b in orders if b not in rows]
    for some in grouped(others, lambda b: tuple(group.layout(orders[b]))).values():
        rows |= dict(zip(some, group.prefilled([orders[b] for b in some], some), strict=True))
    return rows
