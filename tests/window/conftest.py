from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window
from window.fake import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


@pytest.fixture
def window(engine: FakeEngine) -> Iterator[Window]:
    """A window that may approximate, with three chunks computed."""
    with Window(engine, "hd", budget=100, fidelity=Fidelity("patched", rank=2)) as made:
        made.extend([Chunk.text("aa"), Chunk.image(np.full((4, 4, 3), 9, np.uint8), text="b"), Chunk.text("cc")])
        made.ask("q", max_tokens=3)
        yield made
