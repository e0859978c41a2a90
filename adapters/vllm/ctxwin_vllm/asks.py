"""Asks of an engine: the requests that a layout takes on vLLM, and the KV that they capture."""

import itertools
import logging
import threading
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ctxwin.engines.outputs import concat_outputs
from ctxwin.engines.results import EngineCounters, Generation, PrefillCost
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment, gap_runs, without_spans
from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin.hashing import digest
from ctxwin.kv.kernels.staging import to_host
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.merge import FixedPoint
from ctxwin.kv.relocate import relocate
from ctxwin.kv.states import has_maps
from ctxwin.store.span_codec import all_finite
from ctxwin_vllm.cache_namespace import CacheNamespace
from ctxwin_vllm.compact_prompt import compact_prompt
from ctxwin_vllm.draft_model import unrotated_rows
from ctxwin_vllm.inputs import is_closed, join
from ctxwin_vllm.prompts import EnginePrompts, PromptBuilder
from ctxwin_vllm.requests import CallerError, Forced, LoadError, Outcome, StreamGuard, run
from ctxwin_vllm.transport import Transfer
from ctxwin_vllm.transport.base import ALL, blank_span

_QUERY = "query"
_PendingRequest = Generator[tuple[dict[str, Any], Transfer], Outcome, None]
"""A request's prompt and transfer, twice: once to be run, and once its outcome has been taken in."""
_log = logging.getLogger("ctxwin.engines")


