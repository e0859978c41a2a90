"""Lets transformers and vLLM import beside a CPU build of torch; a model, and an engine on it, for the tests of several files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxwin.engines.torchvision_repair import repair
from shared_servers import SERVER_OF

repair()

_ENGINES: list[Any] = []
"""The shared engine while it is open."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that sees, wide enough for vLLM's kernels."""
    from engines import models

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return models.wide(models.write_vision_model, tmp_path_factory.mktemp("vllm") / "vision", rope_parameters=rope)


@pytest.fixture(scope="module")
def shared_engine(model_dir: Path) -> Any:
    """The engine of the files that `shared_servers` puts in a row; it closes behind the last of them."""
    from ctxwin_vllm.engine import VLLMEngine

    if not _ENGINES:
        _ENGINES.append(VLLMEngine(model_dir, dtype="float32"))
    return _ENGINES[0]


def _shares(item: pytest.Item | None) -> bool:
    return item is not None and SERVER_OF.get(f"adapters/vllm/{item.path.name}") == "engine"


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    while _ENGINES and not _shares(nextitem):
        _ENGINES.pop().close()
