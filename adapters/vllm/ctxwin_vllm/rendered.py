"""Prompts that vLLM's own server has rendered, served with spans: the ids, the pictures and the sampling stay vLLM's.

`RenderedRequest` answers for one such prompt. Its requests carry the pictures as vLLM's renderer gave them, under the names by
which vLLM itself caches them: a load that fails leaves a request that vLLM can compute.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3  # five times as fast as SHA-256

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.cost import CostModel, Stopwatch, Workload
from ctxwin.engines.encoding.segmentation import SEEN, split
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, MediaSpan, Segment
from ctxwin.errors import AnswerStopped
from ctxwin.hashing import digest
from ctxwin.kv.layout import SpanKV
from ctxwin.store.lru import LRUCache
from ctxwin_vllm.asks import Ask
from ctxwin_vllm.cache_namespace import CacheNamespace, namespace_of
from ctxwin_vllm.engine import VLLMEngine
from ctxwin_vllm.requests import LoadError

if TYPE_CHECKING:
    import torch

    from ctxwin_vllm.transport import Transfer

MOST_SEGMENTS = 512
MOST_AT_ONCE = 512
"""Most tokens that vLLM computes of an exact chat while its window is updated. Where its cache lacks more, the store may hold
them, from another server say, and the update is a small share of their time."""
STEP_MS = 4.0
"""Milliseconds of the step in which vLLM's processes load KV in the background, apart from the load itself."""
_PICTURE_BYTES = 512
_TOKEN_BYTES = 64
"""Of a `CutPrompt`, by estimate: an id and its three positions."""


class NotAWindow(ValueError):
    """A prompt that is left to vLLM alone; the message says why."""


class Picture:
    """A picture as vLLM's renderer prepared it, and its patch grid. Thread-safe."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        grid = item.get("image_grid_thw")
        t, h, w = (1, 1, 1) if grid is None else (int(size) for size in grid.data.reshape(-1).tolist())
        self.grid: tuple[int, int, int] = (t, h, w)  # positions of a model without a grid do not depend on it
        self._item: Mapping[str, Any] | None = item
        self._content = ""
        self._lock = threading.Lock()

    def content(self) -> str:
        """Return a digest of the model's inputs; vLLM's name may be the client's choice. Cost: one hash, once."""
        with self._lock:
            if self._item is not None:
                tensors = [(name, element.data) for name, element in sorted(self._item.items())]
                self._content, self._item = digest("picture", [[name, _sum(data)] for name, data in tensors]), None
            return self._content


def _sum(data: Any) -> Any:
    import torch

    if isinstance(data, list | tuple):
        return [_sum(part) for part in data]
    if not isinstance(data, torch.Tensor):
        return repr(data)
    raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return [str(data.dtype), list(data.shape), blake3(raw).hexdigest()]


@dataclass(frozen=True)
class Medium:
    """One picture of a rendered prompt: where its placeholders stand, and vLLM's name and data of it."""

    offset: int
    tokens: int
    name: str
    data: Any
    place: Any
    picture: Picture


