"""The reference engine, on transformers: every arm runs on it, and other engines are compared with it.

KV is a `DynamicCache` filled with relocated spans; segments without KV are computed after it with explicit 3-D positions
and a causal mask over past and new tokens. One request at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ctxwin.engines.base import BEST, WHOLE, EngineSpec
from ctxwin.engines.encoding.checkpoint import open_checkpoint
from ctxwin.engines.encoding.encoder import Encoder, EncodingEngine
from ctxwin.engines.forks import note_engine
from ctxwin.engines.hf import model as hf_model
from ctxwin.engines.hf.decoder import Decoder, ForwardPass
from ctxwin.engines.hf.recurrent import states_of
from ctxwin.engines.outputs import outputs_identity
from ctxwin.engines.results import AttendedKV, EngineCounters, Generation, PrefillCost
from ctxwin.engines.sampling import Sampling, check_sampling
from ctxwin.engines.segments import Encoded, Segment, without_spans
from ctxwin.errors import AnswerStopped, UnsupportedModel
from ctxwin.kv.config import kv_spec_from_config, with_maps
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.merge import FixedPoint, merged_slots
from ctxwin.kv.relocate import check_relocation
from ctxwin.progress import step
from ctxwin.store import open_store
from ctxwin.store.spans import SpanRepository

if TYPE_CHECKING:
    from pathlib import Path

    from ctxwin.store.base import Store

_PROBED = 16
"""Number of tokens that are computed at two positions when a model is opened."""
_FAR = 997
_log = logging.getLogger("ctxwin.engines")


class HFEngine(EncodingEngine):
    """Serves Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen2.5-Omni, Qwen3-Omni, InternVL, GLM-4.xV, Kimi K2.5, and text models: GQA, MHA
    (Qwen2, Llama and similar) and MLA (DeepSeek); exactly only Qwen3.5 and Qwen3-Next, whose recurrent layers keep states.

    Args:
        model: local folder or Hub name.
        device: torch device.
        dtype: ``float32``, ``bfloat16`` or ``float16`` (or the torch dtype); None takes the checkpoint's own.
        store: where spans, embeddings and sources are kept; None opens a store in memory.
        outputs: whether the decoder's per-token outputs are kept beside the KV.
        position_free: for a hybrid, whether chunks' maps on the recurrent states are kept too (`ctxwin.kv.states`), so that a
            chunk can follow other antecedents than it was computed after. Costs three times the bytes of its states, and its
            recurrent layers run twice.

    Raises:
        UnsupportedModel: a model whose KV cannot be moved, by its config or as measured on the loaded model (two forwards
            over 16 tokens), or a vision model other than those in `families`.
        ValueError: no such model, device or dtype.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: str | torch.dtype | None = None,
        store: Store | None = None,
        outputs: bool = False,
        position_free: bool = False,
    ) -> None:
        note_engine()
        checkpoint = open_checkpoint(model)
        name = checkpoint.dtype(dtype, "float32")
        # KV stored before attention was capped belongs to another model.
        capped = ", capped" if getattr(checkpoint.text_config, "attn_logit_softcapping", None) else ""
        identity = outputs_identity(checkpoint.identity(name, f"transformers{capped}"), outputs)
        kv = kv_spec_from_config(checkpoint.config, identity, name, "hf")
        if position_free and kv.recurrent:
            kv = with_maps(kv, checkpoint.config)
            identity = kv.identity
        longest, sees = int(checkpoint.text_config.max_position_embeddings), checkpoint.media is not None
        self.spec = EngineSpec("hf", str(model), identity, kv, longest, sees, outputs, kv.maps)
        step("loading weights")
        self.decoder = Decoder(checkpoint, device, name, self.spec)
        self.store = store if store is not None else open_store("memory:")
        self.repo = SpanRepository(self.store, identity, spec=kv, behind=self.decoder.device.type != "cpu")
        self.counters = EngineCounters()
        self._checkpoint = checkpoint
        self._lock = threading.RLock()
        self._waiting, self._waited, self._counting = 0, -math.inf, threading.Lock()
        if hf_model.use_eager_if_needed(self.text_model, lambda: self._probe(0)):
            _log.info("%s attends eagerly: fused attention leaves out what its config asks for", model)
        check_relocation(kv, self._probe, max(1, min(_FAR, self.spec.max_tokens - _PROBED)))
        self.counters = EngineCounters()  # the measurement does not count as work
        vision = self._encode_media if sees else None
        self.encoder = Encoder(checkpoint, identity, self.repo, vision, self.decoder.positions, self.counters, longest)
        _log.info("transformers engine: %s (%s) on %s, %s", model, checkpoint.config.model_type, device, name)

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
    ) -> SpanKV:
        """See `Engine.prefill`. Without a prefix cache and a queue, ``salt`` and ``background`` have no effect. ``stopped`` is
        polled before each layer."""
        with self._turn(background), self._lock, hf_model.stopping(self.text_model, stopped):
            done = self._run([*context, Segment(target, start)])
            done.add_to(tally)
            return self.decoder.span(done, done.slices[-1], target.positions, start)

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
        """See `Engine.generate`. ``salt`` has no effect: this engine has no prefix cache."""
        check_sampling(sampling, self._checkpoint.text_config.vocab_size)
        if sampling.json_schema is not None or sampling.repetition_penalty != 1:
            raise UnsupportedModel("the hf engine has no JSON schemas and no repetition_penalty; open it as vllm:MODEL")
        if sampling.hold < 1 and capture_query:
            raise UnsupportedModel("an exchange is remembered with all of its KV: hold must be 1, got less")
        begun = time.perf_counter()
        generation = Generation()
        with self._turn(background), self._lock:
            start = _end(layout)
            done, sums = self._run_prompt(layout, query, sampling, sampling.max_tokens)
            generation.computed_tokens, generation.forwards = done.computed, done.forwards
            generation.bytes_loaded = done.bytes_loaded
            for i, segment in enumerate(layout):
                if segment.capture and (segment.span is None or segment.recompute):
                    at, positions = done.slices[i], segment.encoded.positions
                    generation.captured[i] = self.decoder.span(done, at, positions, segment.start)
            schedule = self._schedule(done, sampling, sums)
            fed = self._decode_loop(done, query, start, sampling, generation, on_token, begun, schedule)
            if capture_query:  # positions relative to its start
                begin, end = done.slices[-1]
                later = np.tile(np.arange(query.advance, query.advance + fed, dtype=np.int64), (3, 1))
                positions = np.concatenate([query.positions, later], axis=1)
                generation.query_span = self.decoder.span(done, (begin, end + fed), positions, start)
        generation.text = self.decode(generation.token_ids)
        generation.total_s = time.perf_counter() - begun
        return generation

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: PrefillCost | None = None
    ) -> AttendedKV:
        self._check_merging()
        with self._turn(background=True), self._lock:
            done = self._begin([*context, Segment(target, start)])
            self.decoder.check([*context, Segment(target, start)])
            self.decoder.extend(done, context)
            with hf_model.capture_attention(self.text_model, target.tokens) as sums:
                self.decoder.extend(done, [Segment(target, start)])
            done.usable_logits()
            done.add_to(tally)
            span = self.decoder.span(done, done.slices[-1], target.positions, start)
            return AttendedKV(span, torch.stack([sums[layer] for layer in sorted(sums)]))

    def _check_merging(self) -> None:
        if self.spec.kv.recurrent:
            raise UnsupportedModel(f"{self.spec.model} has recurrent layers, whose states cannot be merged")
        if self.decoder.window is not None:
            raise UnsupportedModel(f"{self.spec.model} has sliding layers, whose attention does not tell what to merge")
        if self.text_model.config._attn_implementation == "eager":
            raise UnsupportedModel(f"{self.spec.model} caps attention or has sinks: its sums do not tell what to merge")

    def check_hold(self, sampling: Sampling) -> None:
        if sampling.hold < 1 and self.spec.kv.recurrent:
            raise UnsupportedModel("a recurrent state cannot drop a token: hold must be 1, got less")
        if sampling.hold < 1 and sampling.merge_prompt:
            self._check_merging()

    def _run_prompt(
        self, layout: Sequence[Segment], query: Encoded, sampling: Sampling, room: int
    ) -> tuple[ForwardPass, dict[int, torch.Tensor]]:
        """Run a prompt; return the attention that it got by layer, too, where it is to be merged."""
        self.check_hold(sampling)
        merging = sampling.hold < 1 and sampling.merge_prompt
        segments = [*(without_spans(layout) if merging else layout), Segment(query, _end(layout))]
        tokens = sum(segment.tokens for segment in segments)
        if not merging:
            return self._run(segments, room=room), {}
        with hf_model.capture_attention(self.text_model, tokens) as sums:
            return self._run(segments, room=room), sums

    def _schedule(self, done: ForwardPass, sampling: Sampling, sums: dict[int, torch.Tensor]) -> FixedPoint | None:
        """Merge a prompt where `_run_prompt` gave its attention; return what is kept from then on, None where all is."""
        if sampling.hold >= 1:
            return None
        slots, head = self.decoder.slots(done), done.slices[0][1]
        if sums:
            head, slots = 1, merged_slots(sampling.hold, slots)
            hf_model.merge_slots(done.cache, torch.stack([sums[layer] for layer in sorted(sums)]), slots)
        return FixedPoint(sampling.hold, done.tokens, slots, head, sampling.hold_every)

    def logits(self, layout: Sequence[Segment], query: Encoded) -> torch.Tensor:
        """Return next-token logits after ``query``, float32 ``[vocab]`` on the CPU; one forward over segments without KV."""
        with self._lock:
            return self._run([*layout, Segment(query, _end(layout))]).last

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
        """See `Engine.forced_logprobs`. ``stopped`` is polled before each forward, which covers one segment."""
        if sampling.hold < 1:
            return [self._forced_within(layout, query, ids, best, stopped, tally, sampling) for query, ids in answers]
        scores = []
        with self._lock:
            # A query and its answer are one forward.
            joined = (Encoded.joined([query, Encoded.of_ids(answer)]) for query, answer in answers)
            tails = [Segment(tail, _end(layout)) for tail in joined]
            for tail in tails:
                self.decoder.check([*layout, tail])
            done = self._begin(layout)
            try:
                self.decoder.extend(done, layout, 1, stopped)
                for (_, answer), tail in zip(answers, tails, strict=True):
                    states_before = states_of(done.cache) if self.spec.kv.recurrent else {}
                    self.decoder.extend(done, [tail], len(answer) + 1, stopped)
                    self.decoder.remove_last(done, tail.tokens, states_before)
                    scores.append(hf_model.score_answer(done.usable_logits(), answer, best))
            finally:
                done.add_to(tally)
        return scores

    def _forced_within(
        self,
        layout: Sequence[Segment],
        query: Encoded,
        answer: Sequence[int],
        best: int,
        stopped: Callable[[], bool],
        tally: PrefillCost | None,
        sampling: Sampling,
    ) -> list[dict[int, float]]:
        """`forced_logprobs` of one answer of which slots are dropped, ``hold_every`` tokens a forward."""
        with self._lock, torch.no_grad():
            done, sums = self._run_prompt(layout, query, sampling, len(answer))
            schedule, rows = self._schedule(done, sampling, sums), [done.usable_logits()[-1:]]
            assert schedule is not None
            at = _end(layout) + query.advance
            for begin in range(0, len(answer), sampling.hold_every):
                if stopped():
                    raise AnswerStopped("the engine is wanted for other work")
                ids = torch.tensor(answer[begin : begin + sampling.hold_every])
                places = torch.arange(at + begin, at + begin + len(ids)).expand(3, -1)
                self.decoder.feed(done, self.decoder.embed_tokens(ids), places, len(ids))
                rows.append(done.usable_logits())
                if (slots := schedule.append(len(ids))) is not None:
                    hf_model.select_slots(done.cache, slots)
            done.add_to(tally)
            return hf_model.score_answer(torch.cat(rows), answer, best)

    @property
    def busy(self) -> bool:
        return self._waiting > 0

    @contextmanager
    def _turn(self, background: bool = False) -> Iterator[None]:
        """Count a waiting caller, from before it acquires the lock."""
        with self._counting:
            self._waiting += not background
        try:
            yield
        finally:
            with self._counting:
                self._waiting -= not background
                self._waited = self._waited if background else time.monotonic()

    @property
    def idle_s(self) -> float:
        return 0.0 if self.busy else time.monotonic() - self._waited

    def close(self) -> None:
        """Release the model. The store belongs to the caller and stays open."""
        self.repo.flush()
        with self._lock:
            self.decoder.close()

    def _run(self, segments: Sequence[Segment], *, room: int = 0) -> ForwardPass:
        """Load or compute ``segments``, the last of which has no span; ``room`` tokens will be generated after them."""
        done = self._begin(segments)
        self.decoder.check(segments, room)
        self.decoder.extend(done, segments)
        done.usable_logits()
        return done

    def _begin(self, segments: Sequence[Segment]) -> ForwardPass:
        return self.decoder.begin(segments, self.embed, self.counters)

    def inputs(self, encodeds: Sequence[Encoded]) -> hf_model.Inputs:
        """See `Decoder.inputs`."""
        return self.decoder.inputs(encodeds, self.embed)

    @property
    def text_model(self) -> Any:
        """The decoder, for running it layer by layer: ``layers``, ``norm``, ``rotary_emb``, ``config``."""
        return self.decoder.model.get_decoder()

    @property
    def lm_head(self) -> Any:
        """The projection of the decoder's normed hidden states to logits."""
        return self.decoder.model.get_output_embeddings()

    def _encode_media(self, inputs: Any, grids: Any, *, audio: bool = False) -> torch.Tensor:
        with self._turn(), self._lock:
            return self.decoder.encode_media(inputs, grids, audio=audio)

    def _probe(self, start: int) -> SpanKV:
        """Compute KV of tokens spread over the vocabulary at ``start``; see `check_relocation`."""
        rows = int(self.decoder.model.get_input_embeddings().weight.shape[0])
        ids = tuple(rows * (2 * i + 1) // (2 * _PROBED) for i in range(_PROBED))
        steps = np.arange(_PROBED, dtype=np.int64)
        places = [steps, steps // 2, steps % 5] if self.spec.kv.rope.sections else [steps] * 3
        encoded = Encoded("", ids, np.stack(places), _PROBED)
        done = self._run([Segment(encoded, start)])
        return self.decoder.span(done, done.slices[-1], encoded.positions, start)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self._checkpoint.eos)

    def _decode_loop(
        self,
        done: ForwardPass,
        query: Encoded,
        start: int,
        sampling: Sampling,
        generation: Generation,
        on_token: Callable[[int, str], bool] | None,
        begun: float,
        schedule: FixedPoint | None,
    ) -> int:
        """Sample until an end; return how many generated tokens were fed back (their KV is in the cache)."""
        ends = self._checkpoint.eos | set(sampling.stop_ids)
        generator = torch.Generator().manual_seed(sampling.seed) if sampling.seed is not None else None
        at, fed = start + query.advance, 0
        logits = done.last
        if sampling.logprobs:
            generation.logprobs = hf_model.top_logprobs(logits, sampling.logprobs)
        with torch.no_grad():
            while True:
                drawn = hf_model.filter_logits(logits, sampling, generation.token_ids)
                token = hf_model.sample(drawn, sampling.temperature, generator)
                if not generation.ttft_s:
                    generation.ttft_s = time.perf_counter() - begun
                if token in ends:
                    return fed
                if sampling.token_logprobs is not None:
                    token = hf_model.score_token(token, len(generation.token_ids), logits, sampling.token_logprobs)
                generation.token_ids.append(token)
                if on_token is not None and on_token(token, self.decode(generation.token_ids)) is False:
                    generation.finished = False
                    return fed
                if len(generation.token_ids) >= sampling.max_tokens:
                    return fed
                ids = torch.tensor([token])
                self.decoder.feed(done, self.decoder.embed_tokens(ids), torch.full((3, 1), at + fed))
                fed += 1
                logits = done.last
                if schedule is not None and (slots := schedule.append(1)) is not None:
                    hf_model.select_slots(done.cache, slots)


def _end(layout: Sequence[Segment]) -> int:
    """Return the position where the query starts: directly after the last segment."""
    return layout[-1].start + layout[-1].encoded.advance if layout else 0
