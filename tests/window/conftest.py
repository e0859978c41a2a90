from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.profiles import PROFILES_VARIABLE
from ctxwin.window import idle as idling
from window.fake import FakeEngine


@pytest.fixture
def window(engine: FakeEngine) -> Iterator[Window]:
    """A window that may approximate, with three chunks computed."""
    with Window(engine, "hd", budget=100, fidelity=Fidelity("patched", rank=2)) as made:
        made.extend([Chunk.text("aa"), Chunk.image(np.full((4, 4, 3), 9, np.uint8), text="b"), Chunk.text("cc")])
        made.ask("q", max_tokens=3)
        yield made


@pytest.fixture
def idle(engine: FakeEngine) -> Iterator[Window]:
    """A window that computes ahead."""
    with Window(engine, "watch", 200, Fidelity("exact"), prefill="idle") as window:
        yield window


@pytest.fixture(scope="module")
def all_of_the_time() -> Iterator[None]:
    """Computing ahead takes all of the time, so that tests need not wait for its share."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(idling, "IDLE_SHARE", 1.0)
        yield


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for bases of the user's own."""
    monkeypatch.setenv(PROFILES_VARIABLE, str(tmp_path / "own"))
    return tmp_path / "own"
