"""Chunks as JSON: what a client may send, checked and turned into `Chunk`. Paths and URLs are never opened.

Media are data: base64, a ``data:`` URL, or ``{"file": NAME}`` for a part of a multipart body. A chunk that was uploaded
stands anywhere as ``{"type": "ctxwin_chunk", "chunk": ID}``.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ctxwin.chunk import Chunk, MediaPart, Role, TextPart, TokensPart
from ctxwin.errors import BadMedia
from ctxwin.media import pixels_digest, stack_frames
from ctxwin.serve.limits import Allowance

if TYPE_CHECKING:
    import numpy as np

REFERENCE = "ctxwin_chunk"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Pictures whose header says what decoding them takes. Others do not (tiles of a TIFF may be larger than the picture, icons
are decoded to be opened), or run programs."""
FPS = 0.01, 1000.0
"""Frames per second that a video may have."""
_LONGEST_VIDEO = 24 * 3600.0
Find = Callable[[str], Chunk]
Decode = Callable[[bytes, int, int], "np.ndarray"]
"""``(file, width, height)`` -> pixels ``[height, width, 3]`` uint8; BadMedia where the file is not what its header says."""
SEED = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What torch's generators take."""
TOKEN = Annotated[int, Field(ge=0, lt=2**31)]
COUNT = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""A number that counts or indexes something; operations say which of them make sense."""


class Body(BaseModel):
    """A JSON body; unknown fields are refused, so that a misspelt option is not ignored."""

    model_config = ConfigDict(extra="forbid")


class File(Body):
    """Bytes that stand in another part of a multipart body."""

    file: str


Data = str | File


class Text(Body):
    type: Literal["text"]
    text: str = Field(min_length=1)


class Tokens(Body):
    type: Literal["tokens"]
    ids: list[TOKEN] = Field(min_length=1)


class Image(Body):
    """``text`` stands in a line of its own in front."""

    type: Literal["image"]
    image: Data
    text: str = ""


class Video(Body):
    """Frames of one size, encoded as images, in order."""

    type: Literal["video"]
    frames: list[Data] = Field(min_length=1)
    fps: float = Field(default=2.0, ge=FPS[0], le=FPS[1])
    text: str = ""

    @model_validator(mode="after")
    def _has_a_sane_length(self) -> Self:
        if len(self.frames) / self.fps > _LONGEST_VIDEO:
            raise ValueError(f"a video must last {_LONGEST_VIDEO:g} s at most, got {len(self.frames) / self.fps:g} s")
        return self


class Reference(Body):
    type: Literal["ctxwin_chunk"]
    chunk: str


Part = Annotated[Text | Tokens | Image | Video | Reference, Field(discriminator="type")]


class Metadata(Body):
    """What is no part of a chunk's id; None leaves what was given before."""

    label: str | None = None
    pin: bool | None = None
    priority: COUNT | None = None
    keep_source: bool | None = None

    def given(self) -> dict[str, Any]:
        names = ("label", "pin", "priority", "keep_source")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Own(Metadata):
    """A chunk in full. With ``id``, its content must have that identity."""

    as_frames: bool = False
    id: str | None = None


class TextChunk(Own, Text):
    pass


class TokensChunk(Own, Tokens):
    pass


class ImageChunk(Own, Image):
    pass


class VideoChunk(Own, Video):
    pass


class PartsChunk(Own):
    type: Literal["parts"]
    content: list[Part] = Field(min_length=1)


class MessageChunk(Own):
    type: Literal["message"]
    role: Role
    content: str | list[str | Part] = Field(min_length=1)


class ReferredChunk(Metadata, Reference):
    pass


Spec = Annotated[
    TextChunk | TokensChunk | ImageChunk | VideoChunk | PartsChunk | MessageChunk | ReferredChunk,
    Field(discriminator="type"),
]
CHUNK: TypeAdapter[Any] = TypeAdapter(Spec)


def check_spec(data: Any) -> Any:
    """A checked chunk; ValueError names what is wrong with it."""
    return checked(CHUNK.validate_python, data)


def checked(validate: Callable[[Any], Any], data: Any) -> Any:
    """What pydantic makes of ``data``, its complaints as one line."""
    try:
        return validate(data)
    except ValidationError as error:
        raise ValueError(complaint(error)) from None


def complaint(error: ValidationError) -> str:
    found = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)]
    return "the request is malformed: " + "; ".join(found[:4])


