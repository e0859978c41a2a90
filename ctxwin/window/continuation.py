"""`Continuation`: what a window's next plan or layout takes over from the newest ones: choices, plan entries, loaded KV."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxwin.engines.segments import Segment
from ctxwin.window.answer import PlanEntry
from ctxwin.window.changes import with_fields
from ctxwin.window.choice import Choice
from ctxwin.window.layout import Layout, Work
from ctxwin.window.state import Conditioning, Prefix, State

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.kv.layout import SpanKV
    from ctxwin.kv.patch import Patch


class LoadedChunk(NamedTuple):
    """How a chunk was loaded: its segment without KV, and the KV that was checked to be its own, while that is in memory."""

    front: Prefix
    conditioning: Conditioning
    segment: Segment
    span: weakref.ref[SpanKV]
    patch: Callable[[], Patch | None]


@dataclass(frozen=True)
class LoadedFront:
    """The first chunks of a layout that were loaded as they are stored; ``counts`` and ``contents`` are the layout's."""

    chunks: Sequence[LoadedChunk] = ()
    counts: Sequence[int] = (0,)
    contents: Sequence[str] = ()

    def followed_by(self, layout: Layout, known: int) -> LoadedFront:
        """Return that of the next layout, which took over the first ``known`` chunks."""
        chunks = list(self.chunks[:known])
        for choice, segment in zip(layout.choices[known:], layout.segments[known + 1 :], strict=True):
            if choice.compute or choice.partial_base is not None or segment.span is None:
                break
            bare, span = with_fields(segment, span=None, patch=None), weakref.ref(segment.span)
            patch = _no_patch if segment.patch is None else weakref.ref(segment.patch)
            chunks.append(LoadedChunk(choice.front, choice.conditioning, bare, span, patch))
        return LoadedFront(chunks, layout.counts, layout.contents)


def _no_patch() -> None:
    """Return None, as the reference to the patch of a chunk without one."""


@dataclass
class Continuation:
    """See the module. Its values are replaced and never changed, as a plan may be made beside an ask.

    Attributes:
        choices: the newest ones.
        planned: choices with the entries of their plan.
        loaded: what the newest layout loaded first.
        broken_at: index of the first chunk that the last answer computed anew behind other chunks; see `without_transient`.
    """

    choices: Sequence[Choice] = ()
    planned: tuple[Sequence[Choice], Sequence[PlanEntry]] = ((), ())
    loaded: LoadedFront = field(default_factory=LoadedFront)
    broken_at: int | None = None

    def stored(self) -> dict[str, bool]:
        """Return whether keys were stored as far as the newest choices were made on it."""
        stored: dict[str, bool] = {}
        deque(map(stored.update, [choice.premises.stored for choice in self.choices if choice.premises]), maxlen=0)
        return stored

    def holding(self, were: Mapping[str, bool], stored: Mapping[str, bool]) -> Sequence[Choice]:
        """Return the newest choices; those must be made anew that were made on keys which are or are not ``stored`` now."""
        if were == stored:
            return self.choices
        changed = {key for key, known in were.items() if stored[key] != known}
        return [
            with_fields(c, premises=None) if c.premises and not changed.isdisjoint(c.premises.stored) else c
            for c in self.choices
        ]

    def segments(
        self, engine: Engine, choices: Sequence[Choice], ends: Sequence[int], cached: int, work: Work
    ) -> list[Segment]:
        """Return the segments of the first chunks that the newest layout loaded just so and whose KV is still in memory.

        Args:
            ends: prompt tokens up to the end of each chunk; an engine's prefix cache holds the first ``cached`` tokens.
        """
        costs, began, chunks = engine.costs, engine.costs.clock(), self.loaded.chunks
        known = [choice.conditioning for choice in choices[: len(chunks)]]
        patches = [kv.patch for kv in known if kv.patch is not None]
        records: Mapping[Any, Any] = engine.repo.at_hand([kv.span for kv in known] + patches)
        segments: list[Segment] = []
        for choice, chunk, end in zip(choices, chunks, ends, strict=False):
            kv = choice.conditioning
            if choice.front is not chunk.front or kv is not chunk.conditioning:
                break
            if end <= cached:
                segments.append(with_fields(chunk.segment, cached=True))
                continue
            span, patch = records.get(kv.span), records.get(kv.patch)
            if span is None or span is not chunk.span() or patch is not chunk.patch():
                break
            segments.append(with_fields(chunk.segment, span=span, patch=patch))
        first = bisect_right(ends, cached, hi=len(segments))
        if spans := len(segments) - first:
            patched = [segment.tokens for segment in segments[first:] if segment.patch is not None]
            tokens, ms = ends[len(segments) - 1] - ends[first] + segments[first].tokens, 1e3 * (costs.clock() - began)
            costs.fetched("at hand", tokens + sum(patched), ms, spans + len(patched))
            work.priced_ms += ms
        return segments

    def without_transient(self, layout: Layout, state: State, engine: Engine) -> Layout:
        """Return the layout of an exact window's answer without captures of KV that the next edit makes useless.

        A window that loses chunks in front of others before every answer has all KV behind them computed anew each time. From
        the second such answer on that KV is not read back and stored: vLLM's prefix cache holds it for as long as nothing is
        edited. What an answer without such an edit computes is stored again.
        """
        keeps = engine.caches_prefixes and not engine.spec.kv.recurrent and not engine.spec.outputs
        if state.fidelity.mode != "exact" or not keeps:  # audits of others ask for the KV again
            return layout
        moved = (
            i for i, choice in enumerate(layout.choices)
            if choice.compute and (kv := choice.entry.kv) and kv.provenance != choice.conditioning.provenance
        )  # fmt: skip
        previous, self.broken_at = self.broken_at, next(moved, None)
        if previous is None or self.broken_at is None:
            return layout
        first = 1 + max(previous, self.broken_at)
        rest = (replace(segment, capture=False) for segment in layout.segments[first:])
        return replace(layout, segments=(*layout.segments[:first], *rest))
