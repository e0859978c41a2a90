"""The reference engine, on transformers: every arm runs on it, and other engines are compared with it.

KV is a `DynamicCache` filled with relocated spans; segments without KV are computed after it with explicit 3-D positions
and a causal mask over past and new tokens. One request at a time.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ctxwin.engines.base import BEST, EngineSpec
from ctxwin.engines.encoding.checkpoint import open_checkpoint
from ctxwin.engines.encoding.encoder import Encoder, EncodingEngine
from ctxwin.engines.encoding.families import both_ways, run_tower
from ctxwin.engines.hf import model as hf_model
from ctxwin.engines.hf import recurrent
from ctxwin.engines.outputs import concat_outputs, outputs_identity, rows_of
from ctxwin.engines.results import AttendedKV, EngineCounters, Generation, Tally
from ctxwin.engines.sampling import Sampling, check_sampling
from ctxwin.engines.segments import Encoded, MediaSpan, Segment, check_states
from ctxwin.errors import AnswerStopped, EngineFailed, UnsupportedModel
from ctxwin.kv.config import attention_layers, kv_spec_from_config, sliding_window, with_maps
from ctxwin.kv.kernels.staging import to_host
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.merge import budget_slots
from ctxwin.kv.patch import apply_patch
from ctxwin.kv.relocate import check_relocation, relocate
from ctxwin.kv.rows import from_rows, to_rows
from ctxwin.kv.states import States, compose_states
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


@dataclass
class _Pass:
    """One assembled sequence: its cache, the slots of each segment, and its cost."""

    cache: Any
    tokens: int = 0
    slices: list[tuple[int, int]] = field(default_factory=list)
    states: dict[int, States] = field(default_factory=dict)  # by the number of preceding slots
    logits: torch.Tensor | None = None
    outputs: list[Mapping[str, torch.Tensor]] = field(default_factory=list)
    computed: int = 0
    forwards: int = 0
    bytes_loaded: int = 0

    @property
    def last(self) -> torch.Tensor:
        """Logits after the last token."""
        assert self.logits is not None
        return self.logits[-1]


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
        checkpoint = open_checkpoint(model)
        name = checkpoint.dtype(dtype, "float32")
        # KV stored before attention was capped belongs to another model.
        capped = ", capped" if getattr(checkpoint.text_config, "attn_logit_softcapping", None) else ""
        identity = outputs_identity(checkpoint.identity(name, f"transformers{capped}"), outputs)
        kv = kv_spec_from_config(checkpoint.config, identity, name, "hf")
        if position_free and kv.recurrent:
            kv = with_maps(kv, checkpoint.config)
            identity = kv.identity
        step("loading weights")
        self._device, self._model = hf_model.load(checkpoint, device, name)
        longest, sees = int(checkpoint.text_config.max_position_embeddings), checkpoint.media is not None
        self.spec = EngineSpec("hf", str(model), identity, kv, longest, sees, outputs, kv.maps)
        self._last_output: Any = None  # the decoder's latest output
        if outputs:
            self.text_model.register_forward_hook(self._capture_output)
        self.store = store if store is not None else open_store("memory:")
        self.repo = SpanRepository(self.store, identity, spec=kv, behind=self._device.type != "cpu")
        self.counters = EngineCounters()
        self._checkpoint = checkpoint
        self._dtype = getattr(torch, name)
        self._hears = checkpoint.family is not None and checkpoint.family.sound
        self._deep = hf_model.deep_layers(checkpoint.config)
        self._attention = attention_layers(checkpoint.config)
        self._window = sliding_window(checkpoint.config)
        self._own_inputs = bool(getattr(checkpoint.text_config, "hidden_size_per_layer_input", None))
        self._both_ways = both_ways(checkpoint.config)
        every = range(int(checkpoint.text_config.num_hidden_layers))
        self._recurrent = tuple(i for i in every if i not in self._attention)
        if kv.maps:
            recurrent.install_hooks(self.text_model)
        self._lock = threading.RLock()
        self._waiting, self._waited, self._counting = 0, -math.inf, threading.Lock()
        if hf_model.use_eager_if_needed(self.text_model, lambda: self._probe(0)):
            _log.info("%s attends eagerly: fused attention leaves out what its config asks for", model)
        check_relocation(kv, self._probe, max(1, min(_FAR, self.spec.max_tokens - _PROBED)))
        self.counters = EngineCounters()  # the measurement does not count as work
        vision = self._see if sees else None
        self.encoder = Encoder(checkpoint, identity, self.repo, vision, self._positions, self.counters, longest)
        _log.info("transformers engine: %s (%s) on %s, %s", model, checkpoint.config.model_type, self._device, name)

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
    ) -> SpanKV:
        """See `Engine.prefill`. Without a prefix cache and a queue, ``salt`` and ``background`` have no effect. ``stopped`` is
        polled before each layer."""
        with self._turn(background), self._lock, hf_model.stopping(self.text_model, stopped):
            done = self._run([*context, Segment(target, start)])
            if tally is not None:
                tally.forwards += done.forwards
                tally.tokens += done.computed
            return self._span(done, done.slices[-1], target.positions, start)

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
        check_sampling(sampling)
        if sampling.json_schema is not None or sampling.repetition_penalty != 1:
            raise UnsupportedModel("the hf engine has no JSON schemas and no repetition_penalty; open it as vllm:MODEL")
        if sampling.hold < 1 and self.spec.kv.recurrent:
            raise UnsupportedModel("a recurrent state cannot drop a token: hold must be 1, got less")
        if sampling.hold < 1 and capture_query:
            raise UnsupportedModel("an exchange is remembered with all of its KV: hold must be 1, got less")
        begun = time.perf_counter()
        generation = Generation()
        with self._turn(background), self._lock:
            start = _end(layout)
            done = self._run([*layout, Segment(query, start)], room=sampling.max_tokens)
            generation.computed_tokens, generation.forwards = done.computed, done.forwards
            generation.bytes_loaded = done.bytes_loaded
            for i, segment in enumerate(layout):
                if segment.capture and (segment.span is None or segment.recompute):
                    generation.captured[i] = self._span(done, done.slices[i], segment.encoded.positions, segment.start)
            fed = self._decode_loop(done, query, start, sampling, generation, on_token, begun)
            if capture_query:  # positions relative to its start
                begin, end = done.slices[-1]
                later = np.tile(np.arange(query.advance, query.advance + fed, dtype=np.int64), (3, 1))
                positions = np.concatenate([query.positions, later], axis=1)
                generation.query_span = self._span(done, (begin, end + fed), positions, start)
        generation.text = self.decode(generation.token_ids)
        generation.total_s = time.perf_counter() - begun
        return generation

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: Tally | None = None
    ) -> AttendedKV:
        if self.spec.kv.recurrent:
            raise UnsupportedModel(f"{self.spec.model} has recurrent layers, whose states cannot be merged")
        if self._window is not None:
            raise UnsupportedModel(f"{self.spec.model} has sliding layers, whose attention does not tell what to merge")
        if self.text_model.config._attn_implementation == "eager":
            raise UnsupportedModel(
                f"{self.spec.model} caps its attention or has sinks, so sums of it do not tell what to merge"
            )
        with self._turn(background=True), self._lock:
            done = self._begin([*context, Segment(target, start)])
            self._check([*context, Segment(target, start)], 0)
            self._fill(done, context, 1)
            with hf_model.capture_attention(self.text_model, target.tokens) as sums:
                self._fill(done, [Segment(target, start)], 1)
            _usable(done)
            if tally is not None:
                tally.forwards += done.forwards
                tally.tokens += done.computed
            span = self._span(done, done.slices[-1], target.positions, start)
            return AttendedKV(span, torch.stack([sums[layer] for layer in sorted(sums)]))

    @property
    def drops_tokens(self) -> bool:
        return not self.spec.kv.recurrent

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
        tally: Tally | None = None,
    ) -> list[list[dict[int, float]]]:
        """See `Engine.forced_logprobs`. ``stopped`` is polled before each forward, which covers one segment."""
        scores = []
        with self._lock:
            tails = [_tail(layout, query, answer) for query, answer in answers]
            for tail in tails:
                self._check([*layout, *tail], 0)
            done = self._begin(layout)
            try:
                self._fill(done, layout, 1, stopped)
                for (_, answer), tail in zip(answers, tails, strict=True):
                    states_before = recurrent.states_of(done.cache) if self.spec.kv.recurrent else {}
                    self._fill(done, [replace(tail[0], encoded=_concat(tail))], len(answer) + 1, stopped)
                    self._remove_last(done, sum(part.tokens for part in tail), states_before)
                    scores.append(hf_model.score_answer(_usable(done), answer, best))
            finally:
                if tally is not None:
                    tally.forwards += done.forwards
                    tally.tokens += done.computed
        return scores

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
            self._model = None

    def _run(self, segments: Sequence[Segment], *, room: int = 0) -> _Pass:
        """Assemble ``segments`` into one sequence. Neighbours without a span share a forward; neighbours with one, a load.

        Args:
            segments: in order; the last one has no span.
            room: number of tokens that will be generated after them.
        """
        done = self._begin(segments)
        self._check(segments, room)
        self._fill(done, segments, 1)
        _usable(done)
        return done

    def _begin(self, segments: Sequence[Segment]) -> _Pass:
        """Return a sequence of ``segments`` with an empty cache."""
        from transformers import DynamicCache

        self._open_model()
        slots = [segment.slots for segment in segments]
        ends = list(itertools.accumulate(slots))
        slices = [(end - count, end) for count, end in zip(slots, ends, strict=True)]
        tokens = sum(segment.tokens for segment in segments)
        # Given a config, the cache would learn which layers slide, and drop tokens that left the window.
        config = self._checkpoint.text_config if self.spec.kv.recurrent else None
        return _Pass(DynamicCache(config=config), tokens, slices)

    def _fill(
        self, done: _Pass, segments: Sequence[Segment], keep: int, stopped: Callable[[], bool] | None = None
    ) -> None:
        """Load or compute ``segments`` after the cached ones; see `_run`.

        ``stopped`` is polled before each forward, which then covers one segment; once it is true, AnswerStopped is raised.
        """
        filled = (part for segment in segments if segment.tokens for part in segment.parts())
        if self.spec.kv.recurrent:
            check_states(self.spec.model, segments, self.spec.state_patches)
        try:
            with torch.no_grad():
                for loaded, grouped in itertools.groupby(filled, lambda segment: segment.span is not None):
                    run = list(grouped)
                    if loaded:
                        self._load(done, run)
                        continue
                    separate = (
                        stopped is not None or self.spec.kv.recurrent
                    )  # a state is there at the end of a forward only
                    for part in [[segment] for segment in run] if separate else [run]:
                        if stopped is not None and stopped():
                            raise AnswerStopped("the engine is wanted for other work")
                        self._compute(done, part, keep)
        except RuntimeError as error:  # torch's own: out of memory, a failed kernel
            if isinstance(error, AnswerStopped):
                raise
            raise EngineFailed(f"the forward over {done.tokens} tokens failed: {error}") from error

    def _check(self, segments: Sequence[Segment], room: int) -> None:
        tokens = sum(p.encoded.tokens for p in segments)
        last = max((p.start + int(p.encoded.positions.max()) for p in segments if p.encoded.tokens), default=0)
        if not segments or not segments[-1].encoded.tokens or segments[-1].span is not None:
            raise ValueError("the last segment of a forward must have tokens to compute, got none")
        if tokens + room > self.spec.max_tokens or last + room >= self.spec.max_tokens:
            raise EngineFailed(
                f"{tokens} prompt tokens (up to position {last}) and {room} to generate must fit the model's "
                f"{self.spec.max_tokens} positions; drop chunks or ask for fewer tokens"
            )

    def _load(self, done: _Pass, segments: Sequence[Segment]) -> None:
        """Write relocated spans into the cache: one rotation per span, one append per layer."""
        keys, values, states = [], [], list[States]()
        for segment in segments:
            span = segment.span
            assert span is not None
            if not torch.equal(span.positions.cpu(), torch.tensor(segment.places)):
                raise ValueError(
                    f"a span must have its segment's {segment.encoded.tokens} positions, got {span.tokens} others (chunk "
                    f"{segment.encoded.chunk_id[:12]})"
                )
            states_on_device = {name: state.to(self._device) for name, state in span.states.items()}
            here = SpanKV(span.k.to(self._device), span.v.to(self._device), span.positions.to(self._device), span.start)
            here = replace(here, states=states_on_device)
            if segment.patch is None:
                moved = relocate(here, self.spec.kv, segment.start)
            else:
                moved = apply_patch(here, segment.patch, self.spec.kv, segment.start)
            if self.spec.outputs:
                done.outputs.append(span.outputs)
            keys.append(moved.k.to(self._dtype))
            values.append(moved.v.to(self._dtype))
            states.append(moved.states)
            done.bytes_loaded += span.nbytes
        k, v = torch.cat(keys, dim=1), torch.cat(values, dim=1)
        for layer, pair in zip(self._attention, from_rows(self.spec.kv, lambda i: (k[i], v[i])), strict=True):
            # Transformers caches MLA's latent as "keys" and its decoupled rope keys as "values".
            first, second = pair[::-1] if self.spec.kv.family == "mla" else pair
            done.cache.update(first.transpose(0, 1)[None], second.transpose(0, 1)[None], layer)
        if self.spec.kv.recurrent:
            end_states: States = recurrent.states_of(done.cache)
            for segment, states_here in zip(segments, states, strict=True):
                end_states = compose_states(end_states, states_here) if segment.approximate else states_here
            recurrent.set_states(done.cache, end_states)

    def _compute(self, done: _Pass, segments: Sequence[Segment], keep: int) -> None:
        """Run `_forward`, and keep the states after it where they are captured."""
        if not self.spec.kv.recurrent:
            self._forward(done, segments, keep)
            return
        with recurrent.capture_maps(self._recurrent if self.spec.kv.maps else ()) as maps:
            self._forward(done, segments, keep)
        if segments[-1].capture or self.spec.kv.maps:
            done.states[self._slots(done)] = {**recurrent.states_of(done.cache), **maps}

    def _slots(self, done: _Pass) -> int:
        """Return the number of slots in the cache."""
        return int(done.cache.get_seq_length(self._attention[0]))

    def _remove_last(self, done: _Pass, count: int, states: States) -> None:
        """Remove the last ``count`` tokens from the cache; ``states`` are those that preceded them."""
        if not self.spec.kv.recurrent:
            done.cache.crop(-count)
            return
        for layer in self._attention:
            done.cache.layers[layer].crop(-count)
        recurrent.set_states(done.cache, states)

    def _forward(self, done: _Pass, segments: Sequence[Segment], keep: int = 1) -> None:
        """Run one forward over neighbouring segments after everything in the cache."""
        fed = self.inputs([p.encoded for p in segments])
        positions = torch.from_numpy(np.concatenate([p.encoded.positions + p.start for p in segments], axis=1))
        self._feed(done, fed, positions, keep)
        tokens = int(fed.embeds.shape[0])
        done.computed += tokens
        done.forwards += 1
        self.counters.prefill_tokens += tokens
        self.counters.prefill_forwards += 1

    def _feed(self, done: _Pass, fed: hf_model.Inputs, positions: torch.Tensor, keep: int = 1) -> None:
        """Run T tokens at ``positions [3, T]`` and put the logits of the last ``keep`` into ``done``."""
        past, new = self._slots(done), int(fed.embeds.shape[0])
        mask = hf_model.masks(self._open_model(), past, new, self._window, fed.pictures, self._both_ways != "sliding")
        places = positions.to(self._device)
        run: dict[str, Any] = dict(
            inputs_embeds=fed.embeds[None],
            position_ids=places[:, None] if self.spec.kv.rope.sections else places[:1],
            attention_mask=mask,
            past_key_values=done.cache,
            use_cache=True,
        )
        if (
            self._own_inputs
        ):  # every layer's embedding of each token, which the model would read back from its embedding
            assert fed.ids is not None
            run["per_layer_inputs"] = self.text_model.get_per_layer_inputs(fed.ids.to(self._device)[None], None)
        if self.spec.kv.recurrent:
            masks = {"full_attention": mask, "linear_attention": None}
            out = self.text_model(**{**run, "attention_mask": masks})
            logits = self.lm_head(out.last_hidden_state[:, -keep:])
        elif fed.deep is None and not self._hears:
            logits = self._model(**run, logits_to_keep=keep).logits
        else:  # the whole model takes such features from pixels only, its decoder takes them as they are
            if fed.deep is not None:
                every = torch.ones(1, new, dtype=torch.bool, device=self._device)
                run |= {"visual_pos_masks": every, "deepstack_visual_embeds": list(fed.deep)}
            out = self.text_model(**run)  # Qwen2.5-Omni as a whole would give the logits of every token
            logits = self.lm_head(out.last_hidden_state[:, -keep:])
        done.logits = logits[0].to("cpu", torch.float32)
        if self.spec.outputs:
            done.outputs.append({name: rows.to("cpu") for name, rows in rows_of(self._last_output, new).items()})
            self._last_output = None

    def inputs(self, encodeds: Sequence[Encoded]) -> hf_model.Inputs:
        """Return the decoder inputs of neighbouring encoded segments, T tokens together; no vision encode.

        Raises:
            ChunkUnavailable: vision embeddings left the store.
            EngineFailed: the embeddings have another model's shape.
        """
        ids = torch.tensor([i for encoded in encodeds for i in encoded.token_ids], dtype=torch.int64)
        words = self._words(ids)
        starts = itertools.accumulate((encoded.tokens for encoded in encodeds), initial=0)
        media_rows = []
        for at, encoded in zip(starts, encodeds, strict=False):
            for media in encoded.media:
                # In a part of a chunk a medium may begin before it and end after it.
                begin, end = max(0, -media.offset), min(media.tokens, encoded.tokens - media.offset)
                stored = self.embed(media.key)
                places, rows = media.placeholders(begin, end)
                if stored.shape[0] == media.tokens - len(media.words):
                    stored = stored[rows]
                if media.modality == "audio":  # the layers add nothing for sound
                    stored = torch.nn.functional.pad(stored, (0, self._deep * int(words.shape[1])))
                media_rows.append(([at + media.offset + i for i in places], stored))
        for places, _ in media_rows:
            ids[places] = self._checkpoint.text_config.pad_token_id or 0  # as transformers has it for media
        return replace(hf_model.inputs(words, media_rows, self._deep, bool(self._both_ways)), ids=ids)

    def _capture_output(self, module: Any, args: Any, output: Any) -> None:
        self._last_output = output

    def _probe(self, start: int) -> SpanKV:
        """Compute KV of tokens spread over the vocabulary at ``start``; see `check_relocation`."""
        rows = int(self._open_model().get_input_embeddings().weight.shape[0])
        ids = tuple(rows * (2 * i + 1) // (2 * _PROBED) for i in range(_PROBED))
        steps = np.arange(_PROBED, dtype=np.int64)
        places = [steps, steps // 2, steps % 5] if self.spec.kv.rope.sections else [steps] * 3
        encoded = Encoded("", ids, np.stack(places), _PROBED)
        done = self._run([Segment(encoded, start)])
        return self._span(done, done.slices[-1], encoded.positions, start)

    def _words(self, ids: torch.Tensor) -> torch.Tensor:
        """Return word embeddings ``[T, hidden]`` of ids ``[T]``."""
        with torch.no_grad():
            rows = self._open_model().get_input_embeddings()(ids.to(self._device))
        assert isinstance(rows, torch.Tensor)
        return rows

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self._checkpoint.eos)

    @property
    def text_model(self) -> Any:
        """The decoder, for running it layer by layer: ``layers``, ``norm``, ``rotary_emb``, ``config``."""
        return self._open_model().get_decoder()

    @property
    def lm_head(self) -> Any:
        """The projection of the decoder's normed hidden states to logits."""
        return self._open_model().get_output_embeddings()

    def _decode_loop(
        self,
        done: _Pass,
        query: Encoded,
        start: int,
        sampling: Sampling,
        generation: Generation,
        on_token: Callable[[int, str], bool] | None,
        begun: float,
    ) -> int:
        """Sample until an end; return how many generated tokens were fed back (their KV is in the cache)."""
        ends = self._checkpoint.eos | set(sampling.stop_ids)
        generator = torch.Generator().manual_seed(sampling.seed) if sampling.seed is not None else None
        at, fed = start + query.advance, 0
        logits = done.last
        head, prompt_slots = done.slices[0][1], done.slices[-1][1]
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
                self._feed(done, hf_model.Inputs(self._words(ids), ids=ids), torch.full((3, 1), at + fed))
                fed += 1
                logits = done.last
                if sampling.hold < 1 and self._slots(done) > max(
                    prompt_slots, budget_slots(sampling.hold, done.tokens + fed)
                ):
                    hf_model.drop_slot(done.cache, head)

    def _span(self, done: _Pass, part: tuple[int, int], positions: np.ndarray, start: int) -> SpanKV:
        """Copy part of the cache to the CPU, in the frame it was computed in."""

        def take(layer: int, name: str) -> torch.Tensor:
            cached: torch.Tensor = getattr(done.cache.layers[layer], name)[0, :, part[0] : part[1]]
            return cached.transpose(0, 1)

        rope, content = ("values", "keys") if self.spec.kv.family == "mla" else ("keys", "values")
        outputs = concat_outputs(done.outputs) if self.spec.outputs else {}
        rows = {name: all_of_it[part[0] : part[1]].clone() for name, all_of_it in outputs.items()}
        states: States = {}
        if self.spec.kv.recurrent:
            end_states = done.states.get(part[1])
            if end_states is None and part[1] == self._slots(done):
                end_states = recurrent.states_of(done.cache)
            states = {name: state.to("cpu") for name, state in (end_states or {}).items()}
        k, v = to_rows(self.spec.kv, [(take(i, rope), take(i, content)) for i in self._attention])
        span = SpanKV(to_host(k), to_host(v), torch.tensor(positions), start, rows, states)
        span.validate(self.spec.kv)
        return span

    def _see(self, pixels: Any, grids: Any, heard: bool = False) -> torch.Tensor:
        """Run the vision tower, or the audio tower if ``heard``: embeddings ``[tokens, hidden * (1 + D)]`` of all items."""
        with self._turn(), self._lock, torch.no_grad():
            if heard:
                features = pixels[None].to(self._device, self._dtype)
                mask = torch.ones_like(features[:, 0], dtype=torch.int64)
                tower = self._open_model().get_audio_features
                embeddings = tower(features, feature_attention_mask=mask, return_dict=True).last_hidden_state
                assert isinstance(embeddings, torch.Tensor)
                return embeddings
            family = self._checkpoint.family
            assert family is not None
            inputs_on_device = pixels.to(self._device, self._dtype), grids.to(self._device)
            features_of_items = run_tower(self._open_model(), family, self._checkpoint.config, *inputs_on_device)
            deep = getattr(features_of_items, "deepstack_features", None) or ()
            # The model's own order, which is vLLM's too: input embeddings first, then layer by layer. Items are separate, or in
            # one tensor: InternVL's tiles [tiles, tokens, hidden], and deep layers in transformers before 5.19.
            parts = [
                p.flatten(0, -2) if isinstance(p, torch.Tensor) else torch.cat(list(p))
                for p in (features_of_items.pooler_output, *deep)
            ]
            return torch.cat(parts, dim=-1)

    def _positions(self, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
        return hf_model.positions(self._open_model(), token_ids, media)

    def _open_model(self) -> Any:
        if self._model is None:
            raise EngineFailed("the engine is closed; open it again")
        return self._model


def _tail(layout: Sequence[Segment], query: Encoded, answer_ids: Sequence[int]) -> list[Segment]:
    """Return a query and its answer as segments, to be computed in one forward."""
    start, count = _end(layout), len(answer_ids)
    places = np.tile(np.arange(count, dtype=np.int64), (3, 1))
    answer = Encoded("", tuple(int(i) for i in answer_ids), places, count)
    return [Segment(query, start), *([Segment(answer, start + query.advance)] if count else [])]


def _concat(tail: Sequence[Segment]) -> Encoded:
    """Concatenate neighbouring text segments."""
    first = tail[0]
    ids = tuple(i for part in tail for i in part.encoded.token_ids)
    places = np.concatenate([part.encoded.positions + (part.start - first.start) for part in tail], axis=1)
    return Encoded("", ids, places, tail[-1].start - first.start + tail[-1].encoded.advance)


def _usable(done: _Pass) -> torch.Tensor:
    """Return the logits of a pass; raise EngineFailed where they are missing or NaN."""
    if done.logits is None or bool(done.logits.isnan().any()):
        raise EngineFailed("the model gave no usable logits (NaN); try dtype='float32'")
    return done.logits


def _end(layout: Sequence[Segment]) -> int:
    """Return the position where the query starts: directly after the last segment."""
    return layout[-1].start + layout[-1].encoded.advance if layout else 0
