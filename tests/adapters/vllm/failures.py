"""Engines and windows of tests in which something goes wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.vllm import faults
from adapters.vllm.layouts import picture
from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import EngineFailed
from waiting import wait_until

BLOCKS = 40
"""Of 32 tokens; the longest request takes 32 of them."""
WORDS = "what color is the shape of a frame camera watch number now red blue circle"


def open_engine(model_dir: Path, processes: str) -> Any:
    from ctxwin_vllm.engine import VLLMEngine

    return VLLMEngine(
        model_dir, dtype="float32", processes=processes, num_gpu_blocks_override=BLOCKS, disable_log_stats=False
    )


def text(seed: int, words: int = 150) -> Chunk:
    rng = np.random.default_rng(seed)
    return Chunk.text(" ".join(rng.choice(WORDS.split(), words)))


def assert_killed_well(engine: Any, name: str) -> None:
    """Kills the process of that name, EngineCor or a worker, under three waiting asks and a call, and closes."""
    windows = [Window(engine, "watch a camera", fidelity=Fidelity("exact")) for _ in range(3)]
    for window in windows:
        window.extend([picture(1), text(2, 80)])
        window.ask("what color", max_tokens=1)
    below = faults.descendants(os.getpid())
    cores = faults.cores(os.getpid())
    (core,) = cores if name == "EngineCor" else [pid for pid in below if pid not in cores]
    waiting = threading.Barrier(4)
    assert wait_until(lambda: faults.free_blocks(engine), 20)  # so that spans are loaded
    files = faults.mapped([os.getpid(), *below])

    def ask(window: Window) -> str:
        stream = window.stream("what color", max_tokens=600)
        next(stream)
        waiting.wait(timeout=60)
        return "".join(stream)

    faults.endless(engine)
    folder = engine._core.transport.path
    assert folder.exists()

    def see() -> None:
        """Vision encodes, one after the other."""
        for seed in range(10_000):
            engine.encode(picture(seed))

    with ThreadPoolExecutor(4) as threads:
        asked: list[Future[Any]] = [threads.submit(ask, window) for window in windows]
        waiting.wait(timeout=60)
        asked.append(threads.submit(see))
        time.sleep(0.2)
        os.kill(core, signal.SIGKILL)
        killed = time.monotonic()
        for future in asked:
            with pytest.raises(EngineFailed, match="open a new one"):
                future.result(timeout=60)
        assert time.monotonic() - killed < 30
    for window in windows:
        with pytest.raises(EngineFailed, match="open a new one"):
            window.ask("what color", max_tokens=1)
        window.close()
    assert len(engine._core.transport) == 0 and engine.store.stats().leased == 0
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 20
    assert not folder.exists()
    assert wait_until(lambda: not faults.running(below), 30), faults.running(below)
    assert files and wait_until(lambda: not faults.left(files), 10), faults.left(files)
