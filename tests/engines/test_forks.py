"""A process forked from one with an engine lacks the threads with which torch computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ctxwin import Chunk, Window
from ctxwin.engines.hf.engine import HFEngine
from forks import refusals


@pytest.fixture
def threads() -> Iterator[None]:
    """Two threads for torch, as any machine with more than one processor has them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_windows_and_engines_are_refused_where_torch_would_wait(vision_dir: Path, threads: None) -> None:
    engine = HFEngine(vision_dir)
    window = Window(engine, "You watch.")
    window.append(Chunk.image(np.full((448, 448, 3), 99, np.uint8)))
    answer = window.ask("what is there?", max_tokens=2).text
    torch.ones(512, 512) @ torch.ones(512, 512)  # both threads have run
    refused = refusals(
        [
            lambda: window.ask("what is there?", max_tokens=2),
            lambda: window.append(Chunk.text("a cat")),
            lambda: window.slide(1),
            lambda: HFEngine(vision_dir),
        ]
    )
    assert all("forked" in message and "spawn" in message for message in refused)
    assert window.ask("what is there?", max_tokens=2).text == answer


def test_a_fork_with_one_thread_computes(vision_dir: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        window = Window(HFEngine(vision_dir), "You watch.")
        window.append(Chunk.text("a door"))
        answer = window.ask("what is there?", max_tokens=2).text

        def ask() -> None:
            assert window.ask("what is there?", max_tokens=2).text == answer

        assert refusals([ask]) == [""]
    finally:
        torch.set_num_threads(before)
