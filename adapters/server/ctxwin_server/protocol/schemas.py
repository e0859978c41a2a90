"""Chunks as JSON: schemas of what a client may send, and conversion to `Chunk`. Paths and URLs are never opened.

Media are data: base64, a ``data:`` URL, or ``{"file": NAME}`` for a part of a multipart body. An uploaded chunk
is referenced by ``{"type": "ctxwin_chunk", "chunk": ID}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import ConfigDict, Field, TypeAdapter, create_model, model_validator

from ctxwin.chunk import Chunk, MediaPart, Role, TextPart, TokensPart
from ctxwin.media import pixels_digest, stack_frames
from ctxwin_chats.bodies import Body, FormBody, decode_data, picture_size
from ctxwin_server.protocol.limits import Allowance

if TYPE_CHECKING:
    import numpy as np

FPS = 0.01, 1000.0
"""Frames per second that a video may have."""
_LONGEST_VIDEO = 24 * 3600.0
Find = Callable[[str], Chunk]
Decode = Callable[[bytes, int, int], "np.ndarray"]
"""``(file, width, height)`` -> pixels ``[height, width, 3]`` uint8; raises BadMedia if the file contradicts its header."""
TOKEN = Annotated[int, Field(ge=0, lt=2**31)]
COUNT = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""A count or an index; operations check its range."""


class File(Body):
    """Bytes in another part of a multipart body."""

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
    """An image; ``text`` precedes it, on a line of its own."""

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
    """Metadata, which is not part of a chunk's id; None keeps the earlier value."""

    label: str | None = None
    pin: bool | None = None
    priority: COUNT | None = None
    keep_source: bool | None = None

    def sent_fields(self) -> dict[str, Any]:
        """Return the fields that were sent."""
        return self.model_dump(include=set(Metadata.model_fields), exclude_none=True)


class Own(Metadata):
    """A chunk in full. With ``id``, its content must have that identity."""

    as_frames: bool = False
    id: str | None = None


class FormChunk(Own, FormBody):
    """Fields of a form beside its picture; the chunk that they become is validated as any other."""

    model_config = ConfigDict(extra="allow")


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


def build_chunk(spec: Any, files: Mapping[str, bytes], allowance: Allowance, find: Find, decode: Decode) -> Chunk:
    """Build the chunk that a validated ``spec`` describes.

    Args:
        files: bytes by name, of a multipart body.
        allowance: remaining allowance of the request, charged before anything is decoded.
        find: returns an uploaded chunk by id.
        decode: decodes a picture whose size was charged.

    Raises:
        BadMedia, TooLarge, UnknownUpload. ValueError: its content does not match its id.
    """
    if isinstance(spec, ReferredChunk):
        return find(spec.chunk).model_copy(update=spec.sent_fields())
    parts: list[TextPart | TokensPart | MediaPart] = []
    pixels: dict[str, np.ndarray] = {}

    def picture(data: Data) -> np.ndarray:
        if not isinstance(data, File):
            raw = decode_data(data)
        elif (file := files.get(data.file)) is not None:
            raw = file
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

    content = spec.content if isinstance(spec, PartsChunk | MessageChunk) else [spec]
    for part in [content] if isinstance(content, str) else content:
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
                chunk = find(part.chunk)
                if chunk.role is not None:
                    raise ValueError(f"a part must be no message of its own, got the {chunk.role} message {chunk.id}")
                parts.extend(chunk.parts)
    role = spec.role if isinstance(spec, MessageChunk) else None
    chunk = Chunk(parts=tuple(parts), role=role, as_frames=spec.as_frames, **spec.sent_fields()).holding(pixels)
    if spec.id is not None and spec.id != chunk.id:
        raise ValueError(f"the content must have the id it is sent with, {spec.id}, got {chunk.id}; send it again")
    return chunk


def without_sources(parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``parts`` without paths: a client must not make a server open files."""
    none = dict.fromkeys(("source", "start", "end", "frames"))
    return tuple(p.model_copy(update=none) if isinstance(p, MediaPart) else p for p in parts)
