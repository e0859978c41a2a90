"""`Chunk`: a piece of context with a content-addressed id.

The id is a digest of the content for the model (text, token ids, decoded pixels with their shape and mode, sampling of a video,
samples of sound), never of its origin: a PNG file and the array that it decodes to are the same chunk. ``label``, ``pin``,
``priority`` and ``source`` are metadata. Media are decoded once, here, so that a bad file is refused before a window changes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from ctxwin.audio import RATES, as_samples, pack_samples, samples_digest
from ctxwin.errors import BadMedia
from ctxwin.hashing import digest
from ctxwin.media import as_rgb, check_rate, pack_frames, pixels_digest, stack_frames, unpack_frames
from ctxwin.validation import check_unicode, validate
from ctxwin.video import decode_video

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

Role = Literal["user", "assistant", "system", "tool"]


class TextPart(BaseModel):
    """Text inside a chunk."""

    model_config = ConfigDict(frozen=True)
    kind: Literal["text"] = "text"
    text: str


class TokensPart(BaseModel):
    """Raw token ids inside a chunk."""

    model_config = ConfigDict(frozen=True)
    kind: Literal["tokens"] = "tokens"
    ids: tuple[int, ...]


class MediaPart(BaseModel):
    """An image, a video as its sampled frames, or sound.

    Attributes:
        media: ``image``, ``video`` or ``audio``.
        content: digest of the decoded pixels with shape and mode, or of the samples with their rate.
        shape: ``(frames, height, width)``; one frame for an image, ``(1, 1, samples)`` for sound.
        fps: sampled frames per second; None for images and sound.
        rate: samples per second, of sound.
        track: this sound is the track of the video before it.
        source: path of the media; None for in-memory media.
        start, end, frames: sampling of ``source`` (videos, sound); ``frames`` if a number of frames was requested.
    """

    model_config = ConfigDict(frozen=True)
    kind: Literal["media"] = "media"
    media: Literal["image", "video", "audio"]
    content: str
    shape: tuple[int, int, int]
    fps: float | None = None
    rate: int | None = Field(default=None, ge=RATES[0], le=RATES[1])
    track: bool = False
    source: str | None = None
    start: float | None = None
    end: float | None = None
    frames: int | None = None

    @model_validator(mode="after")
    def _only_sound_has_a_rate(self) -> Self:
        if (self.media == "audio") != (self.rate is not None) or (self.track and self.rate is None):
            raise ValueError(f"rate and track are of sound alone, got rate={self.rate} for {self.media} media")
        return self

    def pack(self, decoded: np.ndarray) -> bytes:
        """Return lossless bytes of decoded media: frames ``[F, H, W, 3]``, or samples ``[N]``."""
        return pack_frames(decoded) if self.rate is None else pack_samples(decoded, self.rate)

    def unpack(self, packed: bytes) -> np.ndarray:
        """Decode the bytes of `pack`; raises BadMedia."""
        return unpack_frames(packed) if self.rate is None else as_samples(packed)[0]

    def digest(self, decoded: np.ndarray) -> str:
        """Return the digest of ``decoded``, as in ``content``."""
        return pixels_digest(decoded) if self.rate is None else samples_digest(decoded, self.rate)


Part = TextPart | TokensPart | MediaPart


class Chunk(BaseModel):
    """An immutable piece of context. Create one with `text`, `image`, `video`, `audio`, `message` or `tokens`.

    Attributes:
        parts: text, token ids and media, in order.
        role: the turn this chunk is (a message chunk); None for a bare chunk, which lives in the open user turn.
        label: a name for display; not part of the id.
        pin: `Window.slide` skips a pinned chunk; not part of the id.
        priority: `ctxwin.policies.ByPriority` keeps the highest longest; not part of the id.
        keep_source: a window may keep the encoded bytes of in-memory media to rebuild it later.
        as_frames: encode a video as single images instead of the processor's native video tokens.
        origin: the library file that it was drawn from (`ctxwin.Library`); "" for others; not part of the id.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: tuple[TextPart | TokensPart | MediaPart, ...] = Field(min_length=1)
    role: Role | None = None
    as_frames: bool = False
    label: str = ""
    pin: bool = False
    priority: int = 0
    keep_source: bool = True
    origin: str = Field(default="", max_length=200)
    _frames: dict[str, Any] = PrivateAttr(default_factory=dict)
    _cached_id: tuple[tuple[Any, ...], Role | None, bool, str] | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _tracks_have_their_videos(self) -> Self:
        check_unicode("label", self.label)  # of a file's name, say: no snapshot could be written
        for previous, part in zip((None, *self.parts), self.parts, strict=False):
            if not isinstance(part, MediaPart) or not part.track:
                continue
            if self.as_frames or not isinstance(previous, MediaPart) or previous.media != "video":
                raise ValueError("a track must directly follow its video, which is not as_frames; use Chunk.audio")
        return self

    def __eq__(self, other: object) -> bool:
        # Pixels held in memory are a cache, not a part of the value.
        return isinstance(other, Chunk) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((self.parts, self.role, self.label, self.pin))

    @property
    def id(self) -> str:
        """Content identity: SHA-256, hexadecimal. Cost: a hash over part descriptions, not over pixels; once per chunk."""
        private = self.__pydantic_private__ or {}  # pydantic's `__getattr__` takes longer than all of this
        cached: tuple[tuple[Any, ...], Role | None, bool, str] | None = private.get("_cached_id")
        # A copy with other parts inherits the cached id of the original, so the key is compared.
        if cached is not None and cached[0] is self.parts and cached[1:3] == (self.role, self.as_frames):
            return cached[3]
        described: list[Any] = []
        for part in self.parts:
            if isinstance(part, TextPart):
                described.append(["text", part.text])
            elif isinstance(part, TokensPart):
                described.append(["tokens", list(part.ids)])
            else:
                described.append(["media", part.media, part.content, list(part.shape), part.fps])
                described += ["track"] if part.track else []
        chunk_id = digest("chunk", self.role, self.as_frames, described)
        self._cached_id = (self.parts, self.role, self.as_frames, chunk_id)
        return chunk_id

    @property
    def source(self) -> str | None:
        """Path of its first media; None if that came from memory or there is none."""
        return next((p.source for p in self.parts if isinstance(p, MediaPart)), None)

    @property
    def media(self) -> tuple[MediaPart, ...]:
        """Images, videos and sounds among the parts, in order."""
        return tuple(p for p in self.parts if isinstance(p, MediaPart))

    @classmethod
    def text(cls, text: str, **metadata: Any) -> Chunk:
        """Create a text chunk. Raises ValueError if ``text`` is empty. O(len)."""
        if not isinstance(text, str) or not text:
            raise ValueError(f"text must be a non-empty str, got {text!r}")
        check_unicode("text", text)
        return cls._of((TextPart(text=text),), metadata)

    @classmethod
    def tokens(cls, ids: Iterable[int] | np.ndarray, **metadata: Any) -> Chunk:
        """Create a chunk of raw token ids, integers of any kind. Raises ValueError if there are none, or negative ones."""
        try:
            integers = tuple(map(operator.index, ids))
        except TypeError:  # other numbers, texts, an array of two dimensions
            integers = ()
        if not integers or min(integers) < 0:
            raise ValueError(f"tokens must be a non-empty list of ids >= 0, got {ids!r}"[:200])
        return cls._of((TokensPart(ids=integers),), metadata)

    @classmethod
    def image(
        cls, image: str | Path | Image | np.ndarray | bytes | bytearray, text: str = "", **metadata: Any
    ) -> Chunk:
        """Create a chunk of an image with an optional line of text before it.

        Args:
            image: path, PIL image, HxWx3 uint8 RGB array, or encoded bytes.
            text: a line put before the image (a newline is added), e.g. ``t=4 s``.

        Raises:
            BadMedia: empty or undecodable. Cost: one decode and one hash.
        """
        frames = as_rgb(image, copy=True)[None]  # its owner may write the next frame into it
        part = MediaPart(media="image", content=pixels_digest(frames), shape=frames.shape[:3], source=_path(image))
        return cls._with_media([(part, frames)], text, metadata)

    @classmethod
    def video(
        cls,
        video: str | Path | bytes | bytearray | np.ndarray | Sequence[Any],
        start: float | None = None,
        end: float | None = None,
        fps: float | None = None,
        frames: int | None = None,
        text: str = "",
        audio: str | Path | bytes | np.ndarray | None = None,
        sampling_rate: int | None = None,
        **metadata: Any,
    ) -> Chunk:
        """Create a chunk of a clip: a file's ``[start, end)`` seconds sampled by ``fps`` or ``frames``, or a list of frames.

        Args:
            video: path or bytes of a file, or frames of one size.
            start, end, fps, frames: sampling of a file, by presentation time (`ctxwin.video.decode_video`).
            text: a line put before the clip.
            audio: its sound track as for `audio` (that of the video file itself is not read), for audio models: the same
                seconds as of a file, all of it with a list of frames. The two are interleaved by time.
            sampling_rate: of a track given as an array.
            metadata: fields of `Chunk`.

        Raises:
            BadMedia: undecodable, truncated, no video stream, no decoder, an empty range, frames of different size. Cost:
                decoding up to ``end``.
        """
        if isinstance(video, str | Path | bytes | bytearray):
            pixels, rate = decode_video(video, start, end, fps, frames)
        elif not hasattr(video, "__len__"):
            raise BadMedia(f"a video must be a path, bytes or a list of frames, got {type(video).__name__}")
        else:
            if start is not None or end is not None or frames is not None:
                raise BadMedia("start, end and frames need a video path, got a list of frames; slice the list instead")
            rate = 2.0 if fps is None else fps
            check_rate(rate, len(video))
            pixels = stack_frames(list(video))
        sampling: dict[str, Any] = {"fps": rate, "start": start, "end": end, "frames": frames}
        content, source = pixels_digest(pixels), _path(video)
        part = MediaPart(media="video", content=content, shape=pixels.shape[:3], source=source, **sampling)
        if audio is not None and metadata.get("as_frames"):
            raise BadMedia("a video as frames has no track, got audio; append the sound as Chunk.audio")
        tracks = [] if audio is None else [_decode_audio(audio, sampling_rate, start, end, track=True)]
        return cls._with_media([(part, pixels), *tracks], text, metadata)

    @classmethod
    def audio(
        cls,
        audio: str | Path | bytes | np.ndarray,
        sampling_rate: int | None = None,
        text: str = "",
        start: float | None = None,
        end: float | None = None,
        **metadata: Any,
    ) -> Chunk:
        """Create a chunk of sound, for audio models: ``[start, end)`` seconds of it, channels averaged.

        Args:
            audio: path or encoded bytes (WAV; FLAC, Ogg, MP3 by soundfile), or float32 mono samples ``[N]`` from -1 to 1. It is
                resampled to the model's own rate when it is encoded.
            sampling_rate: samples per second, of an array only.
            text: a line put before the sound.
            start, end: seconds; None: from the beginning, to the end.
            metadata: fields of `Chunk`.

        Raises:
            BadMedia: empty, undecodable, not finite, too long, or a range outside it. Cost: one decode and one hash.
            MissingExtra: SciPy or soundfile is not installed: ``pip install 'ctxwin[audio]'``.
        """
        return cls._with_media([_decode_audio(audio, sampling_rate, start, end)], text, metadata)

    @classmethod
    def message(cls, role: Role, content: str | Chunk | Mapping[str, Any] | Sequence[Any], **metadata: Any) -> Chunk:
        """Create a chunk of an entire turn: it closes the open user turn, and a new one opens after it.

        Args:
            role: ``user``, ``assistant``, ``system`` or ``tool``.
            content: a string, a chunk or a ``{"type": "text"|"image"|"video"|"audio", ...}`` block, or a list of these.
            metadata: fields of `Chunk`; ``as_frames``, ``keep_source``, ``pin`` and the first ``origin`` are else the content's.

        Raises ValueError for other content, an unknown key of a block of media, and videos of which only some are ``as_frames``.
        """
        if role not in ("user", "assistant", "system", "tool"):
            raise ValueError(f"role must be user, assistant, system or tool, got {role!r}")
        parts: list[Part] = []
        pixels: dict[str, Any] = {}
        blocks = [content] if isinstance(content, str | Mapping | Chunk) else content
        if not isinstance(blocks, Iterable):
            raise ValueError(f"a message's content must be a str or a list of blocks, got {type(content).__name__}")
        chunks = [block if isinstance(block, Chunk) else _block(block) for block in blocks]
        for chunk in chunks:
            parts += chunk.parts
            pixels |= chunk._frames
        if not parts:
            raise ValueError("a message must have content, got none")
        return cls._of(tuple(parts), {"role": role, **_fields_of(chunks, metadata), **metadata}).holding(pixels)

    @classmethod
    def _with_media(cls, media: Sequence[tuple[MediaPart, np.ndarray]], text: str, metadata: dict[str, Any]) -> Chunk:
        check_unicode("text", text)
        lead: tuple[Part, ...] = (TextPart(text=text + "\n"),) if text else ()
        pixels = {part.content: decoded for part, decoded in media}
        return cls._of((*lead, *(part for part, _ in media)), metadata).holding(pixels)

    @classmethod
    def _of(cls, parts: tuple[Part, ...], metadata: dict[str, Any]) -> Self:
        return cast("Self", validate(lambda fields: cls(parts=parts, **fields), metadata, ""))

    def pixels(self, part: MediaPart) -> np.ndarray | None:
        """Return decoded frames ``[F, H, W, 3]``, or samples ``[N]``, from memory or read again from the source.

        None if both are gone, or if the source has changed since (its digest is compared). Read only: draw on a copy.
        """
        decoded = self._frames.get(part.content)
        if decoded is not None or part.source is None:
            return cast("np.ndarray | None", decoded)
        try:
            if part.media == "image":
                decoded = as_rgb(part.source)[None]
            elif part.media == "audio":
                decoded, _ = as_samples(part.source, None, part.start, part.end)
            else:
                fps = None if part.frames is not None else part.fps
                decoded, _ = decode_video(part.source, part.start, part.end, fps, part.frames)
        except BadMedia:
            return None
        return decoded if part.digest(decoded) == part.content else None

    def holding(self, pixels: Mapping[str, np.ndarray]) -> Chunk:
        """Return the same chunk (same id) with decoded media in memory, by the media's ``content``."""
        copy, views = self.model_copy(), {content: decoded.view() for content, decoded in pixels.items()}
        for view in views.values():
            view.flags.writeable = False  # what is drawn into it would be served under the digest of what was there
        copy._frames = {**self._frames, **views}
        return copy

    def drawn_from(self, origin: str) -> Chunk:
        """Return the same chunk (same id), with its pixels, as drawn from a library file."""
        return self.model_copy(update={"origin": origin})

    def light(self) -> Chunk:
        """Return the same chunk (same id) without pixels in memory."""
        copy = self.model_copy()
        copy._frames = {}
        return copy


