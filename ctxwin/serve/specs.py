"""Chunks as JSON: what a client may send, checked and turned into `Chunk`. Paths and URLs are never opened.

Media are data: base64, a ``data:`` URL, or ``{"file": NAME}`` for a part of a multipart body. A chunk that was uploaded
stands anywhere as ``{"type": "ctxwin_chunk", "chunk": ID}``.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model, model_validator

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
    """Text."""

    type: Literal["text"]
    text: str = Field(min_length=1)


class Tokens(Body):
    """Token ids of the served model."""

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
    """A chunk that was uploaded."""

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
        """What was sent of it."""
        return self.model_dump(include=set(Metadata.model_fields), exclude_none=True)


class Own(Metadata):
    """A chunk in full. With ``id``, its content must have that identity."""

    as_frames: bool = False
    id: str | None = None


class PartsChunk(Own):
    """Several parts that are one chunk."""

    type: Literal["parts"]
    content: list[Part] = Field(min_length=1)


class MessageChunk(Own):
    """A message of a chat that is one chunk."""

    type: Literal["message"]
    role: Role
    content: str | list[str | Part] = Field(min_length=1)


class ReferredChunk(Metadata, Reference):
    """An uploaded chunk, with other metadata."""


_SINGLE = [create_model(f"{part.__name__}Chunk", __base__=(Own, part)) for part in (Text, Tokens, Image, Video)]
_Chunk: Any = Union[(*_SINGLE, PartsChunk, MessageChunk, ReferredChunk)]
CHUNK: TypeAdapter[Any] = TypeAdapter(Annotated[_Chunk, Field(discriminator="type")])


def checked(validate: Callable[[Any], Any], data: Any) -> Any:
    """What pydantic makes of ``data``, its complaints as one line."""
    try:
        return validate(data)
    except ValidationError as error:
        raise ValueError(_complaint(error)) from None


def _complaint(error: ValidationError) -> str:
    found = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)]
    return "the request is malformed: " + "; ".join(found[:4])


def build_chunk(spec: Any, files: Mapping[str, bytes], allowance: Allowance, find: Find, decode: Decode) -> Chunk:
    """The chunk that a checked ``spec`` is.

    Args:
        files: bytes by name, of a multipart body.
        allowance: what the request's media may still cost; asked before anything is decoded.
        find: an uploaded chunk by id.
        decode: decodes a picture whose header was read and allowed.

    Raises:
        BadMedia, TooLarge, UnknownUpload. ValueError: its content is not what its id says.
    """
    if isinstance(spec, ReferredChunk):
        return find(spec.chunk).model_copy(update=spec.given())
    parts: list[TextPart | TokensPart | MediaPart] = []
    pixels: dict[str, np.ndarray] = {}

    def picture(data: Data) -> np.ndarray:
        if not isinstance(data, File):
            raw = decode_data(data)
        elif (held := files.get(data.file)) is not None:
            raw = held
        else:
            raise ValueError(f"file must name a part of the multipart body {sorted(files)}, got {data.file!r}")
        width, height = picture_size(raw)
        allowance.take_picture(width, height)
        return decode(raw, width, height)

    def add_text(text: str) -> None:
        if not text:
            raise ValueError("text must not be empty")
        parts.append(TextPart(text=text))

    def add_media(media: Literal["image", "video"], text: str, frames: np.ndarray, fps: float | None = None) -> None:
        if text:
            add_text(text + "\n")
        shape = (len(frames), *frames.shape[1:3])
        part = MediaPart(media=media, content=pixels_digest(frames), shape=shape, fps=fps)
        parts.append(part)
        pixels[part.content] = frames

    def add(part: Any) -> None:
        match part:
            case str():
                add_text(part)
            case Text():
                add_text(part.text)
            case Tokens():
                parts.append(TokensPart(ids=tuple(part.ids)))
            case Image():
                add_media("image", part.text, picture(part.image)[None])
            case Video():
                add_media("video", part.text, stack_frames(list(map(picture, part.frames))), part.fps)
            case _:
                found = find(part.chunk)
                if found.role is not None:
                    raise ValueError(f"a part must be no message of its own, got the {found.role} message {found.id}")
                parts.extend(found.parts)

    content = spec.content if isinstance(spec, PartsChunk | MessageChunk) else [spec]
    for part in [content] if isinstance(content, str) else content:
        add(part)
    role = spec.role if isinstance(spec, MessageChunk) else None
    chunk = Chunk(parts=tuple(parts), role=role, as_frames=spec.as_frames, **spec.given()).holding(pixels)
    if spec.id is not None and spec.id != chunk.id:
        raise ValueError(f"the content must have the id it is sent with, {spec.id}, got {chunk.id}; send it again")
    return chunk


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
    none = dict.fromkeys(("source", "start", "end", "frames"))
    return tuple(p.model_copy(update=none) if isinstance(p, MediaPart) else p for p in parts)
