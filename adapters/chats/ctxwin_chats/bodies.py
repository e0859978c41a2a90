"""JSON bodies: a base of their schemas, and the media in them, which are data. Paths and URLs are never opened."""

from __future__ import annotations

import base64
import binascii

from pydantic import BaseModel, ConfigDict

from ctxwin.errors import BadMedia
from ctxwin.media import open_picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")
"""Formats whose header tells the cost of decoding. Others do not (tiles of a TIFF may be larger than the picture, icons are
decoded on opening), or run programs."""


class Body(BaseModel):
    """A JSON body; unknown fields are refused, so that a misspelt option is not ignored, and so are values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class FormBody(Body):
    """Fields of a form or a URL, whose values are strings."""

    model_config = ConfigDict(strict=False)


def picture_size(raw: bytes) -> tuple[int, int]:
    """Return width and height of an encoded picture by its header; raise BadMedia for an unsupported format."""
    with open_picture(raw, FORMATS) as picture:  # reads the header only
        return picture.size


def decode_data(text: str) -> bytes:
    """Decode base64 or a ``data:`` URL; raise BadMedia otherwise. Other URLs are not fetched."""
    head, comma, rest = text.partition(",") if text.startswith("data:") else ("", ",", text)
    if not comma or (head and not head.endswith(";base64")):
        raise BadMedia(f"a data URL must be base64, like data:image/png;base64,..., got {text[:40]!r}")
    if not head and "://" in text[:16]:
        raise BadMedia(f"media must be sent as data, got the URL {text[:60]!r}; fetch it yourself and send its bytes")
    try:
        return base64.b64decode(rest, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadMedia(f"media must be base64, got {len(rest)} characters that are not: {error}") from None
