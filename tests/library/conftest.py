from __future__ import annotations

import pytest

from ctxwin import Library
from window.fake import FakeEngine


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shelf(engine: FakeEngine, clock: Clock) -> Library:
    """A library in the engine's own store."""
    return Library(engine.store, "shelf", clock=clock)
