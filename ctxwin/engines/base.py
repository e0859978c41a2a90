"""The engine contract.

An engine turns chunks into tokens and positions, computes the KV of one span after others, and answers a query after
a layout of spans. It keeps no window state: each call carries everything it needs. Engines are thread-safe.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Self, TypedDict, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ctxwin.engines.cost import CostModel
from ctxwin.errors import ChunkUnavailable, UnsupportedModel
from ctxwin.kv.states import has_maps

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ctxwin.chunk import Chunk
    from ctxwin.engines.encoding.templates import Template
    from ctxwin.kv.layout import KVSpec, SpanKV
    from ctxwin.kv.patch import Patch
    from ctxwin.store.base import Store
    from ctxwin.store.spans import SpanRepository


@dataclass(frozen=True)
class EngineSpec:
    """Model identity, cache layout and limits of an engine.

    Attributes:
        name: ``hf`` or ``vllm``.
        model: the path or hub name it was opened with.
        identity: digest of the model (config, weights, dtype, processor settings); part of every stored key.
        kv: layout of its KV cache.
        max_tokens: the longest prompt plus answer it accepts.
        vision: whether it accepts images.
        outputs: whether spans also hold a forward's other per-token tensors (`ctxwin.engines.outputs`).
        state_patches: whether patches of recurrent states can be served (`ctxwin.kv.states`), for a model that has them.
    """

    name: str
    model: str
    identity: str
    kv: KVSpec
    max_tokens: int
    vision: bool
    outputs: bool = False
    state_patches: bool = False


@dataclass(frozen=True)
class MediaSpan:
    """One image, video or sound inside an encoded chunk.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        key: store key of the vision embeddings (``embed/<digest>``).
        offset: index of its first placeholder token within the chunk; negative within a part that begins inside it.
        tokens: number of its tokens: placeholders, and words among them.
        grid_thw: patch grid before merging (t, h, w); t counts tiles where a picture is cut into them (InternVL).
            For sound (1, 1, frames of its spectrogram).
        seconds_per_grid: seconds per temporal grid step; None for images, and for videos whose times are text
            (Qwen3-VL: each temporal group is a span of its own).
        words: indices of its tokens, ascending from 0, that are words instead of placeholders: row breaks (Mistral 3), tile
            marks (SmolVLM), tokens of the sound of a video, or of a sound's video. The tower gives no embedding for them.
        whole: its placeholders also attend to later ones (Gemma 3), so all of them are computed in one forward.
        sound: whether it is a video with its sound, or the sound of one.
    """

    modality: str
    key: str
    offset: int
    tokens: int
    grid_thw: tuple[int, int, int]
    seconds_per_grid: float | None = None
    words: tuple[int, ...] = ()
    whole: bool = False
    sound: bool = False

    def placeholders(self, begin: int, end: int) -> tuple[list[int], slice]:
        """Return the placeholders among its tokens ``[begin, end)``, and the slice of their embedding rows."""
        words = set(self.words)
        places = [i for i in range(begin, end) if i not in words]
        first = begin - bisect_left(self.words, begin)
        return places, slice(first, first + len(places))


@dataclass(frozen=True)
class Encoded:
    """A chunk as one engine counts it.

    Attributes:
        chunk_id: content identity of what was encoded.
        token_ids: one id per KV slot (media placeholders expanded).
        positions: int64 ``[3, T]`` relative to the chunk's own origin.
        advance: the next chunk starts at this chunk's start + ``advance``, by the engine's own rule: max position + 1
            for text and images; after a video transformers continues from its height and width, vLLM from its end.
        media: the images, videos and sounds in it, in order.
    """

    chunk_id: str
    token_ids: tuple[int, ...]
    positions: np.ndarray = field(compare=False)  # follows from the ids and the media
    advance: int
    media: tuple[MediaSpan, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def media_ranges(self) -> tuple[tuple[int, int], ...]:
        """First token and number of tokens of each medium that may be cut, in order; a video with its sound is one."""
        ranges: list[tuple[int, int]] = []
        for offset, tokens in sorted((m.offset, m.tokens) for m in self.media if not m.whole):
            begin, count = ranges[-1] if ranges else (0, 0)
            if offset < begin + count:
                ranges[-1] = (begin, max(count, offset + tokens - begin))
            else:
                ranges.append((offset, tokens))
        return tuple(ranges)

    def part(self, begin: int, end: int) -> Encoded:
        """Return the tokens ``[begin, end)`` at their positions, with every medium that overlaps them, uncut.

        Only the last part has an ``advance``.
        """
        media = tuple(
            replace(m, offset=m.offset - begin) for m in self.media if m.offset < end and begin < m.offset + m.tokens
        )
        advance = self.advance if end == self.tokens else 0
        return Encoded(self.chunk_id, self.token_ids[begin:end], self.positions[:, begin:end], advance, media)


@dataclass(frozen=True)
class Segment:
    """One chunk at its place in a prompt, with the KV that serves it: the unit that a window passes to an engine.

    Attributes:
        encoded: its tokens.
        start: position of its origin.
        span: its KV in any frame, relocated by the engine to ``start``; None: the engine computes it in place.
        capture: whether the engine returns the KV it computed (only meaningful where ``span`` is None).
        span_key: stable name of ``span``, or of the KV that is computed in its place; "" where it has none.
        patch: reconditions ``span`` as it is moved to ``start``; None: the span is served as it is.
        patch_key: stable name of ``patch``.
        approximate: whether its KV differs from that of a forward after the preceding segments as they are served.
            Segments before the first approximate one may share an engine's prefix cache with plain requests, whatever the
            call's salt.
        recompute: token ranges, ascending and disjoint, that are computed in place although there is a ``span``; the span
            serves the other tokens (MPIC, section 4.1). ``capture`` then returns all of it as served. Excludes a patch.
        merged: whether ``span`` has fewer slots than there are tokens (`ctxwin.kv.merge`); the next segment keeps its
            position. Implies ``approximate``; excludes a patch and ``recompute``.
    """

    encoded: Encoded
    start: int
    span: SpanKV | None = None
    capture: bool = False
    span_key: str = ""
    patch: Patch | None = None
    patch_key: str = ""
    approximate: bool = False
    recompute: tuple[tuple[int, int], ...] = ()
    merged: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.encoded.tokens

    @property
    def slots(self) -> int:
        """Number of slots its KV takes."""
        return self.span.tokens if self.merged and self.span is not None else self.encoded.tokens

    @property
    def places(self) -> np.ndarray:
        """Positions of its slots relative to its origin: int64 ``[3, slots]``."""
        return self.encoded.positions[:, : self.slots]

    @property
    def key(self) -> str:
        """Stable name of the KV as served; "" where a part of it has none."""
        if self.patch is None:
            return self.span_key
        return f"{self.span_key}+{self.patch_key}" if self.span_key and self.patch_key else ""

    def parts(self) -> list[Segment]:
        """Split the segment where it changes between computing and loading; a list of itself where it does not.

        Positions continue through the parts.

        Raises:
            ValueError: ranges outside its tokens, or through a medium that is computed as a whole.
        """
        if not self.recompute or self.span is None:
            return [self]
        cuts = [0, *(at for pair in self.recompute for at in pair), self.tokens]
        if cuts != sorted(cuts) or self.patch is not None:
            raise ValueError(
                f"recompute must be ascending ranges within {self.tokens} tokens, over a span without a patch, got "
                f"{self.recompute}"
            )
        whole = [m for m in self.encoded.media if m.whole]
        if any(m.offset < at < m.offset + m.tokens for m in whole for at in cuts):
            raise ValueError(
                f"recompute must not cut a picture whose tokens see those behind them, got {self.recompute}"
            )
        parts = []
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if begin < end:
                key = f"{self.span_key}[{begin}:{end}]" if self.span_key else ""
                span = None if i % 2 else self.span.slice(begin, end)
                capture = self.capture and span is None
                part = replace(self, encoded=self.encoded.part(begin, end), span=span, span_key=key, recompute=())
                parts.append(replace(part, capture=capture))
        return parts


def partial_ranges(media: Iterable[tuple[int, int]], count: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of a chunk that MPIC-k computes: all text, and the first ``count`` tokens of each medium.

    A medium that may not be cut is left out of ``media`` and computed like text. Ranges are ascending and disjoint.

    MPIC, section 4.2; EPIC (arXiv 2410.15332) computes the first tokens of each chunk.

    Args:
        media: first token and number of tokens of each medium, ascending.
        tokens: length of the chunk.
    """
    ranges: list[tuple[int, int]] = []
    begin = 0
    for offset, length in (*media, (tokens, 0)):
        end = offset + min(count, length)
        if ranges and ranges[-1][1] == begin < end:
            ranges[-1] = (ranges[-1][0], end)
        elif begin < end:
            ranges.append((begin, end))
        begin = offset + length
    return tuple(ranges)


