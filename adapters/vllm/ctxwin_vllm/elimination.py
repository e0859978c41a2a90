"""Answers that keep a share of the KV (Elastic Cache, arXiv 2407.18121): slots leave a running request every few tokens.

One request computes the prompt and the first tokens. What is kept of them is loaded by a second one, in blocks of its own. There
the connector moves kept slots together before a step and has vLLM go on from that many tokens, as with a session that gets more
input (`internals.shorten`). vLLM puts a token at the position that its slot has, so all keys are turned by as much as that is
too early; see `compact_prompt`. In pipelines, with drafts and where an answer is only scored, it is generated in pieces: what
one request computed is read back, joins the KV of the answer, and is loaded by the next. Either way KV waits in one frame, from
which it is turned anew each time, so rounding does not add up.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling, check_sampling
from ctxwin.engines.segments import Encoded, Segment, without_spans
from ctxwin.errors import AnswerStopped, EngineFailed, UnsupportedModel
from ctxwin.kv.config import sliding_window
from ctxwin.kv.kernels.staging import to_host
from ctxwin.kv.layout import SpanKV, SpanOrigin
from ctxwin.kv.merge import FixedPoint, merged_slots
from ctxwin.kv.relocate import relocate
from ctxwin.kv.rows import Pair
from ctxwin_vllm.asks import Ask, AskRunner, engine_errors
from ctxwin_vllm.cache_namespace import CacheNamespace
from ctxwin_vllm.core import Core
from ctxwin_vllm.prompts import PromptBuilder
from ctxwin_vllm.requests import Forced, LoadError, Outcome, StreamGuard, continued
from ctxwin_vllm.resident import Selection
from ctxwin_vllm.transport.base import ALL

_SUBMISSIONS = 3
_log = logging.getLogger("ctxwin.engines")


def check_hold(core: Core, sampling: Sampling) -> None:
    """Raise UnsupportedModel for what cannot be answered with a share of the KV; see `Engine.check_hold`."""
    if sampling.hold >= 1:
        return
    reasons = {
        "a recurrent state cannot drop a token": core.kv.recurrent,
        "sliding layers see by distance, which dropped tokens change": sliding_window(core.checkpoint.config)
        is not None,
        "outputs=True keeps rows of all tokens": core.outputs,
        "the draft model keeps KV of all tokens": core.draft_model is not None,
        "json_schema and penalties act within one request, and such an answer takes several; leave them out, ask with a "
        "Fidelity without advanced eliminate and merge_prompt, or open hf:MODEL": sampling.json_schema is not None
        or sampling.has_penalties,
    }
    for reason, applies in reasons.items():
        if applies:
            share = f"hold, the share of the KV that an answer keeps, must be 1 with {core.model} on vLLM"
            raise UnsupportedModel(f"{share}, got {sampling.hold}: {reason}")
    if sampling.merge_prompt and core.kv.family == "mla":
        raise UnsupportedModel(
            "a prompt is merged by its attention, which vLLM shows for GQA and MHA only: merge_prompt must be False, got True; "
            "or open the model as hf:MODEL"
        )


class BudgetedAnswer:
    """One answer at work, with a ``hold`` below 1, and the KV that it keeps; ``generation``: what its requests cost."""

    def __init__(
        self, core: Core, asks: AskRunner, layout: Sequence[Segment], query: Encoded, sampling: Sampling, salt: str
    ) -> None:
        check_sampling(sampling)
        check_hold(core, sampling)
        self._core, self._asks, self._query, self._sampling = core, asks, query, sampling
        self._layout, self._salt = list(layout), salt
        if sampling.merge_prompt:  # a prefix hit would compute no queries
            self._layout, self._salt = without_spans(layout), _unshared()
        self._one = replace(sampling, hold=1.0, merge_prompt=False)
        core.check(self._layout, [query], self._one)
        self.generation = Generation()
        self._prompt: Pair  # of which workers may keep a copy
        self._origin: SpanOrigin | None
        self._selection: Selection  # of it
        self._answer: Pair  # what is kept behind that
        self._at = 0

    def generate(self, guard: StreamGuard | None, background: bool, builder: PromptBuilder | None) -> Outcome:
        """Generate the answer; its outcome holds the tokens of all requests."""
        sampling, most, every = self._one, self._sampling.max_tokens, self._sampling.hold_every
        count = 1 if self._sampling.merge_prompt else min(most, 1 + every)
        first = replace(sampling, max_tokens=count)
        ask = Ask(self._query, first, self._salt, on_token=guard, background=background, builder=builder)
        outcome = answer = self._serve_prompt(ask)
        while outcome.finished and len(outcome.token_ids) == count and len(answer.token_ids) < most:
            done = len(answer.token_ids)
            if outcome is answer:
                schedule = self._hold_prompt(answer, done - 1)
            else:
                self._hold_piece(schedule, count)
            count = most - done if self._core.shortens else min(every, most - done)
            seed = None if sampling.seed is None else (sampling.seed + done) % 2**63
            piece = replace(sampling, max_tokens=count, logprobs=0, seed=seed)
            if guard is not None:
                guard.earlier = list(answer.token_ids)
            words = Encoded.of_ids(answer.token_ids[-1:])
            hold = replace(schedule) if self._core.shortens else None
            outcome = self._request(Ask(words, piece, "", hold is None, guard, background, hold=hold))
            answer.token_ids += continued(outcome.token_ids, done)
            answer.finished = outcome.finished
        if guard is not None:
            guard.earlier = []
            guard.check(answer.token_ids)
        return answer

    def score(self, answer: Sequence[int], best: int, stopped: Callable[[], bool]) -> list[dict[int, float]]:
        """Return the rows of `Engine.forced_logprobs` for an answer, read in the pieces that it would be generated in."""
        only, every = Sampling(max_tokens=1), self._sampling.hold_every
        self._salt = _unshared()  # in a shared namespace its tokens could come from the cache, unscored
        ids = [int(token) for token in answer]

        def ask(query: Encoded, scored: Sequence[int]) -> Ask:
            forced, answer = Forced(len(scored), best, stopped), Encoded.of_ids(scored) if scored else None
            return Ask(query, only, self._salt, background=True, answer=answer, forced=forced)

        outcome = self._serve_prompt(ask(self._query, ids[:1]))
        rows, schedule = outcome.forced, self._hold_prompt(outcome, 0)
        for begin in range(0, len(ids), every):
            if stopped():
                raise AnswerStopped("the engine is wanted for other work")
            rows.pop()  # of KV that is dropped by now
            words = Encoded.of_ids(ids[begin : begin + 1])
            rows += self._request(replace(ask(words, ids[begin + 1 : begin + every + 1]), capture_query=True)).forced
            self._hold_piece(schedule, len(ids[begin : begin + every]))
        return rows

    def _serve_prompt(self, ask: Ask) -> Outcome:
        """Run the request of the prompt, and capture the KV of all of it; its attention as well, where it is to be merged."""
        merging = self._sampling.merge_prompt
        ask = replace(ask, capture_all=True, attention_of=ALL if merging else "")
        with self._core.transport.capturing_queries() if merging else nullcontext():
            self.generation, outcome = self._asks.serve(self._layout, ask)
        return outcome

    def _hold_prompt(self, outcome: Outcome, fed: int) -> FixedPoint:
        """Keep the prompt's KV and that of ``fed`` tokens behind it."""
        if outcome.kv is None:
            raise EngineFailed("the KV of the prompt was not captured; vLLM ended the request early")
        tokens = sum(segment.tokens for segment in self._layout) + self._query.tokens
        slots = sum(segment.slots for segment in self._layout) + self._query.tokens
        # Drafts that vLLM accepted behind the last token of the piece have KV there, too.
        k, v = self._prompt = outcome.kv[0][:, : slots + fed], outcome.kv[1][:, : slots + fed]
        self._origin, self._answer = outcome.origin, (k[:, :0], v[:, :0])
        self._selection = Selection(torch.arange(k.shape[1]))
        head = self._layout[0].slots if self._layout else self._query.tokens
        if self._sampling.merge_prompt:
            assert outcome.sums is not None and slots == tokens
            head, slots = 1, merged_slots(self._sampling.hold, tokens)
            self._selection = Selection(torch.arange(slots), slots, outcome.sums)
        self._at = outcome.begin + self._query.advance + fed
        schedule = FixedPoint(self._sampling.hold, tokens, slots, head, self._sampling.hold_every)
        self._drop(schedule.append(fed))
        return schedule

    def _hold_piece(self, schedule: FixedPoint, count: int) -> None:
        """Keep the KV of the first ``count`` tokens of the last request."""
        span = self.generation.query_span
        if span is None or span.tokens < count:
            raise EngineFailed("the KV of the answer was not captured; vLLM ended the request early")
        span = relocate(span.slice(0, count), self._core.kv, self._at)
        k, v = self._answer
        self._answer = torch.cat([k, span.k.to(k.device)], dim=1), torch.cat([v, span.v.to(v.device)], dim=1)
        self._at += count
        self._drop(schedule.append(count))

    def _drop(self, slots: Sequence[int] | None) -> None:
        if slots is not None:
            index, count = torch.tensor(slots), len(self._selection.slots)
            self._selection = replace(self._selection, slots=self._selection.slots[index[index < count]])
            self._answer = Selection(index[index >= count] - count).apply(*self._answer)

    def _segments(self) -> list[Segment]:
        """Return the KV that is kept as segments of a prompt, in one frame."""
        core, spans = self._core, list[SpanKV]()
        if (copy := core.transport.select(self._origin, self._selection)) is not None:
            spans.append(copy)
        else:
            self._origin, self._prompt = None, self._selection.apply(*self._prompt)
            self._selection = Selection(torch.arange(self._prompt[0].shape[1]))
        for k, v in (self._prompt, self._answer)[len(spans) :]:
            if k.shape[1]:
                spans.append(_span(*to_host(k, v)))
                if (paged := getattr(core.transport, "paged", None)) is not None:
                    paged.keep(spans[-1].origin, k, v)
        fillers = [Encoded("", (0,) * span.tokens, span.positions.numpy(), self._at) for span in spans]
        return [Segment(x, 0, span=y, approximate=True, merged=True) for x, y in zip(fillers, spans, strict=True)]

    def _request(self, ask: Ask) -> Outcome:
        """Run a request behind the KV that is held; approximations are submitted again where loading fails."""
        for remaining in reversed(range(_SUBMISSIONS)):
            if self._asks.closed:
                raise EngineFailed("the engine is closed; open a new one")
            piece, salt = Generation(), _unshared()
            try:
                with engine_errors():
                    asked = replace(ask, salt=salt)
                    return self._asks.run_one(piece, self._segments(), 0, asked, (), CacheNamespace(salt))
            except LoadError as error:
                if not remaining:
                    raise EngineFailed(f"the KV of the answer so far could not be loaded: {error}") from error
                _log.warning("loading the KV of an answer so far into vLLM failed (%s); it is submitted again", error)
                self._asks.count_retry()
            finally:
                if ask.forced is None:  # a step of the answer, no prefill
                    piece.forwards = piece.computed_tokens = 0
                self._asks.count(piece)
                self.generation.query_span = piece.query_span
                self.generation.forwards += piece.forwards
                self.generation.computed_tokens += piece.computed_tokens
                self.generation.bytes_loaded += piece.bytes_loaded
        raise AssertionError("the last submission returns or raises")


def _span(k: torch.Tensor, v: torch.Tensor) -> SpanKV:
    return SpanKV(k, v, torch.arange(k.shape[1]).expand(3, -1), 0)


def _unshared() -> str:
    return f"held-{uuid.uuid4().hex}"