@dataclass(frozen=True)
class RenderedPrompt:
    """A request's prompt as vLLM's renderer made it.

    Attributes:
        engine_input: as vLLM's server hands it to its engine.
        salt: the ``cache_salt`` in it; "" is none.
    """

    engine_input: Mapping[str, Any] = field(repr=False)
    ids: tuple[int, ...]
    media: tuple[Medium, ...]
    salt: str
    _names: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)  # hashed once

    @cached_property
    def spans(self) -> list[MediaSpan]:
        """Its pictures."""
        return [MediaSpan("image", m.name, m.offset, m.tokens, m.picture.grid) for m in self.media]

    def block_names(self, engine: VLLMEngine) -> list[bytes]:
        """Return the names of its blocks in the record of vLLM's prefix cache; none without one."""
        if engine.core.has_prefix_cache and not self._names:
            self._names.extend(engine.prompts.salted_names(self.ids, self.spans, self.salt))
        return self._names

    def hash_pictures(self) -> None:
        """Hash its pictures, which releases their data."""
        for medium in self.media:
            medium.picture.content()

    def reserve(self, engine: VLLMEngine) -> str:
        """Return a handle of a transfer for it where vLLM's prefix cache holds all that was computed here of a conversation, and
        what is new is short, so that nothing is to be loaded; else ""."""
        cache, names = engine.core.prefixes, self.block_names(engine)
        if engine.spec.kv.recurrent or not cache.continues(names) or len(self.ids) - cache.hit(names) > MOST_AT_ONCE:
            return ""
        return engine.core.transport.reserve()

    def prefix(self, tokens: int) -> dict[str, Any]:
        """Return the engine input of its first tokens; a picture that they end in is part of it as a whole."""
        media = [(medium, medium.offset) for medium in self.media if medium.offset < tokens]
        return build_input(self.ids[:tokens], media, self.salt)

    def boundary(self, tokens: int, *, whole_media: bool) -> int:
        """Return where to end a prefix of so many tokens, or more; ``whole_media``: in none, nor between one and its marks."""
        media = self.media if whole_media else ()
        return next((m.offset + m.tokens + 1 for m in media if m.offset <= tokens <= m.offset + m.tokens), tokens)


def build_input(ids: Sequence[int], media: Sequence[tuple[Medium, int]], salt: str) -> dict[str, Any]:
    """Return an engine input as vLLM's renderer makes it, of pictures that begin at these offsets."""
    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    if not media:
        return dict(tokens_input(list(ids), cache_salt=salt or None))
    items = MultiModalKwargsItems({"image": [medium.data for medium, _ in media]})
    names = {"image": [medium.name for medium, _ in media]}
    places = {"image": [replace(medium.place, offset=offset) for medium, offset in media]}
    return dict(mm_input(list(ids), items, names, places, cache_salt=salt or None))


class Pictures:
    """The pictures of rendered prompts by vLLM's name of them.

    vLLM's renderer sends the data of a picture once, and its name alone afterwards. Thread-safe.
    """

    def __init__(self) -> None:
        self._known: LRUCache[Picture] = LRUCache(8 << 20)

    def read(self, engine_input: Any) -> RenderedPrompt:
        """Return a rendered prompt. Raises NotAWindow for one that cannot be cut into segments. O(media)."""
        if not isinstance(engine_input, Mapping) or engine_input.get("type") not in ("token", "multimodal"):
            raise NotAWindow("the prompt is not made of tokens")
        media: list[Medium] = []
        for modality, places in engine_input.get("mm_placeholders", {}).items():
            if modality != "image":
                raise NotAWindow(f"windows behind chats hold text and images, got {modality}")
            items, names = engine_input["mm_kwargs"][modality], engine_input["mm_hashes"][modality]
            for place, data, name in zip(places, items, names, strict=True):
                media.append(Medium(place.offset, place.length, name, data, place, self._picture(name, data)))
        media.sort(key=lambda medium: medium.offset)
        ids, salt = tuple(engine_input["prompt_token_ids"]), str(engine_input.get("cache_salt") or "")
        return RenderedPrompt(engine_input, ids, tuple(media), salt)

    def _picture(self, name: str, data: Any) -> Picture:
        if data is None:
            picture = self._known.get(name)
            if picture is None:
                raise NotAWindow("a picture was sent before its requests could be windows")
            return picture
        picture = Picture(data)
        self._known.put(name, picture, _PICTURE_BYTES)
        return picture


class CutPrompt(NamedTuple):
    """How a prompt was cut: for its next one, which begins with it. ``pictures``: offset and content of each."""

    cuts: Sequence[int]
    segments: list[tuple[Chunk, Encoded]]
    pictures: list[tuple[int, str]]


