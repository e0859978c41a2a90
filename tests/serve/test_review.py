"""What a client could do to a server or to itself: bombs, retries that overlap, snapshots that lie, clients that leave."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest

from ctxwin.serve.limits import Limits
from serve.serving import Server, serving
from serve.test_routes import call, png


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(max_pixels=100_000, max_windows=8, window_ttl_s=1000)) as running:
        yield running


def opened(server: Server, **body: object) -> str:
    return str(call(server, "/v1/windows", {"header": "h", **body})[1]["id"])


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
