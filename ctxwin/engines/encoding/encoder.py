"""Encoding of chunks into tokens, media and positions, shared by all engines.

The vision tower runs at most once for the same media: its embeddings are stored under ``embed/<digest>`` together with
the patch grid, so that a chunk whose pixels are gone can still be encoded, also after a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ctxwin.audio import resample
from ctxwin.chunk import Chunk, MediaPart, TextPart, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.engines.encoding import families
from ctxwin.engines.encoding.checkpoint import Checkpoint
from ctxwin.engines.encoding.embeddings import Embeddings
from ctxwin.engines.encoding.families import Family, Grid, interleaved, process_video
from ctxwin.engines.encoding.tokens import Tokens
from ctxwin.engines.results import EngineCounters
from ctxwin.engines.segments import Encoded, MediaSpan
from ctxwin.errors import BadMedia, ChunkUnavailable, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.store.lru import LRUCache

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ctxwin.engines.encoding.templates import Template
    from ctxwin.store.spans import SpanRepository

Vision = Callable[..., Any]
"""``(inputs, grids int64 [n, 3]) -> embeddings [tokens, width]`` of all n items, in order.

Inputs are pixels; with ``audio=True`` the spectrogram ``[bins, frames]`` of one sound.
"""
Positions = Callable[[Sequence[int], Sequence[MediaSpan]], "tuple[np.ndarray, int]"]
"""``(token_ids, media) -> (int64 [3, T] starting at 0, position of a text token that would follow)``."""

_Item = tuple[str, int, Grid, float | None, str]
"""Key, tokens, grid, seconds per temporal step, and preceding text of one run of placeholders."""
_FRAMES_AT_ONCE = 16
_TOKEN_BYTES, _CHUNK_BYTES = 64, 4096
"""Memory of an `Encoded`: each token's id and position in three axes, and the objects around them."""
_log = logging.getLogger("ctxwin.engines")


