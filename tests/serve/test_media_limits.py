"""What pictures may cost, and which are taken at all."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from ctxwin.serve.limits import Limits
from serve.serving import Server, serving
from serve.test_routes import call, png


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(max_pixels=100_000, max_windows=8, window_ttl_s=1000)) as running:
        yield running


def opened(server: Server, **body: object) -> str:
    return str(call(server, "/v1/windows", {"system_prompt": "h", **body})[1]["id"])


def picture(side: int, shade: int = 0) -> str:
    return base64.b64encode(png(np.full((side, side, 3), shade, np.uint8))).decode()


def test_the_pixels_of_a_request_are_bounded_over_its_chunks(server: Server) -> None:
    """Pictures of one color are small until they are decoded, and all of a request's are held at once."""
    images = [{"type": "image", "image": picture(200, shade)} for shade in range(3)]  # 40 000 pixels each
    window = opened(server)
    status, answer = call(server, f"/v1/windows/{window}/extend", {"chunks": images})
    assert (status, answer["error"]["code"]) == (413, "too_large")
    named = call(server, "/v1/chunks", {"type": "text", "text": "x"})[1]["id"]
    urls = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{i['image']}"}} for i in images]
    content = [{"type": "ctxwin_chunk", "chunk": named}, *urls, {"type": "text", "text": "?"}]
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
