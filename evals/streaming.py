"""A stream through a window: what survivors have absorbed when every chunk met the window of its time.

`Group.earlier` conditions chunks on everything before them, in one forward. Along a stream a chunk meets survivors only,
which met earlier survivors, and all of them move as the window slides: that takes a forward a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxwin.kv.layout import SpanKV
from ctxwin.kv.relocate import relocate

if TYPE_CHECKING:
    from ctxwin.evals.group import Group


def streamed(group: Group, size: int) -> list[list[SpanKV]]:
    """The last ``size`` chunks of every item's ``before``, as they stand after it went through a window of that size.

    A full window loses its leading chunk before the next one comes; survivors are rotated, each time from where they were
    formed, and the new chunk is computed behind them (Kamera, section 5, "Sliding-window survival" and "The window
    mechanics, end to end").

    Returns:
        Spans by item and place, where they were formed. Cost: a forward a chunk of the stream.

    Raises:
        ValueError: items whose ``placed`` is not the end of ``before``.
    """
    for item in group.items:
        if item.placed != item.before[-size:]:
            raise ValueError(
                f"a streamed item must place the last {size} chunks of before, got {item.placed} of {item.before}"
            )
    held: list[list[SpanKV]] = [[] for _ in group.items]
    lead = group.system_prompt_span.tokens
    for step in range(len(group.items[0].before)):
        first = max(0, step + 1 - size)
        orders = [item.before[first : step + 1] for item in group.items]
        places = group.layout(orders[0])
        held = [row[len(row) - (len(places) - 1) :] for row in held]
        moved = [
            [relocate(span, group.spec, p.start) for span, p in zip(row, places[:-1], strict=True)] for row in held
        ]
        new = group.decoder.tokens([row[order[-1]] for row, order in zip(group.chunks, orders, strict=True)])
        memory, _ = group.decoder.append(new.moved(places[-1].start), group.memory(moved))
        for b, order in enumerate(orders):
            at = lead + places[-1].slot
            positions = group.position_rows(order[-1])
            held[b].append(memory.span(b, at, memory.slots, positions, places[-1].start))
    return held