def _path(media: Any) -> str | None:
    """Return where media can be read again; None for those in memory, and for a path that no snapshot can hold."""
    path = str(Path(media).resolve()) if isinstance(media, str | Path) else None
    return None if path and path != path.encode(errors="replace").decode() else path


def _decode_audio(
    audio: Any, sampling_rate: int | None, start: float | None, end: float | None, *, track: bool = False
) -> tuple[MediaPart, np.ndarray]:
    samples, rate = as_samples(audio, sampling_rate, start, end)
    content, shape = samples_digest(samples, rate), (1, 1, len(samples))
    origin: dict[str, Any] = {"source": _path(audio), "start": start, "end": end}
    return MediaPart(media="audio", content=content, shape=shape, rate=rate, track=track, **origin), samples


_OPTIONS = {"image": set[str](), "audio": {"sampling_rate", "start", "end"}}
_OPTIONS["video"] = _OPTIONS["audio"] | {"fps", "frames", "audio", "as_frames"}  # what a block may say of its media


def _fields_of(chunks: Sequence[Chunk], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a message takes over from the chunks in it, where they are not ``given``."""
    as_frames = {chunk.as_frames for chunk in chunks if any(part.media == "video" for part in chunk.media)}
    if len(as_frames) > 1 and "as_frames" not in given:
        raise ValueError("as_frames must be the same for all videos of a message, got both; make it two messages")
    return {
        "as_frames": True in as_frames,
        "keep_source": all(chunk.keep_source for chunk in chunks),
        "pin": any(chunk.pin for chunk in chunks),
        "origin": next((chunk.origin for chunk in chunks if chunk.origin), ""),
    }


def _block(block: Any) -> Chunk:
    match block:
        case str() | {"type": "text", "text": str()}:
            return Chunk.text(block if isinstance(block, str) else block["text"])
        case {"type": "image" | "video" | "audio" as media} if media in block:
            options = {name: value for name, value in block.items() if name not in ("type", media)}
            if unknown := options.keys() - _OPTIONS[media]:
                allowed = ", ".join(sorted(_OPTIONS[media])) or "nothing else"
                raise ValueError(
                    f"{media} blocks must hold type, {media} and {allowed}, got {sorted(map(str, unknown))}"
                )
            return cast("Chunk", getattr(Chunk, media)(block[media], **options))
    got = repr(block)[:200] if isinstance(block, dict | int | float | bytes) else type(block).__name__
    raise ValueError(
        f"a content block must be a str, a Chunk or a text/image/video/audio dict, got {got}; a picture is "
        '{"type": "image", "image": a path, PIL image, array or bytes}'
    )
