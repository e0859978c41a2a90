"""`Continuation`: what a window's next plan or layout takes over from the newest ones: choices, plan entries, loaded KV."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from operator import call, sub
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxwin.engines.cost import Workload
from ctxwin.engines.segments import Segment
from ctxwin.fidelity import Fidelity, Lane
from ctxwin.window.answer import PlanEntry
from ctxwin.window.changes import common_prefix_length, with_fields
from ctxwin.window.choice import Choice, ServedMemo
from ctxwin.window.layout import Layout, Salt, Work
from ctxwin.window.state import Conditioning, Placed, Prefix, State

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.kv.layout import SpanKV
    from ctxwin.kv.patch import Patch
    from ctxwin.store.spans import SpanRepository


_call: Any = call


class LoadedChunk(NamedTuple):
    """How a chunk was loaded: its segment without KV, and the KV that was checked to be its own, while that is in memory.
    ``patch`` is the span where it has none. ``patched``: how many chunks up to it have a patch, and their tokens."""

    prefix: Prefix
    conditioning: Conditioning
    segment: Segment
    span: weakref.ref[SpanKV]
    patch: weakref.ref[SpanKV] | weakref.ref[Patch]
    patched: tuple[int, int]


@dataclass(frozen=True)
class LoadedPrefix:
    """The first chunks of a layout that were loaded as they are stored; the rest is the layout's.

    Attributes:
        spans: the key of each chunk's KV; patches: of its patch, or the same where it has none.
        segments: with the KV, as long as that is decoded in memory (`SpanRepository.attach`).
    """

    chunks: Sequence[LoadedChunk] = ()
    choices: Sequence[Choice] = ()
    counts: Sequence[int] = (0,)
    contents: Sequence[str] = ()
    salt: Salt = field(default_factory=Salt)
    spans: Sequence[str] = ()
    patches: Sequence[str] = ()
    segments: Sequence[weakref.ref[Segment]] = ()

    def followed_by(self, layout: Layout, count: int, salt: Salt, repo: SpanRepository) -> LoadedPrefix:
        """Return that of the next layout, which took over the first ``count`` chunks."""
        chunks, spans = list(self.chunks[:count]), list(self.spans[:count])
        patches, segments = list(self.patches[:count]), list(self.segments[:count])
        patched = chunks[-1].patched if chunks else (0, 0)
        for choice, segment in zip(layout.choices[count:], layout.segments[count + 1 :], strict=True):
            if choice.compute or choice.partial_base is not None or segment.span is None:
                break
            kv, bare, span = choice.conditioning, with_fields(segment, span=None, patch=None), weakref.ref(segment.span)
            patch = span if segment.patch is None else weakref.ref(segment.patch)
            patched = patched if patch is span else (patched[0] + 1, patched[1] + segment.tokens)
            chunks.append(LoadedChunk(choice.prefix, kv, bare, span, patch, patched))
            spans.append(kv.span)
            patches.append(kv.patch or kv.span)
            segments.append(weakref.ref(segment))
            repo.attach(segment, (kv.span, segment.span), (kv.patch, segment.patch))
        loaded = layout.choices[: len(chunks)]
        return LoadedPrefix(chunks, loaded, layout.counts, layout.contents, salt, spans, patches, segments)


@dataclass(frozen=True)
class Selection:
    """Choices of one ask, with the stored keys and prices that they depend on.

    Attributes:
        placed: the chunks; ends: prompt tokens up to the end of each.
        keys: what was looked up, by the first choice made on it; there may be further keys.
        elsewhere: where those of the keys lay that were not at hand, "" for those that were not stored.
        rates: the prices of loads (`CostModel.load_rates`).
        ms: the price of each; that of a choice itself is the one that it was made at, or later.
        standing: how many first choices stand (`Choice.stands`), of one fidelity; loads: what `Prices.of_load` takes of each.
        lanes: tokens by lane.
        written: of how many first choices an answer wrote back what there was, so that another one writes nothing.
    """

    choices: Sequence[Choice] = ()
    placed: Sequence[Placed] = ()
    ends: Sequence[int] = ()
    keys: Mapping[str, int] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    rates: Sequence[object] = ()
    ms: Sequence[float] = ()
    standing: int = 0
    loads: Sequence[tuple[int, str, str]] = ()
    lanes: Mapping[Lane, int] = field(default_factory=Counter)
    written: int = 0

    def on(self, elsewhere: Mapping[str, str]) -> tuple[Sequence[Choice], int]:
        """Return the choices for a store where the keys lie so, and how many of the first ones stand at the same prices. Those
        must be made anew that were made on keys which are or are not stored now."""
        if elsewhere == self.elsewhere:
            return self.choices, self.standing
        moved = {key for key, _ in elsewhere.items() ^ self.elsewhere.items()}
        changed = {key for key in moved if "" in (elsewhere.get(key), self.elsewhere.get(key))}
        choices, standing = list(self.choices), self.standing
        first = min(map(self.keys.__getitem__, moved))
        for i, choice in enumerate(choices[first:], first):
            if choice.premises and not moved.isdisjoint(choice.premises.stored):
                standing = min(standing, i)
                if not changed.isdisjoint(choice.premises.stored):
                    choices[i] = with_fields(choice, premises=None)
        return choices, standing

    def followed_by(
        self,
        choices: Sequence[Choice],
        state: State,
        elsewhere: Mapping[str, str] = MappingProxyType({}),
        rates: Sequence[object] = (),
        ms: Sequence[float] = (),
        unchanged: int = 0,
        tier: Callable[[str], str] = str,
    ) -> Selection:
        """Return those made next, at ``rates``, the first ``unchanged`` of which are these at prices ``ms``.

        ``elsewhere``: of all keys that these were made on; ``tier`` gives that of another stored key.
        """
        old_premises, premises = ([c.premises for c in both[unchanged:]] for both in (self.choices, choices))
        same = new = unchanged + common_prefix_length(old_premises, premises)
        keys = self.keys
        if any(old_premises[same - unchanged :]):  # what others need of their keys is told by these
            new, keys, elsewhere = 0, {}, {}
        lookups = [(i, c.premises.stored) for i, c in enumerate(choices[new:], new) if c.premises]
        if lookups:
            keys = {**keys, **{key: min(i, keys.get(key, i)) for i, stored in reversed(lookups) for key in stored}}
            tiers = {key: tier(key) if at else "" for _, stored in lookups for key, at in stored.items()}
            elsewhere = {**elsewhere, **{key: where for key, where in tiers.items() if where != "at hand"}}
        first = choices[0].premises.fidelity if choices and choices[0].premises else None
        standing = next((i for i, c in enumerate(choices[unchanged:], unchanged) if not c.stands(first)), len(choices))
        offset = self.ends[unchanged - 1] if unchanged else state.system_prompt_tokens
        rest = accumulate([p.tokens for p in state.placed[unchanged:]], initial=offset)
        kvs = [(c.slots, c.conditioning.span, c.conditioning.patch) for c in choices[unchanged:standing]]
        loads = [(slots, tier(span), tier(patch) if patch else "") for slots, span, patch in kvs]
        lanes = Counter(self.lanes if unchanged else ())
        for choice in self.choices[unchanged:] if unchanged else ():
            lanes[choice.lane] -= choice.entry.tokens
        for choice in choices[unchanged:]:
            lanes[choice.lane] += choice.entry.tokens
        return Selection(
            choices, state.placed, [*self.ends[:unchanged], *islice(rest, 1, None)], keys, elsewhere, rates,
            [*ms[:unchanged], *(c.ms for c in choices[unchanged:])], standing,
            [*self.loads[:unchanged], *loads], +lanes, min(self.written, same),
        )  # fmt: skip

    def written_back(self, choices: Sequence[Choice], placed: Sequence[Placed], same: int) -> Selection:
        """Return these behind an answer: ``choices`` of the placements that it wrote back; the first ``same`` were these."""
        rest = range(min(self.written, same), len(choices))
        written = next((i for i in rest if choices[i].premises is None), len(choices))
        if same == len(self.choices) == len(choices):
            standing = min(self.standing, written)
            return replace(self, choices=choices, placed=placed, standing=standing, written=written)
        lookups = [(i, c.premises.stored) for i, c in enumerate(choices) if c.premises]
        keys = {key: i for i, stored in reversed(lookups) for key in stored}
        tiers = {key: "?" if at else "" for _, stored in lookups for key, at in stored.items()}
        return Selection(choices, placed, keys=keys, elsewhere=tiers, written=written)


@dataclass
class Continuation:
    """See the module. Its values are replaced and never changed, as a plan may be made beside an ask.

    Attributes:
        selection: the newest choices.
        planned: choices with the entries of their plan, and prices of these.
        loaded: what the newest layout loaded first.
        remembered: where the last answer remembered its chunks, and how they were served.
        broken_at: index of the first chunk that the last answer computed anew behind other chunks; see `without_transient`.
    """

    selection: Selection = field(default_factory=Selection)
    planned: tuple[Sequence[Choice], Sequence[PlanEntry], Sequence[float]] = ((), (), ())
    loaded: LoadedPrefix = field(default_factory=LoadedPrefix)
    remembered: tuple[Sequence[str], Sequence[ServedMemo]] = ((), ())
    broken_at: int | None = None

    def segments(
        self, engine: Engine, choices: Sequence[Choice], ends: Sequence[int], cached: int, work: Work
    ) -> tuple[list[Segment], Workload]:
        """Return the segments of the first chunks that the newest layout loaded just so and whose KV is still in memory, and what
        loads of these take.

        Args:
            ends: prompt tokens up to the end of each chunk; an engine's prefix cache holds the first ``cached`` tokens.
        """
        costs, began, chunks = engine.costs, engine.costs.clock(), self.loaded.chunks
        same, repo, segments = common_prefix_length(self.loaded.choices, choices), engine.repo, list[Any]()
        for choice, chunk in zip(choices[same:], chunks[same:], strict=False):
            if choice.prefix is not chunk.prefix or choice.conditioning is not chunk.conditioning:
                break
            same += 1
        if not cached:  # as most stand: the segments that are kept beside their KV
            segments += map(_call, self.loaded.segments[:same])
            patches = self.loaded.patches if chunks and chunks[-1].patched[0] else ()
            del segments[repo.count_attached(segments, self.loaded.spans, patches) :]
        number = len(segments)
        rest = slice(number, same)
        for chunk, ref, end in zip(chunks[rest], self.loaded.segments[rest], ends[rest], strict=True):
            kv, bare, whole = chunk.conditioning, chunk.segment, ref()
            if end <= cached:
                segments.append(with_fields(bare, cached=True))
                continue
            span, patch = repo.at_hand(kv.span), repo.at_hand(kv.patch) if kv.patch else None
            if span is None or span is not chunk.span() or (kv.patch and (patch is None or patch is not chunk.patch())):
                break
            if whole is None or whole.span is not span or whole.patch is not patch:
                whole = with_fields(bare, span=span, patch=patch)
                repo.attach(whole, (kv.span, span), (kv.patch, patch))
            segments.append(whole)
        if number < len(segments) and not cached:
            refs = [*self.loaded.segments]
            refs[number : len(segments)] = map(weakref.ref, segments[number:])
            self.loaded = replace(self.loaded, segments=refs)
        loads, first = Workload(), bisect_right(ends, cached, hi=len(segments))
        if spans := len(segments) - first:
            before = chunks[first - 1].patched if first else (0, 0)
            patched, loads.patched = map(sub, chunks[len(segments) - 1].patched, before)
            loads.loaded, loads.spans = ends[len(segments) - 1] - ends[first] + segments[first].tokens, spans
            ms = 1e3 * (costs.clock() - began)
            costs.fetched("at hand", loads.loaded + loads.patched, ms, spans + patched)
            work.priced_ms += ms
        return segments, loads

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


@dataclass(eq=False)
class ServedMemos:
    """How a window's last chunks were served, at most ``most`` of them, by the contents that preceded them."""

    most: int = 8192
    memos: OrderedDict[str, ServedMemo] = field(default_factory=OrderedDict)
    _is_shared: bool = False

    def copy(self) -> ServedMemos:
        """Return memos that begin with these. O(1): the memos themselves are copied once one of the two changes."""
        self._is_shared = True
        return replace(self)

    def clear(self) -> None:
        """Drop all of them."""
        self.memos, self._is_shared = OrderedDict(), False

    def remember(
        self, choices: Sequence[Choice], fidelity: Fidelity, places: Sequence[str] = (), memos: Sequence[ServedMemo] = ()
    ) -> tuple[list[str], list[ServedMemo]]:  # fmt: skip
        """Remember how chunks were served; return where, and the memos. Those of the first chunks are known."""
        if fidelity.mode != "patched":
            return [], []  # exact KV is found by its provenance, and a canonical by its content
        if self._is_shared:
            self.memos, self._is_shared = self.memos.copy(), False
        memo = self.memos
        same = common_prefix_length(memos, [*map(memo.get, places)])
        places, memos = list(places[:same]), list(memos[:same])
        deque(map(memo.move_to_end, places), maxlen=0)
        choices = choices[same:]
        for choice, following in zip(choices, [*(c.prefix for c in choices[1:]), None], strict=False):
            adjacent = following is not None and following.length == choice.prefix.length + 1
            place = following.contents if following and adjacent else choice.prefix.contents_with(choice.entry)
            known_memo = memo.get(place)
            if choice.compute or known_memo is None or known_memo.conditioning is not choice.conditioning:
                known_memo = memo[place] = ServedMemo.of(choice)
            memo.move_to_end(place)
            places.append(place)
            memos.append(known_memo)
        while len(memo) > self.most:
            memo.popitem(last=False)
        return places, memos
