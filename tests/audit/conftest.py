from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxwin import open_engine
from ctxwin.audit import auditor as auditing
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.profiles import BASIS_NAME, PROFILE_NAME
from ctxwin.tiny import checkpoint_dir


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled model, of which nothing was measured; background audits on, evidence in a folder of the test."""
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path / "profiles"))
    monkeypatch.setenv(auditing.VARIABLE, "1")
    made = tmp_path / "model"
    shutil.copytree(checkpoint_dir(), made, ignore=shutil.ignore_patterns(PROFILE_NAME, BASIS_NAME))
    return made


@pytest.fixture
def engine(model: Path) -> Iterator[HFEngine]:
    with open_engine(str(model), engine="hf", dtype="float32") as made:
        assert isinstance(made, HFEngine)
        yield made
