"""Plans and asks of windows whose chunks stand where they stood, by an engine that computes nothing (`scale --unmoved`)."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.base import Engine, EngineSpec
from ctxwin.engines.results import EngineCounters, Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.hashing import digest
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.store.memory import MemoryStore
from ctxwin.store.spans import SpanRepository

KV = KVSpec(
    identity="simulated", family="gqa", layers=1, heads=1, k_dim=2, v_dim=2,
    rope=RopeSpec(inv_freq=(1.0,), rotary_dim=2), dtype="float32",
)  # fmt: skip


class SimulatedEngine(Engine):
    """Counts a token for each word; its KV is zeros, of one head in one layer."""

    def __init__(self, repo: SpanRepository, window_prefix: str = "") -> None:
        self.spec = EngineSpec("simulated", "simulated", digest("simulated"), KV, 1 << 30, vision=False)
        self.repo, self.store, self.counters = repo, repo.store, EngineCounters()
        self.window_prefix = window_prefix

    def _encoded(self, chunk_id: str, text: str) -> Encoded:
        n = len(text.split())
        return Encoded(chunk_id, tuple(range(n)), np.broadcast_to(np.arange(n), (3, n)), n)

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        return self._encoded(digest(system_prompt), system_prompt)

    def encode(self, chunk: Chunk) -> Encoded:
        return self._encoded(chunk.id, " ".join(getattr(part, "text", "") for part in chunk.parts))

    def encode_query(self, query: str) -> Encoded:
        return self._encoded(digest(query), query)

    def _zeros(self, encoded: Encoded, start: int) -> SpanKV:
        zeros = torch.zeros(1, encoded.tokens, 1, 2)
        return SpanKV(zeros, zeros, torch.from_numpy(encoded.positions.copy()), start)

    def prefill(self, context: Sequence[Segment], target: Encoded, start: int, **_: Any) -> SpanKV:
        return self._zeros(target, start)

    def generate(self, layout: Sequence[Segment], query: Encoded, sampling: Sampling, **_: Any) -> Generation:
        captured = {i: self._zeros(s.encoded, s.start) for i, s in enumerate(layout) if s.capture}
        return Generation([1], "1", captured=captured, forwards=1)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a simulated engine computes nothing")

    encode_exchange = decode = embed = _refuse

    def close(self) -> None:
        self.store.close()


LANES = ("resident", "survivor", "patched", "canonical")
"""How chunks stand that did not move: as their exact KV, without the first one, with a removal patch, and toggled."""


def unmoved(chunks: int, lane: str, calls: int = 15) -> dict[str, dict[str, float]]:
    """Return the processor time of this thread, in microseconds for each of so many chunks that did not move: the least and the
    median of some calls."""
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        began = time.thread_time()
        call()
        took.setdefault(name, []).append(1e6 * (time.thread_time() - began) / (len(window.ids) - 1))

    fidelity = Fidelity("patched", rank=2, survivors="removal") if lane == "patched" else Fidelity("patched")
    engine = SimulatedEngine(SpanRepository(MemoryStore(), "simulated"))
    with Window(engine, "You watch a camera.", 1 << 30, fidelity=fidelity) as window:
        window.extend([Chunk.text(f"chunk {i} of a camera that sees the yard and the gate") for i in range(chunks)])
        window.ask("q", 1)
        if lane == "patched":
            window.maintenance.compress()
        if lane in ("survivor", "patched"):
            window.slide(1)
        for placement in window.ids if lane == "canonical" else ():
            window.toggle(placement, conditioned=False)
        window.ask("q", 1)
        if sum(entry.lane == lane for entry in window.plan().entries) < chunks / 2:
            raise AssertionError(f"most chunks must stand in lane {lane}, got others")
        for i in range(chunks, chunks + calls + 40):
            window.append(Chunk.text(f"chunk {i}"))
            timed("plan behind an append", window.plan)
            timed("ask behind an append", partial(window.ask, "q", 1))
            timed("plan behind an ask", window.plan)
    return {name: {"least": min(us[40:]), "median": median(us[40:])} for name, us in took.items()}
