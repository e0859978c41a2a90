"""The server of these tests is the one with vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from adapters.server.vllm.processes import Process


@pytest.fixture
def server(vllm_server: Process) -> Process:
    return vllm_server
