"""Replays: an answer scored as it was served, as a re-prefill would serve it, and through ways that are not trusted yet.

A layout is replayed from the window's state, not from KV kept in memory: what has left the store meanwhile cannot be compared,
and is not. Everything here runs in the background, in prefix-cache spaces of its own, and ends as soon as somebody waits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ctxwin.engines.base import Encoded, Engine, Sampling, Segment
from ctxwin.errors import AnswerStopped, ChunkUnavailable, EngineFailed
from ctxwin.fidelity import Fidelity, Reference
from ctxwin.hashing import digest
from ctxwin.window.assembly import Assembly, Laid, Work
from ctxwin.window.lanes import Before, canonical_key
from ctxwin.window.state import Conditioning, Placed, State, provenance_of, span_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV

EXACT = Fidelity("exact")
Rows = list[dict[int, float]]
Asked = tuple[Encoded, Sequence[int]]


@dataclass(frozen=True)
class Exchange:
    """A question and the greedy answer that was, or would be, given to it.

    Attributes:
        ended: whether the answer ended by itself, so that its end is part of it.
        max_tokens: the longest that was asked for.
    """

    query: str
    ids: tuple[int, ...]
    ended: bool
    max_tokens: int = 32


@dataclass(frozen=True)
class Divergence:
    """How far the answers of two layouts are apart.

    Attributes:
        kl: mean KL(reference || served) a token along the answer, in nats; over the tokens that both name among their best,
            all others taken as one, so never more than over the whole vocabulary.
        changed: whether the greedy answers differ.
    """

    kl: float
    changed: bool


@dataclass(frozen=True)
class Finding:
    """What an audit of a served answer found.

    Attributes:
        window: against a re-prefill of what is placed.
        stream: against a re-prefill of everything that was seen, where something that survives remembers more than is placed.
        strict: the one that decides.
        concerned: placement ids that were served approximately.
    """

    window: Divergence
    stream: Divergence | None
    strict: Divergence
    concerned: tuple[str, ...]


class Stale(Exception):
    """The layout cannot be replayed as it was: its KV left the store, or content was forgotten meanwhile."""


def diverge(reference: Rows, served: Rows, ended: bool) -> Divergence:
    """Two engines' rows of one answer (`Engine.forced_logprobs`) compared."""
    count = len(reference) if ended else len(reference) - 1
    kls, changed = [], False
    for p, q in zip(reference[:count], served[:count], strict=True):
        changed = changed or likeliest(p) != likeliest(q)
        kls.append(kl_of_rows(p, q))
    return Divergence(math.fsum(kls) / len(kls) if kls else 0.0, changed)


def deciding(window: Divergence, stream: Divergence | None, reference: Reference) -> Divergence:
    """What an answer is judged by (`Fidelity`): of both re-prefills where the one of what was seen was measured.

    The stricter one is further off. But where the two would answer differently, whoever gives the answer of what is placed
    counts as unchanged: exact serving gives that one, and no way to serve could be as near to both.
    """
    if stream is None or reference == "window":
        return window
    if reference == "stream":
        return stream
    near, far = sorted((window, stream), key=lambda found: (found.changed, found.kl))
    return near if reference == "nearer" else replace(far, changed=window.changed)


def both_needed(window: Divergence, reference: Reference) -> bool:
    """Whether the answer over everything seen bears on the decision; it is the longest of all forwards."""
    return reference == "stream" or (window.changed and reference != "window")


def likeliest(row: dict[int, float]) -> int:
    """The token that greedy decoding takes; of equally likely ones the first."""
    return max(row, key=lambda token: (row[token], -token))


