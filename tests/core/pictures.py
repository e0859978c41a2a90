"""Picture files as cameras, editors and clipboards leave them: every mode in every format that Pillow writes, and then some."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin

MODES = (
    "1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX", "RGBa", "La",
    "I;16", "I;16L", "I;16B", "I;16N",
)  # fmt: skip
WIDTH, HEIGHT = 13, 7  # no square: a picture that is not turned has another shape
_DRAWINGS = {"PDF"}  # Pillow writes it and does not read it


def picture(mode: str, seed: int = 0, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    """Noise in one of `MODES`, its alpha (where there is one) noise, too."""
    rng = np.random.default_rng(seed)
    width, height = size
    if mode in ("I", "F") or mode.startswith("I;16"):
        deep = rng.integers(0, 65536, (height, width))
        if mode.startswith("I;16"):
            order = ">" if mode == "I;16B" else "<"
            return Image.frombytes(mode, size, deep.astype(f"{order}u2").tobytes())
        return Image.fromarray(deep.astype(np.int32 if mode == "I" else np.float32))
    noise = Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
    if mode in ("RGBA", "LA"):
        return noise.convert(mode)
    if mode in ("RGBa", "La"):
        return noise.convert(mode[:-1] + "A").convert(mode)
    if mode == "PA":
        palette = noise.convert("RGB").quantize(16).convert("PA")
        palette.putalpha(noise.getchannel("A"))
        return palette
    if mode == "LAB":
        return Image.merge("LAB", noise.split()[:3])
    if mode == "P":
        return noise.convert("RGB").quantize(16)
    return noise.convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file that Pillow writes."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def oriented(orientation: int) -> bytes:
    """An EXIF block that says how the picture is to be turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def png(rows: list[bytes], size: tuple[int, int], depth: int, colour: int, *chunks: bytes, interlace: int = 0) -> bytes:
    """A PNG file of rows (each with its filter byte), in depths and orders that Pillow does not write."""
    head = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, interlace)
    parts = [
        _png_chunk(b"IHDR", head),
        *chunks,
        _png_chunk(b"IDAT", zlib.compress(b"".join(rows))),
        _png_chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def interlaced(pixels: np.ndarray) -> bytes:
    """RGB or RGBA ``[H, W, C]`` uint8 as a PNG of seven passes (Adam7)."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = [b"\0" + row.tobytes() for y, x, dy, dx in passes for row in pixels[y::dy, x::dx] if row.size]
    height, width, channels = pixels.shape
    return png(rows, (width, height), 8, {3: 2, 4: 6}[channels], interlace=1)


def _by_mode() -> Iterator[tuple[str, bytes]]:
    Image.init()  # every format, whatever was opened before
    for mode in MODES:
        for kind in sorted(set(Image.SAVE) - _DRAWINGS):
            try:
                yield f"{mode} {kind}", encoded(picture(mode), kind)
            except (OSError, ValueError, KeyError, SystemError, TypeError, RuntimeError):
                continue  # Pillow does not write this mode in this format


def _turned() -> Iterator[tuple[str, bytes]]:
    for orientation in range(10):  # 0 and 9 mean nothing
        for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"):
            for mode in ("RGB", "L", "RGBA"):
                if mode == "RGBA" and kind in ("JPEG", "MPO"):
                    continue
                options = {"exif": oriented(orientation)} | ({"lossless": True} if kind == "WEBP" else {})
                yield f"turned {orientation} {mode} {kind}", encoded(picture(mode, orientation), kind, **options)
    whole = encoded(picture("RGB"), "JPEG", exif=oriented(6))
    at = whole.index(b"Exif\0\0") + 6
    yield "turned EXIF broken", whole[:at] + b"\xff" * 12 + whole[at + 12 :]
    yield "turned EXIF cut", whole[:at] + whole[at : at + 8] + b"\0" * 18 + whole[at + 26 :]
    notes = PngImagePlugin.PngInfo()
    notes.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="8"/></x:xmpmeta>')
    yield "turned by XMP", encoded(picture("RGB"), "PNG", pnginfo=notes)
    yield "turned palette", encoded(picture("P"), "PNG", exif=oriented(5), transparency=2)
    yield "turned grey with alpha", encoded(picture("LA"), "PNG", exif=oriented(7))


def _transparent() -> Iterator[tuple[str, bytes]]:
    for transparency in (0, 5, bytes(range(0, 256, 16))):
        yield f"palette transparent {transparency!r:.12}", encoded(picture("P"), "PNG", transparency=transparency)
    yield "palette transparent GIF", encoded(picture("P"), "GIF", transparency=3)
    yield "one bit transparent", encoded(picture("1"), "PNG", transparency=0)
    yield "grey transparent", encoded(picture("L"), "PNG", transparency=picture("L").getpixel((2, 2)))
    yield "colour transparent", encoded(picture("RGB"), "PNG", transparency=picture("RGB").getpixel((2, 2)))
    icon = Image.new("RGBA", (WIDTH, HEIGHT), (0, 0, 0, 0))
    icon.putpixel((3, 3), (0, 0, 0, 255))
    for kind in ("PNG", "WEBP", "GIF", "AVIF"):
        yield f"icon {kind}", encoded(icon, kind)


def _profiled() -> Iterator[tuple[str, bytes]]:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        for mode in ("RGB", "L", "CMYK"):
            try:
                yield f"profile {mode} {kind}", encoded(picture(mode), kind, icc_profile=profile)
            except OSError:
                continue


def _encoders() -> Iterator[tuple[str, bytes]]:
    noise = picture("RGB", size=(65, 33))
    for progressive in (False, True):
        for subsampling in (0, 1, 2):
            options = {"progressive": progressive, "subsampling": subsampling, "quality": 60}
            yield f"JPEG {options}", encoded(noise, "JPEG", **options)
    yield "JPEG CMYK of Adobe", encoded(picture("CMYK"), "JPEG", quality=90)
    yield "JPEG with restarts", encoded(noise, "JPEG", restart_marker_rows=1)
    for channels in (3, 4):
        pixels = np.random.default_rng(channels).integers(0, 256, (HEIGHT, WIDTH, channels), dtype=np.uint8)
        yield f"PNG interlaced {channels}", interlaced(pixels)
    for colour, channels in ((0, 1), (2, 3), (4, 2), (6, 4)):
        deep = np.random.default_rng(colour).integers(0, 65536, (HEIGHT, WIDTH * channels))
        yield (
            f"PNG 16 bits {colour}",
            png([b"\0" + r.astype(">u2").tobytes() for r in deep], (WIDTH, HEIGHT), 16, colour),
        )
    for depth in (1, 2, 4):
        rows = np.random.default_rng(depth).integers(0, 256, (HEIGHT, -(-WIDTH * depth // 8)), dtype=np.uint8)
        lines = [b"\0" + r.tobytes() for r in rows]
        yield f"PNG grey {depth} bits", png(lines, (WIDTH, HEIGHT), depth, 0)
        palette = _png_chunk(b"PLTE", random.Random(depth).randbytes(3 << depth))
        yield f"PNG palette {depth} bits", png(lines, (WIDTH, HEIGHT), depth, 3, palette)
        alpha = _png_chunk(b"tRNS", random.Random(depth).randbytes(1 << depth))
        yield f"PNG palette {depth} bits transparent", png(lines, (WIDTH, HEIGHT), depth, 3, palette, alpha)
    yield (
        "PNG gamma",
        png(
            [b"\0" + bytes(range(WIDTH))] * HEIGHT,
            (WIDTH, HEIGHT),
            8,
            0,
            _png_chunk(b"gAMA", struct.pack(">I", 100_000)),
        ),
    )
    for maximum in (1, 15, 255, 1000, 65535):
        for magic, channels in ((b"P5", 1), (b"P6", 3)):
            size = 1 if maximum < 256 else 2
            samples = np.random.default_rng(maximum).integers(0, maximum + 1, WIDTH * HEIGHT * channels)
            body = samples.astype(">u2" if size == 2 else "u1").tobytes()
            yield f"{magic.decode()} {maximum}", b"%s %d %d %d\n" % (magic, WIDTH, HEIGHT, maximum) + body
    yield "P3 plain", b"P3 2 1 255\n0 128 255  9 8 7\n"
    yield "WEBP lossy with alpha", encoded(picture("RGBA"), "WEBP", quality=40)


def _animated() -> Iterator[tuple[str, bytes]]:
    frames = [picture(mode, seed) for seed, mode in enumerate(("RGB", "RGB", "RGB"))]
    for kind in ("GIF", "WEBP", "PNG", "TIFF", "AVIF"):
        yield f"animated {kind}", encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    clear = [picture("RGBA", seed) for seed in range(3)]
    for kind in ("GIF", "WEBP", "PNG", "AVIF"):
        yield f"animated with alpha {kind}", encoded(clear[0], kind, save_all=True, append_images=clear[1:])
    yield (
        "animated PNG, other picture",
        encoded(clear[0], "PNG", save_all=True, append_images=clear[1:], default_image=True),
    )
    yield "two of a phone", encoded(frames[0], "MPO", save_all=True, append_images=frames[1:2], exif=oriented(8))
    small = encoded(frames[0], "GIF")
    yield "GIF larger than its frame", small[:6] + struct.pack("<HH", WIDTH + 5, HEIGHT + 4) + small[10:]


def broken(trials: int = 4, size: tuple[int, int] = (64, 48)) -> Iterator[tuple[str, bytes]]:
    """Files cut off, with ``trials`` ways each to have bits turned, and files that are no pictures."""
    yield "empty", b""
    yield "one byte", b"\x89"
    noise = picture("RGB", size=size)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "AVIF"):
        whole = encoded(noise, kind)
        for share in (0.02, 0.3, 0.7, 0.98):
            yield f"cut {share} {kind}", whole[: int(len(whole) * share)]
        rng = random.Random(kind)
        for trial in range(trials):
            damaged = bytearray(whole)
            for _ in range(4):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            yield f"damaged {trial} {kind}", bytes(damaged)
        yield f"trailing {kind}", whole + b"more"
    yield "text", b"a picture of a cat"
    yield "SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    yield "HEIC", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40)
    yield "EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"
    yield "HTML", b"<!DOCTYPE html><title>404</title>"


def corpus() -> list[tuple[str, bytes]]:
    """Name and bytes of every file."""
    kinds = (_by_mode, _turned, _transparent, _profiled, _encoders, _animated, broken)
    return [file for kind in kinds for file in kind()]
