"""Contexts asked on any engine, by the engine contract alone: what is measured where the model cannot be read inside, as on vLLM.

A re-prefill is one request without spans; what an arm serves is loaded from spans, as windows do it. KV comes from
`Engine.prefill`, a chunk at a time, answers from `Engine.generate`, and what the model expects along them from
`Engine.forced_logprobs`, whose best tokens are compared and all others taken as one.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ctxwin.audit.replay import kl_of_rows, likeliest
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.kv.layout import SpanKV
from ctxwin_evals.arms import Served
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item, grouped
from ctxwin_evals.measure import Measurer, Reply


@dataclass(frozen=True)
class Fresh(Sequence["SpanKV"]):
    """Chunks of item ``b`` prefilled in an order: computed by the request that asks, and as spans only where one is taken."""

    group: "ServedGroup"
    b: int
    order: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        return self.group.span(self.b, self.order[: range(len(self))[at] + 1])


class ServedGroup(Group):
    """A `Group` whose forwards are requests to the engine; ``decoder`` is a `Reader`."""

    embeds: ClassVar[bool] = False

    def span(self, b: int, order: tuple[int, ...]) -> SpanKV:
        """Return KV of the last chunk of an order, computed after the others; once."""
        if (b, order) not in self._orders:
            front = [self.span(b, order[: i + 1]) for i in range(len(order) - 1)]
            self._orders[b, order] = self._compute(b, order, front)
        return self._orders[b, order]

    def _compute(self, b: int, order: Sequence[int], front: Sequence[SpanKV]) -> SpanKV:
        target, start = self.chunks[b][order[-1]], self.layout(order)[-1].start
        segments = self.segments(b, order[:-1], front)
        engine: Engine = self.decoder.engine
        return engine.prefill(segments, target, start, salt=unshared_salt(), background=True)

    def prefilled(self, orders: Sequence[Sequence[int]], items: Sequence[int] | None = None) -> Sequence[Fresh]:
        rows = range(len(self)) if items is None else items
        return [Fresh(self, b, tuple(order)) for b, order in zip(rows, orders, strict=True)]

    def appended(self, orders: Sequence[Sequence[int]], rows: Sequence[Sequence[SpanKV]]) -> list[SpanKV]:
        return [self._compute(b, order, row) for b, (order, row) in enumerate(zip(orders, rows, strict=True))]

    def stepwise(self) -> list[list[SpanKV]]:
        return [list(row) for row in self.exact]


class ServedMeasurer(Measurer):
    """A `Measurer` whose every question is a request to the engine; ``decoder`` is a `Reader`. Answers are read ``along``."""

    divergence = staticmethod(kl_of_rows)
    groups: ClassVar[type[Group]] = ServedGroup

    def _ask(
        self, group: Group, items: Sequence[Item], served: Sequence[Served | None], first: Sequence[Reply | None] | None
    ) -> list[Reply | None]:
        rows = {item.context or item.index: b for b, item in enumerate(group.items)}
        out: list[Reply | None] = [None] * len(items)
        having = [i for i, one in enumerate(served) if one is not None]
        for indices in grouped(having, lambda i: id(served[i])).values():
            one, item = served[indices[0]], items[indices[0]]
            assert one is not None
            fresh = one.spans if isinstance(one.spans, Fresh) else None
            order = item.placed if fresh is None else fresh.order
            b, spans = rows[item.context or item.index], one.spans if fresh is None else None
            segments = group.segments(b, order, spans, one.recompute)
            references = None if first is None else [first[i] for i in indices]
            answers = self._read_answers(segments, [items[i] for i in indices], references)
            for i, answer in zip(indices, answers, strict=True):
                out[i] = answer
        return out

    def _read_answers(
        self, segments: Sequence[Segment], items: Sequence[Item], first: Sequence[Reply | None] | None
    ) -> list[Reply | None]:
        """Return answers given one layout: the reference's own, or read along the reference's."""
        ids = [self._generate(segments, item) if first is None else [] for item in items]
        if first is not None:
            ids = [[] if answer is None else answer.token_ids for answer in first]
        questions = [(self.decoder.query(item.query), token_ids) for item, token_ids in zip(items, ids, strict=True)]
        out: list[Reply | None] = []
        logprobs = self.decoder.engine.forced_logprobs(segments, questions)
        for i, (item, token_ids, rows) in enumerate(zip(items, ids, logprobs, strict=True)):
            along = rows if len(token_ids) < item.max_tokens else rows[:-1]  # one that was cut has no end
            reference = None if first is None else first[i]
            forced = () if reference is None or reference.forced is None else reference.forced
            if reference is not None and [*map(likeliest, along)] != [*map(likeliest, forced)]:
                token_ids = self._generate(segments, item)
            out.append(Reply(rows[0], self.text(token_ids), token_ids, along))
        return out

    def _generate(self, segments: Sequence[Segment], item: Item) -> list[int]:
        sampling, query = Sampling(item.max_tokens), self.decoder.query(item.query)
        generation = self.decoder.engine.generate(segments, query, sampling, salt=unshared_salt(), background=True)
        return [int(token) for token in generation.token_ids]


def unshared_salt() -> str:
    """Return a salt of one request alone, so that no request shares cached prefixes with another."""
    return f"probe-{uuid.uuid4().hex}"
