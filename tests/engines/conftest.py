from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny; threads would only wait for each other

from ctxwin.engines.torchvision_repair import repair

repair()


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engines.models import write_vision_model

    return write_vision_model(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engines.models import write_text_model

    return write_text_model(tmp_path_factory.mktemp("models") / "text")
