"""Replays: an answer scored as it was served, as a re-prefill would serve it, and with strategies that are not trusted yet.

A layout is replayed from the window's state, not from KV kept in memory; it is not compared if the store has dropped some of
its KV meanwhile. Everything here runs in the background, in prefix-cache namespaces of its own, and stops when a request waits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ctxwin.engines.base import Engine, Sampling, Segment
from ctxwin.errors import AnswerStopped, ChunkUnavailable, EngineFailed
from ctxwin.fidelity import Fidelity, Reference
from ctxwin.hashing import digest
from ctxwin.window.assembly import Assembly
from ctxwin.window.lanes import ServedMemo, canonical_key
from ctxwin.window.layout import Layout, Work
from ctxwin.window.state import Conditioning, Placed, State, provenance_of, span_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV

EXACT = Fidelity("exact")
Rows = list[dict[int, float]]


@dataclass(frozen=True)
class Exchange:
    """A question and its greedy answer.

    Attributes:
        ended: the answer ended by itself, so that its end token is part of it.
        max_tokens: the requested maximum length.
    """

    query: str
    ids: tuple[int, ...]
    ended: bool
    max_tokens: int = 32


@dataclass(frozen=True)
class Divergence:
    """Difference between the answers of two layouts.

    Attributes:
        kl: mean KL(reference || served) per token along the answer, in nats; over the tokens among the best of both, with all
            others taken as one, so never more than over the entire vocabulary.
        changed: the greedy answers differ.
    """

    kl: float
    changed: bool

    @property
    def harm(self) -> float:
        """Harm to the answer, in [0, 1]. The only definition of harm."""
        return float(self.changed)


@dataclass(frozen=True)
class Finding:
    """Result of an audit of a served answer.

    Attributes:
        window: against a re-prefill of the placed chunks.
        stream: against a re-prefill of all chunks seen, if a survivor remembers evicted ones.
        strict: the divergence that decides.
        concerned: placement ids that were served approximately.
    """

    window: Divergence
    stream: Divergence | None
    strict: Divergence
    concerned: tuple[str, ...]

    def __str__(self) -> str:
        changed = ", another answer" if self.strict.changed else ""
        return f"{self.strict.kl:.3g} nats a token from a re-prefill{changed}"

    def divergences(self) -> dict[str, float | bool]:
        """Return the KL by reference, and whether the answer would be another one."""
        kls: dict[str, float | bool] = {"window": self.window.kl, "changed": self.strict.changed}
        return kls if self.stream is None else {**kls, "stream": self.stream.kl}


class Stale(Exception):
    """The layout cannot be replayed: the store has dropped some of its KV, or content was forgotten meanwhile."""


def diverge(reference: Rows, candidate: Rows, ended: bool) -> Divergence:
    """Compare the rows of one answer (`Engine.forced_logprobs`) from two layouts."""
    count = len(reference) if ended else len(reference) - 1
    kls, changed = [], False
    for p, q in zip(reference[:count], candidate[:count], strict=True):
        changed = changed or likeliest(p) != likeliest(q)
        kls.append(kl_of_rows(p, q))
    return Divergence(math.fsum(kls) / len(kls) if kls else 0.0, changed)


def judge(window: Divergence, stream: Divergence | None, reference: Reference) -> Divergence:
    """Return the divergence that decides (`Fidelity`), from both re-prefills if that of all chunks seen was computed.

    ``stricter`` takes the larger one. But if the two references answer differently, an answer equal to that of the placed
    chunks counts as unchanged: exact serving gives it, and no strategy could match both.
    """
    if stream is None or reference == "window":
        return window
    if reference == "stream":
        return stream
    near, far = sorted((window, stream), key=lambda divergence: (divergence.changed, divergence.kl))
    return near if reference == "nearer" else replace(far, changed=window.changed)


def needs_stream(window: Divergence, reference: Reference) -> bool:
    """Return True if the re-prefill of all chunks seen affects the decision; it is the longest of all forwards."""
    return reference == "stream" or (window.changed and reference != "window")


def likeliest(row: dict[int, float]) -> int:
    """Return the token that greedy decoding takes; of equally likely ones the first."""
    return max(row, key=lambda token: (row[token], -token))


def kl_of_rows(p: dict[int, float], q: dict[int, float]) -> float:
    """Return KL(p || q) in nats over the tokens in both rows, with all others taken as one."""
    both = p.keys() & q.keys()
    terms = [math.exp(p[t]) * (p[t] - q[t]) for t in both if p[t] > -math.inf]
    rest_p, rest_q = (max(1e-12, 1 - math.fsum(math.exp(row[t]) for t in both)) for row in (p, q))
    return max(0.0, math.fsum([*terms, rest_p * math.log(rest_p / rest_q)]))


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

    def use_memos(self, memos: OrderedDict[str, ServedMemo]) -> None:
        """Set how the window's chunks were served before, so that its layout is built as it was."""
        self._assembly.memo = memos

    def score(self, segments: Sequence[Segment], exchanges: Sequence[Exchange]) -> list[Rows]:
        """Return the rows of each exchange over a layout."""
        questions = [(self.engine.encode_query(e.query), e.ids) for e in exchanges]
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
        """Return segments of the recently seen chunks, in the order of arrival; None if these are the placed ones.

        Recently: twice as many chunks as are placed, as in `ctxwin eval probe`, and no more than the engine takes. A model is
        not generation for streams of any length, and would be a poor reference beyond.
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
        return None if [p.id for p in recent] == [p.id for p in state.placed] else self._bare(state, recent)

    def _bare(self, state: State, entries: Sequence[Placed]) -> tuple[Segment, ...]:
        segments, at = [Segment(self.engine.encode_system_prompt(state.system_prompt), 0)], state.system_prompt_advance
        for p in entries:
            encoded = self.engine.encode(p.chunk)
            segments.append(Segment(encoded, at))
            at += encoded.advance
        return tuple(segments)

    def answer(self, segments: Sequence[Segment], query: str, max_tokens: int) -> Exchange:
        """Generate the greedy answer over a layout of exact KV."""
        ids: list[int] = []

        def collect(token: int, text: str) -> bool:
            ids.append(token)
            return not self.stopped()

        self._check()
        bare = [replace(s, approximate=False, capture=False) for s in segments]
        encoded, salt = self.engine.encode_query(query), digest("audit", id(self), "answers")
        generation = self.engine.generate(
            bare, encoded, Sampling(max_tokens), salt=salt, on_token=collect, background=True
        )
        self.work.tokens += generation.computed_tokens
        self.work.forwards += generation.forwards
        if not generation.finished or self.stopped():
            raise AnswerStopped("the engine is needed for other work")
        return Exchange(
            query, tuple(int(i) for i in generation.token_ids), len(generation.token_ids) < max_tokens, max_tokens
        )

    def audit(self, state: State, fidelity: Fidelity, keys: Sequence[str], exchange: Exchange) -> Finding:
        """Compare a served answer with re-prefills; see `Finding`.

        Cost: a forward over the placed chunks, and one over all chunks seen if that decides, or if ``fidelity.audit`` requests
        both.
        """
        layout = self.build_layout(state, fidelity, keys)
        concerned = tuple(c.entry.id for c in layout.choices if not c.conditioning.exact)
        (served_rows,) = self.score(layout.segments, [exchange])
        (window_rows,) = self.score(self.reprefill(state), [exchange])
        window, stream = diverge(window_rows, served_rows, exchange.ended), None
        remembers = any(c.lane == "survivor" or c.evicted_antecedents or c.conditioning.depth for c in layout.choices)
        reference = fidelity.advanced.reference
        compare_stream = needs_stream(window, reference) or (fidelity.audit > 0 and reference != "window")
        stream_segments = self.reprefill_stream(state) if remembers and compare_stream else None
        if stream_segments is not None:
            (stream_rows,) = self.score(stream_segments, [exchange])
            stream = diverge(stream_rows, served_rows, exchange.ended)
        return Finding(window, stream, judge(window, stream, reference), concerned)

    def _check(self) -> None:
        if self.stopped():
            raise AnswerStopped("the engine is needed for other work")
        if not self.fresh():
            raise Stale("content was forgotten")


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


_RESERVED_TOKENS = 512
"""Tokens reserved for a query and an answer after the chunks of a stream."""
UNREPLAYABLE = (Stale, ChunkUnavailable, EngineFailed)
"""Errors that end a replay without a conclusion."""


def keys_of(layout: Layout) -> list[str]:
    """Return the keys that each chunk of a layout is served from."""
    return [f"{c.conditioning.span}+{c.conditioning.patch}" for c in layout.choices]
