"""Puts `operator_oracle` on the path of the tests beside it; lets transformers import beside a CPU build of torch."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxwin.engines.torchvision_repair import repair
from interpreted import interpreted_kernel

sys.path.insert(0, str(Path(__file__).parent))
repair()


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and on a busy machine their barriers cost most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nothing was written to holds NaN, so a gap in a buffer cannot pass for a number."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    with interpreted_kernel() as made:
        yield made
