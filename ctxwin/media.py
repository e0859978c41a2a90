"""Decoding of images (Pillow) and videos (OpenCV) to RGB arrays, and the lossless form sources are kept in.

Pillow and OpenCV are imported where they are used, so that ``import ctxwin`` loads neither.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.errors import BadMedia
from ctxwin.extras import optional_imports
from ctxwin.hashing import digest

if TYPE_CHECKING:
    import numpy as np

MAX_PIXELS = 100_000_000  # of one image; read from its header before it is decoded
MAX_FRAMES = 4096
MAX_VIDEO_PIXELS = 1_000_000_000  # of all frames together; three bytes each
FPS = (1e-3, 1000.0)  # sane rates of a video, in frames per second
MAX_SECONDS = 86_400.0
# In other formats (TIFF, PSD, EPS ...) a small file can name buffers of any size, or start programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")
_MAX_SCANS = 64  # of a progressive JPEG: each is a pass over the whole image; usual files have ten
_FRAMES = b"CTXWFRM1"


def pixels_digest(frames: np.ndarray) -> str:
    """Identity of RGB frames ``[F, H, W, 3]`` uint8: bytes with shape, dtype and mode."""
    import numpy as np

    return digest("pixels", "RGB", "uint8", list(frames.shape), np.ascontiguousarray(frames).tobytes())


def check_size(width: int, height: int) -> None:
    """Raises BadMedia for an image that is empty or over `MAX_PIXELS`."""
    if width < 1 or height < 1:
        raise BadMedia(f"an image must not be empty, got {width}x{height} pixels")
    if width * height > MAX_PIXELS:
        raise BadMedia(f"an image must have at most {MAX_PIXELS:,} pixels, got {width}x{height}; shrink it first")


def check_rate(fps: float | None, frames: int = 0) -> None:
    """Raises BadMedia for a rate outside `FPS`, more than `MAX_FRAMES`, or a video longer than `MAX_SECONDS`."""
    if fps is not None and not FPS[0] <= fps <= FPS[1]:
        raise BadMedia(f"fps must be from {FPS[0]:g} to {FPS[1]:g}, got {fps:g}")
    if frames > MAX_FRAMES:
        raise BadMedia(f"a video must have at most {MAX_FRAMES:,} frames, got {frames:,}; sample fewer, or cut it")
    if fps is not None and frames / fps > MAX_SECONDS:
        raise BadMedia(f"a video must last at most {MAX_SECONDS:,.0f} s, got {frames} frames at {fps:g} fps")


def as_rgb(image: Any) -> np.ndarray:
    """``[H, W, 3]`` uint8 RGB of a path, encoded bytes, PIL image or array.

    Raises BadMedia: empty, undecodable, over `MAX_PIXELS`, or of another format than PNG, JPEG, WebP, GIF, BMP and PPM
    (open those with Pillow and pass its image). Sizes are read from the header, before anything is decoded.
    """
    import numpy as np
    from PIL import Image

    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise BadMedia(
                f"an image array must be HxWx3 uint8 RGB, got shape {image.shape} dtype {image.dtype}; "
                "convert it first, e.g. (x * 255).astype('uint8')"
            )
        check_size(image.shape[1], image.shape[0])
        return np.ascontiguousarray(image)
    try:
        picture = image if isinstance(image, Image.Image) else _opened(image)
        check_size(*picture.size)
        return np.ascontiguousarray(np.asarray(picture.convert("RGB")))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        name = repr(str(image)) if isinstance(image, str | Path) else "an image in memory"
        raise BadMedia(f"an image must be decodable, got {name}: {error}") from error


def _opened(media: Any) -> Any:
    """A Pillow image whose header was read; raises BadMedia for another format, or a JPEG of too many scans."""
    from PIL import Image, UnidentifiedImageError

    if not isinstance(media, str | Path | bytes | bytearray):
        raise BadMedia(f"an image must be a path, PIL image, HxWx3 uint8 array or bytes, got {type(media).__name__}")
    if isinstance(media, str | Path) and not Path(media).is_file():
        raise BadMedia(f"an image path must be a readable file, got {str(media)!r}")
    if not media:
        raise BadMedia("an image must not be empty, got 0 bytes")
    try:
        with warnings.catch_warnings():  # Pillow's own bound only warns below twice its size; ours follows
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(media if isinstance(media, str | Path) else io.BytesIO(media), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise BadMedia(f"an image must be decodable and of {', '.join(_FORMATS)}, got {error}") from error
    if picture.format == "JPEG":
        raw = Path(media).read_bytes() if isinstance(media, str | Path) else media
        if (scans := raw.count(b"\xff\xda")) > _MAX_SCANS:
            raise BadMedia(f"a progressive JPEG must have at most {_MAX_SCANS} scans, got {scans}; save it again")
    return picture


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
    cannot be opened, holds no frame in the range, ends before ``end`` (a truncated file), or is over a limit of this module.
    """
    with optional_imports():
        import cv2
    import numpy as np

    if fps is not None and frames is not None:
        raise BadMedia("a video must be sampled by fps or by frames, got both; drop one")
    check_rate(fps, frames or 0)
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
        if not rate > 0:
            raise BadMedia(f"a video must be decodable by OpenCV, got {str(path)!r}; re-encode it, e.g. as mp4v")
        declared = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        step = 0.0 if frames is not None else 1.0 / (fps or 2.0)
        kept: list[np.ndarray] = []
        count, due = 0, begin
        while end is None or count / rate < end - 1e-9:
            ok, bgr = capture.read()
            if not ok:
                break
            count += 1
            if (count - 1) / rate + 1e-9 < due:
                continue
            _check_pixels(len(kept) + 1, bgr, "sample fewer by fps, or pass a shorter range")
            kept.append(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB))
            due += step
    finally:
        capture.release()
    wanted = end if end is not None else declared / rate
    if not kept or count + 1 < int(wanted * rate):
        raise BadMedia(
            f"{str(path)!r} ended after {count / rate:.2f} s of {wanted:.2f} s: the file is truncated or the range lies "
            "outside it; pass an end inside the file"
        )
    check_rate(None, len(kept) if frames is None else frames)
    if frames is not None:
        take = np.linspace(0, len(kept) - 1, frames).round().astype(int)
        return np.stack([kept[i] for i in take]), frames / (len(kept) / rate)
    return np.stack(kept), float(fps or 2.0)