SEED = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A seed that torch's generators accept."""


class SamplingOptions(TypedDict, total=False):
    """Options of sampling, by the names that OpenAI and vLLM give them, with their ranges; None leaves the default of `Sampling`.

    Defined here alone: `Window.ask` and its kin, chat models, the client, HTTP and vLLM's parameters follow.

    Attributes:
        temperature: 0, the default of windows, always takes the likeliest token; chats have OpenAI's, 1.
        top_p: sample only from the most likely tokens that together have this probability.
        top_k: sample only from so many of the most likely tokens; 0 or -1 is all.
        min_p: sample only from tokens at least this fraction as likely as the most likely one.
        presence_penalty: subtracted from the logits of tokens that the answer already has.
        frequency_penalty: subtracted once for each occurrence.
        repetition_penalty: divides the positive logits of tokens in the prompt or answer, multiplies negative ones.
        seed: makes sampling repeatable.
    """

    temperature: Annotated[float | None, Field(ge=0, le=2)]
    top_p: Annotated[float | None, Field(gt=0, le=1)]
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)]
    min_p: Annotated[float | None, Field(ge=0, le=1)]
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)]
    repetition_penalty: Annotated[float | None, Field(gt=0, allow_inf_nan=False)]
    seed: SEED | None


def options_model(options: type, name: str = "Options") -> type[BaseModel]:
    """Return a pydantic model with the fields of a typed dictionary, each None by default; it refuses any other field."""
    hints = get_type_hints(options, include_extras=True)
    fields: dict[str, Any] = {field: (hint, None) for field, hint in hints.items()}
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


