"""Random programs of windows on vLLM, with plain requests in between."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.errors import ChunkUnavailable

HEADERS = ("watch a camera", "what color is the shape")
WORDS = [
    "system", "user", "assistant", "what", "color", "is", "the", "shape", "of", "a", "frame", "camera", "number", "now",
    "red", "blue", "circle", "square",
]  # fmt: skip
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
                with window.fork() as branch:
                    branch.append(rng.choice(self.chunks))
                    self.ask(branch, rng, "branch")
                    if rng.random() < 0.5:
                        window.adopt(branch)
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
        self.note_plain([*parts, query], logprobs)

    def note_plain(self, parts: list[Any], logprobs: dict[int, float]) -> None:
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