class Encoder:
    """Turns system prompts, chunks, queries and exchanges into `Encoded`. Thread-safe.

    Texts are tokenised piece by piece, and special tokens inside them are read as plain text: content cannot forge a turn
    or a picture. Raw ids (`Chunk.tokens`) may hold special tokens, but no media placeholders.

    Args:
        checkpoint: the model's files.
        identity: model identity, part of every embedding key.
        repository: where embeddings are kept and media sources are looked up.
        vision: runs the vision or the audio tower; None for a text model.
        positions: the serving engine's position rule.
        counters: ``vision_encodes`` counts runs of the towers.
        max_tokens: the engine's limit; a longer text is refused before it is tokenised. None for no limit.
        cache_bytes: bound on cached encoded chunks; system prompts and queries get a quarter of it.

    Every ``encode`` raises BudgetExceeded for input beyond ``max_tokens``, which is then not cached.
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
        self._cache: LRUCache[Encoded] = LRUCache(cache_bytes)
        self._texts: LRUCache[Encoded] = LRUCache(cache_bytes // 4)
        self._closing: tuple[int, ...] | None = None
        self._seeing = threading.RLock()
        self.tokens = Tokens(checkpoint.tokenizer, max_tokens)

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        """Encode the system turn and the opening of the user turn; raise UnsupportedModel without a system turn."""
        name = digest("system_prompt", system_prompt)
        cached = self._texts.get(name)
        if cached is not None:
            return cached
        self.tokens.check(system_prompt)
        opening, closing = self.checkpoint.template.system_prompt(system_prompt)
        ids = [*self.tokens.template(opening), *self.tokens.content(system_prompt), *self.tokens.template(closing)]
        bos = self.checkpoint.bos
        # A processor prepends BOS where the template does not write it (LLaVA 1.5); a text template's tokens have none.
        if self.checkpoint.template.plain or (self.checkpoint.family is not None and tuple(ids[: len(bos)]) != bos):
            ids = [*bos, *ids]
        return self._cached(self._texts, self._encoded(name, ids, ()))

    def encode_query(self, query: str) -> Encoded:
        """Encode the query and the turn's closing."""
        name = digest("query", query)
        cached = self._texts.get(name)
        return cached or self._cached(self._texts, self._encoded(name, self._query_ids(query), ()))

    def encode_exchange(self, query: str, answer_ids: Sequence[int], after: str | None = None) -> Encoded:
        """Encode the query as `encode_query`, the answer, and its turn's end with a reopened user turn, or ``after``.

        Without ``after`` the answer is as the chat template writes it in an earlier turn. Placeholders that the model itself
        wrote stand for no media, and are left out, as they are of its text.
        """
        reserved = self._placeholders()
        answer = [int(i) for i in answer_ids if i not in reserved]
        name = digest("exchange", query, answer) if after is None else digest("exchange", query, answer, after)
        before: Sequence[int] = self.encode_query(query).token_ids
        if after is None:
            opening, shown, after = self.checkpoint.template.exchange(text := self.tokens.text(answer))
            answer = answer if shown == text else self.tokens.content(shown)
            if opening != self.checkpoint.template.closing:
                before = [*self.tokens.content(query), *self.tokens.template(opening)]
        return self._encoded(name, [*before, *answer, *self.tokens.template(after)], ())

    def encode(self, chunk: Chunk) -> Encoded:
        """Encode a chunk; see `Engine.encode`. Text is tokenised without any lock."""
        cached = self._cache.get(chunk.id)
        if cached is not None and all(self.embeddings.contains(m.key) for m in cached.media):
            return cached
        ids: list[int] = []
        media: list[MediaSpan] = []
        opening, closing = self._around(chunk)
        ids += self.tokens.template(opening)
        for part, following in zip(chunk.parts, (*chunk.parts[1:], None), strict=True):
            if isinstance(part, TextPart):
                ids += self.tokens.content(part.text)
            elif isinstance(part, TokensPart):
                ids += self._raw_ids(part)
            else:
                track = following if isinstance(following, MediaPart) and following.track else None
                with self._seeing:  # one at a time: the second of two with the same picture finds it stored
                    self._add_media(chunk, part, track, ids, media)
        ids += self.tokens.template(closing)
        if not ids:
            raise ValueError("a chunk must have at least one token, got none after tokenisation")
        return self._cached(self._cache, self._encoded(chunk.id, ids, tuple(media)))

    def media_keys(self, chunk: Chunk) -> set[str]:
        """Return the store keys of every record that encoding the media of ``chunk`` leaves, whether it exists or not.

        Needs neither pixels nor a run of the tower.
        """
        family, tokens = self.checkpoint.family, self.checkpoint.media
        if family is None or tokens is None:
            return set()
        keys: list[str] = []
        for part, following in zip(chunk.parts, (*chunk.parts[1:], None), strict=True):
            if not isinstance(part, MediaPart):
                continue
            has_track = isinstance(following, MediaPart) and following.track
            if part.media == "audio":
                keys.append(self._sound_key(part))
            elif part.media == "video" and (has_track or (not chunk.as_frames and tokens.video is not None)):
                keys += (key for key, _ in self._video_keys(part, family))
            else:
                keys += self._image_keys(part)
        return {name for key in keys for name in self.embeddings.keys(key)}

    def embed(self, key: str) -> torch.Tensor:
        """Return stored embeddings, as the tower computed them; see `Engine.embed`."""
        stored = self.embeddings.get(key)
        if stored is None:
            raise ChunkUnavailable(
                f"the vision embeddings {key} have left the store; encode the chunk again (its pixels are needed)"
            )
        return stored[0]

    def _encoded(self, chunk_id: str, ids: Sequence[int], media: tuple[MediaSpan, ...]) -> Encoded:
        self.tokens.check_count(len(ids), "what is encoded")
        positions, advance = self._positions(ids, media)
        return Encoded(chunk_id, tuple(ids), positions, advance, media)

    def _cached(self, cache: LRUCache[Encoded], encoded: Encoded) -> Encoded:
        cache.put(encoded.chunk_id, encoded, _CHUNK_BYTES + _TOKEN_BYTES * encoded.tokens)
        return encoded

    def _query_ids(self, query: str) -> list[int]:
        if self._closing is None:
            self._closing = tuple(self.tokens.template(self.checkpoint.template.closing))
        return [*self.tokens.content(query), *self._closing]

    def _placeholders(self) -> set[int | None]:
        """Return the ids that stand for the tokens of media."""
        media = self.checkpoint.media
        return set() if media is None else {media.image, media.video, media.audio}

    def _raw_ids(self, part: TokensPart) -> tuple[int, ...]:
        reserved = self._placeholders()
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
        """Return the template text around the chunk's parts: none for a bare chunk, its turn for a message."""
        template = self.checkpoint.template
        if chunk.role is None:
            return "", ""
        for part in chunk.parts:
            if isinstance(part, TextPart):
                self.tokens.check(part.text)
        around = template.turns(chunk.role)
        if not any(isinstance(p, TokensPart) for p in chunk.parts):
            visible = [p for p in chunk.parts if not (isinstance(p, MediaPart) and p.media != "image")]
            texts = [p.text for p in visible if isinstance(p, TextPart)]
            blocks = [{"type": "text", "text": p.text} if p.kind == "text" else {"type": "image"} for p in visible]
            template.check_message(chunk.role, "".join(texts) if len(texts) == len(visible) else blocks)
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
            token_ids = self._picture_ids(grid) if family.marks and not native else [pad] * rows
            words = tuple(i for i, token in enumerate(token_ids) if token != pad)
            kind, whole = "video" if native else "image", bool(families.bidirectional_layers(checkpoint.config))
            media.append(MediaSpan(kind, key, len(ids), len(token_ids), grid, seconds, words, whole))
            ids += token_ids
            ids += self._mark(tokens.end) if marked else tail

    def _add_sound(
        self, chunk: Chunk, part: MediaPart, track: MediaPart | None, ids: list[int], media: list[MediaSpan]
    ) -> None:
        """Add a sound, or a video with its ``track``; a track itself adds nothing, because its video already has."""
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
        token_ids = self.tokens.template(interleaved(checkpoint.config, checkpoint.processor, grid, seconds, rows))
        for modality, key, pad, size in (("video", video, tokens.video, grid), ("audio", sound, tokens.audio, frames)):
            places = [i for i, token in enumerate(token_ids) if token == pad]
            first, count = places[0], places[-1] + 1 - places[0]
            words = tuple(sorted(set(range(count)) - {i - first for i in places}))
            times = seconds if modality == "video" else None
            media.append(MediaSpan(modality, key, len(ids) + first, count, size, times, words, sound=True))
        ids += token_ids

    def _sound(self, chunk: Chunk, part: MediaPart) -> tuple[str, int, Grid]:
        """Return key, tokens and grid of a sound."""
        key = self._sound_key(part)
        if self.embeddings.get(key) is None:
            processor, rate = self.checkpoint.processor, part.rate
            assert rate is not None
            samples = resample(self._pixels(chunk, part), rate, int(processor.feature_extractor.sampling_rate))
            return (key, *self._run(part, [key], families.process_audio, processor, samples)[key])
        return (key, *self._stored_size(key))

    @staticmethod
    def _mark(token: int | None) -> list[int]:
        return [] if token is None else [token]

    def _picture_ids(self, grid: Grid) -> list[int]:
        """Return all tokens of a picture of a family with marks."""
        return self.tokens.template(families.picture_text(self.checkpoint.config, self.checkpoint.processor, grid))

    def _rows(self, grid: Grid, video: bool) -> int:
        """Return how many embeddings a picture or a video has."""
        checkpoint = self.checkpoint
        if checkpoint.family is not None and checkpoint.family.marks and checkpoint.media is not None:
            if video:
                return families.video_tokens(checkpoint.processor, grid)
            return self._picture_ids(grid).count(checkpoint.media.image)
        t, h, w = grid
        return t * h * w // checkpoint.patches_per_token

    def _images(self, chunk: Chunk, part: MediaPart, family: Family) -> list[_Item]:
        """Return an image, or the frames of a video as images."""
        frames = part.media == "video"
        keys = self._image_keys(part)
        missing = [i for i, key in enumerate(keys) if self.embeddings.get(key) is None]
        fresh: dict[str, tuple[int, Grid]] = {}
        if missing:
            from PIL import Image

            checkpoint, frames_array = self.checkpoint, self._pixels(chunk, part)
            once = 1 if family.marks else _FRAMES_AT_ONCE
            for at in range(0, len(missing), once):
                batch = missing[at : at + once]
                pictures = [Image.fromarray(frames_array[i]) for i in batch]
                arguments = family, checkpoint.config, checkpoint.image_processor, pictures, frames
                fresh |= self._run(part, [keys[i] for i in batch], families.process_images, *arguments)
        return [(key, *(fresh.get(key) or self._stored_size(key)), None, "") for key in keys]

    def _video(self, chunk: Chunk, part: MediaPart, family: Family) -> list[_Item]:
        """Return a video as native tokens: one item, or one per temporal group where the family stamps them."""
        patch = families.frames_per_group(self.checkpoint.video_processor)
        fps = part.fps or 2.0
        marks = self._video_keys(part, family)
        keys = [key for key, _ in marks]
        fresh: dict[str, tuple[int, Grid]] = {}
        if any(self.embeddings.get(key) is None for key in keys):
            fresh = self._run(part, keys, process_video, family, self.checkpoint.processor, self._pixels(chunk, part))
        seconds = None if family.stamps or family.marks else patch / fps
        return [(key, *(fresh.get(key) or self._stored_size(key)), seconds, mark) for key, mark in marks]

    def _run(
        self, part: MediaPart, keys: list[str], process: Callable[..., tuple[Any, Any]], *inputs: Any
    ) -> dict[str, tuple[int, Grid]]:
        """Run the tower once over ``process(*inputs)`` and store each part under its key.

        Returns (tokens, grid) by key. With more keys than grids, each temporal step of the one grid has its own key.
        """
        assert self._vision is not None
        try:
            pixels, grids = process(*inputs)
        except BadMedia:
            raise
        except ValueError as error:  # an aspect ratio beyond the processor's limits, for example
            raise BadMedia(f"the model's processor refused {part.media} of shape {part.shape}: {error}") from error
        is_sound = part.media == "audio"
        embeddings = self._vision(pixels, grids, audio=True) if is_sound else self._vision(pixels, grids)
        self._counters.vision_encodes += 1
        sizes = [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]
        if len(sizes) != len(keys):
            ((steps, high, wide),) = sizes
            sizes = [(1, high, wide)] * steps
        count = int(embeddings.shape[0])
        rows = [count] if is_sound else [self._rows(grid, process is process_video) for grid in sizes]
        if count != sum(rows):
            raise UnsupportedModel(f"the vision tower must give {sum(rows)} embeddings, got {count}")
        for key, rows_of_item, grid in zip(keys, embeddings.split(rows), sizes, strict=True):
            self.embeddings.put(key, rows_of_item.clone(), grid)
        return {key: (tokens, grid) for key, tokens, grid in zip(keys, rows, sizes, strict=True)}

    def _stored_size(self, key: str) -> tuple[int, Grid]:
        stored = self.embeddings.get(key)
        if stored is None:
            raise ChunkUnavailable(f"the vision embeddings {key} left the store while the chunk was encoded; try again")
        return int(stored[0].shape[0]), stored[1]

    def _image_keys(self, part: MediaPart) -> list[str]:
        """Return the key of an image, or of each frame of a video that is encoded as images."""
        frames = part.media == "video"
        return [self._key(part, "image", index if frames else None) for index in range(part.shape[0])]

    def _video_keys(self, part: MediaPart, family: Family) -> list[tuple[str, str]]:
        """Return the key of a video and "", or the key of each of its temporal groups and the text before it."""
        fps = part.fps or 2.0
        if not family.stamps:
            return [(self._key(part, "video", fps), "")]
        marks = families.stamps(part.shape[0], fps, families.frames_per_group(self.checkpoint.video_processor))
        return [(self._key(part, "video", [fps, i]), mark) for i, mark in enumerate(marks)]

    def _sound_key(self, part: MediaPart) -> str:
        return self._key(part, "audio", part.rate)

    def _key(self, part: MediaPart, form: str, detail: float | int | list[float] | None) -> str:
        return "embed/" + digest("embed", self._identity, part.content, list(part.shape), form, detail)

    def _pixels(self, chunk: Chunk, part: MediaPart) -> np.ndarray:
        """Return frames ``[F, H, W, 3]`` or samples ``[N]``: from the chunk, its file, or the packed source in the store."""
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
    """Base of both engines: an `Encoder`, called under the engine's lock.

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

    def media_keys(self, chunk: Chunk) -> set[str]:
        return self.encoder.media_keys(chunk)

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
