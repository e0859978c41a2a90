"""Random programs of windows over one store, held against transformers' own forward over the whole prompt.

Several windows of different fidelities share an engine and its store; chunks move, leave, come back, are toggled and
forgotten; stored KV vanishes. After every ask, the KV that stood in the engine's cache for each chunk called exact must be
what a plain forward, by a model of its own and without any code of ours, gives there, and the tokens that usage reports
must be those that went through a forward.

Two thousand programs are 20 blocks of 100; a block can be run alone (``-k block-7``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.results import Generation
from ctxwin.errors import BudgetExceeded
from ctxwin.store.memory import MemoryStore
from engines.conformance import picture
from engines.models import write_decoder, write_mla_model, write_text_model, write_vision_model
from window.fake import FIDELITIES

BLOCKS = 20
PROGRAMS = 100
TOLERANCE = 1e-4
WORDS = ["a", "camera", "saw", "red", "blue", "circle", "square", "frame", "number", "now", "what", "shape"]
SETTINGS = [
    *FIDELITIES,
    Fidelity("patched", rank=64),
    Fidelity("patched", rank=2, layers="deep"),
    Fidelity("patched", rank=2, advanced={"forbid": ("resident",)}),
]
WRITERS: dict[str, Callable[[Path], Path]] = {
    "gqa": write_text_model,
    "mha": lambda folder: write_decoder(folder, "Llama", num_key_value_heads=4),
    "mla": write_mla_model,
    "vision": write_vision_model,
}


class Watched(HFEngine):
    """Keeps the cache of the last answer."""

    def _run(self, *args: Any, **options: Any) -> Any:
        self.passed = super()._run(*args, **options)
        return self.passed

    def generate(self, *args: Any, **options: Any) -> Generation:
        made = super().generate(*args, **options)
        self.answered = self.passed
        return made


class Subject:
    """An engine, and a model of its own to hold it against."""

    def __init__(self, folder: Path, vision: bool) -> None:
        loader: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        self.vision = vision
        self.engine = Watched(folder, dtype="float32", store=MemoryStore())
        self.model = loader.from_pretrained(folder, dtype=torch.float32).eval()
        self.held: dict[tuple[Any, ...], tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]] = {}

    def oracle(
        self, ids: Sequence[int], pictures: Sequence[Chunk]
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Cache by layer and last logits of a forward over the whole prompt."""
        key = (tuple(ids), tuple(chunk.id for chunk in pictures))
        if key not in self.held:
            seen: dict[str, Any] = {}
            if pictures:
                from PIL import Image

                processor = self.engine.encoder.checkpoint.image_processor
                shown = [Image.fromarray(PIXELS[chunk.id]) for chunk in pictures]
                made = processor(images=shown, return_tensors="pt")
                kinds = torch.tensor([ids]) == self.model.config.image_token_id
                seen = {
                    "pixel_values": made["pixel_values"],
                    "image_grid_thw": made["image_grid_thw"],
                    "mm_token_type_ids": kinds.long(),
                }
            with torch.no_grad():
                out = self.model(torch.tensor([ids]), use_cache=True, **seen)
            layers = [(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers]
            if len(self.held) > 500:
                self.held.clear()
            self.held[key] = layers, out.logits[0, -1].log_softmax(-1)
        return self.held[key]


PIXELS: dict[str, Any] = {}


class Program:
    """One random program."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.random = random.Random(seed)
        self.subject = subject
        self.engine = subject.engine
        self.windows: list[Window] = []
        self.checked = self.approximate = 0
        self.trace: list[str] = [f"seed {seed}"]

    def chunk(self) -> Chunk:
        if self.subject.vision and self.random.random() < 0.5:
            number = self.random.randrange(6)
            made = Chunk.image(picture(number, 56 if number % 2 else 84))
            PIXELS.setdefault(made.id, picture(number, 56 if number % 2 else 84))
            return made
        few = self.random.random() < 0.7  # chunks that come again, in other windows and programs too
        number = self.random.randrange(6) if few else self.random.randrange(10**6)
        words = random.Random(number).choices(WORDS, k=1 + number % 9)
        return Chunk.text(" ".join(words) + " ")

    def run(self, steps: int) -> None:
        for _ in range(self.random.randint(1, 3)):
            prompt = self.random.choice(["red", "red", "a camera saw"])
            fidelity = self.random.choice(SETTINGS)
            self.windows.append(Window(self.engine, prompt, budget=600, fidelity=fidelity))
            self.windows[-1].extend([self.chunk() for _ in range(self.random.randint(1, 4))])
            self.trace.append(f"window {prompt!r} {fidelity.mode} {fidelity.patch_name} {fidelity.survivors}")
        try:
            for _ in range(steps):
                window = self.random.choice(self.windows)
                name = self.random.choices(*zip(*STEPS.items(), strict=True))[0]
                self.trace.append(f"{self.windows.index(window)}.{name}")
                getattr(self, name)(window)  # pictures stay as well, whatever another window of this store forgets
                window.check()
            for window in self.windows:
                self.ask(window)
        finally:
            for window in self.windows:
                window.close()

    def append(self, window: Window) -> None:
        window.append(self.chunk())

    def insert(self, window: Window) -> None:
        window.insert(self.random.randint(0, len(window.ids)), self.chunk())

    def evict(self, window: Window) -> None:
        if window.ids:
            forget = self.random.random() < 0.3
            window.evict(self.random.choice(window.ids), forget=forget)

    def slide(self, window: Window) -> None:
        if window.ids:
            window.slide(1)

    def recall(self, window: Window) -> None:
        if window.evicted:
            at = self.random.choice([None, 0, len(window.ids)])
            window.recall(self.random.choice(window.evicted), at, repair=self.random.random() < 0.5)

    def reorder(self, window: Window) -> None:
        window.reorder(self.random.sample(window.ids, len(window.ids)))

    def toggle(self, window: Window) -> None:
        if window.ids:
            window.toggle(self.random.choice(window.ids), conditioned=self.random.random() < 0.6)

    def refresh(self, window: Window) -> None:
        window.maintenance.refresh(self.random.choice([None, 1]))

    def compress(self, window: Window) -> None:
        window.maintenance.compress()

    def orbit(self, window: Window) -> None:
        if len(window.ids) >= 3:
            window.maintenance.prepare_orbit(window.ids[:2], orders=2, seed=self.random.randrange(9))

    def fork(self, window: Window) -> None:
        if len(self.windows) < 4:
            self.windows.append(window.fork(self.random.choice([None, None, "blue"])))

    def remember(self, window: Window) -> None:
        window.remember("what color", [20, 30])

    def back(self, window: Window) -> None:
        """Asks an old version: its KV may have been forgotten or lost since."""
        versions = [v for v in range(max(0, window.version - 3), window.version)]
        if versions:
            try:
                old = window.at(self.random.choice(versions))
            except (KeyError, ValueError, LookupError):
                return
            self.ask(old.fork())

    def vanish(self, window: Window) -> None:
        keys = [key for key in self.engine.store.list() if not key.startswith(("embed/", "grid/", "source/", "chunk/"))]
        for key in self.random.sample(keys, min(len(keys), self.random.choice([1, 3, len(keys) // 2]))):
            self.engine.store.delete(key)

    def ask(self, window: Window) -> None:
        plan = window.plan()
        before = self.engine.counters.prefill_tokens
        try:
            answer = window.ask("what color", max_tokens=2, logprobs=4)
        except BudgetExceeded:
            return
        state = window.snapshot()
        usage = answer.usage
        encoded = [self.engine.encode_system_prompt(window.system_prompt), *map(self.encode, state.placed)]
        query = self.engine.encode_query("what color")
        assert usage.prompt_tokens == sum(e.tokens for e in [*encoded, query]), self.trace
        assert usage.computed_tokens == self.engine.counters.prefill_tokens - before, self.trace
        assert sum(usage.reused_tokens.values()) == sum(e.tokens for e in encoded), self.trace
        pictures = [p.chunk for p in state.placed if p.chunk_id in PIXELS]
        ids = [i for e in [*encoded, query] for i in e.token_ids]
        want, logprobs = self.subject.oracle(ids, pictures)
        served = [True, *(entry.exact for entry in window.plan().entries)]
        planned = [True, *(entry.exact for entry in plan.entries)]
        called = [a and b for a, b in zip(served, planned, strict=True)]
        at = 0
        for index, (e, exact) in enumerate(zip(encoded, called, strict=True)):
            if exact:
                self.compare(index, slice(at, at + e.tokens), want)
            self.approximate += not exact
            at += e.tokens
        if usage.exact:
            assert answer.first_token_logprobs is not None
            for token, value in answer.first_token_logprobs.items():
                assert abs(value - float(logprobs[token])) < 2e-3, (token, self.trace)

    def encode(self, placed: Any) -> Any:
        return self.engine.encode(placed.chunk)

    def compare(self, index: int, part: slice, want: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for number, (layer, (keys, values)) in enumerate(zip(self.engine.answered.cache.layers, want, strict=True)):
            for name, got, true in (("keys", layer.keys[0], keys), ("values", layer.values[0], values)):
                away = float((got[:, part] - true[:, part]).abs().max() / true[:, part].abs().max())
                assert away <= TOLERANCE, (
                    f"{name} of layer {number} of piece {index}, called exact, are {away:.2g} away; {self.trace}"
                )
        self.checked += 1


STEPS = {
    "append": 6, "insert": 1, "evict": 3, "slide": 1, "recall": 3, "reorder": 2, "toggle": 2, "refresh": 1, "compress": 2,
    "orbit": 1, "fork": 1, "remember": 1, "back": 1, "vanish": 2, "ask": 7,
}  # fmt: skip


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    folder = tmp_path_factory.mktemp("fuzz")
    return {name: Subject(write(folder / name), name == "vision") for name, write in WRITERS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS), ids=lambda block: f"block-{block}")
def test_what_is_called_exact_is_exact(block: int, subjects: dict[str, Subject], capsys: Any) -> None:
    checked = approximate = 0
    for seed in range(block * PROGRAMS, (block + 1) * PROGRAMS):
        name = list(WRITERS)[seed % len(WRITERS)]
        program = Program(subjects[name], seed)
        program.run(program.random.randint(8, 24))
        checked, approximate = checked + program.checked, approximate + program.approximate
        if seed % 10 == 9:  # spans are shared by ten programs, then the store is emptied
            for key in [*subjects[name].engine.store.list()]:
                subjects[name].engine.store.delete(key)
    with capsys.disabled():
        print(f" {PROGRAMS} programs: {checked} pieces exact, {approximate} called approximate ", end="")
    assert checked > 500
    assert approximate > 100


def test_a_few_programs(subjects: dict[str, Subject]) -> None:
    checked = 0
    for seed in range(8):
        program = Program(subjects["gqa"], 10_000 + seed)
        program.run(10)
        checked += program.checked
    assert checked > 50
