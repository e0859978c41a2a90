"""Decoding of images (Pillow) to RGB arrays, limits of pictures and videos, and lossless storage of sources.

Pillow is imported where it is used, so that ``import ctxwin`` does not load it. Videos: `ctxwin.video`.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.errors import BadMedia
from ctxwin.hashing import digest
from ctxwin.validation import check_numbers

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

MAX_PIXELS = 100_000_000  # of one image; read from its header before it is decoded
MAX_FRAMES = 4096
MAX_VIDEO_PIXELS = 1_000_000_000  # of all frames together; three bytes each
FPS = (1e-3, 1000.0)  # sane rates of a video, in frames per second
MAX_SECONDS = 86_400.0
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM", "AVIF")
"""Pillow's names of the formats that are read. In others (TIFF, ICO, PSD, EPS ...) a small file can name buffers of any size,
is decoded to be opened, or starts programs."""
_SIGNATURES = {
    "a TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "a JPEG 2000": (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
    "a JPEG XL": (b"\xff\x0a", b"\0\0\0\x0cJXL "),
    "a HEIC": (b"ftyphei", b"ftyphev"), "a HEIF": (b"ftypmif1", b"ftypmsf1"),
    "an ICO": (b"\0\0\1\0",), "an ICNS": (b"icns",), "a PSD": (b"8BPS",), "an EPS": (b"%!PS",), "a PDF": (b"%PDF",),
    "a QOI": (b"qoif",), "a DDS": (b"DDS ",), "an SVG": (b"<svg",), "an XML": (b"<?xml",), "an HTML": (b"<!DOCTYPE", b"<html"),
}  # fmt: skip
"""First bytes of common files that are refused by name; ``ftyp`` follows a box's four bytes of length."""
_MAX_SCANS = 64  # of a progressive JPEG: each is a pass over the whole image; usual files have ten
_FRAMES = b"CTXWFRM1"


def pixels_digest(frames: np.ndarray) -> str:
    """Return the identity of RGB frames ``[F, H, W, 3]`` uint8: bytes with shape, dtype and mode."""
    import numpy as np

    return digest("pixels", "RGB", "uint8", list(frames.shape), np.ascontiguousarray(frames).tobytes())


def check_size(width: int, height: int) -> None:
    """Raise BadMedia for an image that is empty or over `MAX_PIXELS`."""
    if width < 1 or height < 1:
        raise BadMedia(f"an image must not be empty, got {width}x{height} pixels")
    if width * height > MAX_PIXELS:
        raise BadMedia(f"an image must have at most {MAX_PIXELS:,} pixels, got {width}x{height}; shrink it first")


def check_rate(fps: float | None, frames: int = 0) -> None:
    """Raise BadMedia for a rate outside `FPS`, more than `MAX_FRAMES`, or a video longer than `MAX_SECONDS`; TypeError for what
    is no number."""
    check_numbers(fps=fps)
    if fps is not None and not FPS[0] <= fps <= FPS[1]:
        raise BadMedia(f"fps must be from {FPS[0]:g} to {FPS[1]:g}, got {fps:g}")
    if frames > MAX_FRAMES:
        raise BadMedia(f"a video must have at most {MAX_FRAMES:,} frames, got {frames:,}; sample fewer, or cut it")
    if fps is not None and frames / fps > MAX_SECONDS:
        raise BadMedia(f"a video must last at most {MAX_SECONDS:,.0f} s, got {frames} frames at {fps:g} fps")


def as_rgb(image: Any, *, copy: bool = False) -> np.ndarray:
    """Return ``[H, W, 3]`` uint8 RGB of a path, encoded bytes, PIL image or array: the pixels that vLLM decodes from the file.

    Raises BadMedia: empty, undecodable, over `MAX_PIXELS`, of more than 8 bits a channel, or of a format that is not among
    `FORMATS` (open those with Pillow and pass its image). Sizes are read from the header, before decoding. ``copy``: of an array.
    """
    import numpy as np
    from PIL import Image

    if isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise BadMedia(
                f"an image array must be HxWx3 uint8 RGB, got shape {image.shape} dtype {image.dtype}; {_conversion(image)}"
            )
        check_size(image.shape[1], image.shape[0])
        return np.array(image, order="C") if copy else np.ascontiguousarray(image)
    picture = image if isinstance(image, Image.Image) else open_picture(image)
    try:
        check_size(*picture.size)
        return np.ascontiguousarray(np.asarray(to_rgb(picture)))
    except MemoryError:
        raise
    except BadMedia as error:
        raise BadMedia(f"{image}: {error}" if isinstance(image, str | Path) else str(error)) from None
    except Exception as error:  # Pillow's decoders raise whatever a broken file leads them to
        raise BadMedia(
            f"an image must be decodable, got {_name(image)}: {str(error) or type(error).__name__}"
        ) from error


