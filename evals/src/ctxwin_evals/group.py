"""Items of one shape with all that arms share: tokens, exact spans, canonicals, deficits, patches.

Each forward runs once for the whole group, when the first arm needs it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch, apply_patch
from ctxwin.kv.relocate import relocate
from ctxwin_evals.decoder import Decoder, Memory, Tokens, concatenated
from ctxwin_evals.items import Item, grouped
from ctxwin_evals.patching import Patcher

AT_ONCE = 32
"""Contexts that share a forward, at most."""


@dataclass(frozen=True)
class Place:
    """Place of a chunk in a row: its first token's index (the system prompt's not counted), its origin, its size."""

    slot: int
    start: int
    tokens: int

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.slot + self.tokens


class Group:
    """A batch of items whose chunks have the same sizes and positions; ``chunks`` are encoded, by item and index.

    Args:
        decoder: the model.
        items: all of one shape; see `Item.shape`.
        patcher: compresses deficits.
        system_prompt: system prompt of items that have none of their own.

    Below, ``b`` is the index of an item, ``place`` the position of a chunk among the placed ones, and ``frame`` its index
    among all chunks of the item.
    """

    embeds: ClassVar[bool] = True
    """Whether it knows the embeddings of its tokens."""

    def __init__(self, decoder: Decoder, items: Sequence[Item], patcher: Patcher, system_prompt: str) -> None:
        self.decoder = decoder
        self.items = tuple(items)
        self.patcher = patcher
        prompts = {system_prompt if item.system_prompt is None else item.system_prompt for item in items}
        if len(prompts) != 1:
            raise ValueError(f"items of a group must have one system prompt, got {sorted(prompts)}")
        self.system_prompt, self.system_prompt_span = decoder.system_prompt(prompts.pop())
        encode = decoder.engine.encode
        self.chunks: list[list[Encoded]] = [[encode(chunk) for chunk in item.load()] for item in self.items]
        self._kinds: list[tuple[int, int, bytes]] = [_kind(encoded) for encoded in self.chunks[0]]
        if any([_kind(e) for e in row] != self._kinds for row in self.chunks):
            raise ValueError("items of a group must have chunks of the same sizes and positions")
        self._tokens: dict[int, Tokens] = {}
        self._deficits: dict[tuple[int, int, str], Deficit] = {}
        self._patches: dict[object, Patch] = {}
        self._orders: dict[tuple[int, tuple[int, ...]], SpanKV] = {}

    def __len__(self) -> int:
        return len(self.items)

    @property
    def spec(self) -> KVSpec:
        """Layout of the model's KV."""
        return self.decoder.spec

    def layout(self, order: Sequence[int]) -> list[Place]:
        """Return the places of chunks in this order after the system prompt."""
        places, slot, start = [], 0, self.system_prompt.advance
        for frame in order:
            tokens, advance, _ = self._kinds[frame]
            places.append(Place(slot, start, tokens))
            slot, start = slot + tokens, start + advance
        return places

    @cached_property
    def places(self) -> list[Place]:
        """Of the placed chunks."""
        layouts = [self.layout(item.placed) for item in self.items]
        if any(row != layouts[0] for row in layouts):
            raise ValueError("items of a group must have placed chunks of the same sizes and positions")
        return layouts[0]

    @cached_property
    def begin(self) -> int:
        """Position of the question."""
        return self.system_prompt.advance + sum(self._kinds[frame][1] for frame in self.items[0].placed)

    @property
    def context_tokens(self) -> int:
        """Tokens of the placed chunks."""
        return self.places[-1].end

    def pictured(self, count: int | None = None) -> Tensor:
        """bool ``[B, context tokens]``: placed tokens that are embeddings of pictures or videos, the first ``count`` of each."""
        mask = torch.zeros(len(self), self.context_tokens, dtype=torch.bool)
        for b, item in enumerate(self.items):
            for place, frame in zip(self.places, item.placed, strict=True):
                for media in self.chunks[b][frame].media:
                    begin = place.slot + media.offset
                    mask[b, begin : begin + (media.tokens if count is None else min(media.tokens, count))] = True
        return mask

    def tokens(self, frame: int) -> Tokens:
        """Chunk ``frame`` of every item, at its own origin."""
        if frame not in self._tokens:
            self._tokens[frame] = self.decoder.tokens([row[frame] for row in self.chunks])
        return self._tokens[frame]

    def row(self, orders: Sequence[Sequence[int]], items: Sequence[int] | None = None) -> Tokens:
        """Chunks in place, in an order an item; the orders have one layout."""
        batch = list(range(len(self))) if items is None else list(items)
        parts = []
        for i, place in enumerate(self.layout(orders[0])):
            some = [self.tokens(order[i]).of([b]) for b, order in zip(batch, orders, strict=True)]
            parts.append(concatenated(some, items=True).moved(place.start))
        return concatenated(parts)

    @cached_property
    def context(self) -> Tokens:
        """The placed chunks in place."""
        return self.row([item.placed for item in self.items])

    def position_rows(self, frame: int) -> Tensor:
        """int64 ``[3, T]``: positions of a chunk relative to its origin."""
        return torch.from_numpy(np.array(self.chunks[0][frame].positions))

    def behind_system_prompt(self, count: int) -> Memory:
        """The system prompt's KV, ``count`` times."""
        return self.decoder.memory([[self.system_prompt_span]] * count)

    def segments(
        self,
        b: int,
        order: Sequence[int],
        spans: Sequence[SpanKV] | None,
        recompute: Sequence[tuple[tuple[int, int], ...]] = (),
    ) -> list[Segment]:
        """System prompt and chunks of an item in order for a request: with their spans, or all to be computed.

        ``recompute`` are ranges of each span that the request computes in place.
        """
        segments = [Segment(self.system_prompt, 0, span=None if spans is None else self.system_prompt_span)]
        for i, (frame, place) in enumerate(zip(order, self.layout(order), strict=True)):
            encoded, ranges = self.chunks[b][frame], recompute[i] if recompute else ()
            if spans is None or ranges == ((0, encoded.tokens),):
                segments.append(Segment(encoded, place.start))
            else:
                fewer = spans[i].tokens < encoded.tokens
                segments.append(Segment(encoded, place.start, span=spans[i], recompute=ranges, merged=fewer))
        return segments

    def prefilled(
        self, orders: Sequence[Sequence[int]], items: Sequence[int] | None = None
    ) -> Sequence[Sequence[SpanKV]]:
        """Chunks prefilled in order after the system prompt: their spans, by item, exact in place. One forward."""
        memory, _ = self.decoder.append(self.row(orders, items), self.behind_system_prompt(len(orders)))
        return [self.placed_spans(memory, b, order) for b, order in enumerate(orders)]

    def placed_spans(self, memory: Memory, row: int, order: Sequence[int]) -> list[SpanKV]:
        """Chunks in this order from a row of a memory of the system prompt and their slots."""
        lead = self.system_prompt_span.tokens
        return [
            memory.span(row, lead + p.slot, lead + p.end, self.position_rows(f), p.start)
            for f, p in zip(order, self.layout(order), strict=True)
        ]

    @cached_property
    def exact(self) -> Sequence[Sequence[SpanKV]]:
        """Re-prefill of what is placed: spans by item and place, rotated in place. One forward."""
        return self.prefilled([item.placed for item in self.items])

    @cached_property
    def earlier(self) -> Sequence[Sequence[SpanKV]]:
        """Spans as conditioned before the edit (slide, recall), rotated to where they stood then. One forward."""
        return self.prefilled([item.before for item in self.items])

    def last_spans(self, orders: Sequence[tuple[int, tuple[int, ...]]]) -> list[SpanKV]:
        """Return KV of the last chunk of each order, conditioned on the preceding ones.

        ``orders`` are pairs (item, frames in order). Orders of one layout share a forward; each is computed once.
        """
        missing = [w for w in dict.fromkeys(orders) if w not in self._orders]
        for same in grouped(missing, lambda w: tuple(self._kinds[frame] for frame in w[1])).values():
            for at in range(0, len(same), AT_ONCE):
                part = same[at : at + AT_ONCE]
                rows = self.prefilled([order for _, order in part], [b for b, _ in part])
                for w, row in zip(part, rows, strict=True):
                    self._orders[w] = row[-1]
        return [self._orders[w] for w in orders]

    @cached_property
    def canonical(self) -> list[list[SpanKV]]:
        """Canonicals of the placed chunks, formed after the system prompt alone, in the canonical frame."""
        orders = [(b, (frame,)) for b, item in enumerate(self.items) for frame in item.placed]
        spans = iter([relocate(span, self.spec, 0) for span in self.last_spans(orders)])
        return [[next(spans) for _ in item.placed] for item in self.items]

    def deficit(self, b: int, place: int, *, against: str = "canonical") -> Deficit:
        """Return the exact span minus the canonical, or minus the survivor (``against="survivor"``)."""
        key = (b, place, against)
        if key not in self._deficits:
            base = self.canonical if against == "canonical" else self.survivors
            self._deficits[key] = deficit(self.exact[b][place], base[b][place], self.spec)
        return self._deficits[key]

    def deficits(self) -> Iterator[Deficit]:
        """The deficits of all placed chunks but the first, which has none."""
        for b in range(len(self)):
            yield from (self.deficit(b, place) for place in range(1, len(self.places)))

    def patch(self, b: int, place: int, rank: int | None, variant: str = "", *, against: str = "canonical") -> Patch:
        """The patch of a `deficit`: on the survivor it removes what left the window. ``variant`` as in `Patcher`."""
        patcher, key = self.patcher.variant(variant), (against, b, place, variant)
        return patcher.patch(lambda: self.deficit(b, place, against=against), rank, self._patches, key)

    def compressed(self, lost: Deficit, rank: int | None, key: object) -> Patch:
        """The patch of an arm's own deficit; ``key`` tells it from others of this group."""
        return self.patcher.patch(lambda: lost, rank, self._patches, key)

    def _rotate(self, row: Sequence[SpanKV], places: Sequence[Place]) -> list[SpanKV]:
        return [relocate(span, self.spec, place.start) for span, place in zip(row, places, strict=True)]

    @cached_property
    def blind(self) -> list[list[SpanKV]]:
        """Canonicals rotated into place."""
        return [self._rotate(row, self.places) for row in self.canonical]

    @cached_property
    def _streamed(self) -> list[list[SpanKV]]:
        """KV that remains of a stream through a window of the items' size, by item and place, where it was formed.

        `earlier` conditions chunks on everything before them, in one forward. Along a stream a chunk meets only survivors,
        which met earlier survivors: a full window loses its leading chunk before the next one comes, survivors are rotated,
        each time from where they were formed, and the new chunk is computed after them (Kamera, section 5, "Sliding-window
        survival" and "The window mechanics, end to end"). Cost: one forward for each chunk of the stream.

        Raises ValueError for items whose ``placed`` is not the end of ``before``.
        """
        size = int(self.items[0].meta["stream_window"])
        for item in self.items:
            if item.placed != item.before[-size:]:
                raise ValueError(
                    f"a streamed item must place the last {size} chunks of before, got {item.placed} of {item.before}"
                )
        remaining: list[list[SpanKV]] = [[] for _ in self.items]
        for step in range(len(self.items[0].before)):
            first = max(0, step + 1 - size)
            orders = [item.before[first : step + 1] for item in self.items]
            places = self.layout(orders[0])
            remaining = [row[len(row) - (len(places) - 1) :] for row in remaining]
            moved = [self._rotate(row, places[:-1]) for row in remaining]
            for row, span in zip(remaining, self.appended(orders, moved), strict=True):
                row.append(span)
        return remaining

    def appended(self, orders: Sequence[Sequence[int]], rows: Sequence[Sequence[SpanKV]]) -> list[SpanKV]:
        """The last chunk of each item's order, computed after ``rows``: the others' spans in place. One forward."""
        place = self.layout(orders[0])[-1]
        new = self.decoder.tokens([row[order[-1]] for row, order in zip(self.chunks, orders, strict=True)])
        memory, _ = self.decoder.append(new.moved(place.start), self.memory(rows))
        begin = self.system_prompt_span.tokens + place.slot
        return [
            memory.span(b, begin, memory.slots, self.position_rows(order[-1]), place.start)
            for b, order in enumerate(orders)
        ]

    def stepwise(self) -> list[list[SpanKV]]:
        """The placed chunks, computed one by one: a forward each."""
        memory = self.behind_system_prompt(len(self))
        for place in self.places:
            part = torch.arange(place.slot, place.end).expand(len(self), -1)
            memory, _ = self.decoder.append(self.context.pick(part.to(memory.k.device)), memory)
        return self.spans(memory)

    @cached_property
    def survivors(self) -> list[list[SpanKV]]:
        """Survivors: placed chunks with their KV from before the edit, rotated into place."""
        if self.items[0].meta.get("stream_window") is not None:
            return [self._rotate(row, self.places) for row in self._streamed]
        rows = []
        for item, spans in zip(self.items, self.earlier, strict=True):
            by_frame = dict(zip(item.before, spans, strict=True))
            rows.append(self._rotate([by_frame[frame] for frame in item.placed], self.places))
        return rows

    def patched(self, base: SpanKV, patch: Patch, place: int) -> SpanKV:
        """``base`` reconditioned and rotated to ``place``."""
        return apply_patch(base, patch, self.spec, self.places[place].start)

    def memory(self, rows: Sequence[Sequence[SpanKV]]) -> Memory:
        """The system prompt and a row of placed spans an item."""
        return self.decoder.memory([[self.system_prompt_span, *row] for row in rows])

    def spans(self, memory: Memory) -> list[list[SpanKV]]:
        """The placed chunks of a memory of system prompt and placed slots, by item and place."""
        return [self.placed_spans(memory, b, item.placed) for b, item in enumerate(self.items)]

    def kv_bytes(self, places: Iterable[int] | None = None) -> int:
        """Bytes of the KV of some placed chunks (all by default) in bf16."""
        some = range(len(self.places)) if places is None else places
        return sum(self.spec.span_bytes(self.places[i].tokens) for i in some)


def _kind(encoded: Encoded) -> tuple[int, int, bytes]:
    """(tokens, advance, positions): chunks of one kind can stand in for one another in a batch."""
    return encoded.tokens, encoded.advance, np.ascontiguousarray(encoded.positions).tobytes()
