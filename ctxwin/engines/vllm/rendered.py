"""Prompts that vLLM's own server has rendered, served with spans: the ids, the pictures and the sampling stay vLLM's.

`split` cuts a prompt into the segments of a window: a picture with its two marks is one, and so is the text between pictures,
cut behind the header of every turn, so that a turn's end and the next one's header belong to the text in front of them. A cut
depends on what stands near it alone, so what stays in a conversation is cut the same way every time.

`PromptEngine` answers for one such prompt. Its requests carry the pictures as vLLM's renderer gave them, under the names by
which vLLM itself caches them: a load that fails leaves a request that vLLM can compute.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Encoded, Generation, MediaSpan, Sampling, Segment
from ctxwin.engines.vllm.engine import VLLMEngine, _Ask
from ctxwin.engines.vllm.prefix_space import Space, space_of
from ctxwin.hashing import digest
from ctxwin.kv.layout import SpanKV
from ctxwin.store.recent import Recent

if TYPE_CHECKING:
    from ctxwin.engines.vllm.transport import Transfer

HEADER = 16
"""Most tokens between the mark of a turn and the end of its header."""
LONG = 256
"""Tokens of a text from which on it is also cut behind a line."""
MOST_SEGMENTS = 512
_PICTURE_BYTES = 512


class NotAWindow(ValueError):
    """A prompt that is left to vLLM alone; the message says why."""


class Picture:
    """A picture as vLLM's renderer prepared it. Thread-safe.

    Attributes:
        grid: its patch grid.
    """

    def __init__(self, item: Mapping[str, Any]) -> None:
        grid = item.get("image_grid_thw")
        t, h, w = (1, 1, 1) if grid is None else (int(size) for size in grid.data.reshape(-1).tolist())
        self.grid: tuple[int, int, int] = (t, h, w)  # a model without one has positions that do not follow from it
        self._item: Mapping[str, Any] | None = item
        self._content = ""
        self._lock = threading.Lock()

    def content(self) -> str:
        """Digest of what the model sees. vLLM's name of it may be its client's choice. Cost: one hash, once."""
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
    return [str(data.dtype), list(data.shape), hashlib.sha256(raw).hexdigest()]


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
    """What vLLM's renderer made of a request.

    Attributes:
        engine_input: as vLLM's server hands it to its engine.
        salt: the ``cache_salt`` in it; "" is none.
    """

    engine_input: Mapping[str, Any] = field(repr=False)
    ids: tuple[int, ...]
    media: tuple[Medium, ...]
    salt: str


class Pictures:
    """The pictures of rendered prompts by vLLM's name of them.

    vLLM's renderer sends the data of a picture once, and its name alone afterwards. Thread-safe.
    """

    def __init__(self) -> None:
        self._known: Recent[Picture] = Recent(8 << 20)

    def read(self, engine_input: Any) -> RenderedPrompt:
        """A rendered prompt; NotAWindow for one that cannot be cut into segments. O(media)."""
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
            known = self._known.get(name)
            if known is None:
                raise NotAWindow("a picture was sent before its requests could be windows")
            return known
        made = Picture(data)
        self._known.put(name, made, _PICTURE_BYTES)
        return made


def split(
    prompt: RenderedPrompt, special: frozenset[int], wraps: frozenset[int], line: Callable[[int], bool]
) -> list[int]:
    """Where the segments of a prompt begin, and its length at the end.

    Args:
        special: ids that no text is made of.
        wraps: the ids among them that open or close a picture.
        line: whether an id's text ends a line.
    """
    ids, end = prompt.ids, len(prompt.ids)
    cuts, inside = {0, end}, set[int]()
    for medium in prompt.media:
        begin, behind = medium.offset, medium.offset + medium.tokens
        begin -= begin > 0 and ids[begin - 1] in wraps
        behind += behind < end and ids[behind] in wraps
        cuts |= {begin, behind}
        inside.update(range(begin, behind))
    for i, token in enumerate(ids):
        if token in special and i not in inside:
            cuts.add(_behind_header(ids, i, special, line))
    whole: list[int] = []
    for begin, behind in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
        whole.append(begin)
        if begin not in inside:
            for i in range(begin, behind - 1):
                if i + 1 - whole[-1] >= LONG and line(ids[i]):
                    whole.append(i + 1)
    return [*whole, end]


def _behind_header(ids: Sequence[int], at: int, special: frozenset[int], line: Callable[[int], bool]) -> int:
    """Where the text begins behind the mark at ``at``; 0 where another mark comes first."""
    stop = min(len(ids), at + 1 + HEADER)
    for i in range(at + 1, stop):
        if ids[i] in special:
            return 0
        if line(ids[i]):
            return i + 1 if i + 1 < len(ids) and ids[i + 1] not in special else 0
    return min(at + 1, len(ids) - 1)


@dataclass
class HandedOver:
    """A request for vLLM's own server to run.

    Attributes:
        prompt: its engine input.
        handle: what its ``kv_transfer_params`` hold under `transport.PARAM`.
        captures: indices of the segments whose KV is read back.
        made: what was computed to get here.
    """

    prompt: dict[str, Any] = field(repr=False)
    handle: str
    transfer: Transfer
    segments: list[Segment]
    captures: list[int]
    made: Generation


class PromptEngine(VLLMEngine):
    """``engine`` for one rendered prompt: `encode` knows its chunks alone.

    Attributes:
        chunks: its segments but for the first, which is the window's system prompt, and the last, the ``query``.

    Raises:
        NotAWindow: a prompt that has no such segments, or too many; a model with recurrent layers.
    """

    def __init__(self, engine: VLLMEngine, prompt: RenderedPrompt) -> None:
        if engine.spec.kv.recurrent:  # states are read back where a request ends, and a chat's ends behind its answer
            raise NotAWindow("plain chats of a model with recurrent layers are left to vLLM; use a window")
        vars(self).update(vars(engine), costs=engine.costs)
        self._rendered = prompt
        self._media = {medium.name: medium for medium in prompt.media}
        tokenizer, media = self.encoder.checkpoint.tokenizer, self.encoder.checkpoint.media
        special = frozenset(tokenizer.all_special_ids)
        wraps = frozenset(() if media is None else (i for i in (media.start, media.end) if i is not None))
        held: dict[int, bool] = {}

        def line(token: int) -> bool:
            if token not in held:
                held[token] = self.decode([token]).endswith("\n")
            return held[token]

        cuts = split(prompt, special, wraps, line)
        if not 3 <= len(cuts) <= MOST_SEGMENTS + 1:
            raise NotAWindow(f"a window behind a chat has 2 to {MOST_SEGMENTS} segments, got {len(cuts) - 1}")
        self._encoded: dict[str, Encoded] = {}
        made = self._segments(cuts)
        (self.system_prompt, self._first), *between, (self.query_chunk, self.query) = made
        self.chunks = [chunk for chunk, _ in between]

    @property
    def identity(self) -> str:
        """What a window of such prompts runs on: no other kind of window shares its provenances.

        A salt that a client has chosen keeps its requests apart from all others here as in vLLM's prefix cache.
        """
        own = "" if self._rendered.salt == self.plain_salt else self._rendered.salt
        return digest("rendered", self.spec.name, self.spec.identity, own)

    def encode(self, chunk: Chunk) -> Encoded:
        return self._encoded[chunk.id]

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        return self._first

    def hand_over(self, layout: Sequence[Segment], salt: str) -> HandedOver:
        """What vLLM's server needs to answer behind ``layout``; runs what has to be computed in front of held KV.

        `take_back` must follow. Raises like `generate`, LoadError, and NotAWindow for merged segments.
        """
        if any(segment.merged for segment in layout):
            raise NotAWindow("a chunk is merged, but the request's own prompt has all of its tokens")
        ask = _Ask(None, Sampling(max_tokens=1), salt)
        base = self._core.check(layout, (), ask.sampling)
        made = Generation()
        segments, space, _ = self._filled(made, layout, base, ask)
        wanted = [i for i, segment in enumerate(segments) if segment.capture and segment.span is None]
        prompt, transfer = self._transfer(segments, base, ask, wanted, space)
        whole = dict(self._rendered.engine_input)
        if prompt.get("cache_salt"):
            whole["cache_salt"] = prompt["cache_salt"]
        handle = self._core.transport.add(transfer)
        return HandedOver(whole, handle, transfer, segments, wanted, made)

    def take_back(self, handed: HandedOver, *, finished: bool) -> dict[int, SpanKV]:
        """What a request has computed, by segment; nothing unless it ``finished`` well. Blocks until it is read back."""
        transport, transfer = self._core.transport, handed.transfer
        try:
            transport.collect(handed.handle, transfer, finished)
        finally:
            transport.remove(handed.handle)
        if not finished or transfer.error is not None:
            return {}
        captured = dict(handed.made.captured)
        for i in handed.captures:
            if str(i) in transfer.captured:
                segment = handed.segments[i]
                captured[i] = self._span(transfer, str(i), segment.encoded, segment.start)
        return captured

    def forget_media(self) -> None:
        """Lets go of the pictures' data, once nothing more is asked."""
        self._media = {}
        self._rendered = replace(self._rendered, engine_input={}, media=())

    def _segments(self, cuts: Sequence[int]) -> list[tuple[Chunk, Encoded]]:
        prompt, spans = self._rendered, []
        for medium in prompt.media:
            spans.append(MediaSpan("image", medium.name, medium.offset, medium.tokens, medium.picture.grid))
        positions, end = self._core.inputs.positions(prompt.ids, spans)
        starts = [*(int(positions[:, at].min()) for at in cuts[:-1]), end]
        made = []
        for i, (begin, behind) in enumerate(itertools.pairwise(cuts)):
            ids = prompt.ids[begin:behind]
            media = tuple(replace(s, offset=s.offset - begin) for s in spans if begin <= s.offset < behind)
            shown = [self._media[span.key].picture for span in media]
            # A digest in place of the tokens: a conversation keeps many chunks, and its next request has their tokens.
            chunk = Chunk.text(
                digest("segment", list(ids), [[p.content(), list(p.grid)] for p in shown]), keep_source=False
            )
            local = positions[:, begin:behind] - starts[i]
            encoded = Encoded(chunk.id, ids, local, starts[i + 1] - starts[i], media)
            self._encoded[chunk.id] = encoded
            made.append((chunk, encoded))
        return made

    def _space(self, segments: Sequence[Segment], salt: str) -> Space:
        return Space(salt) if salt else space_of(segments, "", self._core.block)

    def _prompt(self, ids: list[int], media: list[MediaSpan], space: Space, transfer: Transfer) -> dict[str, Any]:
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        own = self._rendered.salt
        salt = self._salt(digest(space.salt, own)) if space.salt else own
        if not media:
            return dict(tokens_input(ids, cache_salt=salt or None))
        items, names, places = (defaultdict[str, list[Any]](list) for _ in range(3))
        for span in media:
            medium = self._media[span.key]
            items["image"].append(medium.data)
            names["image"].append(medium.name)
            places["image"].append(replace(medium.place, offset=span.offset))
        made = mm_input(ids, MultiModalKwargsItems(dict(items)), dict(names), dict(places), cache_salt=salt or None)
        return dict(made)
