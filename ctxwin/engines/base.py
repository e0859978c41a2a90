"""The engine contract.

An engine turns chunks into tokens and positions, computes the KV of one span behind others, and answers a query behind
a layout of spans. It keeps no window state: a call holds all that it needs. Engines are thread-safe.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from ctxwin.engines.cost import CostModel
from ctxwin.errors import UnsupportedModel
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
    """What an engine runs.

    Attributes:
        name: ``hf`` or ``vllm``.
        model: the path or hub name it was opened with.
        identity: digest of the model (config, weights, dtype, processor settings); part of every stored key.
        kv: layout of its KV cache.
        max_tokens: the longest prompt plus answer it takes.
        vision: whether it sees images.
        outputs: whether spans hold what else a forward gives for each token (`ctxwin.engines.outputs`).
        state_patches: of a model with recurrent layers, whether patches of their states can be served (`ctxwin.kv.states`).
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
        offset: index of its first placeholder token within the chunk; negative within a part that begins in its midst.
        tokens: number of its tokens: placeholders, and words among them.
        grid_thw: patch grid before merging (t, h, w); t counts tiles where a picture is cut into them (InternVL).
            Of sound (1, 1, frames of its spectrogram).
        seconds_per_grid: seconds per temporal grid step; None for images, and for videos whose times are text
            (Qwen3-VL: each temporal group is a span of its own).
        words: which of its tokens, ascending from 0, are no placeholders but words: row breaks (Mistral 3), marks of tiles
            (SmolVLM), what belongs to the sound of a video, or to a sound's video. They have no embedding of the tower's.
        whole: its placeholders see those behind them as well (Gemma 3), so that all of them are computed in one forward.
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

    def seen(self, begin: int, end: int) -> tuple[list[int], slice]:
        """The placeholders among its tokens ``[begin, end)``, and the rows of the embeddings that are theirs."""
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
            for text and images; behind a video transformers continues from its height and width, vLLM from its end.
        media: the images, videos and sounds in it, in order.
    """

    chunk_id: str
    token_ids: tuple[int, ...]
    positions: np.ndarray = field(compare=False)  # follows from the ids and the media
    advance: int
    media: tuple[MediaSpan, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.token_ids)

    @property
    def media_ranges(self) -> tuple[tuple[int, int], ...]:
        """First token and number of tokens of each medium that may be cut, in order; a video with its sound is one."""
        made: list[tuple[int, int]] = []
        for offset, tokens in sorted((m.offset, m.tokens) for m in self.media if not m.whole):
            begin, count = made[-1] if made else (0, 0)
            if offset < begin + count:
                made[-1] = (begin, max(count, offset + tokens - begin))
            else:
                made.append((offset, tokens))
        return tuple(made)

    def part(self, begin: int, end: int) -> Encoded:
        """The tokens ``[begin, end)``, which keep their positions; with all media that reach into it, as they are.

        Only the last part moves what follows on.
        """
        media = tuple(
            replace(m, offset=m.offset - begin) for m in self.media if m.offset < end and begin < m.offset + m.tokens
        )
        advance = self.advance if end == self.tokens else 0
        return Encoded(self.chunk_id, self.token_ids[begin:end], self.positions[:, begin:end], advance, media)


@dataclass(frozen=True)
class Segment:
    """One chunk at its place in a prompt, with the KV that serves it: what travels from a window to the paged blocks.

    Attributes:
        encoded: its tokens.
        start: position of its origin.
        span: its KV in any frame, relocated by the engine to ``start``; None: the engine computes it in place.
        capture: whether the engine returns the KV it computed (only meaningful where ``span`` is None).
        span_key: stable name of ``span``, or of the KV that is computed in its place; "" where it has none.
        patch: reconditions ``span`` on its way to ``start``; None: the span is served as it is.
        patch_key: stable name of ``patch``.
        approximate: whether its KV differs from what a forward behind the segments in front, as they are served, would
            give. Whatever the call's salt, what stands in front of the first such segment may share an engine's prefix
            cache with plain requests.
        recompute: ranges of tokens, ascending and apart, that are computed in place although there is a ``span``, which
            gives the others (MPIC, section 4.1); then ``capture`` returns all of it as served. Not with a patch.
        merged: whether ``span`` has fewer slots than there are tokens (`ctxwin.kv.merge`): what follows on stands where it
            would behind all of them. Then ``approximate`` is, too; neither a patch nor ``recompute``.
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
        """How many tokens it has."""
        return self.encoded.tokens

    @property
    def slots(self) -> int:
        """How many slots its KV takes."""
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
        """The segment cut where it changes between computing and loading; itself where it does not.

        A chunk's own position counts on through its parts. Raises ValueError for ranges that are not within its tokens, or
        cut a medium that is computed as a whole.
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
        made = []
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if begin < end:
                named = f"{self.span_key}[{begin}:{end}]" if self.span_key else ""
                span = None if i % 2 else self.span.slice(begin, end)
                capture = self.capture and span is None
                part = replace(self, encoded=self.encoded.part(begin, end), span=span, span_key=named, recompute=())
                made.append(replace(part, capture=capture))
        return made


def partial_ranges(media: Iterable[tuple[int, int]], count: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """The token ranges of a chunk that MPIC-k computes: all text, and the first ``count`` tokens of each medium.

    What is no medium here, as one that may not be cut, is computed like text.

    MPIC, section 4.2; EPIC (arXiv 2410.15332) computes the first tokens of each chunk. Ranges are ascending and apart.

    Args:
        media: first token and number of tokens of each medium, ascending.
        tokens: of the chunk.
    """
    made: list[tuple[int, int]] = []
    begin = 0
    for offset, length in (*media, (tokens, 0)):
        end = offset + min(count, length)
        if made and made[-1][1] == begin < end:
            made[-1] = (made[-1][0], end)
        elif begin < end:
            made.append((begin, end))
        begin = offset + length
    return tuple(made)


@dataclass(frozen=True)
class Sampling:
    """How to decode. ``temperature`` 0 is greedy.

    Attributes:
        max_tokens: most tokens to generate (>= 1).
        logprobs: how many first-token log-probabilities to return: 0 none, -1 the whole vocabulary.
        stop_ids: further token ids that end the answer, beside the model's own.
        top_p: only the most likely tokens that together have this probability, in (0, 1].
        top_k: only so many of the most likely tokens; 0 is all.
        min_p: only tokens at least this fraction as likely as the most likely one, in [0, 1].
        presence_penalty: taken off the logits of tokens that the answer has already; frequency_penalty: times how often.
        repetition_penalty: divides the positive logits of tokens that prompt or answer have, multiplies negative ones.
        token_logprobs: generated ids are `ScoredToken` with so many of the best beside them; None: plain ints.
        hold: most slots that are held of so many tokens, in (0, 1]: beyond that each generated token drops the one 25 behind
            the newest, never the system prompt's (Elastic Cache's fixed-point elimination, algorithm 1).
        json_schema: the answer is JSON of this schema (JSON text); None: any text.

    An engine refuses what it cannot do with UnsupportedModel.
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


