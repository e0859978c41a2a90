from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ctxwin.engines.torchvision_repair import repair

repair()

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5-VL: what holds on it holds by definition, not by training."""
    from engines.models import write_vision_model

    return write_vision_model(tmp_path_factory.mktemp("evals") / "vision")


@pytest.fixture(scope="session")
def engine(model_dir: Path) -> Iterator[HFEngine]:
    from ctxwin.engines.hf.engine import HFEngine

    opened = HFEngine(model_dir, dtype="float32")
    yield opened
    opened.close()
