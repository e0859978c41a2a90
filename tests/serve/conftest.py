"""One ``ctxwin serve`` with vLLM and two tenants for all tests that need no server of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serve.test_vllm_server import Process

TENANTS = """
[[tenant]]
name = "acme"
keys = ["key-acme"]

[[tenant]]
name = "bolt"
keys = ["key-bolt"]
"""


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    from serve.test_vllm_server import running_server

    folder = tmp_path_factory.mktemp("server")
    (folder / "tenants.toml").write_text(TENANTS)
    with running_server(
        folder, "--api-key", "key-own", "--tenants", str(folder / "tenants.toml"), "--enable-prompt-tokens-details",
        "--store", f"tiered:memory:,disk:{folder / 'kv'}", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    ) as made:  # fmt: skip
        yield made
