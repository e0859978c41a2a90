from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langgraph._internal import _serde
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde import _msgpack
from langgraph.checkpoint.sqlite import SqliteSaver

from ctxwin import Chunk, Fidelity, Window
from window.fake import FakeEngine

HEADER = "hd"


class CountingEngine(FakeEngine):
    """Counts what was asked of it; ``broken`` fails that many asks."""

    asked = 0

    def generate(self, *args: Any, **options: Any) -> Any:
        self.asked += 1
        return super().generate(*args, **options)


@pytest.fixture
def engine() -> Iterator[CountingEngine]:
    with CountingEngine() as made:
        yield made


@pytest.fixture(params=["memory", "sqlite"])
def saver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Any]:
    """In memory as LangGraph comes; in SQLite as with LANGGRAPH_STRICT_MSGPACK: nothing in a state is of a type of ours."""
    if request.param == "memory":
        yield InMemorySaver()
        return
    for module in (_msgpack, _serde):  # which read it once
        monkeypatch.setattr(module, "STRICT_MSGPACK_ENABLED", True)
    connection = sqlite3.connect(tmp_path / "threads.sqlite", check_same_thread=False)
    yield SqliteSaver(connection)
    connection.close()
    # A blocked type does not fail, it comes back as something else, and a warning says so.
    logged = [record.getMessage() for stage in ("setup", "call") for record in caplog.get_records(stage)]
    assert not any("Blocked deserialization" in message for message in logged)


@pytest.fixture
def picture() -> Callable[[int], Chunk]:
    return lambda i: Chunk.image(np.full((4, 4, 3), i, np.uint8), text=f"t={i}")


@pytest.fixture
def oracle() -> Callable[..., str]:
    """What a window made from nothing, on another engine with a store of its own, answers over the same chunks."""

    def ask(chunks: list[Chunk], query: str, *, system_prompt: str = HEADER, max_tokens: int = 3) -> str:
        with FakeEngine() as other, Window(other, system_prompt, fidelity=Fidelity("exact")) as window:
            window.extend(chunks)
            return window.ask(query, max_tokens=max_tokens).text

    return ask
