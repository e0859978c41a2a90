"""From lanes to KV: fetches or rebuilds the spans an ask needs, runs the engine, stores what was computed.

Every stored segment may be gone by the time it is needed. `Assembly.build_layout` therefore fetches first and commits later: a
key that cannot be read is remembered as missing, counted, and the lanes are chosen again without it, so that a failure of
the store becomes a recomputation and never a wrong answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from ctxwin import tracing
from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment, partial_ranges, without_spans
from ctxwin.errors import ChunkUnavailable
from ctxwin.fidelity import Fidelity
from ctxwin.profiles import compress_deficit, served_basis
from ctxwin.window.answer import Plan
from ctxwin.window.changes import Memo, common_prefix_length, with_fields
from ctxwin.window.choice import SAVES_MS, Choice
from ctxwin.window.continuation import Continuation, Selection, ServedMemos
from ctxwin.window.forecast import with_forecast
from ctxwin.window.lanes import (
    Has,
    canonical_key,
    choose,
    computed_plan,
    patched_conditioning,
    plan_of,
    steps_of,
    system_prompt_key,
)
from ctxwin.window.layout import Layout, Work, salt_of
from ctxwin.window.orbits import observe_order
from ctxwin.window.prices import Prices, workload
from ctxwin.window.reading import Reads
from ctxwin.window.recurrent import preceding_states
from ctxwin.window.state import Conditioning, Placed, State, content_name, patch_key
from ctxwin.window.storage_policy import Demand

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.kv.states import States
    from ctxwin.store.spans import SpanRepository

T = TypeVar("T")
_AT_ONCE = 8
"""Forwards whose KV is held at once."""
log = logging.getLogger("ctxwin")


@dataclass
class Assembly:
    """Binds one engine (with its repository of spans) to the functions a window needs. Holds no window state.

    Attributes:
        missing: keys that could not be read.
        memo: how chunks were served; a restart forgets it.
        newest: what the next plan or layout takes over as far as it has not changed.
        salt: keeps what it prefills out of the exact prefix cache; "" does not.
        cached_tokens: of an exact layout with KV for its first tokens, how many of these need no spans; see `Segment.cached`.
    """

    engine: Engine
    demand: Callable[[], Demand] = Demand
    missing: set[str] = field(default_factory=set)
    memo: ServedMemos = field(default_factory=ServedMemos)
    newest: Continuation = field(default_factory=Continuation)
    salt: str = ""
    cached_tokens: Callable[[int], int] | None = None

    @property
    def repo(self) -> SpanRepository:
        """The engine's store, as spans and patches."""
        return self.engine.repo

    def has(self, key: str) -> bool:
        """Return True if ``key`` can be served, as far as is known without reading it."""
        return key not in self.missing and self.repo.contains(key)

    def follow(self, other: Assembly) -> None:
        """Go on with what is remembered of the chunks of another window."""
        self.memo, self.newest = other.memo.copy(), replace(other.newest, broken_at=None)

    def forget(self) -> None:
        """Drop what is remembered of chunks that were served."""
        self.memo.clear()
        self.newest = Continuation()

    def plan(self, state: State, fidelity: Fidelity, query: str | None = None) -> Plan:
        """Return the plan of an ask of ``state``. Reads no KV. The tokens of ``query``, if given, are included."""
        # An ask that returns outputs, as all do here by default, needs its tokens whole.
        merging = fidelity.merges_prompt and state.conditioned and not self.engine.spec.outputs
        selection, has, prices = self.choose(state, fidelity)
        choices = selection.choices
        plan = plan_of(
            state, selection, self.engine.spec.kv, system_prompt_key(state), has, prices, self.newest.planned
        )
        self.newest.planned = choices, plan.entries, selection.ms
        plan = computed_plan(state, plan, self.engine.spec.kv, prices) if merging else plan
        if (encoded_query := None if query is None else self.engine.encode_query(query)) is not None:
            (*preceding, answer), more = plan.steps, encoded_query.tokens
            answer = replace(answer, tokens=answer.tokens + more, computed=answer.computed + more)
            plan = replace(plan, steps=(*preceding, answer))
        return plan if merging else with_forecast(self.engine, state, choices, plan, encoded_query)

    @property
    def prices(self) -> Prices:
        """Prices of serving a chunk on this engine."""
        return Prices(self.engine.costs, self.repo.tier)

    def choose(self, state: State, fidelity: Fidelity) -> tuple[Selection, Has, Prices]:
        """Return the choices for ``state``, a predicate of stored keys, with one answer for each though a store may lose it, and
        prices by where they lie. All keys that the newest choices were made on are looked up at once."""
        selection, rates = self.newest.selection, self.engine.costs.load_rates
        keys, elsewhere = selection.keys, self.repo.elsewhere(selection.keys)
        elsewhere.update(dict.fromkeys(self.missing & keys.keys(), ""))
        has = Memo(lambda key: elsewhere.get(key) != "" if key in keys else self.has(key)).__getitem__
        tier = Memo(lambda key: elsewhere.get(key, "at hand" * (key in keys)) or self.repo.tier(key)).__getitem__
        prices = Prices(self.engine.costs, tier)
        previous, standing = selection.on(elsewhere)
        ms = selection.ms if rates == selection.rates else [*starmap(cache(prices.of_load), selection.loads)]
        if ms is not selection.ms and max(ms, default=0.0) >= SAVES_MS:  # another lane may be cheaper
            standing = 0
        unchanged = max(0, min(standing, common_prefix_length(selection.placed, state.placed), len(state.placed) - 1))
        tokens = selection.ends[unchanged - 1] if unchanged else 0
        choices = choose(state, fidelity, has, prices, self.memo.memos, self.engine, previous, unchanged, tokens)
        unchanged = min(unchanged, common_prefix_length(selection.choices, choices))
        selection = self.newest.selection = selection.followed_by(
            choices, state, elsewhere, rates, ms, unchanged, prices.tier
        )
        return selection, has, prices

    def build_layout(self, state: State, fidelity: Fidelity, work: Work) -> Layout:
        """Choose lanes, fetch their KV and form missing canonicals. Repeats without the keys that turn out to be missing."""
        costs, priced, began = self.engine.costs, work.priced_ms, self.engine.costs.clock()
        self.missing.clear()
        self.know_basis(fidelity)
        ahead: dict[str, SpanKV] = {}
        with tracing.span("lay_out", chunks=len(state.placed), mode=fidelity.mode):
            # Each round either succeeds or learns of at least one missing key, so it ends.
            while True:
                selection, has, prices = self.choose(state, fidelity)
                _, ms = steps_of(state, selection, system_prompt_key(state), has, prices)
                fetched = self._fetch_layout(state, selection, work, ahead, has, Reads(costs, prices.tier))
                if fetched is not None:
                    own_ms = 1e3 * (costs.clock() - began) - (work.priced_ms - priced)
                    costs.learn(costs.library, (1, len(selection.choices)), own_ms)
                    return with_fields(fetched, ms=ms)

    def _fetch_layout(
        self, state: State, selection: Selection, work: Work, ahead: dict[str, SpanKV], has: Has, reads: Reads
    ) -> Layout | None:
        """Return the layout with its KV; None if some of it turned out to be missing.

        ``ahead``: spans computed while reads went on, by key; they serve the next round, too.
        """
        choices, ends, cached = selection.choices, selection.ends, 0
        if self.cached_tokens is not None and has(system_prompt_key(state)):
            computed = (end - c.entry.tokens for c, end in zip(choices, ends, strict=True) if c.compute)
            cached = self.cached_tokens(min(computed, default=state.tokens))
        newest, start = self.newest, state.system_prompt_advance
        standing, loads = newest.segments(self.engine, choices, ends, cached, work)
        if standing:
            start = standing[-1].start + standing[-1].encoded.advance
        encodeds = [self._encoded(choice.entry) for choice in choices[len(standing) :]]
        rest = [*zip(choices[len(standing) :], encodeds, ends[len(standing) :], strict=True)]
        self._begin_reads(rest, cached, reads)
        segments = [self.system_prompt(state, work, reads, cached, has), *standing]
        counts = [*newest.loaded.counts[: len(segments)]]
        contents = dict.fromkeys(newest.loaded.contents[: counts[-1]])  # in order, each once
        early: dict[int, SpanKV] = {}
        for choice, encoded, end in rest:
            contents[content_name(choice.entry.chunk_id)] = None
            captured, key = choice.compute or choice.partial_base is not None, choice.conditioning.span
            segment = Segment(encoded, start, capture=captured, span_key=key, cached=end <= cached)
            if not choice.compute and not segment.cached:
                formed = None
                if choice.form_canonical:
                    segments[0] = self.computed_system_prompt(segments[0], work)
                    _, formed = self.canonical(state, choice.entry, segments[0], work)
                if (loaded := self._loaded_segment(choice, segment, formed, work, reads)) is None:
                    return None
                segment, absorbed = loaded
                contents.update(dict.fromkeys(absorbed))
            elif not segment.cached and (key in ahead or reads.left_ms > 2 * self.prices.request_ms):
                # Reads go on meanwhile; a chunk before the loaded KV takes a request of its own anyway.
                segments[0] = self.computed_system_prompt(segments[0], work)
                span = ahead.get(key) or self._computed_early(choices, segments, segment, work)
                if span is not None:
                    ahead[key] = early[len(segments)] = span
                    segment = replace(segment, span=span, capture=False)
            counts.append(len(contents))
            segments.append(segment)
            start += encoded.advance
        salt = salt_of(segments, newest.loaded.salt, len(standing))
        layout = Layout(
            tuple(choices), tuple(segments), salt.name, tuple(contents), tuple(counts), state.tokens, selection.lanes,
            standing=0 if cached else len(standing), loads=loads, ahead=early,
        )  # fmt: skip
        newest.loaded = newest.loaded.followed_by(layout, len(standing), salt, self.repo)
        return layout

    def _begin_reads(self, rest: Sequence[tuple[Choice, Encoded, int]], cached: int, reads: Reads) -> None:
        """Begin to read the stored KV of chunks, given with their ends, but for the first ``cached`` tokens."""
        for choice, encoded, end in rest:
            if not choice.compute and not choice.form_canonical and end > cached:
                source, patch = choice.partial_base or choice.conditioning, choice.conditioning.patch
                reads.begin(source.span, choice.slots, self._span_read(source, encoded, choice.entry.chunk_id))
                if patch is not None:
                    reads.begin(patch, encoded.tokens, partial(self.repo.get_patch, patch, is_stored=True))

    def _loaded_segment(
        self, choice: Choice, segment: Segment, formed: SpanKV | None, work: Work, reads: Reads
    ) -> tuple[Segment, Sequence[str]] | None:
        """Return ``segment`` with the KV that serves it, and what that absorbed beside its antecedents; None if some is gone.

        ``formed``: a canonical formed just now; it serves even if the store refused it: asking again would never end.
        """
        conditioning, encoded, partial_base = choice.conditioning, segment.encoded, choice.partial_base
        source, key, patch = partial_base or conditioning, conditioning.patch, None
        read = self._span_read(source, encoded, choice.entry.chunk_id)
        stored = (formed, {}) if formed else self._stored(source.span, encoded.tokens, work, read, reads)
        if stored is not None and key is not None:
            patch = self._stored(key, encoded.tokens, work, partial(self.repo.get_patch, key, is_stored=True), reads)
        if stored is None or (patch is None and key is not None):
            return None
        ranges = partial_ranges(encoded.media_ranges, choice.recompute, encoded.tokens) if partial_base else ()
        absorbed = patch.meta.get("absorbed", ()) if patch else ()
        loaded = with_fields(
            segment, span=stored[0], approximate=not choice.in_place, patch=patch, patch_key=key or "",
            merged=conditioning.slots is not None, recompute=ranges,
        )  # fmt: skip
        return loaded, absorbed if conditioning.exact else [*absorbed, *stored[1].get("absorbed", ())]

    def _computed_early(
        self, choices: Sequence[Choice], segments: Sequence[Segment], segment: Segment, work: Work
    ) -> SpanKV | None:
        """Return KV of ``segment``, computed behind ``segments``; None if these were not loaded as they are served."""
        fallbacks, entries = work.fallbacks, [c.entry for c in choices[: len(segments)]]
        span = self.prefill(segments, segment.encoded, segment.start, work, entries, salt_of(segments).name)
        return span if work.fallbacks == fallbacks else None

    def _encoded(self, entry: Placed) -> Encoded:
        """Return the tokens of a placed chunk. Raises ValueError if the snapshot recorded another number."""
        encoded = self.engine.encode(entry.chunk)
        if (encoded.tokens, encoded.advance) != (entry.tokens, entry.advance):
            raise ValueError(
                f"chunk {entry.id} must have {encoded.tokens} tokens over {encoded.advance} positions, got "
                f"{entry.tokens} over {entry.advance}; restore the snapshot as its window gave it"
            )
        return encoded

    def system_prompt(
        self, state: State, work: Work, reads: Reads | None = None, cached: int = 0, has: Has | None = None
    ) -> Segment:
        """Return the segment of the system prompt, with its KV if that is stored."""
        encoded, key = self.engine.encode_system_prompt(state.system_prompt), system_prompt_key(state)
        stored = None
        if encoded.tokens <= cached:
            return Segment(encoded, 0, span_key=key, cached=True)
        if (has or self.has)(key):
            reads = reads or Reads(self.engine.costs, self.repo.tier)
            read = partial(self.repo.get_span, key, encoded.token_ids, is_stored=True)
            stored = self._read(key, encoded.tokens, work, read, reads)
        span = None if stored is None else stored[0]
        return Segment(encoded, 0, span=span, capture=span is None, span_key=key)

    def computed_system_prompt(self, system_prompt: Segment, work: Work) -> Segment:
        """Return ``system_prompt`` with its KV, computed once for all canonicals formed after it."""
        if system_prompt.available:
            return system_prompt
        span = self.prefill([], system_prompt.encoded, 0, work)
        work.system_prompt = True
        self.put(system_prompt.span_key, span, system_prompt.encoded, provenance="system_prompt")
        return replace(system_prompt, span=span, capture=False)

    def _span_read(
        self, conditioning: Conditioning, encoded: Encoded, chunk: str
    ) -> Callable[[], tuple[SpanKV, dict[str, Any]] | None]:
        """Return a read of the span of ``conditioning`` and its record; a span that contradicts the snapshot is a miss."""
        expected: dict[str, Any] = {"chunk": chunk, "is_stored": True}  # by the choice, just now
        if conditioning.patch is None:
            expected["provenance"] = conditioning.provenance
        if conditioning.exact:
            expected["exact"] = True
        encoded = encoded.part(0, conditioning.slots) if conditioning.slots else encoded
        expected["positions"] = encoded.positions
        return partial(self.repo.get_span, conditioning.span, encoded.token_ids, **expected)

    def _stored(self, key: str, tokens: int, work: Work, read: Callable[[], T | None], reads: Reads) -> T | None:
        """Return the result of ``read`` for ``key``, which a layout needs; None if it is gone or late."""
        stored = self._read(key, tokens, work, read, reads)
        if stored is None:
            self.missing.add(key)
            work.misses += 1
            log.warning("%s is gone from the store, or late: recomputing", key[:20])
        return stored

    def _read(self, key: str, tokens: int, work: Work, read: Callable[[], T | None], reads: Reads) -> T | None:
        began = self.engine.costs.clock()
        stored = reads.take(key, tokens, read)
        work.priced_ms += 1e3 * (self.engine.costs.clock() - began)
        return stored

    def know_basis(self, fidelity: Fidelity) -> None:
        """Give the repository the basis whose coefficients the stored patches of this fidelity are."""
        if fidelity.advanced.layout == "shared" and fidelity.mode == "patched":
            over = served_basis(self.engine.spec.model, self.engine.spec.kv, fidelity).basis
            if over is not None:
                self.repo.know_basis(over)

    def put(self, key: str, span: SpanKV, encoded: Encoded, **fields: Any) -> None:
        """Store a computed span; a refusal is logged by the store and costs a recomputation later.

        Its record has the ``chunk`` (``encoded``'s by default), its ``provenance``, whether it is ``exact``, and
        the contents it ``absorbed``.
        """
        self.missing.discard(key)
        record = {"chunk": encoded.chunk_id, "provenance": "", "exact": True, "absorbed": [], **fields}
        self.repo.put_span(key, span, {"token_ids": list(encoded.token_ids), **record})

    def put_chunk(self, layout: Layout, index: int, span: SpanKV, conditioning: Conditioning) -> None:
        """Store KV of the chunk at ``index``, computed in its place, under ``conditioning``."""
        record = {"provenance": conditioning.provenance, "exact": conditioning.exact}
        encoded, absorbed = layout.segments[index + 1].encoded, layout.absorbed(index)
        self.put(conditioning.span, span, encoded, absorbed=absorbed, **record)

    def canonical(
        self, state: State, entry: Placed, system_prompt: Segment | None, work: Work
    ) -> tuple[str, SpanKV | None]:
        """Return the key of a chunk's canonical and, if it was not stored, its KV, formed by one forward."""
        provenance, key = canonical_key(state, entry.chunk_id)
        if self.has(key):
            return key, None
        system_prompt = self.computed_system_prompt(system_prompt or self.system_prompt(state, work), work)
        encoded = self.engine.encode(entry.chunk)
        span = self.prefill([system_prompt], encoded, state.system_prompt_advance, work, [entry])
        self.put(key, span, encoded, provenance=provenance)
        return key, span

    def run(self, layout: Layout, query: Encoded, sampling: Sampling, **options: Any) -> Generation:
        """Run `Engine.generate` over a layout with its options, and learn from the time it takes."""
        costs, listener = self.engine.costs, options.pop("on_token", None)
        with costs.timed() as watch:

            def on_token(token: int, text: str) -> bool:
                watch.lap()
                return listener is None or listener(token, text) is not False

            options |= {"salt": layout.salt, "on_token": on_token}
            call = partial(self.engine.generate, layout.segments, query, sampling, **options)
            with tracing.span("run", tokens=layout.tokens + query.tokens):
                generation = self._with_embeddings((choice.entry for choice in layout.choices), call)
        if generation.fallbacks:
            return generation
        generation.captured.update(layout.ahead)
        segments = without_spans(layout.segments) if sampling.merge_prompt else layout.segments
        if watch.alone:
            standing = layout.standing if segments is layout.segments and segments[0].available else 0
            others = (*segments[:1], *segments[standing + 1 :], Segment(query, 0))
            amounts = workload(others, generation.forwards, layout.loads if standing else None).amounts
            costs.learn(costs.engine, amounts, watch.first or watch.ms)
        self.repo.note_served(map(attrgetter("patch_key"), segments))
        return generation

    def prefill(
        self,
        preceding: Sequence[Segment],
        encoded: Encoded,
        start: int,
        work: Work,
        entries: Iterable[Placed] = (),
        salt: str = "",
    ) -> SpanKV:
        """Run `Engine.prefill`, counted in ``work``. ``entries`` are the chunks that may have to be encoded again."""
        costs, counts = self.engine.costs, (work.forwards, work.fallbacks)
        options: dict[str, Any] = {} if work.stopped is None else {"stopped": work.stopped}
        options |= {"salt": salt or self.salt, "background": work.background, "tally": work}
        prefill = partial(self.engine.prefill, **options)
        with costs.timed() as watch:
            span = self._with_embeddings(entries, partial(prefill, tuple(preceding), encoded, start))
        work.priced_ms += watch.ms
        if watch.alone and not work.background and work.fallbacks == counts[1]:
            engine_work = workload([*preceding, Segment(encoded, start)], work.forwards - counts[0])
            costs.learn(costs.engine, engine_work.amounts, watch.ms)
        return span

    def prefill_all(
        self, preceding: Segment, encodeds: Sequence[Encoded], start: int, work: Work, entries: Iterable[Placed]
    ) -> Iterator[SpanKV]:
        """Yield the KV of each of ``encodeds`` after ``preceding``, by `Engine.prefill_all` a few at a time; see `prefill`."""
        for at in range(0, len(encodeds), _AT_ONCE):
            options = {"salt": self.salt, "background": work.background, "tally": work}
            call = partial(self.engine.prefill_all, (preceding,), encodeds[at : at + _AT_ONCE], start, **options)
            with self.engine.costs.timed():  # calls beside it teach nothing
                spans = self._with_embeddings(entries, call)
            yield from spans

    def _with_embeddings(self, entries: Iterable[Placed], call: Callable[[], T]) -> T:
        """Return ``call()``; encode ``entries`` again and retry if their vision embeddings left a shared store meanwhile."""
        for _ in range(2):
            try:
                return call()
            except ChunkUnavailable:
                for p in (entries := list(entries)):
                    self.engine.encode(p.chunk)
        return call()

    def write_back(self, state: State, layout: Layout, captured: dict[int, SpanKV], fidelity: Fidelity) -> State:
        """Store captured KV and return ``state`` with each placement's conditioning as it was served.

        The version stays: the placed chunks are the same, only the knowledge about their KV changes.
        """
        captured, selection = {**layout.ahead, **captured}, self.newest.selection
        if 0 in captured:
            self.put(layout.segments[0].span_key, captured[0], layout.segments[0].encoded, provenance="system_prompt")
        same = common_prefix_length(selection.choices, layout.choices)
        written = min(selection.written, same)
        entries, memorable = list(state.placed[:written]), list(layout.choices[:written])
        demand = cache(self.demand)  # asked of every open window: once an answer at most
        for i, choice in enumerate(layout.choices[written:], start=written + 1):
            p, in_place = choice.entry, choice.compute or choice.partial_base is not None
            # What the engine could not read back stays uncomputed.
            lost = in_place and i not in captured and (not choice.compute or layout.segments[i].capture)
            if choice.compute and i in captured:
                kv = self._store(state, layout, i - 1, captured, fidelity, demand)
                choice = replace(choice, lane=kv.lane, conditioning=kv, compute=kv.patch is None)
            elif in_place and i in captured:
                self.put_chunk(layout, i - 1, captured[i], choice.conditioning)
                choice = replace(choice, lane="resident", partial_base=None)
            kv = choice.conditioning
            if not lost and (p.unseen or not p.seen or (kv is not p.kv and kv != p.kv)) and choice.updates_entry:
                p = p.replace(kv=kv, seen=True, unseen=())
            entries.append(p)
            if not in_place or i in captured:
                memorable.append(choice)
        same_places = max(0, written - 1)  # the next one's place told where the last one was remembered
        places, memos = self.newest.remembered
        self.newest.remembered = self.memo.remember(memorable, fidelity, places[:same_places], memos[:same_places])
        pairs = zip(layout.choices[written:], entries[written:], strict=True)
        choices = [*layout.choices[:written], *(c if c.entry is p else c.of_entry(p) for c, p in pairs)]
        self.newest.selection = selection.written_back(choices, tuple(entries), same)
        return state.replace(placed=entries)

    def _store(
        self,
        state: State,
        layout: Layout,
        index: int,
        captured: Mapping[int, SpanKV],
        fidelity: Fidelity,
        demand: Callable[[], Demand],
    ) -> Conditioning:
        """Store the KV of the chunk at ``index`` that was computed in place; return how it is served from now on.

        It is stored as a patch where `ctxwin.window.storage_policy` says so. Runs no forward, as an answer waits for it.
        """
        encoded, absorbed, span = layout.segments[index + 1].encoded, layout.absorbed(index), captured[index + 1]
        entry, conditioning = layout.choices[index].entry, layout.choices[index].conditioning
        if fidelity.mode == "patched" and fidelity.allows("patched") and conditioning.antecedents:
            base = conditioning.base
            if base is None:
                _, canonical = canonical_key(state, entry.chunk_id)
                base = canonical if self.has(canonical) and demand().pays(state, entry, True) else None
            if base is not None and self.has(base):
                states = preceding_states(layout, captured, index) if self.engine.spec.kv.recurrent else None
                key = self.form(span, base, conditioning.provenance, encoded, fidelity, absorbed, states)
                if key is not None:
                    return patched_conditioning(conditioning, "patched", base, key)
        self.put_chunk(layout, index, span, conditioning)
        if conditioning.exact and fidelity.allows("orbit") and fidelity.mode == "patched":
            observe_order(self, state, index, span, fidelity, conditioning.span)
        return conditioning.model_copy(update={"base": None})

    def form(
        self,
        span: SpanKV,
        base_key: str,
        provenance: str,
        encoded: Encoded,
        fidelity: Fidelity,
        absorbed: Sequence[str],
        states: States | None = None,
    ) -> str | None:
        """Form and store the patch that turns a stored base into ``span``; None if it would not be smaller than
        ``span``, the base is gone, or the store refuses.

        ``absorbed``: the contents that ``span`` absorbed. The patch also holds the base's, with the opposite sign. ``states``: of
        a hybrid, the states in front of it; without them it gets no patch.
        """
        from ctxwin.kv.deficit import deficit

        key = patch_key(provenance, base_key, fidelity.patch_name)
        self.know_basis(fidelity)
        if self.has(key):
            return key
        base = self.repo.get_span(base_key, token_ids=encoded.token_ids)
        spec = self.engine.spec
        if base is None or (spec.kv.recurrent and states is None):
            return None
        patch = compress_deficit(deficit(span, base[0], spec.kv, states), spec.model, spec.kv, fidelity)
        patch.meta.update(chunk=encoded.chunk_id, absorbed=[*absorbed, *base[1].get("absorbed", ())])
        if patch.nbytes >= span.nbytes or not self.repo.put_patch(key, patch):
            return None
        self.missing.discard(key)
        return key
