"""Decoding of images (Pillow) and videos (OpenCV) to RGB arrays, and the lossless form sources are kept in.

Pillow and OpenCV are imported where they are used, so that ``import ctxwin`` loads neither.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.errors import BadMedia
from ctxwin.extras import optional_imports
from ctxwin.hashing import digest

if TYPE_CHECKING:
    import numpy as np

_FRAMES = b"CTXWFRM1"


def pixels_digest(frames: np.ndarray) -> str:
    """Identity of RGB frames ``[F, H, W, 3]`` uint8: bytes with shape, dtype and mode."""
    import numpy as np

    return digest("pixels", "RGB", "uint8", list(frames.shape), np.ascontiguousarray(frames).tobytes())


def as_rgb(image: Any) -> np.ndarray:
    """``[H, W, 3]`` uint8 RGB of a path, encoded bytes, PIL image or array; raises BadMedia (empty, undecodable)."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    picture: Image.Image
    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise BadMedia(
                f"an image array must be HxWx3 uint8 RGB, got shape {image.shape} dtype {image.dtype}; "
                "convert it first, e.g. (x * 255).astype('uint8')"
            )
        array = image
    else:
        try:
            if isinstance(image, bytes | bytearray):
                if not image:
                    raise BadMedia("an image must not be empty, got 0 bytes")
                picture = Image.open(io.BytesIO(image))
            elif isinstance(image, str | Path):
                if not Path(image).is_file():
                    raise BadMedia(f"an image path must be a readable file, got {str(image)!r}")
                picture = Image.open(image)
            elif isinstance(image, Image.Image):
                picture = image
            else:
                raise BadMedia(
                    f"an image must be a path, PIL image, HxWx3 uint8 array or bytes, got {type(image).__name__}"
                )
            array = np.asarray(picture.convert("RGB"))
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise BadMedia(f"an image must be decodable, got {_name(image)}: {error}") from error
    if array.shape[0] == 0 or array.shape[1] == 0:
        raise BadMedia(f"an image must not be empty, got {array.shape[1]}x{array.shape[0]} pixels")
    return np.ascontiguousarray(array)


def _name(media: Any) -> str:
    return (
        repr(str(media))
        if isinstance(media, str | Path)
        else f"{len(media)} bytes"
        if isinstance(media, bytes)
        else "an image"
    )


def decode_video(
    path: str | Path,
    start: float | None = None,
    end: float | None = None,
    fps: float | None = None,
    frames: int | None = None,
) -> tuple[np.ndarray, float]:
    """Frames ``[F, H, W, 3]`` RGB of ``[start, end)`` seconds, and the sampled frames per second.

    Read sequentially (a container's frame count can lie). ``fps`` takes the first frame at or after each sampling time;
    ``frames`` takes that many by ``round(linspace(first, last, frames))``; neither: 2 fps. Raises BadMedia where the file
    cannot be opened, holds no frame in the range, or ends before ``end`` (a truncated file).
    """
    with optional_imports():
        import cv2
    import numpy as np

    if fps is not None and frames is not None:
        raise BadMedia("a video must be sampled by fps or by frames, got both; drop one")
    if fps is not None and not fps > 0:
        raise BadMedia(f"fps must be > 0, got {fps}")
    if frames is not None and frames < 1:
        raise BadMedia(f"frames must be >= 1, got {frames}")
    begin = 0.0 if start is None else float(start)
    if begin < 0 or (end is not None and end <= begin):
        raise BadMedia(f"a video range must be 0 <= start < end, got start={start} end={end}")
    if not Path(path).is_file():
        raise BadMedia(f"a video path must be a readable file, got {str(path)!r}")
    capture = cv2.VideoCapture(str(path))
    try:
        rate = float(capture.get(cv2.CAP_PROP_FPS)) if capture.isOpened() else 0.0
        declared = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) if capture.isOpened() else 0
        if not capture.isOpened() or not rate > 0:
            raise BadMedia(f"a video must be decodable by OpenCV, got {str(path)!r}; re-encode it, e.g. as mp4v")
        step = None if frames is not None else 1.0 / (fps or 2.0)
        kept: list[np.ndarray] = []
        count, due = 0, begin
        while True:
            time = count / rate
            if end is not None and time >= end - 1e-9:
                break
            ok, bgr = capture.read()
            if not ok:
                break
            count += 1
            if time + 1e-9 < begin:
                continue
            if step is None or time + 1e-9 >= due:
                kept.append(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB))
                if step is not None:
                    due += step
    finally:
        capture.release()
    wanted = end if end is not None else declared / rate
    if not kept or count + 1 < int(wanted * rate):
        raise BadMedia(
            f"{str(path)!r} ended after {count / rate:.2f} s of {wanted:.2f} s: the file is truncated or the range lies "
            "outside it; pass an end inside the file"
        )
    if frames is not None:
        take = np.linspace(0, len(kept) - 1, frames).round().astype(int)
        seconds = len(kept) / rate
        return np.stack([kept[i] for i in take]), frames / seconds
    return np.stack(kept), float(fps or 2.0)


def stack_frames(frames: Sequence[Any]) -> np.ndarray:
    """A list of images as ``[F, H, W, 3]``; raises BadMedia where sizes differ or the list is empty."""
    import numpy as np

    if not len(frames):
        raise BadMedia("a video must hold at least one frame, got none")
    arrays = [as_rgb(frame) for frame in frames]
    if len({a.shape for a in arrays}) > 1:
        raise BadMedia(f"all frames of a video must have one size, got {sorted({a.shape[:2] for a in arrays})}")
    return np.stack(arrays)


def pack_frames(frames: np.ndarray) -> bytes:
    """Lossless bytes of frames: PNG each, length-prefixed."""
    from PIL import Image

    out = [_FRAMES, struct.pack(">I", len(frames))]
    for frame in frames:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "PNG", compress_level=1)
        raw = buffer.getvalue()
        out += [struct.pack(">Q", len(raw)), raw]
    return b"".join(out)


def unpack_frames(data: bytes) -> np.ndarray:
    """The inverse of `pack_frames`; raises BadMedia."""
    import numpy as np

    if data[:8] != _FRAMES:
        raise BadMedia("a stored source must start with the frame system prompt, got other bytes")
    (count,) = struct.unpack_from(">I", data, 8)
    at, frames = 12, []
    for _ in range(count):
        (size,) = struct.unpack_from(">Q", data, at)
        frames.append(as_rgb(data[at + 8 : at + 8 + size]))
        at += 8 + size
    return np.stack(frames)
