"""From lanes to KV: fetches or rebuilds the spans an ask needs, runs the engine, stores what was computed.

Every stored segment may be gone by the time it is wanted. `Assembly.lay_out` therefore fetches first and commits later: a
key that cannot be read is remembered as missing, counted, and the lanes are chosen again without it, so that a failure of
the store becomes a recomputation and never a wrong answer.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from ctxwin import tracing
from ctxwin.engines.base import Encoded, Engine, Generation, Sampling, Segment, Tally, partial_ranges
from ctxwin.errors import ChunkUnavailable
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.profiles import compressed, served_basis
from ctxwin.window.answer import Plan
from ctxwin.window.economy import Demand
from ctxwin.window.lanes import Before, Choice, canonical_key, choose, patched, plan_of, steps_of
from ctxwin.window.orbits import meet
from ctxwin.window.prices import Prices, workload
from ctxwin.window.reading import Reads
from ctxwin.window.recurrent import states_in_front
from ctxwin.window.state import (
    ANYTHING,
    Conditioning,
    Front,
    Placed,
    State,
    content_name,
    patch_key,
    provenance_of,
    span_key,
)

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.kv.patch import Patch
    from ctxwin.kv.states import States
    from ctxwin.store.spans import SpanRepository

T = TypeVar("T")
log = logging.getLogger("ctxwin")
MAX_NAMED = 1024
"""Contents that a record names; KV that absorbed more counts as having absorbed anything."""
MAX_BEFORE = 8192
"""Chunks behind others that a window remembers how it served."""


@dataclass
class Work(Tally):
    """What one operation cost beyond `Engine.generate`: forwards run to form canonicals and patches, and misses."""

    misses: int = 0
    system_prompt: bool = False  # whether the system prompt was among them
    background: bool = False  # no caller is waiting for it
    priced_ms: float = 0.0  # of its time: what has a price of its own


@dataclass(frozen=True)
class Laid:
    """A layout ready for an engine: system prompt first, then one segment per placed chunk.

    Attributes:
        ms: what the plan said of it: up to the first token, what the query's tokens take apart.
        ahead: KV of chunks that were computed already, by index into the segments, as an answer would capture it.
    """

    choices: tuple[Choice, ...]
    segments: tuple[Segment, ...]
    salt: str
    contents: tuple[str, ...]
    counts: tuple[int, ...]
    ms: float = 0.0
    ahead: Mapping[int, SpanKV] = field(default_factory=dict)

    def absorbed(self, index: int) -> Sequence[str]:
        """Whose content KV absorbs that is computed in the place of chunk ``index`` (or behind the last one), by name."""
        count = self.counts[index]
        return self.contents[:count] if count <= MAX_NAMED else [ANYTHING]

    def end(self, state: State) -> Front:
        """What stands in front of a chunk that is appended."""
        if not self.choices:
            return Front.of(state)
        last = self.choices[-1]
        return last.front.behind(last.placed, last.served)

    def computed(self, state: State) -> Laid:
        """What was served where the engine could load nothing: everything was computed in place, and is exact."""
        choices: list[Choice] = []
        front = Front.of(state)
        for choice in self.choices:
            served = front.computed(choice.placed.chunk_id, "computed")
            choices.append(Choice(choice.placed, "computed", front, served, compute=True))
            front = front.behind(choice.placed, served)
        none = {"span": None, "patch": None, "patch_key": "", "approximate": False, "recompute": (), "merged": False}
        bare = (replace(segment, **none) for segment in self.segments)  # type: ignore[arg-type]
        names = tuple(dict.fromkeys(content_name(c.placed.chunk_id) for c in choices))
        return Laid(tuple(choices), tuple(bare), "", names, tuple(range(len(choices) + 1)))


def salt_of(segments: Sequence[Segment]) -> str:
    """The prefix-cache space of a layout: "" (the exact one) or a digest of the KV that a forward would not give.

    Everything up to the last segment that is `approximate` names the space; what stands behind it is what a forward behind
    exactly that gives, so the engine's own chain of block hashes tells it apart. An append or a fork therefore stays in
    its space, and an edit undone comes back to it.
    """
    last = max((i for i, segment in enumerate(segments) if segment.approximate), default=0)
    return digest("salt", [segment.key for segment in segments[: last + 1]]) if last else ""


@dataclass
class Assembly:
    """Binds one engine (with its repository of spans) to the functions a window needs. Holds no window state.

    Attributes:
        missing: keys that could not be read.
        before: how chunks were served, by what stood in front of them; see `lanes.Before`. A restart forgets it.
        salt: keeps what it prefills out of the exact prefix cache; "" does not.
    """

    engine: Engine
    demand: Callable[[], Demand] = Demand
    missing: set[str] = field(default_factory=set)
    before: OrderedDict[str, Before] = field(default_factory=OrderedDict)
    salt: str = ""

    @property
    def repo(self) -> SpanRepository:
        """The engine's store, as spans and patches."""
        return self.engine.repo

    def has(self, key: str) -> bool:
        """Whether ``key`` can be served, as far as is known without reading it."""
        return key not in self.missing and self.repo.contains(key)

    def plan(self, state: State, fidelity: Fidelity) -> Plan:
        """What an ask of ``state`` would do; reads no KV."""
        kv, prices, has = self.engine.spec.kv, self.prices, cache(self.has)
        choices = choose(state, fidelity, has, prices, self.before)
        return plan_of(state, choices, kv, _system_prompt_key(state), has, prices)

    @property
    def prices(self) -> Prices:
        """What serving a chunk costs on this engine."""
        return Prices(self.engine.costs, self.repo.tier)

    def lay_out(self, state: State, fidelity: Fidelity, work: Work) -> Laid:
        """Chooses lanes, fetches their KV, forms missing canonicals. Repeats with what turned out to be missing."""
        with tracing.span("lay_out", chunks=len(state.placed), mode=fidelity.mode):
            return self._lay_out(state, fidelity, work)

    def _lay_out(self, state: State, fidelity: Fidelity, work: Work) -> Laid:
        costs, priced = self.engine.costs, work.priced_ms
        began = costs.clock()
        self.missing.clear()
        self.know_basis(fidelity)
        ahead: dict[str, SpanKV] = {}
        # Each round either succeeds or learns of at least one missing key, so it ends.
        while True:
            has = cache(self.has)  # one answer for each key, though a store may lose it
            choices = choose(state, fidelity, has, self.prices, self.before)
            _, ms = steps_of(state, choices, _system_prompt_key(state), has, self.prices)
            fetched = self._fetched(state, choices, work, ahead)
            if fetched is not None:
                own_ms = 1e3 * (costs.clock() - began) - (work.priced_ms - priced)
                costs.learn(costs.library, (1, len(choices)), own_ms)
                return replace(fetched, ms=ms)

    def _fetched(self, state: State, choices: Sequence[Choice], work: Work, ahead: dict[str, SpanKV]) -> Laid | None:
        """The layout with its KV; None where some of it turned out to be missing.

        ``ahead``: what was computed while reads went on, by its key; it serves the next round, too.
        """
        reads = Reads(self.engine.costs, self.repo.tier)
        encodeds = [self._encoded(choice.placed) for choice in choices]
        for choice, encoded in zip(choices, encodeds, strict=True):
            if not choice.compute and not choice.form_canonical:
                source = choice.linked or choice.served
                reads.begin(source.span, choice.slots, self._span_read(source, encoded, choice.placed.chunk_id))
                if choice.served.patch is not None:
                    reads.begin(choice.served.patch, encoded.tokens, partial(self.repo.get_patch, choice.served.patch))
        system_prompt = self.system_prompt(state, work, reads)
        segments = [system_prompt]
        contents: dict[str, None] = {}  # in order, each once
        counts = [0]
        early: dict[int, SpanKV] = {}
        for choice, encoded, start in zip(choices, encodeds, state.starts(), strict=True):
            served, placed = choice.served, choice.placed
            contents[content_name(placed.chunk_id)] = None
            linked = choice.linked
            segment = Segment(encoded, start, capture=choice.compute or linked is not None, span_key=served.span)
            if not choice.compute:
                formed = None
                if choice.form_canonical:
                    system_prompt = segments[0] = self._computed_system_prompt(state, system_prompt, work)
                    _, formed = self.canonical(state, placed, system_prompt, work)
                # What was formed just now serves even where the store refused it; asking again would never end.
                found = (formed, {}) if formed else self._span(linked or served, encoded, placed.chunk_id, work, reads)
                patch = None
                if found is not None and served.patch is not None:
                    patch = self._patch(served.patch, encoded.tokens, work, reads)
                if found is None or (patch is None and served.patch is not None):
                    return None
                for record in (patch.meta if patch else {}, {} if served.exact else found[1]):
                    contents.update(dict.fromkeys(record.get("absorbed", ())))
                segment = replace(segment, span=found[0], approximate=not choice.in_place)
                segment = replace(segment, patch=patch, patch_key=served.patch or "", merged=served.slots is not None)
                if linked is not None:
                    segment = replace(
                        segment, recompute=partial_ranges(encoded.media_ranges, choice.recompute, encoded.tokens)
                    )
            elif served.span in ahead or reads.left_ms > 2 * self.prices.request_ms:
                # Reads go on meanwhile. In front of what they bring it takes a request of its own anyway.
                system_prompt = segments[0] = self._computed_system_prompt(state, system_prompt, work)
                span = ahead.get(served.span)
                if span is None:
                    fallbacks, front = work.fallbacks, [c.placed for c in choices[: len(segments)]]
                    span = self.prefill(segments, encoded, start, work, front, salt_of(segments))
                    span = None if work.fallbacks > fallbacks else span  # computed behind other KV than is served
                if span is not None:
                    ahead[served.span] = early[len(segments)] = span
                    segment = replace(segment, span=span, capture=False)
            counts.append(len(contents))
            segments.append(segment)
        return Laid(tuple(choices), tuple(segments), salt_of(segments), tuple(contents), tuple(counts), ahead=early)

    def _encoded(self, placed: Placed) -> Encoded:
        """The tokens of a placed chunk; ValueError where a snapshot said another number."""
        encoded = self.engine.encode(placed.chunk)
        if (encoded.tokens, encoded.advance) != (placed.tokens, placed.advance):
            raise ValueError(
                f"chunk {placed.id} must have {encoded.tokens} tokens over {encoded.advance} positions, got "
                f"{placed.tokens} over {placed.advance}; restore the snapshot as its window gave it"
            )
        return encoded

    def system_prompt(self, state: State, work: Work, reads: Reads | None = None) -> Segment:
        encoded = self.engine.encode_system_prompt(state.system_prompt)
        key = _system_prompt_key(state)
        found = None
        if self.has(key):
            reads = reads or Reads(self.engine.costs, self.repo.tier)
            found = self._read(key, encoded.tokens, work, partial(self.repo.get_span, key, encoded.token_ids), reads)
        span = None if found is None else found[0]
        return Segment(encoded, 0, span=span, capture=span is None, span_key=key)

    def _computed_system_prompt(self, state: State, system_prompt: Segment, work: Work) -> Segment:
        """``system_prompt`` with its KV: computed once for all canonicals that are formed behind it."""
        if system_prompt.span is not None:
            return system_prompt
        span = self.prefill([], system_prompt.encoded, 0, work)
        work.system_prompt = True
        self.put(system_prompt.span_key, span, system_prompt.encoded, provenance="system_prompt")
        return replace(system_prompt, span=span, capture=False)

    def _span_read(
        self, served: Conditioning, encoded: Encoded, chunk: str
    ) -> Callable[[], tuple[SpanKV, dict[str, Any]] | None]:
        """A read of the span of ``served`` and its record: a miss where it is not what a snapshot said it is."""
        said: dict[str, Any] = {"chunk": chunk}
        if served.patch is None:
            said["provenance"] = served.provenance
        if served.exact:
            said["exact"] = True
        encoded = encoded.part(0, served.slots) if served.slots else encoded
        return partial(self.repo.get_span, served.span, encoded.token_ids, positions=encoded.positions, **said)

    def _span(
        self, served: Conditioning, encoded: Encoded, chunk: str, work: Work, reads: Reads
    ) -> tuple[SpanKV, Mapping[str, Any]] | None:
        """The span of ``served`` and its record; None where it is gone or late."""
        found = self._read(served.span, encoded.tokens, work, self._span_read(served, encoded, chunk), reads)
        if found is None:
            self._miss(served.span, work)
        return found

    def _patch(self, key: str, tokens: int, work: Work, reads: Reads) -> Patch | None:
        patch = self._read(key, tokens, work, partial(self.repo.get_patch, key), reads)
        if patch is None:
            self._miss(key, work)
        return patch

    def _read(self, key: str, tokens: int, work: Work, read: Callable[[], T | None], reads: Reads) -> T | None:
        """What ``read`` finds under ``key``, begun before or not."""
        began = self.engine.costs.clock()
        found = reads.take(key, tokens, read)
        work.priced_ms += 1e3 * (self.engine.costs.clock() - began)
        return found

    def know_basis(self, fidelity: Fidelity) -> None:
        """Tells the repository the directions that stored patches of this fidelity are coefficients of."""
        if fidelity.layout == "shared" and fidelity.mode == "patched":
            over = served_basis(self.engine.spec.model, self.engine.spec.kv, fidelity).basis
            if over is not None:
                self.repo.know_basis(over)

    def _miss(self, key: str, work: Work) -> None:
        self.missing.add(key)
        work.misses += 1
        log.warning("%s is gone from the store, or late: recomputing", key[:20])

    def put(self, key: str, span: SpanKV, encoded: Encoded, **said: Any) -> None:
        """Stores a computed span; a refusal is logged by the store and costs a recomputation later.

        Its record says what it is: the ``chunk`` (``encoded``'s by default), its ``provenance``, whether it is ``exact``, and
        whose content it ``absorbed``.
        """
        self.missing.discard(key)
        record = {"chunk": encoded.chunk_id, "provenance": "", "exact": True, "absorbed": [], **said}
        self.repo.put_span(key, span, {"token_ids": list(encoded.token_ids), **record})

    def canonical(
        self, state: State, placed: Placed, system_prompt: Segment | None, work: Work
    ) -> tuple[str, SpanKV | None]:
        """The key of a chunk's canonical; where it is not held, also its KV, formed by one forward behind the system prompt."""
        provenance, key = canonical_key(state, placed.chunk_id)
        if self.has(key):
            return key, None
        system_prompt = self._computed_system_prompt(state, system_prompt or self.system_prompt(state, work), work)
        encoded = self.engine.encode(placed.chunk)
        span = self.prefill([system_prompt], encoded, state.system_prompt_advance, work, [placed])
        self.put(key, span, encoded, provenance=provenance)
        return key, span

    def run(self, laid: Laid, query: Encoded, sampling: Sampling, **options: Any) -> Generation:
        """`Engine.generate` over a layout, with its options; how long it takes is learnt."""
        costs, heard = self.engine.costs, options.pop("on_token", None)
        with costs.timed() as watch:

            def on_token(token: int, text: str) -> bool:
                watch.lap()
                return heard is None or heard(token, text) is not False

            options |= {"salt": laid.salt, "on_token": on_token}
            call = partial(self.engine.generate, laid.segments, query, sampling, **options)
            with tracing.span("run", tokens=sum(s.encoded.tokens for s in laid.segments) + query.tokens):
                made = self._seen([choice.placed for choice in laid.choices], call)
        if not made.fallbacks:
            made.captured.update(laid.ahead)
        if watch.alone and not made.fallbacks:
            asked = workload([*laid.segments, Segment(query, 0)], made.forwards)
            costs.learn(costs.engine, asked.amounts, watch.first or watch.ms)
        for segment in laid.segments if not made.fallbacks else ():
            if segment.patch is not None:
                self.repo.note_served(segment.patch_key)
        return made

    def prefill(
        self,
        front: Sequence[Segment],
        encoded: Encoded,
        start: int,
        work: Work,
        placed: Iterable[Placed] = (),
        salt: str = "",
    ) -> SpanKV:
        """`Engine.prefill`, counted in ``work``; ``placed`` are the chunks that may have to be encoded again for it."""
        costs, before = self.engine.costs, (work.forwards, work.fallbacks)
        prefill = partial(self.engine.prefill, salt=salt or self.salt, background=work.background, tally=work)
        with costs.timed() as watch:
            span = self._seen(placed, partial(prefill, tuple(front), encoded, start))
        work.priced_ms += watch.ms
        if watch.alone and not work.background and work.fallbacks == before[1]:
            asked = workload([*front, Segment(encoded, start)], work.forwards - before[0])
            costs.learn(costs.engine, asked.amounts, watch.ms)
        return span

    def _seen(self, placed: Iterable[Placed], call: Callable[[], T]) -> T:
        """``call``, again where vision embeddings left a shared store since ``placed`` were encoded: they are made anew."""
        for _ in range(2):
            try:
                return call()
            except ChunkUnavailable:
                for p in placed:
                    self.engine.encode(p.chunk)
        return call()

    def settle(self, state: State, laid: Laid, captured: dict[int, SpanKV], fidelity: Fidelity) -> State:
        """Stores captured KV and returns ``state`` with each placement's conditioning as it was served.

        The version stays: what is placed has not changed, only what is known about its KV.
        """
        captured = {**laid.ahead, **captured}
        if 0 in captured:
            self.put(laid.segments[0].span_key, captured[0], laid.segments[0].encoded, provenance="system_prompt")
        placed, served = [], []
        demand = cache(self.demand)  # asked of every open window: once an answer at most
        for i, choice in enumerate(laid.choices, start=1):
            p = choice.placed
            if choice.compute:
                if i not in captured:  # the engine could not read it back: stay uncomputed
                    placed.append(p)
                    continue
                kept = self._store(state, choice.served, captured, laid, i - 1, fidelity, demand)
                choice = replace(choice, lane=kept.lane, served=kept, compute=kept.patch is None)
                p = p.replace(kv=kept, seen=True, unseen=())
            elif choice.settles:
                if choice.linked is not None:
                    if i not in captured:
                        placed.append(p)
                        continue
                    said = {"provenance": choice.served.provenance, "exact": False, "absorbed": laid.absorbed(i - 1)}
                    self.put(choice.served.span, captured[i], laid.segments[i].encoded, **said)
                    choice = replace(choice, lane="resident", linked=None)
                p = p.replace(kv=choice.served, seen=True, unseen=())
            placed.append(p)
            served.append(choice)
        self.remember(served, fidelity)
        return state.replace(placed=tuple(placed))

    def remember(self, choices: Iterable[Choice], fidelity: Fidelity) -> None:
        """Remembers how chunks were served; the window's last `MAX_BEFORE` chunks."""
        if fidelity.mode != "patched":
            return  # exact KV is found by its provenance, and a canonical by its content
        for choice in choices:
            place = choice.front.contents_behind(choice.placed)
            self.before[place] = Before.of(choice)
            self.before.move_to_end(place)
        while len(self.before) > MAX_BEFORE:
            self.before.popitem(last=False)

    def _store(
        self,
        state: State,
        served: Conditioning,
        captured: Mapping[int, SpanKV],
        laid: Laid,
        index: int,
        fidelity: Fidelity,
        demand: Callable[[], Demand],
    ) -> Conditioning:
        """Stores the KV of the chunk at ``index`` that was computed in place; returns how it is served from now on.

        It is kept as a patch where `ctxwin.window.economy` says so. Never runs a forward: it is on the path of an answer.
        """
        encoded, absorbed, span = laid.segments[index + 1].encoded, laid.absorbed(index), captured[index + 1]
        if fidelity.mode == "patched" and fidelity.allows("patched") and served.antecedents:
            placed = laid.choices[index].placed
            base = served.base
            if base is None:
                _, canonical = canonical_key(state, placed.chunk_id)
                base = canonical if self.has(canonical) and demand().pays(state, placed, True) else None
            if base is not None and self.has(base):
                front = states_in_front(laid, captured, index) if self.engine.spec.kv.recurrent else None
                key = self.form(span, base, served.provenance, encoded, fidelity, absorbed, front)
                if key is not None:
                    return patched(served, "patched", base, key)
        self.put(served.span, span, encoded, provenance=served.provenance, exact=served.exact, absorbed=absorbed)
        if served.exact and fidelity.allows("orbit") and fidelity.mode == "patched":
            meet(self, state, index, span, fidelity)
        return served.model_copy(update={"base": None})

    def form(
        self,
        span: SpanKV,
        base_key: str,
        provenance: str,
        encoded: Encoded,
        fidelity: Fidelity,
        absorbed: Sequence[str],
        front: States | None = None,
    ) -> str | None:
        """Forms and stores the patch that turns a stored base into ``span``; None where it would not be smaller than
        ``span``, the base is gone, or the store refuses.

        ``absorbed``: whose content ``span`` absorbed. The patch also holds what the base did, with the other sign. ``front``: of
        a hybrid, the states in front of it; without them it gets no patch.
        """
        from ctxwin.kv.deficit import deficit

        key = patch_key(provenance, base_key, fidelity.patch_name)
        self.know_basis(fidelity)
        if self.has(key):
            return key
        base = self.repo.get_span(base_key, token_ids=encoded.token_ids)
        spec = self.engine.spec
        if base is None or (spec.kv.recurrent and front is None):
            return None
        patch = compressed(deficit(span, base[0], spec.kv, front), spec.model, spec.kv, fidelity)
        patch.meta.update(chunk=encoded.chunk_id, absorbed=[*absorbed, *base[1].get("absorbed", ())])
        if patch.nbytes >= span.nbytes or not self.repo.put_patch(key, patch):
            return None
        self.missing.discard(key)
        return key

    def prefilled(self, state: State, index: int, laid: Laid, fidelity: Fidelity, work: Work) -> State:
        """``state`` once the chunk at ``index``, which has to be computed, is: as an ask would, in one forward of its own."""
        system_prompt = self._computed_system_prompt(state, laid.segments[0], work)
        laid = replace(laid, segments=(system_prompt, *laid.segments[1:]))
        span, laid = self._in_place(state, index, laid, work)
        return self.settle(state, laid, {index + 1: span}, fidelity)

    def _in_place(self, state: State, index: int, laid: Laid, work: Work) -> tuple[SpanKV, Laid]:
        """KV of a placed chunk behind what is in front of it now, and what was in front of it in the end."""
        segment, front = laid.segments[index + 1], laid.segments[: index + 1]
        fallbacks, placed = work.fallbacks, [c.placed for c in laid.choices[: index + 1]]
        span = self.prefill(front, segment.encoded, segment.start, work, placed, salt_of(front))
        return span, laid.computed(state) if work.fallbacks > fallbacks else laid

    def reform(self, state: State, index: int, laid: Laid, fidelity: Fidelity, work: Work) -> State:
        """Re-forms one placed chunk behind what is in front of it now: one forward, no vision encode."""
        span, laid = self._in_place(state, index, laid, work)
        segment, choice = laid.segments[index + 1], laid.choices[index]
        served = choice.front.computed(choice.placed.chunk_id, "formed")
        absorbed = laid.absorbed(index)  # in full: a patch would be another approximation
        self.put(
            served.span, span, segment.encoded, provenance=served.provenance, exact=served.exact, absorbed=absorbed
        )
        formed = choice.placed.replace(kv=served, seen=True, unseen=())
        return state.replace(placed=(*state.placed[:index], formed, *state.placed[index + 1 :]))


def _system_prompt_key(state: State) -> str:
    return span_key(provenance_of(state.system_prompt_key, "system_prompt"))
