"""Media that cost more than they look: refused from their headers, before anything is decoded."""

from __future__ import annotations

import io
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from core.pictures import encoded as encoded_as
from core.pictures import oriented, picture
from ctxwin import Chunk
from ctxwin.errors import BadMedia
from ctxwin.media import as_rgb, pack_frames, stack_frames, unpack_frames
from ctxwin.video import decode_video


def encoded(kind: str, size: tuple[int, int] = (8, 8), **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (255, 0, 0)).save(out, kind, **options)
    return out.getvalue()


def tile_bomb() -> bytes:
    """A TIFF of 8x8 pixels in one tile of 30,000x30,000."""
    entries = [
        (256, 3, 8), (257, 3, 8), (258, 3, 8), (259, 3, 1), (262, 3, 1), (322, 4, 30_000), (323, 4, 30_000),
        (324, 4, 8), (325, 4, 64),
    ]  # fmt: skip
    table = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries)) + table + bytes(4) + bytes(64)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM"])
def test_usual_formats_are_read(kind: str, tmp_path: Path) -> None:
    raw = encoded(kind)
    (tmp_path / "picture").write_bytes(raw)
    for given in (raw, tmp_path / "picture"):
        assert as_rgb(given).shape == (8, 8, 3)


@pytest.mark.parametrize(
    "raw", [tile_bomb(), encoded("TIFF"), encoded("ICO"), b"%!PS-Adobe-3.0 EPSF-3.0\n"], ids=range(4)
)
def test_other_formats_are_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "picture.tiff").write_bytes(raw)
    for given in (raw, tmp_path / "picture.tiff"):
        began = time.monotonic()
        with pytest.raises(BadMedia, match="PNG, JPEG, WEBP"):
            as_rgb(given)
        assert time.monotonic() - began < 0.5


def test_pixels_are_counted_before_they_are_decoded() -> None:
    wide = bytearray(encoded("PNG"))
    wide[16:24] = struct.pack(">II", 20_000, 8_000)  # IHDR; its checksum is mended below
    import zlib

    wide[29:33] = struct.pack(">I", zlib.crc32(bytes(wide[12:29])))
    with pytest.raises(BadMedia, match=r"at most 100,000,000 pixels, got 20000x8000"):
        as_rgb(bytes(wide))


def test_what_pillow_refuses_by_its_own_bound_is_told_to_shrink() -> None:
    with pytest.raises(
        BadMedia, match=r"at most 100,000,000 pixels, got an image in memory: .* bomb.*; shrink it first"
    ):
        as_rgb(b"P6 30000 30000 255\n")


def test_a_jpeg_of_many_scans_is_refused() -> None:
    raw = encoded("JPEG", (64, 64), progressive=True)
    assert as_rgb(raw).shape == (64, 64, 3)
    start, end = raw.index(b"\xff\xda"), raw.rindex(b"\xff\xd9")
    with pytest.raises(BadMedia, match="at most 64 scans"):
        as_rgb(raw[:start] + raw[start:end] * 20 + raw[end:])


@pytest.mark.parametrize("fps", [1e-6, 0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_rates_have_sane_ranges(fps: float, tmp_path: Path) -> None:
    frames = [np.zeros((8, 8, 3), np.uint8)] * 2
    with pytest.raises(BadMedia, match=r"fps must be from 0.001 to 1000, got"):
        Chunk.video(frames, fps=fps)
    (tmp_path / "video.mp4").write_bytes(b"")
    with pytest.raises(BadMedia, match=r"fps must be"):
        decode_video(tmp_path / "video.mp4", fps=fps)


def test_a_video_has_a_bound_of_frames_seconds_and_pixels() -> None:
    frame = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(BadMedia, match="at most 4,096 frames, got 5,000"):
        Chunk.video([frame] * 5000)
    with pytest.raises(BadMedia, match="last at most 86,400 s"):
        Chunk.video([frame] * 100, fps=0.001)
    large = np.zeros((2000, 2000, 3), np.uint8)
    with pytest.raises(BadMedia, match="at most 1,000,000,000 pixels in all frames"):
        stack_frames([large] * 300)


def test_a_stored_source_that_lies_is_refused() -> None:
    whole = pack_frames(np.zeros((2, 8, 8, 3), np.uint8))
    assert unpack_frames(whole).shape == (2, 8, 8, 3)
    for bad in (
        whole[:9],
        whole[:30],
        whole[:8] + b"\xff" * 4 + whole[12:],
        whole[:12] + b"\xff" * 8 + whole[20:],
        b"",
    ):
        with pytest.raises(BadMedia):
            unpack_frames(bad)


def test_a_picture_is_seen_upright() -> None:
    """EXIF's eight orientations, as the standard draws them."""
    rng = np.random.default_rng(0)
    upright = rng.integers(0, 256, (6, 10, 3), dtype=np.uint8)
    stored = {  # what a camera stores of the upright picture
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
        6: np.rot90(upright), 7: np.rot90(upright, 2).transpose(1, 0, 2), 8: np.rot90(upright, -1),
    }  # fmt: skip
    whole = Chunk.image(upright)
    for orientation, pixels in stored.items():
        for kind in ("PNG", "WEBP"):
            out = io.BytesIO()
            options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
            Image.fromarray(np.ascontiguousarray(pixels)).save(out, kind, exif=oriented(orientation), **options)
            assert np.array_equal(as_rgb(out.getvalue()), upright), (orientation, kind)
            assert Chunk.image(out.getvalue()).id == Chunk.image(Image.open(out)).id == whole.id


def test_transparent_pixels_are_white() -> None:
    icon = np.zeros((1, 256, 4), np.uint8)
    icon[0, :, 3] = range(256)  # black, more and more opaque
    for image in (Image.fromarray(icon), Image.fromarray(icon).convert("LA")):
        out = io.BytesIO()
        image.save(out, "PNG")
        assert (as_rgb(out.getvalue())[0] == 255 - np.arange(256)[:, None]).all()


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_depth_is_refused_not_cut_to_white(mode: str) -> None:
    deep = picture(mode)
    for image in (deep, *([] if mode == "F" else [encoded_as(deep, "PNG" if mode == "I;16" else "PPM")])):
        with pytest.raises(BadMedia, match=r"at most 8 bits a channel, got one of mode [IF]"):
            as_rgb(image)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40), "a HEIC file"),
        (encoded("TIFF"), "a TIFF file"),
        (encoded("ICO"), "an ICO file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG file"),
        (b"a cat", "5 bytes that start with b'a cat'"),
    ],
)
def test_a_refused_format_has_a_name(raw: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(raw)
    for media in (raw, tmp_path / "picture.png"):
        with pytest.raises(BadMedia) as caught:
            as_rgb(media)
        assert f"got {kind} in" in str(caught.value) and " at 0x" not in str(caught.value)


def test_scans_are_counted_in_pictures_of_two() -> None:
    """A JPEG with a second picture in it has another name in Pillow; its scans cost the same."""
    out = io.BytesIO()
    noise = Image.new("RGB", (64, 64), (255, 0, 0))
    noise.save(out, "MPO", save_all=True, append_images=[noise], progressive=True)
    raw = out.getvalue()
    assert Image.open(io.BytesIO(raw)).format == "MPO" and as_rgb(raw).shape == (64, 64, 3)
    start, end = raw.index(b"\xff\xda"), raw.index(b"\xff\xd9")
    with pytest.raises(BadMedia, match="at most 64 scans"):
        as_rgb(raw[:start] + raw[start:end] * 40 + raw[end:])
