"""Chunks to tokens, media and positions: what every engine does the same way.

The vision tower runs at most once for the same media: its embeddings are stored under ``embed/<digest>`` together with
the patch grid, so that a chunk whose pixels are gone can still be encoded, also after a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ctxwin.audio import resampled
from ctxwin.chunk import Chunk, MediaPart, TextPart, TokensPart
from ctxwin.engines.base import Encoded, Engine, EngineCounters, MediaSpan
from ctxwin.engines.encoding.checkpoint import Checkpoint
from ctxwin.engines.encoding.embeddings import Embeddings
from ctxwin.engines.encoding.families import (
    Family,
    Grid,
    both_ways,
    frames_per_group,
    interleaved,
    picture_text,
    process_audio,
    process_images,
    process_video,
    stamps,
    video_tokens,
)
from ctxwin.engines.encoding.tokens import Tokens
from ctxwin.errors import BadMedia, ChunkUnavailable, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.store.recent import Recent

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ctxwin.engines.encoding.templates import Template
    from ctxwin.store.spans import SpanRepository

Vision = Callable[..., Any]
"""``(pixels, grids int64 [n, 3]) -> embeddings [tokens, width]`` of all n items, in order.

With ``heard=True`` behind them it is the spectrogram ``[bins, frames]`` of one sound instead of pixels.
"""
Positions = Callable[[Sequence[int], Sequence[MediaSpan]], "tuple[np.ndarray, int]"]
"""``(token_ids, media) -> (int64 [3, T] starting at 0, position of a text token that would follow)``."""

_Item = tuple[str, int, Grid, float | None, str]
"""Key, tokens, grid, seconds a temporal step, and the text in front, of what stands as one run of placeholders."""
_FRAMES_AT_ONCE = 16
_TOKEN_BYTES = 64
"""Of one token of an `Encoded` in memory: its id, and its place in three axes."""
_log = logging.getLogger("ctxwin.engines")


class Encoder:
    """Turns system prompts, chunks, queries and exchanges into `Encoded`. Thread-safe.

    Texts are tokenised piece by piece, and special tokens inside them are read as plain text: content cannot forge a turn
    or a picture. Raw ids (`Chunk.tokens`) may hold special tokens, but no media placeholders.

    Args:
        checkpoint: the model's files.
        identity: model identity, part of every embedding key.
        repository: where embeddings are kept and media sources are looked up.
        vision: runs the vision tower, or the one that hears; None for a text model.
        positions: the serving engine's position rule.
        counters: ``vision_encodes`` counts runs of the towers.
        max_tokens: what fits the engine; a text that cannot is refused before it is tokenised. None for no bound.
        cache_bytes: bound on encoded chunks that are remembered, and on system prompts.

    Raises BudgetExceeded from every ``encode`` for what cannot fit; nothing of it is remembered.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        identity: str,
        repository: SpanRepository,
        vision: Vision | None,
        positions: Positions,
        counters: EngineCounters,
        max_tokens: int | None = None,
        cache_bytes: int = 64 << 20,
    ) -> None:
        self.checkpoint = checkpoint
        self.embeddings = Embeddings(repository)
        self._identity = identity
        self._repository = repository
        self._vision = vision
        self._positions = positions
        self._counters = counters
        self._cache: Recent[Encoded] = Recent(cache_bytes)
        self._system_prompts: Recent[Encoded] = Recent(cache_bytes // 4)
        self._closing: tuple[int, ...] | None = None
        self._seeing = threading.RLock()
        self.tokens = Tokens(checkpoint.tokenizer, max_tokens)

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        """Tokens of the system turn and the opening of the user turn; raises UnsupportedModel without a system turn."""
        name = digest("system_prompt", system_prompt)
        held = self._system_prompts.get(name)
        if held is not None:
            return held
        self.tokens.check(system_prompt)
        before, after = self.checkpoint.template.system_prompt(system_prompt)
        ids = [*self.tokens.template(before), *self.tokens.content(system_prompt), *self.tokens.template(after)]
        bos = self.checkpoint.bos
        # A processor's call begins with it where the template does not write it (LLaVA 1.5), a text template's tokens do not.
        if self.checkpoint.template.plain or (self.checkpoint.family is not None and tuple(ids[: len(bos)]) != bos):
            ids = [*bos, *ids]
        made = self._made(name, ids, ())
        self._system_prompts.put(name, made, _TOKEN_BYTES * made.tokens)
        return made

    def encode_query(self, query: str) -> Encoded:
        """Tokens of the query and of the turn's closing."""
        return self._made(digest("query", query), self._query_ids(query), ())

    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        """``encode_query(query)``, the answer, and its turn's end with a reopened user turn, or ``after``."""
        answer = [int(i) for i in answer_ids]
        name = digest("exchange", query, answer) if after is None else digest("exchange", query, answer, after)
        if after is None:
            after = self.checkpoint.template.exchange(query, self.tokens.text(answer))
        ids = [*self._query_ids(query), *answer, *self.tokens.template(after)]
        return self._made(name, ids, ())

    def encode(self, chunk: Chunk) -> Encoded:
        """Tokens, media and positions of a chunk; see `Engine.encode`. Text is tokenised without any lock."""
        held = self._cache.get(chunk.id)
        if held is not None and all(self.embeddings.contains(m.key) for m in held.media):
            return held
        ids: list[int] = []
        media: list[MediaSpan] = []
        before, after = self._around(chunk)
        ids += self.tokens.template(before)
        for part, following in zip(chunk.parts, (*chunk.parts[1:], None), strict=True):
            if isinstance(part, TextPart):
                ids += self.tokens.content(part.text)
            elif isinstance(part, TokensPart):
                ids += self._raw_ids(part)
            else:
                track = following if isinstance(following, MediaPart) and following.track else None
                with self._seeing:  # one at a time: of two with the same picture the second finds it
                    self._add_media(chunk, part, track, ids, media)
        ids += self.tokens.template(after)
        if not ids:
            raise ValueError("a chunk must have at least one token, got none after tokenisation")
        made = self._made(chunk.id, ids, tuple(media))
        self._cache.put(chunk.id, made, _TOKEN_BYTES * made.tokens)
        return made

    def embed(self, key: str) -> torch.Tensor:
        """Stored embeddings, as the tower gave them; see `Engine.embed`."""
        found = self.embeddings.get(key)
        if found is None:
            raise ChunkUnavailable(
                f"the vision embeddings {key} have left the store; encode the chunk again (its pixels are needed)"
            )
        return found[0]

    def _made(self, chunk_id: str, ids: Sequence[int], media: tuple[MediaSpan, ...]) -> Encoded:
        self.tokens.check_count(len(ids), "what is encoded")
        positions, advance = self._positions(ids, media)
        return Encoded(chunk_id, tuple(ids), positions, advance, media)

    def _query_ids(self, query: str) -> list[int]:
        if self._closing is None:
            self._closing = tuple(self.tokens.template(self.checkpoint.template.closing))
        return [*self.tokens.content(query), *self._closing]

    def _raw_ids(self, part: TokensPart) -> tuple[int, ...]:
        media = self.checkpoint.media
        reserved = set() if media is None else {media.image, media.video, media.audio}
        size = max(len(self.tokens), int(self.checkpoint.text_config.vocab_size))
        for i in part.ids:
            if i in reserved:
                raise ValueError(
                    f"tokens must not hold media placeholders, got id {i}; use Chunk.image, Chunk.video or Chunk.audio"
                )
            if i >= size:
                raise ValueError(f"token ids must be below the vocabulary size {size}, got {i}")
        return part.ids

    def _around(self, chunk: Chunk) -> tuple[str, str]:
        """What stands around the chunk's parts: nothing for a bare chunk, its turn for a message."""
        template = self.checkpoint.template
        if chunk.role is None:
            return "", ""
        for part in chunk.parts:
            if isinstance(part, TextPart):
                self.tokens.check(part.text)
        around = template.turns(chunk.role)
        if not any(isinstance(p, TokensPart) for p in chunk.parts):
            shown = [p for p in chunk.parts if not (isinstance(p, MediaPart) and p.media != "image")]
            texts = [p.text for p in shown if isinstance(p, TextPart)]
            blocks = [{"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"} for p in shown]
            template.check_message(chunk.role, "".join(texts) if len(texts) == len(shown) else blocks)
        return around

    def _add_media(
        self, chunk: Chunk, part: MediaPart, track: MediaPart | None, ids: list[int], media: list[MediaSpan]
    ) -> None:
        checkpoint = self.checkpoint
        family, tokens = checkpoint.family, checkpoint.media
        if (part.media == "audio" or track is not None) and (family is None or not family.sound):
            raise UnsupportedModel(f"{checkpoint.name} does not hear; use a model that does, such as Qwen2.5-Omni")
        if family is None or tokens is None or self._vision is None or checkpoint.image_processor is None:
            raise UnsupportedModel(f"{checkpoint.name} does not see {part.media}s; use a vision-language model")
        if part.media == "audio" or track is not None:
            self._add_sound(chunk, part, track, ids, media)
            return
        lead, tail = (self.tokens.template(text) for text in checkpoint.template.picture())
        native = part.media == "video" and not chunk.as_frames and tokens.video is not None
        items = self._video(chunk, part, family) if native else self._images(chunk, part, family)
        pad = tokens.video if native else tokens.image
        assert pad is not None
        for key, rows, grid, seconds, stamp in items:
            marked = native and not family.marks
            ids += [*self.tokens.content(stamp), *self._mark(tokens.start)] if marked else lead
            shown = self._shown(grid) if family.marks and not native else [pad] * rows
            words = tuple(i for i, token in enumerate(shown) if token != pad)
            kind, whole = "video" if native else "image", bool(both_ways(checkpoint.config))
            media.append(MediaSpan(kind, key, len(ids), len(shown), grid, seconds, words, whole))
            ids += shown
            ids += self._mark(tokens.end) if marked else tail

    def _add_sound(
        self, chunk: Chunk, part: MediaPart, track: MediaPart | None, ids: list[int], media: list[MediaSpan]
    ) -> None:
        """Sound of its own, or a video with its ``track``; nothing for a track, which its video has brought."""
        checkpoint = self.checkpoint
        family, tokens = checkpoint.family, checkpoint.media
        assert family is not None and tokens is not None and tokens.audio is not None
        if track is None:
            if part.track:
                return
            key, rows, grid = self._sound(chunk, part)
            ids += self._mark(tokens.audio_start)
            media.append(MediaSpan("audio", key, len(ids), rows, grid))
            ids += [*[tokens.audio] * rows, *self._mark(tokens.audio_end)]
            return
        ((video, _, grid, seconds, _),) = self._video(chunk, part, family)
        assert seconds is not None
        sound, rows, frames = self._sound(chunk, track)
        shown = self.tokens.template(interleaved(checkpoint.config, checkpoint.processor, grid, seconds, rows))
        for modality, key, pad, size in (("video", video, tokens.video, grid), ("audio", sound, tokens.audio, frames)):
            own = [i for i, token in enumerate(shown) if token == pad]
            first, count = own[0], own[-1] + 1 - own[0]
            words = tuple(sorted(set(range(count)) - {i - first for i in own}))
            times = seconds if modality == "video" else None
            media.append(MediaSpan(modality, key, len(ids) + first, count, size, times, words, sound=True))
        ids += shown

    def _sound(self, chunk: Chunk, part: MediaPart) -> tuple[str, int, Grid]:
        """Key, tokens and grid of sound."""
        key = self._key(part, "audio", part.rate)
        if self.embeddings.get(key) is None:
            processor, rate = self.checkpoint.processor, part.rate
            assert rate is not None
            samples = resampled(self._pixels(chunk, part), rate, int(processor.feature_extractor.sampling_rate))
            return (key, *self._run(part, [key], process_audio, processor, samples)[key])
        return (key, *self._known(key))

    @staticmethod
    def _mark(token: int | None) -> list[int]:
        return [] if token is None else [token]

    def _shown(self, grid: Grid) -> list[int]:
        """All tokens of a picture of a family with marks."""
        return self.tokens.template(picture_text(self.checkpoint.config, self.checkpoint.processor, grid))

    def _rows(self, grid: Grid, video: bool) -> int:
        """How many embeddings a picture or a video has."""
        checkpoint = self.checkpoint
        if checkpoint.family is not None and checkpoint.family.marks and checkpoint.media is not None:
            if video:
                return video_tokens(checkpoint.processor, grid)
            return self._shown(grid).count(checkpoint.media.image)
        t, h, w = grid
        return t * h * w // checkpoint.patches_per_token

    def _images(self, chunk: Chunk, part: MediaPart, family: Family) -> list[_Item]:
        """An image, or the frames of a video as images."""
        frames = part.media == "video"
        keys = [self._key(part, "image", index if frames else None) for index in range(part.shape[0])]
        missing = [i for i, key in enumerate(keys) if self.embeddings.get(key) is None]
        fresh: dict[str, tuple[int, Grid]] = {}
        if missing:
            from PIL import Image

            checkpoint, shown = self.checkpoint, self._pixels(chunk, part)
            once = 1 if family.marks else _FRAMES_AT_ONCE
            for at in range(0, len(missing), once):
                batch = missing[at : at + once]
                pictures = [Image.fromarray(shown[i]) for i in batch]
                given = family, checkpoint.config, checkpoint.image_processor, pictures, frames
                fresh |= self._run(part, [keys[i] for i in batch], process_images, *given)
        return [(key, *(fresh.get(key) or self._known(key)), None, "") for key in keys]

    def _video(self, chunk: Chunk, part: MediaPart, family: Family) -> list[_Item]:
        """A video as native tokens: one item, or one each temporal group where the family stamps them."""
        processor = self.checkpoint.video_processor
        patch = frames_per_group(processor)
        fps = part.fps or 2.0
        marks = stamps(part.shape[0], fps, patch) if family.stamps else [""]
        keys = [self._key(part, "video", [fps, i] if family.stamps else fps) for i in range(len(marks))]
        fresh: dict[str, tuple[int, Grid]] = {}
        if any(self.embeddings.get(key) is None for key in keys):
            fresh = self._run(part, keys, process_video, family, self.checkpoint.processor, self._pixels(chunk, part))
        seconds = None if family.stamps or family.marks else patch / fps
        return [
            (key, *(fresh.get(key) or self._known(key)), seconds, mark) for key, mark in zip(keys, marks, strict=True)
        ]

    def _run(
        self, part: MediaPart, keys: list[str], process: Callable[..., tuple[Any, Any]], *inputs: Any
    ) -> dict[str, tuple[int, Grid]]:
        """One run of the vision tower over what ``process`` makes of ``inputs``; stores each part by its key.

        Returns (tokens, grid) by key. With more keys than grids, each temporal step of the one grid has a key of its own.
        """
        assert self._vision is not None
        try:
            pixels, grids = process(*inputs)
        except BadMedia:
            raise
        except ValueError as error:  # an aspect ratio beyond the processor's limits, for example
            raise BadMedia(f"the model's processor refused a {part.media} of {part.shape}: {error}") from error
        heard = part.media == "audio"
        embeddings = self._vision(pixels, grids, heard=True) if heard else self._vision(pixels, grids)
        self._counters.vision_encodes += 1
        sizes = [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]
        if len(sizes) != len(keys):
            ((steps, high, wide),) = sizes
            sizes = [(1, high, wide)] * steps
        rows = [int(embeddings.shape[0])] if heard else [self._rows(grid, process is process_video) for grid in sizes]
        if int(embeddings.shape[0]) != sum(rows):
            raise UnsupportedModel(f"the vision tower must give {sum(rows)} embeddings, got {int(embeddings.shape[0])}")
        for key, seen, grid in zip(keys, embeddings.split(rows), sizes, strict=True):
            self.embeddings.put(key, seen.clone(), grid)
        return {key: (count, grid) for key, count, grid in zip(keys, rows, sizes, strict=True)}

    def _known(self, key: str) -> tuple[int, Grid]:
        found = self.embeddings.get(key)
        if found is None:
            raise ChunkUnavailable(f"the vision embeddings {key} left the store while the chunk was encoded; try again")
        return int(found[0].shape[0]), found[1]

    def _key(self, part: MediaPart, form: str, detail: float | int | list[float] | None) -> str:
        return "embed/" + digest("embed", self._identity, part.content, list(part.shape), form, detail)

    def _pixels(self, chunk: Chunk, part: MediaPart) -> np.ndarray:
        """Frames ``[F, H, W, 3]`` or samples ``[N]``: from the chunk, its file, or the packed source in the store."""
        frames = chunk.pixels(part)
        if frames is not None:
            return frames
        packed = self._repository.get_source(f"source/{part.content}")
        if packed is not None:
            return part.unpack(packed)
        origin = f"its file {part.source!r} is gone or changed" if part.source else "it came from memory"
        raise ChunkUnavailable(
            f"the {'samples' if part.rate else 'pixels'} of {part.media} media are needed and cannot be had: {origin} and no "
            "source is stored; append it again from its file, or keep sources (keep_source=True) in a store that lasts"
        )


class EncodingEngine(Engine):
    """What both engines share: an `Encoder` behind the engine's lock.

    Attributes:
        encoder: tokens, positions and embeddings.
    """

    encoder: Encoder
    # Guards the model. Encoding media may run the vision tower, so it takes this lock before the encoder's own, as
    # generating does when it decodes text: the other order can deadlock. Text takes neither.
    _lock: threading.RLock

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        return self.encoder.encode_system_prompt(system_prompt)

    def encode(self, chunk: Chunk) -> Encoded:
        with self._lock if any(isinstance(part, MediaPart) for part in chunk.parts) else nullcontext():
            return self.encoder.encode(chunk)

    def encode_query(self, query: str) -> Encoded:
        return self.encoder.encode_query(query)

    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        return self.encoder.encode_exchange(query, answer_ids, after)

    @property
    def template(self) -> Template | None:
        return self.encoder.checkpoint.template

    def text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.encoder.tokens.content(text))

    def template_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.encoder.tokens.template(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.encoder.tokens.text(token_ids)

    def embed(self, key: str) -> torch.Tensor:
        return self.encoder.embed(key)
