"""Bodies are bounded before they are parsed and tokenised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ctxwin.serve.limits import Limits
from serve.serving import Server, serving
from serve.test_routes import call


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(max_pixels=100_000, max_windows=8, window_ttl_s=1000)) as running:
        yield running


def test_a_body_that_is_nested_without_end_is_refused(server: Server) -> None:
    body = b"[" * 100_000 + b"]" * 100_000
    assert call(server, "/v1/windows", body)[0] == 413
    named = b'{"messages": [{"content": [{"type": "ctxwin_chunk"}]}], "x": %s}' % body
    status, answer = call(server, "/v1/chat/completions", named)
    assert (status, answer["error"]["code"]) == (413, "too_large")