@dataclass(frozen=True)
class Sampling:
    """How to decode: values of `SamplingOptions`, which describes them, and what else an engine can be told.

    Attributes:
        max_tokens: most tokens to generate (>= 1).
        logprobs: how many first-token log-probabilities to return: 0 none, -1 the whole vocabulary.
        stop_ids: further token ids that end the answer, beside the model's own.
        token_logprobs: generated ids are `ScoredToken` with this many of the most likely tokens; None: plain ints.
        hold: largest share of the tokens whose slots are kept, in (0, 1]: beyond it each generated token drops the one 25
            before the newest, never one of the system prompt (Elastic Cache's fixed-point elimination, algorithm 1).
        json_schema: the answer is JSON of this schema (JSON text); None: any text.

    An engine raises UnsupportedModel for a setting that it does not support.
    """

    max_tokens: int = 32
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int = 0
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    token_logprobs: int | None = None
    hold: float = 1.0
    json_schema: str | None = None


_RANGES = options_model(SamplingOptions)


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for settings that are out of range on every engine."""
    if not isinstance(sampling.max_tokens, int) or sampling.max_tokens < 1:
        raise ValueError(f"max_tokens must be an int >= 1, got {sampling.max_tokens!r}")
    if not isinstance(sampling.logprobs, int) or sampling.logprobs < -1:
        raise ValueError(f"logprobs must be an int >= -1 (-1: the whole vocabulary), got {sampling.logprobs!r}")
    if not 0 < sampling.hold <= 1:
        raise ValueError(f"hold must be in (0, 1], got {sampling.hold}")
    try:
        _RANGES.model_validate({name: getattr(sampling, name) for name in _RANGES.model_fields}, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        complaint = first["msg"].replace("Input should be", "must be")
        raise ValueError(f"{first['loc'][0]} {complaint}, got {first['input']!r}") from None


BEST = 32
"""Number of the highest log-probabilities that `Engine.forced_logprobs` returns at each position."""


def check_states(model: str, segments: Sequence[Segment], patches: bool = False) -> None:
    """Check that the states of a hybrid's spans belong to the segments that precede them.

    Args:
        model: name for the error message.
        patches: whether the engine serves patches of states.

    Raises:
        UnsupportedModel: a span was computed after other segments, so its states are not those of this prompt.
        ValueError: a span without states.
    """
    for segment in segments:
        patched = segment.patch is not None and not (patches and segment.patch.states and segment.approximate)
        changed = patched or segment.merged or segment.recompute
        if segment.span is not None and (changed or (segment.approximate and not has_maps(segment.span.states))):
            raise UnsupportedModel(
                f"{model} has recurrent layers, whose states depend on every preceding token: its KV is served "
                "after exactly the same tokens; use Fidelity('exact')"
            )
        if segment.span is not None and segment.span.tokens and not segment.span.states:
            raise ValueError(
                f"the span of chunk {segment.encoded.chunk_id[:12]} must hold the states after it, got none"
            )


class ScoredToken(int):
    """A generated token id with the model's log-probabilities, before temperature and filters.

    Attributes:
        index: its position in the answer.
        logprob: its log-probability, in nats.
        best: log-probabilities of the most likely tokens by id, the highest first.
    """

    index: int
    logprob: float
    best: dict[int, float]

    def __new__(cls, token: int, index: int, logprob: float, best: dict[int, float]) -> Self:
        scored = super().__new__(cls, token)
        scored.index, scored.logprob, scored.best = index, logprob, best
        return scored


@dataclass
class Generation:
    """Answer of one `Engine.generate`, the KV it captured and its cost.

    Attributes:
        token_ids: generated ids, the ending token excluded.
        text: their text.
        logprobs: first-token log-probabilities by token id, as many as asked for.
        captured: KV by index into the layout, for segments with ``capture`` that were computed at least in part; in the
            frame they were computed in.
        query_span: KV of query + generated tokens (all but the last sampled one), where ``capture_query`` was set.
        computed_tokens: prompt tokens that went through a forward, over all forwards of this call.
        cached_tokens: prompt tokens the engine's own prefix cache served.
        forwards: number of prefill forwards.
        bytes_loaded: bytes of KV written into the engine's cache from spans.
        fallbacks: failed loads; everything, ``captured`` included, was then computed in place, exactly.
        ttft_s: seconds from the call to the first token.
        finished: False where ``on_token`` stopped the answer.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: dict[int, float] = field(default_factory=dict)
    captured: dict[int, SpanKV] = field(default_factory=dict)
    query_span: SpanKV | None = None
    computed_tokens: int = 0
    cached_tokens: int = 0
    forwards: int = 0
    bytes_loaded: int = 0
    fallbacks: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    finished: bool = True


