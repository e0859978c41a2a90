"""What is measured of a model goes to folders of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxwin.profiles import PROFILES_VARIABLE


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's real files are read or written."""
    monkeypatch.setenv(PROFILES_VARIABLE, str(tmp_path / "own"))
    return tmp_path / "own"
