"""What pictures may cost, and which are taken at all."""

from __future__ import annotations

import base64
import io
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adapters.server.calls import call, open_window, png
from adapters.server.serving import Server, serving
from ctxwin import Chunk
from ctxwin.errors import BadMedia
from ctxwin.media import as_rgb
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.sandbox.decode_pool import MediaDecoders


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(max_pixels=100_000, max_frames=16, max_windows=8, window_ttl_s=1000)) as running:
        yield running


def picture(side: int, shade: int = 0) -> str:
    return base64.b64encode(png(np.full((side, side, 3), shade, np.uint8))).decode()


def test_the_pixels_of_a_request_are_bounded_over_its_chunks(server: Server) -> None:
    """Pictures of one color are small until they are decoded, and all of a request's are held at once."""
    images = [{"type": "image", "image": picture(200, shade)} for shade in range(3)]  # 40 000 pixels each
    window = open_window(server)
    status, answer = call(server, f"/v1/windows/{window}/extend", {"chunks": images})
    assert (status, answer["error"]["code"]) == (413, "too_large")
    named = [call(server, "/v1/chunks", image)[1]["id"] for image in images]
    content = [*({"type": "ctxwin_chunk", "chunk": name} for name in named), {"type": "text", "text": "?"}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    status, answer = call(server, "/v1/chat/completions", asked)
    assert (status, answer["error"]["code"]) == (413, "too_large")


def test_pictures_that_are_decoded_or_run_before_their_size_is_known_are_refused(server: Server) -> None:
    """An icon names a size in front and holds a PNG of any other, which Pillow decodes to open it."""
    inner = png(np.zeros((1000, 1000, 3), np.uint8))
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inner), 22) + inner
    for raw in (icon, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"):
        status, answer = call(server, "/v1/chunks", {"type": "image", "image": base64.b64encode(raw).decode()})
        assert (status, answer.get("error", {}).get("code")) == (400, "bad_media"), answer


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pictures_of_the_usual_formats_are_taken(server: Server, kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 10, 10)).save(buffer, kind)
    image = base64.b64encode(buffer.getvalue()).decode()
    assert call(server, "/v1/chunks", {"type": "image", "image": image})[0] in (200, 201)


def encoded(kind: str, image: Image.Image, **options: Any) -> bytes:
    image.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM"])
def test_pictures_of_other_formats_are_not_opened(server: Server, kind: str) -> None:
    """A tile of a TIFF may have any size, whatever the picture's is."""
    image = base64.b64encode(encoded(kind, Image.new("RGB", (8, 8)))).decode()
    status, answer = call(server, "/v1/chunks", {"type": "image", "image": image})
    assert (status, answer["error"]["code"]) == (400, "bad_media")


def test_frames_are_bounded_whatever_their_size(server: Server) -> None:
    """512 frames of one pixel are 46 KB of JSON, and 2 GB in front of the vision tower."""
    status, answer = call(server, "/v1/chunks", {"type": "video", "frames": [picture(1)] * 17})
    assert (status, answer["error"]["code"]) == (413, "too_large")
    assert "--max-frames" in answer["error"]["message"]


@pytest.mark.parametrize("fps", [1e-6, 0, -1, 1e6, 1e-300, "nan", "inf"])
def test_a_video_has_a_sane_rate(server: Server, fps: float | str) -> None:
    """Six frames at 1e-6 a second reach positions beyond every cache, and ended the engine for everybody."""
    status, answer = call(server, "/v1/chunks", {"type": "video", "frames": [picture(8)] * 6, "fps": fps})
    assert (status, answer["error"]["code"]) == (400, "invalid_value") and "fps" in answer["error"]["message"]


def test_a_picture_that_takes_too_long_ends_its_decoder_and_nothing_else() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (2000, 2000, 3), dtype=np.uint8))
    slow = encoded("JPEG", noise, progressive=True, quality=95)
    decoders = MediaDecoders(seconds=30, most_bytes=3 << 29, count=1)
    try:
        small = encoded("PNG", Image.new("RGB", (3, 2), (9, 8, 7)))
        assert (decoders.decode(small, 3, 2) == [9, 8, 7]).all()
        process = decoders._idle.queue[0]
        process._seconds = 0.01
        with pytest.raises(BadMedia, match="took more than"):
            decoders.decode(slow, 2000, 2000)
        process._seconds = 30
        assert decoders.decode(small, 3, 2).shape == (2, 3, 3)
    finally:
        decoders.close()


def test_a_picture_that_takes_too_much_memory_is_refused() -> None:
    decoders = MediaDecoders(seconds=30, most_bytes=200 << 20, count=1)
    try:
        with pytest.raises(BadMedia, match=r"MemoryError|process ended"):
            decoders.decode(encoded("PNG", Image.new("1", (9000, 9000))), 9000, 9000)
        assert decoders.decode(encoded("GIF", Image.new("RGB", (3, 2))), 3, 2).shape == (2, 3, 3)
    finally:
        decoders.close()


def test_an_upload_is_seen_upright_and_on_white(server: Server) -> None:
    """A phone's picture and an icon give the chunks that they give in process."""
    noise = np.random.default_rng(5).integers(0, 255, (17, 31, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("AVIF", {})):
        raw = encoded(kind, Image.fromarray(noise), exif=exif, **options)
        assert as_rgb(raw).shape == (31, 17, 3)
        status, answer = call(server, "/v1/chunks", {"type": "image", "image": base64.b64encode(raw).decode()})
        assert status in (200, 201) and answer["id"] == Chunk.image(raw).id


@pytest.fixture(scope="module")
def decoders() -> Iterator[MediaDecoders]:
    opened = MediaDecoders(seconds=30, most_bytes=3 << 29, count=1)
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1"])
def test_a_decoder_gives_what_pillow_gives_here(decoders: MediaDecoders, kind: str, mode: str) -> None:
    noise = Image.fromarray(np.random.default_rng(3).integers(0, 255, (17, 31, 3), dtype=np.uint8)).convert(mode)
    raw = encoded(kind, noise.convert("RGB") if kind == "JPEG" and mode in ("RGBA", "P") else noise)
    assert np.array_equal(decoders.decode(raw, 31, 17), as_rgb(raw))
    with pytest.raises(BadMedia, match="instead of"):
        decoders.decode(raw, 17, 31)


def test_decoders_end_with_the_server() -> None:
    with serving() as server:
        assert call(server, "/v1/chunks", {"type": "image", "image": picture(8)})[0] == 201
        (process,) = [p._popen for p in server.service._decoders._idle.queue if p._popen is not None]
        assert process.poll() is None
        # Answers go first.
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
    assert process.poll() is not None