@dataclass
class Tally:
    """Accumulated cost of `Engine.prefill` calls.

    Attributes:
        forwards: prefill forwards.
        tokens: prompt tokens that went through one.
        fallbacks: calls whose spans could not be loaded; everything was then computed in place, exactly.
    """

    forwards: int = 0
    tokens: int = 0
    fallbacks: int = 0


@dataclass(frozen=True)
class Call:
    """A planned call of `Engine.prefill` or `Engine.generate`.

    Attributes:
        layout: its segments, the target of a prefill last; tensors of stored spans may be empty.
        salt: the call's salt.
        placeholder: stands in for KV that an earlier request of the call will have computed.
        has_query: whether a query follows the layout.
        query: that query, where it is known.
    """

    layout: Sequence[Segment]
    salt: str = ""
    placeholder: SpanKV | None = None
    has_query: bool = False
    query: Encoded | None = None


@dataclass(frozen=True)
class AttendedKV:
    """KV of a chunk, and the attention between its tokens.

    Attributes:
        span: as `Engine.prefill` returns it.
        sums: attention that each token receives from the chunk's tokens, summed over them and averaged over heads, by
            layer: float32 ``[L, T]`` (Elastic Cache, section 3.3).
    """

    span: SpanKV
    sums: torch.Tensor


