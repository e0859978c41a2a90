"""The model of the transformers engine: sequences of loaded and computed segments in its cache, and its towers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ctxwin.engines.base import EngineSpec
from ctxwin.engines.encoding.checkpoint import Checkpoint
from ctxwin.engines.encoding.families import bidirectional_layers, run_tower
from ctxwin.engines.hf import model as hf_model
from ctxwin.engines.hf import recurrent
from ctxwin.engines.outputs import concat_outputs, rows_of
from ctxwin.engines.results import EngineCounters, PrefillCost
from ctxwin.engines.segments import Encoded, MediaSpan, Segment, check_states, gap_runs
from ctxwin.errors import AnswerStopped, EngineFailed
from ctxwin.kv.config import attention_layers, sliding_window
from ctxwin.kv.kernels.staging import to_host
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import apply_patch
from ctxwin.kv.relocate import relocate
from ctxwin.kv.rows import from_rows, to_rows
from ctxwin.kv.states import States, compose_states

Gaps = tuple[torch.Tensor, torch.Tensor]
"""Slots that new tokens take in the cache, and the first slot of the run of each; see `hf_model.masks`."""


@dataclass
class ForwardPass:
    """One sequence in the cache of a `Decoder`: the slots of each segment, and its cost.

    Attributes:
        embed: gives the stored embeddings of a medium by its key.
        counters: what its forwards are added to.
    """

    cache: Any
    embed: Callable[[str], torch.Tensor]
    counters: EngineCounters
    tokens: int = 0
    slices: list[tuple[int, int]] = field(default_factory=list)
    states: dict[int, States] = field(default_factory=dict)  # by the number of preceding slots
    logits: torch.Tensor | None = None
    outputs: list[Mapping[str, torch.Tensor]] = field(default_factory=list)
    computed: int = 0
    forwards: int = 0
    bytes_loaded: int = 0

    def usable_logits(self) -> torch.Tensor:
        """Return the latest logits; raise EngineFailed where they are missing or NaN."""
        if self.logits is None or bool(self.logits.isnan().any()):
            raise EngineFailed("the model gave no usable logits (NaN); try dtype='float32'")
        return self.logits

    def add_to(self, tally: PrefillCost | None) -> None:
        """Add its forwards and their tokens to ``tally``, if there is one."""
        if tally is not None:
            tally.forwards += self.forwards
            tally.tokens += self.computed

    @property
    def last(self) -> torch.Tensor:
        """Logits after the last token."""
        assert self.logits is not None
        return self.logits[-1]


class Decoder:
    """A loaded model, which runs one forward at a time.

    Attributes:
        device: where it computes.
        window: window of its sliding layers; None for a model without.
        bidirectional: see `ctxwin.engines.encoding.families.bidirectional_layers`.
    """

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: str, spec: EngineSpec) -> None:
        self.device, self._model = hf_model.load(checkpoint, device, dtype)
        self.spec, self._checkpoint, self._dtype = spec, checkpoint, getattr(torch, dtype)
        self.window, self.bidirectional = sliding_window(checkpoint.config), bidirectional_layers(checkpoint.config)
        self._last_output: Any = None  # the latest output of its layers
        if spec.outputs:
            self.model.get_decoder().register_forward_hook(self._capture_output)
        self._takes_audio = checkpoint.family is not None and checkpoint.family.sound
        self._deep = hf_model.deep_layers(checkpoint.config)
        self._attention = attention_layers(checkpoint.config)
        self._own_inputs = bool(getattr(checkpoint.text_config, "hidden_size_per_layer_input", None))
        every = range(int(checkpoint.text_config.num_hidden_layers))
        self._recurrent = tuple(i for i in every if i not in self._attention)
        if spec.kv.maps:
            recurrent.install_hooks(self.model.get_decoder())

    @property
    def model(self) -> Any:
        """The whole model. Raises EngineFailed once it is closed."""
        if self._model is None:
            raise EngineFailed("the engine is closed; open it again")
        return self._model

    def close(self) -> None:
        """Release the model."""
        self._model = None

    def begin(
        self, segments: Sequence[Segment], embed: Callable[[str], torch.Tensor], counters: EngineCounters
    ) -> ForwardPass:
        """Return a pass over ``segments`` with an empty cache. Raises EngineFailed where the model is closed."""
        from transformers import DynamicCache

        _ = self.model  # raises where it is closed
        slices = [*itertools.pairwise(itertools.accumulate((segment.slots for segment in segments), initial=0))]
        tokens = sum(segment.tokens for segment in segments)
        # Given a config, the cache would learn which layers slide, and drop tokens that left the window.
        config = self._checkpoint.text_config if self.spec.kv.recurrent else None
        return ForwardPass(DynamicCache(config=config), embed, counters, tokens, slices)

    def extend(
        self, done: ForwardPass, segments: Sequence[Segment], keep: int = 1, stopped: Callable[[], bool] | None = None
    ) -> None:
        """Load or compute ``segments`` after the cached ones: neighbours with a span share a load, others a forward, and so do
        gaps that are computed at once.

        ``stopped`` is polled before each forward, which then covers one segment; once it is true, AnswerStopped is raised.
        """
        parts = [part for segment in segments if segment.tokens for part in segment.parts()]
        kinds, filled = [part.gap for part in parts], 0
        if self.spec.kv.recurrent:
            check_states(self.spec.model, segments, self.spec.state_patches)
        try:
            with torch.no_grad():
                while filled < len(parts):
                    loaded, begin = kinds[filled] is None, filled
                    runs = gap_runs(kinds, begin) if kinds[begin] else []
                    same = itertools.takewhile(lambda kind: (kind is None) == loaded, kinds[begin:])  # noqa: B023
                    filled = runs[-1].stop if runs else begin + len(list(same))
                    run = parts[begin:filled]
                    if loaded:
                        self._load(done, run)
                        continue
                    # A state is there at the end of a forward only.
                    separate = (stopped is not None or self.spec.kv.recurrent) and not runs
                    for some in [[segment] for segment in run] if separate else [run]:
                        if stopped is not None and stopped():
                            raise AnswerStopped("the engine is wanted for other work")
                        if runs:
                            self._fill_gaps(done, some, [range(r.start - begin, r.stop - begin) for r in runs])
                        else:
                            self._compute(done, some, keep)
        except RuntimeError as error:  # torch's own: out of memory, a failed kernel
            if isinstance(error, AnswerStopped):
                raise
            raise EngineFailed(f"the forward over {done.tokens} tokens failed: {error}") from error

    def check(self, segments: Sequence[Segment], room: int = 0) -> None:
        """Check that ``segments``, of which the last has no span, and ``room`` generated tokens fit the model."""
        tokens = sum(p.encoded.tokens for p in segments)
        last = max((p.start + int(p.encoded.positions.max()) for p in segments if p.encoded.tokens), default=0)
        if not segments or not segments[-1].encoded.tokens or segments[-1].span is not None:
            raise ValueError("the last segment of a forward must have tokens to compute, got none")
        if tokens + room > self.spec.max_tokens or last + room >= self.spec.max_tokens:
            raise EngineFailed(
                f"{tokens} prompt tokens (up to position {last}) and {room} to generate must fit the model's "
                f"{self.spec.max_tokens} positions; drop chunks or ask for fewer tokens"
            )

    def _load(self, done: ForwardPass, segments: Sequence[Segment]) -> None:
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
            states_on_device = {name: state.to(self.device) for name, state in span.states.items()}
            here = SpanKV(span.k.to(self.device), span.v.to(self.device), span.positions.to(self.device), span.start)
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

    def _fill_gaps(self, done: ForwardPass, parts: Sequence[Segment], runs: Sequence[range]) -> None:
        """Load ``parts``, then compute ``runs`` of them in one forward, each behind what is loaded in front of it."""
        past = self.slots(done)
        self._load(done, [replace(part, span=part.canonical) if part.gap else part for part in parts])
        begins = list(itertools.accumulate((part.tokens for part in parts), initial=past))
        spans = [(begins[run.start], begins[run.stop]) for run in runs]
        at = torch.cat([torch.arange(*span) for span in spans])
        first = torch.cat([torch.full((end - begin,), begin) for begin, end in spans])
        past = self.slots(done)
        self._forward(done, [parts[i] for run in runs for i in run], gaps=(at, first))
        at = at.to(self.device)
        for layer in (done.cache.layers[i] for i in self._attention):
            layer.keys, layer.values = (
                rows[:, :, :past].index_copy(2, at, rows[:, :, past:]) for rows in (layer.keys, layer.values)
            )
        if self.spec.outputs:
            fresh, outputs = done.outputs.pop(), concat_outputs(done.outputs)
            for name, rows in outputs.items():
                rows[at.to(rows.device)] = fresh[name]
            done.outputs = [outputs]

    def _compute(self, done: ForwardPass, segments: Sequence[Segment], keep: int) -> None:
        """Run `_forward`, and keep the states after it where they are captured."""
        if not self.spec.kv.recurrent:
            self._forward(done, segments, keep)
            return
        with recurrent.capture_maps(self._recurrent if self.spec.kv.maps else ()) as maps:
            self._forward(done, segments, keep)
        if segments[-1].capture or self.spec.kv.maps:
            done.states[self.slots(done)] = {**recurrent.states_of(done.cache), **maps}

    def slots(self, done: ForwardPass) -> int:
        """Return the number of slots in the cache."""
        return int(done.cache.get_seq_length(self._attention[0]))

    def remove_last(self, done: ForwardPass, count: int, states: States) -> None:
        """Remove the last ``count`` tokens from the cache; ``states`` are those that preceded them."""
        if not self.spec.kv.recurrent:
            done.cache.crop(-count)
            return
        for layer in self._attention:
            done.cache.layers[layer].crop(-count)
        recurrent.set_states(done.cache, states)

    def _forward(self, done: ForwardPass, segments: Sequence[Segment], keep: int = 1, gaps: Gaps | None = None) -> None:
        """Run one forward over neighbouring segments after everything in the cache, or over ``gaps`` in it."""
        fed = self.inputs([p.encoded for p in segments], done.embed)
        positions = torch.from_numpy(np.concatenate([p.encoded.positions + p.start for p in segments], axis=1))
        self.feed(done, fed, positions, keep, gaps)
        tokens = int(fed.embeds.shape[0])
        done.computed += tokens
        done.forwards += 1
        done.counters.prefill_tokens += tokens
        done.counters.prefill_forwards += 1

    def feed(
        self, done: ForwardPass, fed: hf_model.Inputs, positions: torch.Tensor, keep: int = 1, gaps: Gaps | None = None
    ) -> None:
        """Run T tokens at ``positions [3, T]`` and put the logits of the last ``keep`` into ``done``; see `hf_model.masks`."""
        past, new = self.slots(done), int(fed.embeds.shape[0])
        text, head = self.model.get_decoder(), self.model.get_output_embeddings()
        mask = hf_model.masks(self.model, past, new, self.window, fed.pictures, self.bidirectional != "sliding", gaps)
        places = positions.to(self.device)
        run: dict[str, Any] = dict(
            inputs_embeds=fed.embeds[None],
            position_ids=places[:, None] if self.spec.kv.rope.sections else places[:1],
            attention_mask=mask,
            past_key_values=done.cache,
            use_cache=True,
        )
        if self._own_inputs:  # each layer's embedding of a token, which the model would read back from its embedding
            assert fed.ids is not None
            run["per_layer_inputs"] = text.get_per_layer_inputs(fed.ids.to(self.device)[None], None)
        if self.spec.kv.recurrent:
            out = text(**{**run, "attention_mask": {"full_attention": mask, "linear_attention": None}})
            logits = head(out.last_hidden_state[:, -keep:])
        elif fed.deep is None and not self._takes_audio:
            logits = self.model(**run, logits_to_keep=keep).logits
        else:  # the whole model takes such features from pixels only, its decoder takes them as they are
            if fed.deep is not None:
                every = torch.ones(1, new, dtype=torch.bool, device=self.device)
                run |= {"visual_pos_masks": every, "deepstack_visual_embeds": list(fed.deep)}
            out = text(**run)  # Qwen2.5-Omni as a whole would give the logits of every token
            logits = head(out.last_hidden_state[:, -keep:])
        done.logits = logits[0].to("cpu", torch.float32)
        if self.spec.outputs:
            done.outputs.append({name: rows.to("cpu") for name, rows in rows_of(self._last_output, new).items()})
            self._last_output = None

    def span(self, done: ForwardPass, part: tuple[int, int], positions: np.ndarray, start: int) -> SpanKV:
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
            if end_states is None and part[1] == self.slots(done):
                end_states = recurrent.states_of(done.cache)
            states = {name: state.to("cpu") for name, state in (end_states or {}).items()}
        k, v = to_rows(self.spec.kv, [(take(i, rope), take(i, content)) for i in self._attention])
        span = SpanKV(*to_host(k, v), torch.tensor(positions), start, rows, states)
        span.validate(self.spec.kv)
        return span

    def inputs(self, encodeds: Sequence[Encoded], embed: Callable[[str], torch.Tensor]) -> hf_model.Inputs:
        """Return the decoder inputs of neighbouring encoded segments, T tokens together; no vision encode.

        Raises:
            ChunkUnavailable: vision embeddings left the store.
            EngineFailed: the embeddings have another model's shape.
        """
        ids = torch.tensor([i for encoded in encodeds for i in encoded.token_ids], dtype=torch.int64)
        embeddings = self.embed_tokens(ids).embeds
        starts = itertools.accumulate((encoded.tokens for encoded in encodeds), initial=0)
        media_rows = []
        for at, encoded in zip(starts, encodeds, strict=False):
            for media in encoded.media:
                # In a part of a chunk a medium may begin before it and end after it.
                begin, end = max(0, -media.offset), min(media.tokens, encoded.tokens - media.offset)
                stored = embed(media.key)
                places, rows = media.placeholders(begin, end)
                if stored.shape[0] == media.tokens - len(media.words):
                    stored = stored[rows]
                if media.modality == "audio":  # the layers add nothing for sound
                    stored = torch.nn.functional.pad(stored, (0, self._deep * int(embeddings.shape[1])))
                media_rows.append(([at + media.offset + i for i in places], stored))
        for places, _ in media_rows:
            ids[places] = self._checkpoint.text_config.pad_token_id or 0  # as transformers has it for media
        return replace(hf_model.inputs(embeddings, media_rows, self._deep, bool(self.bidirectional)), ids=ids)

    def embed_tokens(self, ids: torch.Tensor) -> hf_model.Inputs:
        """Return the decoder inputs of text, with ids ``[T]``."""
        with torch.no_grad():
            rows = self.model.get_input_embeddings()(ids.to(self.device))
        return hf_model.Inputs(rows, ids=ids)

    def _capture_output(self, module: Any, args: Any, output: Any) -> None:
        self._last_output = output

    def encode_media(self, inputs: Any, grids: Any, *, audio: bool = False) -> torch.Tensor:
        """Run the vision tower, or the audio tower if ``audio``: embeddings ``[tokens, hidden * (1 + D)]`` of all items."""
        with torch.no_grad():
            if audio:
                features = inputs[None].to(self.device, self._dtype)
                mask = torch.ones_like(features[:, 0], dtype=torch.int64)
                tower = self.model.get_audio_features
                embeddings = tower(features, feature_attention_mask=mask, return_dict=True).last_hidden_state
                assert isinstance(embeddings, torch.Tensor)
                return embeddings
            family = self._checkpoint.family
            assert family is not None
            inputs_on_device = inputs.to(self.device, self._dtype), grids.to(self.device)
            features_of_items = run_tower(self.model, family, self._checkpoint.config, *inputs_on_device)
            deep = getattr(features_of_items, "deepstack_features", None) or ()
            # The model's own order, which is vLLM's too: input embeddings first, then layer by layer. Items are separate, or in
            # one tensor: InternVL's tiles [tiles, tokens, hidden], and deep layers in transformers before 5.19.
            parts = [
                torch.cat([item.flatten(0, -2) for item in ([p] if isinstance(p, torch.Tensor) else p)])
                for p in (features_of_items.pooler_output, *deep)
            ]
            return torch.cat(parts, dim=-1)

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaSpan]) -> tuple[np.ndarray, int]:
        """Apply the model's own position rule; see `ctxwin.engines.hf.model.positions`."""
        return hf_model.positions(self.model, token_ids, media)