@dataclass(frozen=True)
class Ask:
    """The request that follows a layout; without a query it computes KV only.

    Attributes:
        capture_all: read back the KV of the whole prompt and of what is generated behind it: `Outcome.kv`.
        attention_of: see `RequestMeta.attention_of`.
        builder: builder of its prompts; None is the engine itself.
        hold: see `RequestMeta.hold`.
    """

    query: Encoded | None
    sampling: Sampling
    salt: str
    capture_query: bool = False
    on_token: StreamGuard | None = None
    background: bool = False
    answer: Encoded | None = None
    forced: Forced | None = None
    attention_of: str = ""
    capture_all: bool = False
    builder: PromptBuilder | None = None
    hold: FixedPoint | None = None

    @property
    def tail(self) -> list[Encoded]:
        return [part for part in (self.query, self.answer) if part is not None]


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise vLLM's own errors as EngineFailed, and a caller's as they are."""
    try:
        yield
    except CallerError as error:
        raise error.__cause__ or error from None
    except (CtxwinError, LoadError):
        raise
    except Exception as error:
        raise EngineFailed(f"vLLM could not answer the request: {error}") from error


class AskRunner:
    """Runs the asks of one engine on vLLM; ``lora``: the adapter that they are computed with, vLLM's LoRARequest."""

    def __init__(self, prompts: EnginePrompts, kv: KVSpec, counters: EngineCounters, lora: Any = None) -> None:
        self._core, self._prompts, self._kv = prompts.core, prompts, kv
        self._counters, self._lora, self._counting = counters, lora, threading.Lock()
        self.closed = False

    def close(self) -> bool:
        """Serve nothing any more; return False if it was closed already."""
        with self._counting:
            self.closed, was_closed = True, self.closed
        return not was_closed

    def serve(self, layout: Sequence[Segment], ask: Ask, cost: PrefillCost | None = None) -> tuple[Generation, Outcome]:
        """Serve a layout with its spans, again with them where loading fails, and finally without.

        The spans are available, so a failure is mostly one of transport, and the same KV gives the same answer. Without them
        the answer is the exact one, which differs from an approximation's: approximations are submitted once more.
        """
        if self.closed:
            raise EngineFailed("the engine is closed; open a new one")
        base = self._core.check(layout, ask.tail, ask.sampling)
        if not ask.salt and any(segment.merged for segment in layout):
            raise ValueError("salt must name a namespace of the layout's own, since merged KV is not exact, got ''")
        generation = Generation()
        # A chunk that is computed with its predecessors has no map of its own.
        without = not self._kv.maps or bool(ask.tail)
        for remaining in range((2 if ask.salt else 1) + without, -1, -1):
            segments, request = self._without_spans(layout, ask) if without and not remaining else (layout, ask)
            try:
                with engine_errors():
                    outcome = self._attempt(generation, segments, base, request)
                    if ask.on_token is not None:
                        ask.on_token.check(outcome.token_ids)
                break
            except LoadError as error:
                self._core.prefixes.clear()  # which blocks vLLM dropped with it is not known
                if not remaining:
                    raise EngineFailed(f"vLLM could not answer the request without its spans: {error}") from error
                remedy = "they are submitted again" if remaining > 1 else "the prompt is computed instead"
                _log.warning("loading spans into vLLM failed (%s); %s", error, remedy)
                generation = Generation(computed_tokens=generation.computed_tokens, forwards=generation.forwards)
                generation.fallbacks = int(remaining == 1)
                self.count_retry()
        self.count(generation, cost)
        return generation, outcome

    def serve_together(
        self, layouts: Sequence[Sequence[Segment]], ask: Ask, cost: PrefillCost | None = None
    ) -> list[Generation]:
        """Serve layouts whose last segment is captured and alone missing: their requests are submitted at once, so that vLLM
        steps them together. Where a load fails each is served by itself."""
        if self.closed:
            raise EngineFailed("the engine is closed; open a new one")
        generations, pending = [Generation() for _ in layouts], list[_PendingRequest]()
        try:
            with engine_errors():
                for generation, layout in zip(generations, layouts, strict=True):
                    base = self._core.check(layout, ask.tail, ask.sampling)
                    segments, namespace, computed = self.fill_layout(generation, layout, base, ask)
                    last = [len(layout) - 1]
                    pending.append(self._begin_request(generation, segments, base, ask, last, namespace, computed))
                self._run(pending, ask)
        except LoadError as error:
            _log.warning("loading spans into vLLM failed (%s); requests are submitted one by one", error)
            self._core.prefixes.clear()
            self.count_retry()
            return [self.serve(layout, ask, cost)[0] for layout in layouts]
        for generation in generations:
            self.count(generation, cost)
        return generations

    def _without_spans(self, layout: Sequence[Segment], ask: Ask) -> tuple[Sequence[Segment], Ask]:
        """Return a layout that is computed in place: that is exact, and belongs to (and may use) the exact namespace."""
        bare = without_spans(layout)
        if self._kv.recurrent:  # states before the last segment are read back only where spans are loaded
            last = len(bare) - 1 if not ask.tail else -1
            bare = [replace(segment, capture=segment.capture and i == last) for i, segment in enumerate(bare)]
        return bare, replace(ask, salt="")

    def count_retry(self) -> None:
        """Add a request that was submitted again to the engine's counters."""
        with self._counting:
            self._counters.retries += 1

    def count(self, generation: Generation, cost: PrefillCost | None = None) -> None:
        """Add what a generation took to the engine's counters, and to ``cost``."""
        if cost is not None:
            cost.forwards += generation.forwards
            cost.tokens += generation.computed_tokens
            cost.fallbacks += generation.fallbacks
        with self._counting:
            self._counters.fallbacks += generation.fallbacks
            self._counters.prefill_forwards += generation.forwards
            self._counters.prefill_tokens += generation.computed_tokens
            self._counters.bytes_loaded += generation.bytes_loaded

    def _attempt(self, generation: Generation, layout: Sequence[Segment], base: int, ask: Ask) -> Outcome:
        """Run the requests of one call."""
        parts = [segment.parts() for segment in layout]
        flat = list(itertools.chain.from_iterable(parts))
        segments, namespace, computed = self.fill_layout(generation, flat, base, ask)
        capture = [i for i, segment in enumerate(segments) if segment.capture and segment.span is None]
        outcome = self.run_one(generation, segments, base, ask, capture, namespace, computed)
        firsts = itertools.accumulate(map(len, parts), initial=0)
        captured, generation.captured = generation.captured, {}
        for i, (segment, first) in enumerate(zip(layout, firsts, strict=False)):
            indices = range(first, first + len(parts[i]))
            capture_segment = segment.capture and (segment.span is None or segment.recompute)
            if capture_segment and all(j in captured for j in indices if flat[j].span is None):
                spans = [captured.get(j) or flat[j].span for j in indices]
                generation.captured[i] = self._join(spans, segment.encoded, segment.start - base)
        return outcome

    def _join(self, spans: Sequence[SpanKV | None], encoded: Encoded, start: int) -> SpanKV:
        """Join the parts of a chunk to one span in the frame ``start``."""
        moved = [relocate(span, self._kv, start) for span in spans if span is not None]
        if len(moved) == 1:
            return moved[0]
        dtype = moved[0].k.dtype
        k, v = (torch.cat([getattr(span, name).to("cpu", dtype) for span in moved], dim=1) for name in "kv")
        outputs = concat_outputs([span.outputs for span in moved if span.tokens])
        return SpanKV(k, v, torch.from_numpy(encoded.positions.copy()), start, outputs)

    def fill_layout(
        self, generation: Generation, layout: Sequence[Segment], base: int, ask: Ask
    ) -> tuple[list[Segment], CacheNamespace, int]:
        """Compute the missing segments before spans; return the segments, their namespace, and the tokens computed for that.

        vLLM takes external KV as one prefix only, so a missing segment before a span is computed by a request of its own and
        then loaded with the others; gaps that do not depend on each other are computed in one step. A hybrid's states are read
        back where a request ends, so each of its missing segments that is captured has its own request; where its map is
        captured as well, that request computes nothing else.
        """
        segments = list(layout)
        for i, segment in enumerate(segments):
            if segment.span is None and not segment.encoded.tokens:  # an empty system prompt has nothing to compute
                generation.captured[i] = empty = self._empty_span(segment.start - base)
                segments[i] = replace(segment, span=empty)
        builder = ask.builder or self._prompts
        namespace = builder.namespace(segments, ask.salt)
        last = max((i for i, segment in enumerate(segments) if segment.span is not None), default=0)
        recurrent = self._kv.recurrent
        if recurrent:
            last = len(segments) if ask.tail else len(segments) - 1
        last_mapped = max((i for i, s in enumerate(segments) if s.span is not None or s.capture), default=-1)
        computed = 0
        for i in range(last):
            segment = segments[i]
            if segment.gap and (runs := gap_runs([s.gap for s in segments], i)):
                self._compute_gaps(generation, segments, runs, base, ask)
                continue
            span_follows = i + 1 < len(segments) and segments[i + 1].span is not None
            alone = (recurrent and segment.capture) or (self._kv.maps and i <= last_mapped)
            if not segment.available and (span_follows or alone):
                run = [j for j in range(i + 1) if not segments[j].available]
                prefix, rest = self._core.inputs.end_at(segments, i + 1, self._core.whole_media)
                part = Ask(rest, Sampling(max_tokens=1), ask.salt, background=ask.background, builder=ask.builder)
                run_namespace = namespace
                if rest is not None and any(s.approximate for s in segments):
                    # The rest is computed here, but loaded later with other KV: these blocks must not be found then.
                    run_namespace = builder.namespace(prefix, digest(ask.salt, "rest", i))
                self.run_one(generation, prefix, base, part, run, run_namespace, computed)
                computed = sum(s.slots for s in segments[: i + 1])
                for j in run:
                    segments[j] = replace(segments[j], span=generation.captured[j])
        return segments, namespace, computed

    def _compute_gaps(
        self, generation: Generation, segments: list[Segment], runs: Sequence[range], base: int, ask: Ask
    ) -> None:
        """Compute runs of parts, each behind what is stored in front of it, and put their KV into ``segments``; see `gap_runs`.

        They are requests of one step, in a namespace that no other call finds: names of blocks say nothing of the canonicals in
        them. There they share the blocks that end before their own tokens. In what follows another one's prompt has the same
        tokens and other KV, so the last loaded token, which is never computed, has another id, and names the block. Where a
        prompt must end with its last medium, or positions depend on that token, each has a namespace of its own.
        """
        core, salt = self._core, f"linked-{uuid.uuid4().hex}"
        canonical = [
            replace(s, span=s.canonical, span_key=s.span_key and f"{s.span_key} canonical") if s.gap else s
            for s in segments[: runs[-1].stop]
        ]
        ids, media = join([segment.encoded for segment in segments])
        merged = any(segment.merged for segment in canonical)
        whole = merged or core.whole_media or any(map(is_closed, media))
        loads = [replace(segment, start=segment.start - base) for segment in canonical]
        offsets = [0, *itertools.accumulate(segment.tokens for segment in canonical)]
        requests = []
        for gap in runs:
            begin, end = offsets[gap.start], offsets[gap.stop]
            prompt, shown, space = ids[:end], [m for m in media if m.offset < end], CacheNamespace(f"{salt}-{begin}")
            if whole:
                front = [*canonical[: gap.start], *segments[gap.start :]]
                prefix, rest = core.inputs.end_at(front, gap.stop, core.whole_media)
                if merged:
                    part = Ask(rest, Sampling(max_tokens=1), space.salt, background=ask.background, builder=ask.builder)
                    self.run_one(generation, prefix, base, part, gap, space)
                    continue
                prompt, shown = join([*(segment.encoded for segment in prefix), *([] if rest is None else [rest])])
            elif begin and all(m.modality == "image" for m in media):
                prompt[begin - 1] = int(not prompt[begin - 1])
                space = CacheNamespace(salt)  # else positions may depend on the token in front of other media
            transfer = Transfer(
                loads=tuple(segment for segment in loads[: gap.start] if segment.tokens),
                tenant=self._prompts.tenant,
                captures={str(i): (offsets[i], offsets[i + 1]) for i in gap},
            )
            requests.append(((ask.builder or self._prompts).prompt(prompt, shown, space, transfer), transfer))
        if requests:
            self._run_together(generation, requests, ask)
        for gap, (_, transfer) in zip(runs, requests, strict=not merged):
            for i in gap:
                begin = segments[i].start - base
                generation.captured[i] = self.read_span(transfer, str(i), segments[i].encoded, begin)
        for i in itertools.chain(*runs):
            segments[i] = replace(segments[i], span=generation.captured[i])

    def _run_together(
        self, generation: Generation, requests: Sequence[tuple[dict[str, Any], Transfer]], ask: Ask
    ) -> None:
        driver, transport, only = self._core.driver, self._core.transport, Sampling(max_tokens=1)
        try:
            run(driver, transport, requests, only, background=ask.background, lora=self._lora)
        finally:
            for prompt, transfer in requests:
                cached = transfer.local_tokens + transfer.planned_tokens
                generation.computed_tokens += len(prompt["prompt_token_ids"]) - cached
                generation.bytes_loaded += transfer.bytes_loaded
            generation.forwards += 1

    def run_one(
        self,
        generation: Generation,
        segments: Sequence[Segment],
        base: int,
        ask: Ask,
        capture: Sequence[int],
        namespace: CacheNamespace,
        computed: int = 0,
    ) -> Outcome:
        """Run one request on vLLM: load the leading spans, capture the segments of the indices ``capture``.

        ``computed`` prompt tokens were part of an earlier request of this call: a hit on them counts as no cache hit.
        """
        request = self._begin_request(generation, segments, base, ask, capture, namespace, computed)
        return self._run([request], ask)[0]

    def _run(self, pending: Sequence[_PendingRequest], ask: Ask) -> list[Outcome]:
        """Run requests together, and give each its outcome."""
        requests, eos = [next(request) for request in pending], sorted(self._prompts.encoder.checkpoint.eos)
        try:
            options = (ask.sampling, eos, ask.on_token, ask.background, ask.forced, self._lora)
            outcomes = run(self._core.driver, self._core.transport, requests, *options)
        except BaseException:
            for request in pending:
                request.close()  # counts what it took
            raise
        for request, outcome in zip(pending, outcomes, strict=True):
            request.send(outcome)
        return outcomes

    def _begin_request(
        self,
        generation: Generation,
        segments: Sequence[Segment],
        base: int,
        ask: Ask,
        capture: Sequence[int],
        namespace: CacheNamespace,
        computed: int = 0,
    ) -> _PendingRequest:
        """Yield the request of `run_one`, then take its outcome into ``generation``."""
        loaded_only = 0
        if not ask.tail:  # no later token needs them, and vLLM computes the KV of a prompt's last token
            segments = segments[: max((i + 1 for i, s in enumerate(segments) if not s.merged), default=0)]
        end = segments[-1].start + segments[-1].encoded.advance if segments else base
        if any(segment.merged for segment in segments):
            segments, base, namespace, loaded_only = compact_prompt(segments, base, ask.salt, self._kv)
        transfer = self.build_transfer(segments, base, ask, capture, namespace)
        ids, media = join([*(segment.encoded for segment in segments), *ask.tail])
        prompt = (ask.builder or self._prompts).prompt(ids, media, namespace, transfer)
        transfer.placeholder_tokens = max(transfer.placeholder_tokens, loaded_only)
        try:
            outcome = yield prompt, transfer
        finally:
            parts = [*(segment.encoded for segment in segments), *ask.tail]
            served = transfer.local_tokens + transfer.planned_tokens
            generation.computed_tokens += sum(part.tokens for part in parts) - served
            generation.cached_tokens += max(0, transfer.local_tokens - computed)
            generation.forwards += 1
            generation.bytes_loaded += transfer.bytes_loaded
        outcome.sums, outcome.kv, outcome.begin = transfer.sums, transfer.captured.get(ALL), end - base
        outcome.origin = transfer.origins.get(ALL)
        if ask.builder is None:  # a chat's prompt has the client's own salt
            self._prompts.record(parts, outcome.token_ids[:-1] if outcome.finished else (), namespace)
        for i in capture:
            if outcome.finished or str(i) in transfer.captured:  # else stopped while preempted: its blocks are gone
                generation.captured[i] = self.read_span(transfer, str(i), segments[i].encoded, segments[i].start - base)
        if ask.capture_query and ask.query is not None and (outcome.finished or _QUERY in transfer.captured):
            span = self.read_span(transfer, _QUERY, ask.query, end - base)
            if not outcome.finished:  # vLLM was a step ahead of the caller who stopped it
                span = span.slice(0, min(span.tokens, ask.query.tokens + len(outcome.token_ids) - 1))
            generation.query_span = span
        yield prompt, transfer

    def build_transfer(
        self, segments: Sequence[Segment], base: int, ask: Ask, capture: Sequence[int], namespace: CacheNamespace
    ) -> Transfer:
        """Return the transfer of one request."""
        offsets = [0, *itertools.accumulate(segment.tokens for segment in segments)]
        cached = sum(1 for _ in itertools.takewhile(lambda segment: segment.cached, segments))
        leading = itertools.takewhile(lambda segment: segment.span is not None, segments[cached:])
        loads = tuple(replace(s, start=s.start - base) if base else s for s in leading if s.tokens)
        captures: dict[str, tuple[int, int | None]]
        captures = {str(i): (offsets[i], offsets[i + 1]) for i in capture if segments[i].encoded.tokens}
        if ask.capture_query:
            captures[_QUERY] = (offsets[len(segments)], None)
        if ask.capture_all:
            captures[ALL] = (0, None if ask.answer is None else offsets[-1] + sum(p.tokens for p in ask.tail[:-1]))
        return Transfer(
            loads=loads,
            tenant=self._prompts.tenant,
            captures=captures,
            private_from=namespace.private_from,
            min_load=self._core.min_load if namespace.exact else 0,
            attention_of=ask.attention_of,
            expected_hit=offsets[cached],
            hold=ask.hold,
        )

    def read_span(self, transfer: Transfer, name: str, encoded: Encoded, start: int) -> SpanKV:
        """Return a captured span; a query's has generated tokens after the encoded ones."""
        if not encoded.tokens and name not in transfer.captured:
            return self._empty_span(start)
        if name not in transfer.captured:
            raise EngineFailed(f"the KV of segment {name} was not captured; vLLM ended the request early")
        k, v = transfer.captured[name]
        paged = getattr(self._core.transport, "paged", None)  # in this process
        with nullcontext() if paged is None else paged.loads.reading(transfer.reads):
            states, outputs = (
                {key: tensor.to("cpu") for key, tensor in tensors.get(name, {}).items()}
                for tensors in (transfer.states, transfer.outputs)
            )
            finite = all(map(all_finite, (k, v, *states.values())))
            host = to_host(k, v)
        if not finite:
            raise EngineFailed(f"{self._core.model} gave KV that is not finite (NaN), so its answers mean nothing")
        extra = int(k.shape[1]) - encoded.tokens
        generated = np.tile(np.arange(encoded.advance, encoded.advance + extra, dtype=np.int64), (3, 1))
        positions = torch.from_numpy(np.concatenate([encoded.positions, generated], axis=1))
        if self._kv.maps and name != _QUERY and not has_maps(states):
            raise EngineFailed(f"the map of segment {name} on the recurrent states was not captured; ask again")
        if self._core.draft_model is not None:
            outputs = unrotated_rows(self._core.draft_model, *transfer.drafted[name], positions + start)
        span = SpanKV(*host, positions, start, outputs, states)
        if paged is not None:
            paged.keep(span.origin, k, v)
        elif name in transfer.origins:
            object.__setattr__(span, "origin", transfer.origins[name])
        return span

    def _empty_span(self, start: int) -> SpanKV:
        return blank_span(self._kv, torch.empty(3, 0, dtype=torch.int64), start, "cpu")
