"""Thumbnails of chunks, from wherever their pixels are still available."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from ctxwin.errors import BadMedia
from ctxwin.media import as_rgb, unpack_frames
from ctxwin.video import decode_video

if TYPE_CHECKING:
    import numpy as np

    from ctxwin.chunk import Chunk, MediaPart
    from ctxwin.store.spans import SpanRepository

SIDE = 96
"""Pixels of the longer side."""


def thumbnail(repo: SpanRepository, chunk: Chunk) -> str | None:
    """Return a base64 JPEG of the first picture of ``chunk``, the longer side at most `SIDE`; None if there is none.

    Also None for ``keep_source=False``, whose pixels must not be kept, and where both the source and the stored pixels are gone.
    Cost: reads or decodes the source once, a video file only up to the chunk's first frame.
    """
    if not chunk.media or not chunk.keep_source:
        return None
    frame = _first_frame(repo, chunk, chunk.media[0])
    return None if frame is None else jpeg(frame)


def jpeg(frame: np.ndarray) -> str:
    """Base64 JPEG of an RGB frame ``[H, W, 3]`` uint8, the longer side at most `SIDE`."""
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=70, optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _first_frame(repo: SpanRepository, chunk: Chunk, part: MediaPart) -> np.ndarray | None:
    try:
        decoded = chunk._frames.get(part.content)
        if decoded is not None:
            return as_rgb(decoded[0])
        if part.source is None:
            stored = repo.get_source(f"source/{part.content}")
            return None if stored is None else unpack_frames(stored)[0]
        if part.media == "image":
            return as_rgb(part.source)
        return _first_of(part, part.source)
    except BadMedia:
        return None  # the file is gone


def _first_of(part: MediaPart, source: str) -> np.ndarray:
    begin = part.start or 0.0
    end = begin + 1.0 if part.end is None else min(part.end, begin + 1.0)
    try:
        frames, _ = decode_video(source, begin, end, frames=1)
    except BadMedia:  # there is less than a second of it
        frames, _ = decode_video(source, begin, part.end, frames=1)
    first: np.ndarray = frames[0]
    return first