class Builder:
    """Turns one checked chunk into a `Chunk`.

    Args:
        files: bytes by name, of a multipart body.
        allowance: what the request's media may still cost; asked before anything is decoded.
        find: an uploaded chunk by id.
        decode: decodes a picture whose header was read and allowed.
    """

    def __init__(self, files: Mapping[str, bytes], allowance: Allowance, find: Find, decode: Decode) -> None:
        self._files = files
        self._allowance = allowance
        self._find = find
        self._decode = decode
        self._parts: list[TextPart | TokensPart | MediaPart] = []
        self._pixels: dict[str, np.ndarray] = {}

    def build(self, spec: Any) -> Chunk:
        """The chunk; BadMedia, TooLarge, UnknownUpload, and ValueError where its id is not the one it was sent with."""
        if isinstance(spec, ReferredChunk):
            return self._find(spec.chunk).model_copy(update=spec.given())
        role = None
        if isinstance(spec, PartsChunk | MessageChunk):
            role = spec.role if isinstance(spec, MessageChunk) else None
            for part in [spec.content] if isinstance(spec.content, str) else spec.content:
                self._add(part)
        else:
            self._add(spec)
        chunk = Chunk(parts=tuple(self._parts), role=role, as_frames=spec.as_frames, **spec.given()).holding(
            self._pixels
        )
        if spec.id is not None and spec.id != chunk.id:
            raise ValueError(f"the content must have the id it is sent with, {spec.id}, got {chunk.id}; send it again")
        return chunk

    def _add(self, part: Any) -> None:
        if isinstance(part, str):
            self._add_text(part)
        elif isinstance(part, Text):
            self._add_text(part.text)
        elif isinstance(part, Tokens):
            self._parts.append(TokensPart(ids=tuple(part.ids)))
        elif isinstance(part, Image):
            self._add_line(part.text)
            self._add_media("image", self._picture(part.image)[None], None)
        elif isinstance(part, Video):
            self._add_line(part.text)
            self._add_media("video", stack_frames([self._picture(frame) for frame in part.frames]), part.fps)
        else:
            found = self._find(part.chunk)
            if found.role is not None:
                raise ValueError(f"a part must be no message of its own, got the {found.role} message {found.id}")
            self._parts += found.parts

    def _add_text(self, text: str) -> None:
        if not text:
            raise ValueError("text must not be empty")
        self._parts.append(TextPart(text=text))

    def _add_line(self, text: str) -> None:
        if text:
            self._add_text(text + "\n")

    def _add_media(self, media: Literal["image", "video"], frames: np.ndarray, fps: float | None) -> None:
        height, width = frames.shape[1:3]
        part = MediaPart(
            media=media, content=pixels_digest(frames), shape=(len(frames), height, width),
            fps=None if fps is None else float(fps),
        )  # fmt: skip
        self._parts.append(part)
        self._pixels[part.content] = frames

    def _picture(self, data: Data) -> np.ndarray:
        raw = self._bytes(data)
        width, height = picture_size(raw)
        self._allowance.take_picture(width, height)
        return self._decode(raw, width, height)

    def _bytes(self, data: Data) -> bytes:
        if isinstance(data, File):
            if data.file not in self._files:
                raise ValueError(
                    f"file must name a part of the multipart body {sorted(self._files)}, got {data.file!r}"
                )
            return self._files[data.file]
        return decode_data(data)


def picture_size(raw: bytes) -> tuple[int, int]:
    """Width and height of an encoded picture by its header; BadMedia for a format that is not taken."""
    from PIL import Image, UnidentifiedImageError

    if not raw:
        raise BadMedia("an image must not be empty, got 0 bytes")
    try:
        with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:  # reads the header only
            return picture.size
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadMedia(f"an image must be a {', '.join(FORMATS)} file, got {len(raw)} bytes: {error}") from error


def decode_data(text: str) -> bytes:
    """Bytes of base64 or of a ``data:`` URL; BadMedia otherwise. Other URLs are not fetched."""
    head, comma, rest = text.partition(",") if text.startswith("data:") else ("", ",", text)
    if not comma or (head and not head.endswith(";base64")):
        raise BadMedia(f"a data URL must be base64, like data:image/png;base64,..., got {text[:40]!r}")
    if not head and "://" in text[:16]:
        raise BadMedia(f"media must be sent as data, got the URL {text[:60]!r}; fetch it yourself and send its bytes")
    try:
        return base64.b64decode(rest, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadMedia(f"media must be base64, got {len(rest)} characters that are not: {error}") from None


def without_sources(parts: Sequence[Any]) -> tuple[Any, ...]:
    """``parts`` with no path in them: a client must not make a server open files."""
    return tuple(
        p.model_copy(update={"source": None, "start": None, "end": None, "frames": None}) if isinstance(p, MediaPart) else p
        for p in parts
    )  # fmt: skip