BEST = 32
"""How many of the best log-probabilities `Engine.forced_logprobs` returns at each place."""


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError for a sampling that no engine can do."""
    if not 0 < sampling.hold <= 1:
        raise ValueError(f"hold must be in (0, 1], got {sampling.hold}")
    if sampling.max_tokens < 1 or sampling.temperature < 0:
        raise ValueError(
            f"max_tokens must be >= 1 and temperature >= 0, got {sampling.max_tokens} and {sampling.temperature}"
        )


def check_states(model: str, segments: Sequence[Segment], patches: bool = False) -> None:
    """Raises UnsupportedModel for KV of a hybrid that was computed behind others: its states would be of what does not stand
    there. ValueError for a span without any. ``patches``: whether the engine serves patches of states."""
    for segment in segments:
        patched = segment.patch is not None and not (patches and segment.patch.states and segment.approximate)
        changed = patched or segment.merged or segment.recompute
        if segment.span is not None and (changed or (segment.approximate and not has_maps(segment.span.states))):
            raise UnsupportedModel(
                f"{model} has recurrent layers, whose states are of all that stood in front: its KV is served "
                "behind exactly that; use Fidelity('exact')"
            )
        if segment.span is not None and segment.span.tokens and not segment.span.states:
            raise ValueError(
                f"the span of chunk {segment.encoded.chunk_id[:12]} must hold the states behind it, got none"
            )


class ScoredToken(int):
    """A generated token id that knows its log-probabilities: those of the model, whatever was sampled from them.

    Attributes:
        index: its place in the answer.
        logprob: its own, in nats.
        best: the most likely tokens' by id, the best first.
    """

    index: int
    logprob: float
    best: dict[int, float]

    def __new__(cls, token: int, index: int, logprob: float, best: dict[int, float]) -> Self:
        made = super().__new__(cls, token)
        made.index, made.logprob, made.best = index, logprob, best
        return made


@dataclass
class Generation:
    """What one `Engine.generate` returned.

    Attributes:
        token_ids: generated ids, the ending token excluded.
        text: their text.
        logprobs: first-token log-probabilities by token id, as many as asked for.
        captured: KV by index into the layout, for segments with ``capture`` of which something is computed; in the frame
            they were computed in.
        query_span: KV of query + generated tokens (all but the last sampled one), where ``capture_query`` was set.
        computed_tokens: prompt tokens that went through a forward (all forwards of this call together).
        cached_tokens: prompt tokens the engine's own prefix cache served.
        forwards: number of prefill forwards.
        bytes_loaded: bytes of KV written into the engine's cache from spans.
        fallbacks: loads that failed, so that everything was computed in place, exactly, ``captured`` included.
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
    """What calls of `Engine.prefill` cost, added up by the engine.

    Attributes:
        forwards: prefill forwards.
        tokens: prompt tokens that went through one.
        fallbacks: calls whose spans could not be loaded: everything was computed in place, exactly.
    """

    forwards: int = 0
    tokens: int = 0
    fallbacks: int = 0


