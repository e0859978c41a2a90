"""Thumbnails of chunks, from wherever their pixels are still available."""

from __future__ import annotations

import base64
import contextlib
import io
from typing import TYPE_CHECKING

from ctxwin.errors import BadMedia
from ctxwin.media import unpack_frames

if TYPE_CHECKING:
    import numpy as np

    from ctxwin.chunk import Chunk
    from ctxwin.store.spans import SpanRepository

SIDE = 96
"""Pixels of the longer side."""


def thumbnail(repo: SpanRepository, chunk: Chunk) -> str | None:
    """Return a base64 JPEG of the first picture of ``chunk``, the longer side at most `SIDE`; None if there is none.

    Also None for ``keep_source=False``, whose pixels must not be kept, and where the stored pixels are gone and the source is
    gone or shows others. Cost: decodes the source once, where the pixels have left memory.
    """
    part = next((part for part in chunk.media if part.rate is None), None)
    if part is None or not chunk.keep_source:
        return None
    frames = chunk.pixels(part)  # None for a file that shows something else now
    if frames is None and (stored := repo.get_source(f"source/{part.content}")) is not None:
        with contextlib.suppress(BadMedia):
            frames = unpack_frames(stored)
    return None if frames is None else jpeg(frames[0])


def jpeg(frame: np.ndarray) -> str:
    """Base64 JPEG of an RGB frame ``[H, W, 3]`` uint8, the longer side at most `SIDE`."""
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=70, optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