def kl_of_rows(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p || q) in nats over the tokens that both rows name, all others taken as one."""
    both = p.keys() & q.keys()
    terms = [math.exp(p[t]) * (p[t] - q[t]) for t in both if p[t] > -math.inf]
    rest_p, rest_q = (max(1e-12, 1 - math.fsum(math.exp(row[t]) for t in both)) for row in (p, q))
    return max(0.0, math.fsum([*terms, rest_p * math.log(rest_p / rest_q)]))


@dataclass
class _Shown(Assembly):
    """Sees only part of the store: what another way to serve would have put there. ``shown``: by key; None: all of it."""

    shown: Callable[[str], bool] | None = None

    def has(self, key: str) -> bool:
        return (self.shown is None or self.shown(key)) and super().has(key)


@dataclass
class Replay:
    """Replays of one engine's windows.

    Args:
        engine: of the window, so of its tenant.
        stopped: polled; AnswerStopped ends the replay once it is true.
        fresh: whether what is replayed may still be stored; it may not once content was forgotten.
        work: what it cost.
    """

    engine: Engine
    stopped: Callable[[], bool]
    fresh: Callable[[], bool] = lambda: True
    work: Work = field(default_factory=lambda: Work(background=True))

    def __post_init__(self) -> None:
        self._assembly = _Shown(self.engine, salt=digest("audit", id(self)))

    def earlier(self, before: OrderedDict[str, Before]) -> None:
        """How the window's chunks were served before, so that it is laid out as it was."""
        self._assembly.before = before

    def scored(self, segments: Sequence[Segment], exchanges: Sequence[Exchange]) -> list[Rows]:
        """Rows of each exchange over a layout."""
        asked = [(self.engine.encode_query(e.query), e.ids) for e in exchanges]
        return self.engine.forced_logprobs(segments, asked, stopped=self.stopped, tally=self.work)

    def laid(
        self,
        state: State,
        fidelity: Fidelity,
        served: Sequence[str] | None = None,
        shown: Callable[[str], bool] | None = None,
    ) -> Laid:
        """The layout of a state; Stale where KV is gone, or it would be another one than was ``served`` (keys).

        Only keys that are ``shown`` count as held, if given.
        """
        self._check()
        misses, self._assembly.shown = self.work.misses, shown
        laid = self._assembly.lay_out(state, fidelity, self.work)
        if self.work.misses > misses or (served is not None and keys_of(laid) != list(served)):
            raise Stale("the KV of the answer is not there any more")
        return laid

    def filled(self, laid: Laid) -> tuple[Segment, ...]:
        """``laid`` with the chunks computed that its lanes compute, each behind what is in front as served, and stored."""
        segments = list(laid.segments)
        for i, segment in enumerate(segments):
            if segment.span is None and segment.tokens:
                self._check()
                # Where every chunk in front is served as the window was, the answer itself has computed it.
                known = self.engine.repo.get_span(segment.span_key, token_ids=segment.encoded.token_ids)
                if known is not None:
                    segments[i] = replace(segment, span=known[0], capture=False)
                    continue
                front = [replace(s, approximate=False) for s in segments[:i]]
                salt = digest("audit", id(self), i)
                span = self.engine.prefill(
                    front, segment.encoded, segment.start, salt=salt, background=True, tally=self.work
                )
                segments[i] = replace(segment, span=span, capture=False)
                self._store(laid, i, span)
        return tuple(segments)

    def _store(self, laid: Laid, index: int, span: SpanKV) -> None:
        segment = laid.segments[index]
        said: dict[str, object] = {"provenance": "system_prompt"}
        if index:
            served = laid.choices[index - 1].served
            said = {"provenance": served.provenance, "exact": served.exact, "absorbed": laid.absorbed(index - 1)}
        self._check()
        self._assembly.put(segment.span_key, span, segment.encoded, **said)
        if not self.fresh():  # forgotten between the two lines above: what was stored may hold something of it
            self.engine.repo.delete(segment.span_key)
            self._check()

    def reprefilled(self, state: State) -> tuple[Segment, ...]:
        """What is placed, all of it computed in one piece."""
        return self._bare(state, state.placed)

    def streamed(self, state: State) -> tuple[Segment, ...] | None:
        """Everything seen lately, in the order of arrival; None where that is what is placed.

        Lately: twice as many chunks as are placed, as `ctxwin eval probe` takes it, and no more than the engine can. A model is
        not made for any length of stream, and would be a poor reference there.
        """
        room = self.engine.spec.max_tokens - state.system_prompt_tokens - _ROOM
        kept: list[Placed] = []
        seen = sorted((*state.placed, *state.evicted), key=lambda p: p.arrival, reverse=True)
        for p in seen[: 2 * len(state.placed)]:
            room -= p.tokens
            if room < 0:
                break
            kept.append(p)
        kept.reverse()
        return None if [p.id for p in kept] == [p.id for p in state.placed] else self._bare(state, kept)

    def _bare(self, state: State, placed: Sequence[Placed]) -> tuple[Segment, ...]:
        made, at = [Segment(self.engine.encode_system_prompt(state.system_prompt), 0)], state.system_prompt_advance
        for p in placed:
            encoded = self.engine.encode(p.chunk)
            made.append(Segment(encoded, at))
            at += encoded.advance
        return tuple(made)

    def answered(self, segments: Sequence[Segment], query: str, max_tokens: int) -> Exchange:
        """The greedy answer over a layout of exact KV."""
        ids: list[int] = []

        def heard(token: int, text: str) -> bool:
            ids.append(token)
            return not self.stopped()

        self._check()
        bare = [replace(s, approximate=False, capture=False) for s in segments]
        encoded, salt = self.engine.encode_query(query), digest("audit", id(self), "answers")
        made = self.engine.generate(bare, encoded, Sampling(max_tokens), salt=salt, on_token=heard, background=True)
        self.work.tokens += made.computed_tokens
        self.work.forwards += made.forwards
        if not made.finished or self.stopped():
            raise AnswerStopped("the engine is wanted for other work")
        return Exchange(query, tuple(int(i) for i in made.token_ids), len(made.token_ids) < max_tokens, max_tokens)

    def audit(self, state: State, fidelity: Fidelity, served: Sequence[str], exchange: Exchange) -> Finding:
        """A served answer against re-prefills; see `Finding`. Cost: a forward over everything placed, and one over everything
        seen where that decides, or ``fidelity.audit`` asks for both."""
        laid = self.laid(state, fidelity, served)
        concerned = tuple(c.placed.id for c in laid.choices if not c.served.exact)
        (mine,) = self.scored(laid.segments, [exchange])
        (placed,) = self.scored(self.reprefilled(state), [exchange])
        window, stream = diverge(placed, mine, exchange.ended), None
        remembers = any(c.lane == "survivor" or c.missing or c.served.depth for c in laid.choices)
        reference = fidelity.reference
        wanted = both_needed(window, reference) or (fidelity.audit > 0 and reference != "window")
        seen = self.streamed(state) if remembers and wanted else None
        if seen is not None:
            (all_of_it,) = self.scored(seen, [exchange])
            stream = diverge(all_of_it, mine, exchange.ended)
        return Finding(window, stream, deciding(window, stream, reference), concerned)

    def _check(self) -> None:
        if self.stopped():
            raise AnswerStopped("the engine is wanted for other work")
        if not self.fresh():
            raise Stale("content was forgotten")


def shadow(state: State, known: Mapping[str, Conditioning]) -> tuple[State, Callable[[str], bool]]:
    """``state`` as it would be had its window been served another way, with the KV ``known`` of that way; and which keys would
    be in the store then: what its chunks were served from, canonicals and patches, but not what exact serving has computed."""
    placed = tuple(p.replace(kv=known[p.id], seen=True) if p.id in known else p for p in state.placed)
    made = state.replace(placed=placed)
    keys = made.keys() | {canonical_key(made, p.chunk_id)[1] for p in placed}
    keys.add(span_key(provenance_of(state.system_prompt_key, "system_prompt")))
    return made, lambda key: key in keys or key.startswith(("patch/", "orbit/"))


_ROOM = 512
"""Tokens left for a query and an answer behind everything seen."""
GONE = (Stale, ChunkUnavailable, EngineFailed)
"""Why a replay comes to nothing: there is nothing to compare, and nothing is concluded."""


def keys_of(laid: Laid) -> list[str]:
    """What each chunk of a layout is served from."""
    return [f"{c.served.span}+{c.served.patch}" for c in laid.choices]
