from __future__ import annotations

from collections.abc import Iterator

import pytest

from window.fake import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()