@dataclass(frozen=True)
class AttendedKV:
    """KV of a chunk, and the attention that its tokens gave each other.

    Attributes:
        span: as `Engine.prefill` returns it.
        sums: attention that each token got from the chunk's tokens, by layer, summed over them and averaged over heads:
            float32 ``[L, T]`` (Elastic Cache, section 3.3).
    """

    span: SpanKV
    sums: torch.Tensor


@dataclass
class EngineCounters:
    """Work done since the engine was opened; every forward of ctxwin's counts, background ones too.

    Attributes:
        vision_encodes: runs of the vision tower.
        fallbacks: requests whose spans could not be loaded and were computed instead.
        retries: loads that failed and were tried again, or given up.
        bytes_loaded: bytes of KV written into the engine's cache from spans.
    """

    vision_encodes: int = 0
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    fallbacks: int = 0
    retries: int = 0
    bytes_loaded: int = 0


class Engine(ABC):
    """What a backend implements. One conformance suite (`tests/engines/conformance.py`) runs on every engine."""

    spec: EngineSpec
    store: Store
    repo: SpanRepository  # typed access to `store`; the window keeps its spans and patches there too
    counters: EngineCounters

    @cached_property
    def costs(self) -> CostModel:
        """What calls of this engine took so far; tenants' views have one each, so that none reads another's times."""
        return CostModel()

    @abstractmethod
    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        """Tokens of the system turn and the opening of the user turn; always the first segment, at position 0."""

    @abstractmethod
    def encode(self, chunk: Chunk) -> Encoded:
        """Tokens, media and local positions of a chunk inside the open user turn.

        Vision embeddings are looked up in `store` and computed (and stored) where missing: the vision tower runs at
        most once for the same media, also across restarts. Raises BadMedia, ChunkUnavailable, UnsupportedModel.
        """

    @abstractmethod
    def encode_query(self, query: str) -> Encoded:
        """Tokens of a query plus the closing of the user turn and the opening of the assistant's."""

    @abstractmethod
    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        """Tokens of a remembered exchange: query, turn closing, answer, reopened user turn (or ``after``, of the template).

        Its first tokens are exactly ``encode_query(query)`` followed by ``answer_ids``.
        """

    @property
    def template(self) -> Template | None:
        """The model's chat template in pieces; None where the engine shows none, and chats have no tools then."""
        return None

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of content: special tokens spelled out in it stay text."""
        from ctxwin.chunk import Chunk

        return self.encode(Chunk.text(text)).token_ids if text else ()

    def template_ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece of `template`, in which special tokens count."""
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
    ) -> SpanKV:
        """KV of ``target`` computed behind ``context`` (segments in order, all with spans or computed in place).

        Exact to the engine's arithmetic. Returned in the frame ``start``. Counted in `counters`. ``salt`` as in
        `generate`. ``background`` is work that nobody waits for; an engine that batches serves others first. What the call
        cost is added to ``tally``.
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
        """Answers ``query`` behind ``layout``.

        Segments with a span are relocated and loaded, segments without are computed in place, in order. ``salt`` separates
        prefix-cache entries of approximate windows ("" is the exact, shared space). ``on_token(id, text_so_far)`` is
        called after each token; returning False stops. ``background`` as in `prefill`. Raises EngineFailed.
        """

    def forced_logprobs(
        self,
        layout: Sequence[Segment],
        asked: Sequence[tuple[Encoded, Sequence[int]]],
        *,
        best: int = BEST,
        stopped: Callable[[], bool] = lambda: False,
        tally: Tally | None = None,
    ) -> list[list[dict[int, float]]]:
        """What the model expects at each place of given answers behind a layout, and right behind each answer.

        Work in the background, for audits; nothing of it is found by other requests, or is looked up in what they left.

        Args:
            asked: queries, each with the tokens of its answer: the ending one left out; may be none.
            best: how many log-probabilities to return at each place.
            stopped: polled; once it is true the work ends and AnswerStopped is raised.
            tally: what the call cost is added to it.

        Returns:
            For each answer of n tokens n + 1 rows: log-probabilities by token id, in nats, of the ``best`` tokens and, where
            one follows, of the answer's own. Row i is the distribution that its token i is drawn from.

        Raises:
            EngineFailed: also where a span could not be loaded: then something else would be measured.
            UnsupportedModel: an engine that cannot do it.

        Cost: a forward over what is missing, once, and over each query and answer; no decoding.
        """
        raise UnsupportedModel(f"the {self.spec.name} engine cannot score a given answer, so it cannot be audited")

    def attended(
        self, context: Sequence[Segment], target: Encoded, start: int, *, tally: Tally | None = None
    ) -> AttendedKV:
        """`prefill` in the background, and what says which slots may be merged: see `AttendedKV`.

        Raises EngineFailed, UnsupportedModel: an engine that does not show its attention. Cost: a forward over ``target`` that
        also makes its attention weights, in blocks.
        """
        raise UnsupportedModel(f"the {self.spec.name} engine does not show its attention, so it cannot merge chunks")

    @property
    def busy(self) -> bool:
        """Whether somebody waits for this engine: work in the background then gives way."""
        return False

    @property
    def idle_s(self) -> float:
        """Seconds since somebody waited for it last."""
        return 0.0 if self.busy else math.inf

    @property
    def shared(self) -> object:
        """What engines that share a running model have in common: itself, for one that shares nothing."""
        return self

    @property
    def tenant(self) -> str:
        """Whose engine this is, where several share a model; "" for nobody's in particular."""
        return ""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""

    @abstractmethod
    def embed(self, key: str) -> torch.Tensor:
        """Stored vision embeddings ``[tokens, hidden * (1 + D)]``; raises ChunkUnavailable.

        D is the number of decoder layers behind which a model adds vision features (Qwen3-VL); 0 for others.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and what it started; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