@dataclass
class EngineCounters:
    """Work done since the engine was opened, including background forwards.

    Attributes:
        vision_encodes: runs of the vision tower.
        fallbacks: requests whose spans could not be loaded and were computed instead.
        retries: failed loads, whether tried again or abandoned.
        bytes_loaded: bytes of KV written into the engine's cache from spans.
    """

    vision_encodes: int = 0
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    fallbacks: int = 0
    retries: int = 0
    bytes_loaded: int = 0


class Engine(ABC):
    """Interface of a backend. One conformance suite (`tests/engines/conformance.py`) runs on every engine."""

    spec: EngineSpec
    store: Store
    repo: SpanRepository  # typed access to `store`; windows keep their spans and patches there too
    counters: EngineCounters
    auditing: Callable[..., Any] | None = None
    """Opens the audits of a window (`ctxwin.window.protocols.Auditing`); None: its answers are not audited."""
    forecasts = (
        False  # True where a request may compute other tokens than those without KV; `forecast` then counts them
    )

    @cached_property
    def costs(self) -> CostModel:
        """Cost model fitted to this engine's calls. Each tenant's view has its own, so that none sees another's times."""
        return CostModel()

    @abstractmethod
    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        """Encode the system turn and the opening of the user turn: always the first segment, at position 0."""

    @abstractmethod
    def encode(self, chunk: Chunk) -> Encoded:
        """Encode a chunk inside the open user turn: its tokens, media and local positions.

        Vision embeddings are looked up in `store`, and computed and stored where missing: the vision tower runs at most
        once for the same media, also across restarts.

        Raises:
            BadMedia, ChunkUnavailable, UnsupportedModel: the chunk cannot be encoded.
        """

    def media_keys(self, chunk: Chunk) -> set[str]:
        """Return the store keys of every record that encoding the media of ``chunk`` leaves in `store`.

        Includes at least the keys of records that exist. An engine that must encode to know them returns none where both
        pixels and embeddings are gone.
        """
        try:
            return {m.key for m in self.encode(chunk).media}
        except ChunkUnavailable:
            return set()

    @abstractmethod
    def encode_query(self, query: str) -> Encoded:
        """Encode a query, the closing of the user turn and the opening of the assistant's."""

    @abstractmethod
    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        """Encode a remembered exchange: query, turn closing, answer, reopened user turn (or ``after``, template text).

        Its first tokens are exactly ``encode_query(query)`` followed by ``answer_ids``.
        """

    @property
    def template(self) -> Template | None:
        """The model's chat template in pieces; None where the engine has none, which leaves chats without tools."""
        return None

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise content: special tokens spelled out in it stay text."""
        from ctxwin.chunk import Chunk

        return self.encode(Chunk.text(text)).token_ids if text else ()

    def template_ids(self, text: str) -> tuple[int, ...]:
        """Tokenise a piece of `template`, in which special tokens are recognised."""
        return self.text_ids(text)

    @abstractmethod
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
        """Compute the KV of ``target`` after ``context`` (segments in order, loaded or computed in place).

        Exact to the engine's arithmetic, in the frame ``start``, counted in `counters`.

        Args:
            salt: as in `generate`.
            background: nobody waits for the call; an engine that batches serves others first.
            tally: the cost of the call is added to it.
            stopped: polled; once it is true the call ends, leaves nothing, and raises AnswerStopped.
        """

    @abstractmethod
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
        """Answer ``query`` after ``layout``.

        Segments with a span are relocated and loaded, segments without one are computed in place, in order.

        Args:
            salt: separates prefix-cache entries of approximate windows; "" is the exact, shared namespace.
            capture_query: return the KV of query and answer in ``query_span``.
            on_token: called with ``(id, text_so_far)`` after each token; returning False ends the answer.
            background: as in `prefill`.

        Raises:
            EngineFailed: the model could not be run.
        """

    def forced_logprobs(
        self,
        layout: Sequence[Segment],
        answers: Sequence[tuple[Encoded, Sequence[int]]],
        *,
        best: int = BEST,
        stopped: Callable[[], bool] = lambda: False,
        tally: Tally | None = None,
    ) -> list[list[dict[int, float]]]:
        """Score given answers after a layout: the model's distribution at each token of an answer, and after its last.

        Background work, for audits. It shares no prefix-cache entries with other requests.

        Args:
            answers: queries, each with the tokens of its answer without the ending one; may be empty.
            best: how many log-probabilities to return at each position.
            stopped: polled; once it is true the work ends and AnswerStopped is raised.
            tally: the cost of the call is added to it.

        Returns:
            For each answer of n tokens n + 1 rows: log-probabilities by token id, in nats, of the ``best`` tokens and, where
            one follows, of the answer's own. Row i is the distribution that its token i is drawn from.

        Raises:
            EngineFailed: also where a span could not be loaded, because another prompt would be scored.
            UnsupportedModel: an engine that cannot score answers.

        Cost: one forward over segments without KV, and one over each query and answer; no decoding.
        """
        raise UnsupportedModel(f"the {self.spec.name} engine cannot score a given answer, so it cannot be audited")

    def forecast(self, calls: Sequence[Call]) -> list[int] | None:
        """Count the tokens that each request of these calls, in order, would run through a forward.

        An unknown query counts as empty. None: exactly the tokens without KV are computed. Runs no forward and reads no KV.
        """
        return None

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: Tally | None = None
    ) -> AttendedKV:
        """Run `prefill` in the background and return its attention too, from which mergeable slots are chosen.

        Raises:
            EngineFailed: the model could not be run.
            UnsupportedModel: an engine that does not expose its attention.

        Cost: a forward over ``target`` that also computes its attention weights, in blocks.
        """
        raise UnsupportedModel(f"the {self.spec.name} engine does not expose its attention, so it cannot merge chunks")

    @property
    def drops_tokens(self) -> bool:
        """True if it can drop tokens while it answers (`Sampling.hold` below 1)."""
        return False

    @property
    def busy(self) -> bool:
        """True while a caller waits for this engine; background work then yields."""
        return False

    @property
    def idle_s(self) -> float:
        """Seconds since a caller last waited for it."""
        return 0.0 if self.busy else math.inf

    @property
    def shared(self) -> object:
        """Object common to the engines that share a running model; the engine itself where it shares none."""
        return self

    @property
    def tenant(self) -> str:
        """Tenant of this engine where several share a model; "" for none."""
        return ""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    @abstractmethod
    def embed(self, key: str) -> torch.Tensor:
        """Return stored vision embeddings ``[tokens, hidden * (1 + D)]``; raise ChunkUnavailable where they are gone.

        D is the number of decoder layers after which a model adds vision features (Qwen3-VL); 0 for others.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the engine and everything it started. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
