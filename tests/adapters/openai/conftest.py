from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from adapters.server.serving import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client(max_retries=0)