def _conversion(array: np.ndarray) -> str:
    """Return how an array ``x`` of other values or another shape becomes an image."""
    if array.dtype.kind == "f":
        return "convert it first: (x * 255).astype('uint8') if its values are from 0 to 1"
    if array.dtype == "uint16":
        return "convert it first: (x // 257).astype('uint8') if its values are of 16 bits"
    if array.dtype == "bool":
        return "convert it first: x.astype('uint8') * 255"
    if array.dtype != "uint8":
        return "convert it first: x.astype('uint8') if its values are from 0 to 255"
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        return "put its channels last: x.transpose(1, 2, 0)"
    if array.shape[1:] in ((), (1,)):
        return "where it is an encoded file, as of cv2.imencode, pass its bytes: x.tobytes()"
    return "where it is grey or has alpha, pass a Pillow image: Image.fromarray(x.squeeze())"


def other_form(media: Any) -> str:
    """Return how a file or tensor becomes bytes or an array, as the end of a message; "" for other objects."""
    ways = {"getvalue": "pass its getvalue()", "read": "pass what its read() returns", "numpy": "pass x.cpu().numpy()"}
    return next((f"; {way}" for name, way in ways.items() if hasattr(media, name)), "")


def check_file(path: str | Path, what: str) -> None:
    """Raise BadMedia unless ``path`` is a file."""
    try:
        exists = Path(path).is_file()
    except OSError:  # too long for a name, as a data URL is
        exists = False
    if not exists:
        remedy = "; URLs are not opened, pass the file's bytes" if re.match("[a-z]{2,}:", str(path)) else ""
        raise BadMedia(f"{what} path must be a readable file, got {str(path)[:200]!r}{remedy}")


def to_rgb(picture: Image.Image) -> Image.Image:
    """Return the picture upright, on white, as RGB; of an animation the current frame, the first of a file.

    These are vLLM's steps for a picture of a chat, in their order. Pillow's errors pass through; BadMedia for more than 8
    bits a channel, of which Pillow shows all above 255 as white.
    """
    from PIL import Image, ImageOps

    if picture.mode.startswith("I") or picture.mode == "F":
        raise BadMedia(
            f"an image must have at most 8 bits a channel, got one of mode {picture.mode}; a model would see all above 255 "
            "as white. Scale it first, e.g. Image.fromarray((np.asarray(image) / 257).astype('uint8')) for 16 bits"
        )
    with contextlib.suppress(Exception):  # a broken EXIF block has no effect; broken pixels raise below
        picture = ImageOps.exif_transpose(picture)
    picture.load()
    if picture.mode in ("La", "RGBa"):
        picture = picture.convert(picture.mode.upper())
    if picture.mode in ("RGBA", "LA", "PA") or (picture.mode != "RGB" and "transparency" in picture.info):
        picture = picture.convert("RGBA")
        white = Image.new("RGB", picture.size, "white")
        white.paste(picture, mask=picture.getchannel("A"))
        return white
    return picture.convert("RGB")


