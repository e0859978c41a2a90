"""Replays: an answer scored as it was served, as a re-prefill would serve it, and with strategies that are not trusted yet.

A layout is replayed from the window's state, not from KV kept in memory; it is not compared if the store has dropped some of
its KV meanwhile. Everything here runs in the background, in prefix-cache namespaces of its own, and stops when a request waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from ctxwin.audit.harm import Floor, Harm, Value, value_of
from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import AnswerStopped, ChunkUnavailable, EngineFailed
from ctxwin.fidelity import Fidelity, Reference
from ctxwin.hashing import digest
from ctxwin.window.assembly import Assembly
from ctxwin.window.continuation import Selection, ServedMemos
from ctxwin.window.lanes import canonical_key
from ctxwin.window.layout import Layout, Work
from ctxwin.window.state import Conditioning, Placed, State, provenance_of, span_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV

EXACT = Fidelity("exact")
_NO_FLOOR = Floor()
Rows = list[dict[int, float]]
Layouts = dict[str, Callable[[], Sequence[Segment] | None]]
"""Segments by layout, each built when it is needed; None where there is no such layout."""


@dataclass(frozen=True)
class Exchange:
    """A question and its greedy answer.

    Attributes:
        ended: the answer ended by itself, so that its end token is part of it.
        max_tokens: the requested maximum length.
        greedy: the answer is of the likeliest tokens; one drawn at a temperature has no value to lose.
        raw: read in place of the query, without a turn's closing; then ``ids`` go on with it.
    """

    query: str
    ids: tuple[int, ...]
    ended: bool
    max_tokens: int = 32
    greedy: bool = True
    raw: Encoded | None = None


@dataclass(frozen=True)
class Divergence:
    """Difference between the answers of two layouts.

    Attributes:
        kl: mean KL(reference || served) per token along the answer, in nats; over the tokens among the best of both, with all
            others taken as one, so never more than over the entire vocabulary.
        changed: the greedy tokens differ.
        loss: mean log-probability per token that the reference's greedy tokens lose.
    """

    kl: float
    changed: bool
    loss: float = 0.0

    @property
    def nats(self) -> float:
        """Loss of text, in nats a token: the greater of both."""
        return max(self.kl, self.loss)


@dataclass(frozen=True)
class Finding:
    """Comparison of an answer with exact ones.

    Attributes:
        window: against a re-prefill of the placed chunks.
        stream: against a re-prefill of all chunks seen, if a survivor remembers evicted ones.
        strict: the divergence that decides.
        harm: of the answer.
        concerned: placement ids that were served approximately.
    """

    window: Divergence
    stream: Divergence | None
    strict: Divergence
    harm: Harm
    concerned: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.strict.kl:.3g} nats a token from a re-prefill, {self.harm}"

    def divergences(self) -> dict[str, float | bool]:
        """Return the KL by reference, and the harm as a number in [0, 1]."""
        kls: dict[str, float | bool] = {"window": self.window.kl, "harm": self.harm.share}
        return kls if self.stream is None else {**kls, "stream": self.stream.kl}


class Stale(Exception):
    """The layout cannot be replayed: the store has dropped some of its KV, or content was forgotten meanwhile."""


def diverge(reference: Rows, candidate: Rows, ended: bool) -> Divergence:
    """Compare the rows of one answer (`Engine.forced_logprobs`) from two layouts."""
    count = len(reference) if ended else len(reference) - 1
    kls, losses, changed = [0.0], [0.0], False
    for p, q in zip(reference[:count], candidate[:count], strict=True):
        token = likeliest(p)
        changed = changed or token != likeliest(q)
        kls.append(kl_of_rows(p, q))
        losses.append(min(_MAX_LOSS, p[token] - q.get(token, min(q.values()))))
    return Divergence(math.fsum(kls) / max(1, count), changed, math.fsum(losses) / max(1, count))


def judge(window: Divergence, stream: Divergence | None, reference: Reference) -> Divergence:
    """Return the divergence that decides (`Fidelity`), from both re-prefills if that of all chunks seen was computed."""
    if stream is None or reference == "window":
        return window
    if reference == "stream":
        return stream
    return (min if reference == "nearer" else max)(window, stream, key=lambda divergence: divergence.kl)


def likeliest(row: dict[int, float]) -> int:
    """Return the token that greedy decoding takes; of equally likely ones the first."""
    return max(row, key=lambda token: (row[token], -token))


_MAX_LOSS = 30.0
"""Log-probability that a token can lose at most, which keeps sums finite."""


def kl_of_rows(p: dict[int, float], q: dict[int, float]) -> float:
    """Return KL(p || q) in nats over the tokens in both rows, with all others taken as one; of NaN `_MAX_LOSS`."""
    both = p.keys() & q.keys()
    terms = [math.exp(p[t]) * (p[t] - q[t]) for t in both if p[t] != -math.inf]
    rest_p, rest_q = (max(1e-12, 1 - math.fsum(math.exp(row[t]) for t in both)) for row in (p, q))
    kl = math.fsum([*terms, rest_p * math.log(rest_p / rest_q)])
    return _MAX_LOSS if math.isnan(kl) else max(0.0, kl)


@dataclass
class _FilteredAssembly(Assembly):
    """Sees only the part of the store that another strategy would have stored: keys for which ``visible`` is True; None: all."""

    visible: Callable[[str], bool] | None = None

    def has(self, key: str) -> bool:
        return (self.visible is None or self.visible(key)) and super().has(key)


@dataclass
class Replay:
    """Replays of one engine's windows.

    Args:
        engine: of the window, so of its tenant.
        stopped: polled; AnswerStopped ends the replay once it is true.
        fresh: False once content was forgotten; nothing may be stored then.
        work: accumulates the cost.
    """

    engine: Engine
    stopped: Callable[[], bool]
    fresh: Callable[[], bool] = lambda: True
    work: Work = field(default_factory=lambda: Work(background=True))

    def __post_init__(self) -> None:
        self._assembly = _FilteredAssembly(self.engine, salt=digest("audit", id(self)))
        self._namespaces = itertools.count()

    def use_memos(self, memos: ServedMemos) -> None:
        """Set how the window's chunks were served before, so that its layout is built as it was."""
        self._assembly.memo = memos

    def score(self, segments: Sequence[Segment], exchanges: Sequence[Exchange]) -> list[Rows]:
        """Return the rows of each exchange over a layout."""
        questions = [(e.raw or self.engine.encode_query(e.query), e.ids) for e in exchanges]
        return self.engine.forced_logprobs(segments, questions, stopped=self.stopped, tally=self.work)

    def build_layout(
        self,
        state: State,
        fidelity: Fidelity,
        keys: Sequence[str] | None = None,
        visible: Callable[[str], bool] | None = None,
    ) -> Layout:
        """Return the layout of a state. Raises Stale if KV is gone, or its keys differ from ``keys`` (of the served answer).

        If given, only keys for which ``visible`` is True count as stored.
        """
        self._check()
        misses, self._assembly.visible = self.work.misses, visible
        self._assembly.newest.selection = Selection()  # made on what was visible then
        layout = self._assembly.build_layout(state, fidelity, self.work)
        if self.work.misses > misses or (keys is not None and keys_of(layout) != list(keys)):
            raise Stale("the KV of the answer is no longer stored")
        return layout

    def fill(self, layout: Layout) -> tuple[Segment, ...]:
        """Return the segments of ``layout`` with the chunks that its lanes compute: each computed after the preceding ones as
        served, and stored."""
        segments = list(layout.segments)
        for i, segment in enumerate(segments):
            if segment.span is None and segment.tokens:
                self._check()
                # If every preceding chunk is served as in the window, the answer itself has computed it.
                stored = self.engine.repo.get_span(segment.span_key, token_ids=segment.encoded.token_ids)
                if stored is not None:
                    segments[i] = replace(segment, span=stored[0], capture=False)
                    continue
                preceding = [replace(s, approximate=False) for s in segments[:i]]
                salt = digest("audit", id(self), i)
                span = self.engine.prefill(
                    preceding, segment.encoded, segment.start, salt=salt, background=True, tally=self.work
                )
                segments[i] = replace(segment, span=span, capture=False)
                self._store(layout, i, span)
        return tuple(segments)

    def _store(self, layout: Layout, index: int, span: SpanKV) -> None:
        segment = layout.segments[index]
        metadata: dict[str, object] = {"provenance": "system_prompt"}
        if index:
            source = layout.choices[index - 1].conditioning
            metadata = {"provenance": source.provenance, "exact": source.exact, "absorbed": layout.absorbed(index - 1)}
        self._check()
        self._assembly.put(segment.span_key, span, segment.encoded, **metadata)
        if not self.fresh():  # forgotten between the two lines above: the stored KV may contain some of it
            self.engine.repo.delete(segment.span_key)
            self._check()

    def reprefill(self, state: State) -> tuple[Segment, ...]:
        """Return segments of the placed chunks without KV, to be computed in one forward."""
        return self._bare(state, state.placed)

    def reprefill_stream(self, state: State) -> tuple[Segment, ...] | None:
        """Return segments of the recently seen chunks, in the order of arrival; None if these are the placed ones, or if the
        placed ones stand in another order, which a re-prefill in the order of arrival would not be valid for.

        Recently: twice as many chunks as are placed, as in `ctxwin eval probe`, and no more than the engine takes. A model is
        not made for streams of any length, and would be a poor reference beyond.
        """
        room = self.engine.spec.max_tokens - state.system_prompt_tokens - _RESERVED_TOKENS
        recent: list[Placed] = []
        newest_first = sorted((*state.placed, *state.evicted), key=lambda p: p.arrival, reverse=True)
        for p in newest_first[: 2 * len(state.placed)]:
            room -= p.tokens
            if room < 0:
                break
            recent.append(p)
        recent.reverse()
        ids = [p.id for p in state.placed]
        if len(recent) == len(ids) or [p.id for p in recent if p.id in ids] != ids:
            return None
        return self._bare(state, recent)

    def _bare(self, state: State, entries: Sequence[Placed]) -> tuple[Segment, ...]:
        system_prompt = self.engine.encode_system_prompt(state.system_prompt)
        encodeds = [system_prompt, *(self.engine.encode(p.chunk) for p in entries)]
        starts = itertools.accumulate((encoded.advance for encoded in encodeds), initial=0)
        return tuple(map(Segment, encodeds, starts))

    def exact_layouts(self, state: State, *, pieces: Literal["placed", "cut"] = "cut") -> Layouts:
        """Return the layouts of `References`; ``pieces``: which of the placed chunks' two is computed a chunk at a time."""
        whole = partial(self.reprefill, state)
        layouts: Layouts = {"placed": whole, "cut": whole, "stream": partial(self.reprefill_stream, state)}
        return {**layouts, pieces: lambda: self.in_pieces(whole())}

    def in_pieces(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return segments with the KV they lack, each computed by a forward of its own after the preceding ones; nothing is
        stored."""
        filled: list[Segment] = []
        prefill = partial(self.engine.prefill, background=True, tally=self.work)
        for segment in segments:
            if segment.span is None:
                self._check()
                span = prefill(filled, segment.encoded, segment.start, salt=self._new_namespace())
                segment = replace(segment, span=span)
            filled.append(segment)
        return tuple(filled)

    def answer(self, segments: Sequence[Segment], query: str, max_tokens: int, at_most: int | None = None) -> Exchange:
        """Generate the greedy answer over a layout; ``at_most``: stop, unfinished, after so many tokens."""
        ids: list[int] = []

        def collect(token: int, text: str) -> bool:
            ids.append(token)
            return not self.stopped()

        self._check()
        bare = [replace(s, approximate=False, capture=False) for s in segments]
        limit = max_tokens if at_most is None else min(max_tokens, at_most)
        encoded, salt = self.engine.encode_query(query), self._new_namespace()
        generation = self.engine.generate(bare, encoded, Sampling(limit), salt=salt, on_token=collect, background=True)
        self.work.tokens += generation.computed_tokens
        self.work.forwards += generation.forwards
        if not generation.finished or self.stopped():
            raise AnswerStopped("the engine is needed for other work")
        if generation.fallbacks:
            raise EngineFailed("spans could not be loaded, so that what they serve could not be asked")
        return Exchange(query, tuple(map(int, generation.token_ids)), len(generation.token_ids) < limit, max_tokens)

    def _new_namespace(self) -> str:
        """Return a prefix-cache namespace of one request: layouts without marks must not share any."""
        return digest("audit", id(self), next(self._namespaces))

    def value(self, exchange: Exchange) -> Value | None:
        """Return the value of an answer; None if it is text. One cut off has none, unless so little was requested."""
        complete = exchange.ended or len(exchange.ids) == exchange.max_tokens <= _FEW_TOKENS
        return value_of(self.engine.decode(exchange.ids), complete=complete) if exchange.greedy else None

    def audit(
        self, state: State, fidelity: Fidelity, keys: Sequence[str], exchange: Exchange, floor: Floor = _NO_FLOOR
    ) -> Finding:
        """Compare a served answer with re-prefills; see `Finding`.

        Cost: a forward over the placed chunks, and one over all chunks seen if that decides, or if ``fidelity.audit`` requests
        both; for a greedy answer whose tokens differ also answers of these, until its value is known to be lost or not.
        """
        layout = self.build_layout(state, fidelity, keys)
        concerned = tuple(c.entry.id for c in layout.choices if not c.conditioning.exact)
        (served_rows,) = self.score(layout.segments, [exchange])
        references = References(self, exchange, self.exact_layouts(state))
        reference = fidelity.advanced.reference if remembers(layout) else "window"
        finding = references.compare(served_rows, reference, floor, lambda: self.value(exchange))
        if fidelity.audit > 0 and reference == "stricter":
            stream = references.divergence(served_rows, "stream")
            finding = replace(finding, stream=stream, strict=judge(finding.window, stream, reference))
        return replace(finding, concerned=concerned)

    def _check(self) -> None:
        if self.stopped():
            raise AnswerStopped("the engine is needed for other work")
        if not self.fresh():
            raise Stale("content was forgotten")


@dataclass
class References:
    """Valid exact references of one answer, each computed when it is first needed.

    Args:
        exchange: the answer whose tokens all of them score.
        layouts: segments of the chunks as they are ``placed``, of the same ``cut`` into other pieces, and of the ``stream`` of
            what was seen lately; None if that is what is placed.
        rows: by layout, along the answer.
        own: ``exchange`` is the answer over the placed chunks.
    """

    replay: Replay
    exchange: Exchange
    layouts: Layouts
    rows: dict[str, Rows | None] = field(default_factory=dict)
    own: bool = False

    def __post_init__(self) -> None:
        self._segments: dict[str, Sequence[Segment] | None] = {}
        self._values = {"placed": self.replay.value(self.exchange)} if self.own else {}

    def segments_of(self, name: str) -> Sequence[Segment] | None:
        """Return a layout."""
        if name not in self._segments:
            self._segments[name] = self.layouts[name]()
        return self._segments[name]

    def rows_of(self, name: str) -> Rows | None:
        """Return the rows of a layout; None for a stream of what is placed."""
        if name not in self.rows:
            segments = self.segments_of(name)
            self.rows[name] = None if segments is None else self.replay.score(segments, [self.exchange])[0]
        return self.rows[name]

    def value_of(self, name: str) -> Value | None:
        """Return the value of the greedy answer over a layout."""
        if name not in self._values:
            segments = self.segments_of(name)
            self._values[name] = self.value_of("placed") if segments is None else self.value_over(segments)
        return self._values[name]

    def value_over(self, segments: Sequence[Segment]) -> Value | None:
        """Return the value of the greedy answer over any layout."""
        # An answer that has a value ends soon, unless it is as long as the one at hand.
        at_most = max(_SCORED_TOKENS, 2 * len(self.exchange.ids))
        return self.replay.value(self.replay.answer(segments, self.exchange.query, self.exchange.max_tokens, at_most))

    def divergence(self, rows: Rows, name: str = "placed") -> Divergence | None:
        """Return how far an answer's rows are from those of a reference."""
        exact = self.rows_of(name)
        return None if exact is None else diverge(exact, rows, self.exchange.ended)

    def distance(self, name: str) -> tuple[float, bool | None] | None:
        """Return how far a reference is from the placed chunks: nats a token, and whether the values differ, if scored."""
        rows = self.rows_of(name)
        divergence = None if rows is None else self.divergence(rows)
        if divergence is None:
            return None
        value = self.value_of("placed")
        return divergence.nats, None if value is None else divergence.changed and self.value_of(name) != value

    def compare(self, rows: Rows, reference: Reference, floor: Floor, get_value: Callable[[], Value | None]) -> Finding:
        """Compare an answer with the references.

        Args:
            rows: of its layout, along the exchange.
            reference: which of them decide; ``window`` for KV that remembers nothing.
            get_value: returns its value.
        """
        window = self.divergence(rows)
        assert window is not None
        stream = self.divergence(rows, "stream") if reference in ("stream", "nearer") else None
        strict = judge(window, stream, reference)
        harm = self._lost(strict.changed, reference, get_value) if self.exchange.greedy else None
        if harm is None:
            harm = Harm("text", strict.nats - floor.nats(remembers=reference == "stricter"))
        return Finding(window, stream, strict, harm)

    def _lost(self, changed: bool, reference: Reference, get_value: Callable[[], Value | None]) -> Harm | None:
        """Return the harm to the value; None if the reference's answer has none."""
        if not changed:
            return None if (self.value_of("placed") if self.own else get_value()) is None else Harm("scored", 0.0)
        whole = {"stream": ("stream",), "window": ("placed", "cut")}
        first, *others = whole.get(reference, ("placed", "cut", "stream"))
        if (value := self.value_of(first)) is None:
            return None
        if get_value() == value:
            return Harm("scored", 0.0)
        agree = all(self.value_of(name) == value for name in others)
        return Harm("scored", float(agree), undecided=not agree)


def shadow(state: State, conditionings: Mapping[str, Conditioning]) -> tuple[State, Callable[[str], bool]]:
    """Return ``state`` as if its window had been served by another strategy, and a predicate of the keys stored then.

    Args:
        conditionings: KV of that strategy by placement.

    The keys are those its chunks were served from, canonicals and patches, but not those that exact serving has computed.
    """
    entries = tuple(p.replace(kv=conditionings[p.id], seen=True) if p.id in conditionings else p for p in state.placed)
    shadow_state = state.replace(placed=entries)
    keys = shadow_state.keys() | {canonical_key(shadow_state, p.chunk_id)[1] for p in entries}
    keys.add(span_key(provenance_of(state.system_prompt_key, "system_prompt")))
    return shadow_state, lambda key: key in keys or key.startswith(("patch/", "orbit/"))


_FEW_TOKENS, _SCORED_TOKENS = 2, 64
"""Requested tokens up to which an answer is complete at its limit; tokens after which an answer is text unless the one at hand
is as long."""
_RESERVED_TOKENS = 512
"""Tokens reserved for a query and an answer after the chunks of a stream."""
UNREPLAYABLE = (Stale, ChunkUnavailable, EngineFailed)
"""Errors that end a replay without a conclusion."""


def remembers(layout: Layout) -> bool:
    """Return True if chunks of a layout are served from KV that has seen others that have left, more than an earlier version
    of what is placed."""
    return any(c.conditioning.depth and not c.conditioning.has_known_text for c in layout.choices)


def keys_of(layout: Layout) -> list[str]:
    """Return the keys that each chunk of a layout is served from."""
    return [f"{c.conditioning.span}+{c.conditioning.patch}" for c in layout.choices]
