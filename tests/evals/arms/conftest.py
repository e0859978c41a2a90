from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ctxwin.chunk import Chunk
from ctxwin_evals.arms import Served, parse_arm
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item
from ctxwin_evals.metrics import kl_divergence
from ctxwin_evals.patching import Patcher
from ctxwin_evals.tasks.tiny import TASKS

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

HEADER = "You watch a camera."
TEXTS = ("a red circle now", "the square is blue", "the number of a frame", "what color is the camera now red blue")


def mixed_chunks(seed: int) -> list[Chunk]:
    """Texts and pictures of different sizes, one chunk with a picture behind text."""
    rng = np.random.default_rng(seed)
    small, wide = (rng.integers(0, 255, (28 * h, 28 * w, 3), dtype=np.uint8) for h, w in ((2, 2), (1, 3)))
    return [Chunk.text("a red circle"), Chunk.image(small, text="frame 1"), Chunk.image(wide), Chunk.text(TEXTS[3])]


def text_chunks(seed: int) -> list[Chunk]:
    """The same words in another order behind the first, so that items share a shape."""
    rng = np.random.default_rng(seed)
    words = [text.split(" ") for text in TEXTS]
    return [Chunk.text(" ".join([first, *rng.permutation(rest)])) for first, *rest in words]


def item_of(load: Callable[[int], list[Chunk]], seed: int, **fields: object) -> Item:
    plain: dict[str, object] = dict(
        task="t", index=seed, count=4, placed=(0, 1, 2, 3), query="what color is it?", target="red", doc_id=f"{seed}",
        cluster=f"{seed}", digest=f"{seed}",
    )  # fmt: skip
    return Item(load=lambda: load(seed), **(plain | fields))  # type: ignore[arg-type]


class Bench:
    """Groups on one random model, and what arms say on them."""

    def __init__(self, engine: HFEngine) -> None:
        self.decoder = Decoder(engine)
        self.sees = engine.spec.vision

    def of(self, items: list[Item]) -> Group:
        return Group(self.decoder, items, Patcher(self.decoder.spec, dtype=torch.float32), HEADER)

    def tiny(self, task: str = "multi_hop", frames: int = 3, count: int = 2, turnover: float = 0.0) -> Group:
        return self.of([TASKS[task].case(0, i, (frames,), turnover) for i in range(count)])

    def mixed(self, seed: int = 0, **fields: object) -> Group:
        return self.of([item_of(mixed_chunks, seed, **fields)])

    def texts(self, count: int = 2) -> Group:
        return self.of([item_of(text_chunks, seed) for seed in range(count)])

    def any(self) -> list[Group]:
        """Groups that this model can read: a batch, and a single one of pictures and texts."""
        return [self.tiny(), self.mixed()] if self.sees else [self.texts()]

    def serve(self, group: Group, arm: str) -> list[Served]:
        served = parse_arm(arm).serve(group)
        assert all(one is not None for one in served)
        return [one for one in served if one is not None]

    def logits(self, group: Group, arm: str) -> torch.Tensor:
        memory = group.memory([one.spans for one in self.serve(group, arm)])
        return self.decoder.read(memory, [item.query for item in group.items], group.begin)

    def apart(self, group: Group, arm: str, reference: str = "reprefill") -> float:
        """Largest KL of an arm to another."""
        pairs = zip(self.logits(group, reference), self.logits(group, arm), strict=True)
        return max(kl_divergence(p.numpy(), q.numpy()) for p, q in pairs)

    def same(self, group: Group, arm: str, reference: str, atol: float = 1e-4) -> None:
        """Fails where the KV of two arms differ."""
        for a, b in zip(self.serve(group, arm), self.serve(group, reference), strict=True):
            for x, y in zip(a.spans, b.spans, strict=True):
                torch.testing.assert_close(x.k, y.k, atol=atol, rtol=0)
                torch.testing.assert_close(x.v, y.v, atol=atol, rtol=0)


@pytest.fixture(scope="session")
def bench(engine: HFEngine) -> Bench:
    return Bench(engine)


GUARD = [pytest.mark.slow, pytest.mark.guard]


@pytest.fixture(
    scope="session", params=["qwen2_5_vl", "mla", *(pytest.param(name, marks=GUARD) for name in ("qwen3_vl", "kimi"))]
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A random model of each family: what holds on all of them holds by definition."""
    from ctxwin.engines.hf.engine import HFEngine
    from engines.models import write_kimi, write_mla_model, write_vision_model

    folder: Path = tmp_path_factory.mktemp("arms") / request.param
    other = {"mla": write_mla_model, "kimi": write_kimi}.get(request.param)
    made = other(folder) if other is not None else write_vision_model(folder, request.param)
    opened = HFEngine(made, dtype="float32")
    yield Bench(opened)
    opened.close()