def open_picture(media: str | Path | bytes | bytearray, formats: Sequence[str] = FORMATS) -> Image.Image:
    """Open a Pillow image and read its header; raises BadMedia for another format, or a JPEG with too many scans."""
    from PIL import Image, UnidentifiedImageError

    if not isinstance(media, str | Path | bytes | bytearray):
        wanted = "a path, PIL image, HxWx3 uint8 array or bytes"
        raise BadMedia(f"an image must be {wanted}, got {type(media).__name__}{other_form(media)}")
    if isinstance(media, str | Path):
        check_file(media, "an image")
    try:
        raw = Path(media).read_bytes() if isinstance(media, str | Path) else bytes(media)
    except OSError as error:
        raise BadMedia(f"an image path must be a readable file, got {str(media)!r}: {error}") from error
    if not raw:
        raise BadMedia("an image must not be empty, got 0 bytes")
    Image.init()
    names = [name for name in formats if name in Image.OPEN]  # AVIF is not in every Pillow
    if raw.startswith(b"\xff\xd8") and (scans := raw.count(b"\xff\xda")) > _MAX_SCANS:
        raise BadMedia(f"a progressive JPEG must have at most {_MAX_SCANS} scans, got {scans}; save it again")
    try:
        with warnings.catch_warnings():  # Pillow's own bound only warns below twice its size; ours follows
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(raw), formats=names)
    except UnidentifiedImageError:
        start = raw[4:16] if raw.startswith(b"ftyp", 4) else raw[:16]
        kind = next((name for name, marks in _SIGNATURES.items() if start.startswith(marks)), "")
        kind = f"{kind} file" if kind else f"{len(raw)} bytes that start with {bytes(raw[:12])!r}"
        raise BadMedia(
            f"an image must be decodable and of {', '.join(names)}, got {kind} in {_name(media)}; save it as PNG, "
            "or open it with Pillow and pass the picture"
        ) from None
    except Image.DecompressionBombError as error:  # Pillow's own bound, which is higher
        most = f"an image must have at most {MAX_PIXELS:,} pixels"
        raise BadMedia(f"{most}, got {_name(media)}: {error}; shrink it first") from None
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise BadMedia(
            f"an image must be decodable, got {_name(media)}: {str(error) or type(error).__name__}"
        ) from error


def _name(media: Any) -> str:
    return repr(str(media)) if isinstance(media, str | Path) else "an image in memory"


def check_pixels(count: int, width: int, height: int, remedy: str) -> None:
    """Raise BadMedia if ``count`` frames of a size exceed `MAX_VIDEO_PIXELS`."""
    if count * height * width > MAX_VIDEO_PIXELS:
        raise BadMedia(
            f"a video must have at most {MAX_VIDEO_PIXELS:,} pixels in all frames, got {count} of {width}x{height}; {remedy}"
        )


def stack_frames(frames: Sequence[Any]) -> np.ndarray:
    """Stack a list of images to ``[F, H, W, 3]``; raises BadMedia if sizes differ or the list is empty."""
    import numpy as np

    if not len(frames):
        raise BadMedia("a video must hold at least one frame, got none")
    check_rate(None, len(frames))
    arrays: list[np.ndarray] = []
    for frame in frames:
        arrays.append(as_rgb(frame))
        height, width = arrays[-1].shape[:2]
        check_pixels(len(frames), width, height, "shrink them first")
    if len({a.shape for a in arrays}) > 1:
        raise BadMedia(f"all frames of a video must have one size, got {sorted({a.shape[:2] for a in arrays})}")
    return np.stack(arrays)


def png(frame: np.ndarray) -> bytes:
    """Encode an RGB picture ``[H, W, 3]`` uint8 without loss. Raises BadMedia for an array that Pillow takes for none."""
    from PIL import Image

    if not frame.size:
        raise BadMedia(f"an image must not be empty, got an array of shape {frame.shape}")
    buffer = io.BytesIO()
    try:
        picture = Image.fromarray(frame)
    except TypeError as error:
        raise BadMedia(
            f"an image array must be HxWx3 uint8 RGB, got shape {frame.shape} dtype {frame.dtype}; {_conversion(frame)}"
        ) from error
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def pack_frames(frames: np.ndarray) -> bytes:
    """Return lossless bytes of frames: a PNG each, length-prefixed."""
    packed = [struct.pack(">Q", len(raw)) + raw for raw in map(png, frames)]
    return b"".join([_FRAMES, struct.pack(">I", len(frames)), *packed])


def unpack_frames(data: bytes) -> np.ndarray:
    """Decode the bytes of `pack_frames`; raises BadMedia."""
    return stack_frames([as_rgb(picture) for picture in packed_pictures(data)])


def packed_pictures(data: bytes) -> list[bytes]:
    """Return the PNG files in the bytes of `pack_frames`; raises BadMedia."""
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