@dataclass
class SubmittedRequest:
    """A request for vLLM's own server to run.

    Attributes:
        prompt: its engine input.
        handle: what its ``kv_transfer_params`` hold under `transport.PARAM`.
        captures: indices of the segments whose KV is read back.
        generation: the forwards that prepared it.
        costs: prices of the engine; watch: the time that it took, once it has ended.
    """

    prompt: dict[str, Any] = field(repr=False)
    handle: str
    transfer: Transfer
    segments: list[Segment]
    captures: list[int]
    generation: Generation
    costs: CostModel = field(repr=False)
    watch: Stopwatch | None = None

    def learn(self) -> None:
        """Note what the request took, where no other ran beside it."""
        watch, reused = self.watch, self.transfer.local_tokens + self.transfer.planned_tokens
        if watch is None or not watch.alone or not watch.first:
            return
        work = Workload(1)
        work.compute(sum(segment.tokens for segment in self.segments) - reused, reused)
        if self.transfer.planned_tokens:
            work.load(self.transfer.planned_tokens, False)
        self.costs.learn(self.costs.engine, work.amounts, watch.first)


class RenderedRequest(Engine):
    """One rendered prompt on an engine: `encode` knows its chunks alone, and its requests are built from it.

    Everything else is the engine's. Only the request that vLLM's server itself runs (`submit`) is the client's; the forwards
    for missing chunks are the engine's own.

    Attributes:
        chunks: its segments but for the first, which is the window's system prompt, and the last, the ``query``.
        identity: of the engine for windows of such prompts: no other kind of window shares their provenances. A client's own
            salt separates its requests from all others here, as in vLLM's prefix cache.

    Args:
        handle: reserved for the transfer of a request that vLLM runs already; it loads nothing.

    Raises:
        NotAWindow: a prompt that has no such segments, or too many; a model with recurrent layers.
    """

    def __init__(self, engine: VLLMEngine, prompt: RenderedPrompt, handle: str = "") -> None:
        if engine.spec.kv.recurrent:  # states are read back where a request ends: a chat's after its answer
            raise NotAWindow("plain chats of a model with recurrent layers are left to vLLM; use a window")
        self._engine, self.auditing = engine, engine.auditing
        self._abandoned, self._handle = False, handle
        self.spec, self.store, self.repo, self.counters = engine.spec, engine.store, engine.repo, engine.counters
        self.costs = engine.costs
        client_salt = "" if prompt.salt == engine.plain_salt else prompt.salt
        self.identity = digest("rendered", engine.spec.name, engine.spec.identity, client_salt)
        self._rendered = prompt
        self._media = {medium.name: medium for medium in prompt.media}
        tokens, media = engine.encoder.tokens, engine.encoder.checkpoint.media
        wraps = frozenset(() if media is None else (i for i in (media.start, media.end) if i is not None))
        self._block_names = prompt.block_names(engine)
        known, segments = self._known()
        cuts = split(prompt.ids, prompt.spans, tokens.special, wraps, tokens.ends_line, known)
        if not 3 <= len(cuts) <= MOST_SEGMENTS + 1:
            raise NotAWindow(f"a window behind a chat has 2 to {MOST_SEGMENTS} segments, got {len(cuts) - 1}")
        segments += self._segments(cuts, len(segments))
        self._encoded = {encoded.chunk_id: encoded for _, encoded in segments}
        (self.system_prompt, self._first), *between, (self.query_chunk, self.query) = segments
        self.chunks = [chunk for chunk, _ in between]
        prefixes = engine.core.prefixes
        if self._block_names:
            pictures = [(m.offset, m.picture.content()) for m in prompt.media]
            cut = CutPrompt(cuts, segments, pictures)
            engine.prompts.cut_prompts.put(self._block_names[-1].hex(), cut, _TOKEN_BYTES * len(prompt.ids))
        # vLLM computes a prompt's last token, and with it its block.
        self._hit = min(prefixes.hit(self._block_names), (len(prompt.ids) - 1) // prefixes.block * prefixes.block)

    def encode(self, chunk: Chunk) -> Encoded:
        return self._encoded[chunk.id]

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        return self._first

    def encode_query(self, query: str) -> Encoded:
        return self.query

    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        return self._engine.encode_exchange(query, answer_ids, after)

    def prefill(self, context: Sequence[Segment], target: Encoded, start: int, **options: Any) -> SpanKV:
        return self._engine.prefill(context, target, start, builder=self, **options)

    def generate(self, layout: Sequence[Segment], query: Encoded, sampling: Sampling, **options: Any) -> Generation:
        return self._engine.generate(layout, query, sampling, builder=self, **options)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.decode(token_ids)

    def embed(self, key: str) -> torch.Tensor:
        return self._engine.embed(key)

    @property
    def tenant(self) -> str:
        return self._engine.tenant

    @property
    def shared(self) -> object:
        return self._engine.shared

    @property
    def caches_prefixes(self) -> bool:
        return self._engine.caches_prefixes

    def close(self) -> None:
        """Release the pictures' data. The engine stays open."""
        self._media = {}
        self._rendered = replace(self._rendered, engine_input={}, media=())

    def abandon(self) -> None:
        """Start no more forwards, since the client has left. The preparing thread gets AnswerStopped."""
        self._abandoned = True

    def cached_tokens(self, stored: int) -> int:
        """Return how many of the first ``stored`` tokens, whose KV is stored, need no spans: vLLM's prefix cache holds them, as
        far as earlier requests of this process tell, or they are few and would be loaded later than they are computed."""
        if self._handle:
            return stored
        core, costs, tokens = self._engine.core, self.costs, stored - min(stored, self._hit)
        load_ms, forward_ms = STEP_MS + costs.load_ms(tokens, False), costs.forward_ms(tokens, stored - tokens)
        if tokens >= core.block_size or (load_ms < forward_ms and not core.min_load):
            return self._hit
        return max(stored, self._hit)

    def submit(self, layout: Sequence[Segment], salt: str) -> SubmittedRequest:
        """Compute the missing KV before spans, submit the request after ``layout``, and return it for vLLM's server to run.

        `collect` must follow. Raises like `generate`, LoadError, and NotAWindow for merged segments.
        """
        if any(segment.merged for segment in layout):
            raise NotAWindow("a chunk is merged, but the request's own prompt has all of its tokens")
        if self._handle and (salt or any(segment.span is not None and segment.tokens for segment in layout)):
            raise NotAWindow("its request has begun, and loads nothing")
        self._check_awaited()
        engine, ask, generation = self._engine, Ask(None, Sampling(max_tokens=1), salt, builder=self), Generation()
        base = layout[0].start if self._handle else engine.core.check(layout, (), ask.sampling)
        segments, namespace, _ = engine.asks.fill_layout(generation, layout, base, ask)
        captures = [i for i, segment in enumerate(segments) if segment.capture and segment.span is None]
        transfer = engine.asks.build_transfer(segments, base, ask, captures, namespace)
        engine_input = dict(self._rendered.engine_input)
        if namespace.salt:
            engine_input["cache_salt"], self._block_names = self._salt(namespace), []
        handle = engine.core.transport.add(transfer, self._handle)
        return SubmittedRequest(engine_input, handle, transfer, segments, captures, generation, self.costs)

    def collect(self, submitted: SubmittedRequest, *, finished: bool) -> dict[int, SpanKV]:
        """Return the captured spans of a request by segment; none unless it ``finished``. Blocks until they are read back.

        Raises LoadError where they cannot be read.
        """
        core, transfer = self._engine.core, submitted.transfer
        try:
            if finished and self._handle:  # nobody waits for it here
                core.check(submitted.segments, (), Sampling(max_tokens=1))
            core.transport.collect(submitted.handle, transfer, finished)
        finally:
            core.transport.remove(submitted.handle)
        if not finished:
            return {}
        if transfer.error is not None:
            raise LoadError(str(transfer.error)) from transfer.error
        submitted.learn()
        if transfer.local_tokens < min(self._hit, transfer.expected_hit):
            core.prefixes.clear()  # which blocks vLLM has dropped is not known
        core.prefixes.add(self._block_names)
        captured = dict(submitted.generation.captured)
        for i in submitted.captures:
            if str(i) in transfer.captured:
                segment = submitted.segments[i]
                captured[i] = self._engine.asks.read_span(transfer, str(i), segment.encoded, segment.start)
        return captured

    def namespace(self, segments: Sequence[Segment], salt: str) -> CacheNamespace:
        """See `PromptBuilder`."""
        return CacheNamespace(salt) if salt else namespace_of(segments, "", self._engine.core.block_size)

    def prompt(
        self, ids: list[int], media: list[MediaSpan], namespace: CacheNamespace, transfer: Transfer
    ) -> dict[str, Any]:
        """See `PromptBuilder`."""
        self._check_awaited()
        return build_input(ids, [(self._media[span.key], span.offset) for span in media], self._salt(namespace))

    def _check_awaited(self) -> None:
        if self._abandoned:
            raise AnswerStopped("the client has left")

    def _salt(self, namespace: CacheNamespace) -> str:
        client_salt = self._rendered.salt
        return self._engine.prompts.salted(digest(namespace.salt, client_salt)) if namespace.salt else client_salt

    def _known(self) -> tuple[Sequence[int], list[tuple[Chunk, Encoded]]]:
        """Return the first cuts and segments, as far as the newest prompt that ends in one of the same blocks had them."""
        cached = self._engine.prompts.cut_prompts
        for i in range(len(self._block_names), 0, -1):
            if (cut := cached.get(self._block_names[i - 1].hex())) is not None:
                count = bisect_right(cut.cuts, i * self._engine.core.block_size - SEEN) - 1
                pictures = [(m.offset, m.picture.content()) for m in self._rendered.media if m.offset < cut.cuts[count]]
                if count > 0 and cut.pictures[: len(pictures)] == pictures:  # a name does not say what a picture shows
                    return cut.cuts[: count + 1], cut.segments[:count]
                break
        return (0,), []

    def _segments(self, cuts: Sequence[int], known: int) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield the segments behind the first ones, which are ``known``."""
        first, prompt = cuts[known], self._rendered
        cuts, rest = [cut - first for cut in cuts[known:]], prompt.ids[first:]
        ahead = deque(replace(span, offset=span.offset - first) for span in prompt.spans if span.offset >= first)
        positions, end = self._engine.core.inputs.positions(rest, ahead)
        starts = [*positions[:, cuts[:-1]].min(axis=0).tolist(), end]
        for (begin, stop), (start, next_start) in zip(pairwise(cuts), pairwise(starts), strict=True):
            ids, media = rest[begin:stop], list[MediaSpan]()
            while ahead and ahead[0].offset < stop:
                media.append(replace(ahead[0], offset=ahead[0].offset - begin))
                ahead.popleft()
            pictures = tuple((self._media[span.key].picture.content(), span.grid_thw) for span in media)
            chunk = _segment_chunk(self._engine.tenant, array("I", ids).tobytes(), pictures)
            local = positions[:, begin:stop] - start
            yield chunk, Encoded(chunk.id, ids, local, next_start - start, tuple(media))


@lru_cache(maxsize=1024)
def _segment_chunk(tenant: str, packed_ids: bytes, pictures: tuple[tuple[str, tuple[int, int, int]], ...]) -> Chunk:
    """Return the chunk of a segment, which most of a chat's next requests have again; ``tenant`` finds no other one's.

    It holds a digest in place of the tokens: a conversation keeps many chunks, and its next request has their tokens. The keys
    here have four bytes a token.
    """
    named = digest("segment", array("I", packed_ids).tolist(), [[content, list(grid)] for content, grid in pictures])
    return Chunk.text(named, keep_source=False)