def _check_pixels(count: int, frame: np.ndarray, remedy: str) -> None:
    """Raises BadMedia where ``count`` frames like ``frame`` are over `MAX_VIDEO_PIXELS`."""
    height, width = frame.shape[:2]
    if count * height * width > MAX_VIDEO_PIXELS:
        raise BadMedia(
            f"a video must have at most {MAX_VIDEO_PIXELS:,} pixels in all frames, got {count} of {width}x{height}; {remedy}"
        )


def stack_frames(frames: Sequence[Any]) -> np.ndarray:
    """A list of images as ``[F, H, W, 3]``; raises BadMedia where sizes differ or the list is empty."""
    import numpy as np

    if not len(frames):
        raise BadMedia("a video must hold at least one frame, got none")
    check_rate(None, len(frames))
    arrays: list[np.ndarray] = []
    for frame in frames:
        arrays.append(as_rgb(frame))
        _check_pixels(len(frames), arrays[-1], "shrink them first")
    if len({a.shape for a in arrays}) > 1:
        raise BadMedia(f"all frames of a video must have one size, got {sorted({a.shape[:2] for a in arrays})}")
    return np.stack(arrays)


def png(frame: np.ndarray) -> bytes:
    """An RGB picture ``[H, W, 3]`` uint8, encoded without loss."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def pack_frames(frames: np.ndarray) -> bytes:
    """Lossless bytes of frames: PNG each, length-prefixed."""
    packed = [struct.pack(">Q", len(raw)) + raw for raw in map(png, frames)]
    return b"".join([_FRAMES, struct.pack(">I", len(frames)), *packed])


def unpack_frames(data: bytes) -> np.ndarray:
    """The inverse of `pack_frames`; raises BadMedia."""
    return stack_frames([as_rgb(picture) for picture in packed_pictures(data)])


def packed_pictures(data: bytes) -> list[bytes]:
    """The PNG files in what `pack_frames` made; raises BadMedia."""
    if data[:8] != _FRAMES or len(data) < 12:
        raise BadMedia("a stored source must start with the mark of packed frames, got other bytes")
    (count,) = struct.unpack_from(">I", data, 8)
    check_rate(None, count)
    at = 12
    frames: list[bytes] = []
    for _ in range(count):
        if at + 8 > len(data):
            raise BadMedia(f"a stored source must hold {count} frames, got {len(frames)}")
        (size,) = struct.unpack_from(">Q", data, at)
        frames.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return frames
