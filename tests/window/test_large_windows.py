"""Windows of thousands of tiny chunks: reading, editing and asking them takes time in proportion."""

from __future__ import annotations

import time

from ctxwin import Chunk, Fidelity, Window
from window.fake import FakeEngine

N = 6_000


def test_a_plan_of_many_chunks_takes_seconds() -> None:
    engine = FakeEngine(max_tokens=2 * N)
    with Window(engine, "h", fidelity=Fidelity("patched", rank=2, orbit=True)) as window:
        ids = window.extend([Chunk.tokens([i % 40]) for i in range(N)])
        begin = time.perf_counter()
        plan = window.plan()
        assert len(plan.entries) == N and plan.computed_tokens == window.tokens
        assert len(window.slide(N // 2)) == N // 2
        window.reorder([ids[-1], *window.ids[:-1]])
        window.check()
        assert time.perf_counter() - begin < 20, "a few seconds, with room for a busy machine"
