"""What a patch costs on a serving engine in its own dtype, beside what two engines differ by anyway.

In bfloat16 a re-prefill is itself an approximation: two engines that prefill the same tokens disagree by their rounding. A patch
that stays within that disagreement costs nothing that a change of engine would not. Everything runs on
`ctxwin.Window`, over the generated contexts of `ctxwin.evals.toggles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.evals.isolation import isolated
from ctxwin.evals.toggles import ToggleSettings, draw
from ctxwin.fidelity import Fidelity
from ctxwin.tiny.world import render
from ctxwin.window.ask import kl
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.tiny.world import Item
    from ctxwin.window.answer import Answer

ENGINES = "engines"
_DRAWS = 2000


@dataclass(frozen=True)
class GapSettings:
    """What a run does.

    Attributes:
        n: contexts.
        ranks: of every chunk's patch; each is measured in windows of its own, over the same contexts.
        layers: that patches cover: all, or deep.
        layout: joint, or shared: over the model's basis; ranks are then coefficients a token.
    """

    n: int = 200
    ranks: tuple[int, ...] = (8,)
    layers: str = "all"
    seed: int = 0
    system_prompt: str = "You watch a camera."
    layout: str = "joint"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be >= 1, got {self.n}")
        if not self.ranks or min(self.ranks) < 1 or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks must be different numbers >= 1, got {list(self.ranks)}")
        if self.layers not in ("all", "deep"):
            raise ValueError(f"layers must be all or deep, got {self.layers!r}")
        if self.layout not in ("joint", "shared"):
            raise ValueError(f"layout must be joint or shared, got {self.layout!r}")


def measure(
    serving: Engine, other: Engine, settings: GapSettings, progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """The KL (nats, over the whole vocabulary of the next token) of each gap, and answers that it changes.

    Args:
        serving: the engine that serves windows; ``other``: the one whose re-prefill it is held against. Same model and
            dtype, raise ValueError otherwise.

    Returns:
        ``{"config", "kl": {gap: {median, p95, p95_interval, mean, max, n, changed}}}``. The gap `ENGINES` is that of both
        engines' re-prefills; ``rank 8`` and so on, that of the serving engine's re-prefill and its window of patches, also
        has ``lanes`` (tokens by lane) and ``share``: the bytes of the patches over those of the KV they stand for.
        Cost: a prefill of every context on ``other``, and for every rank one on ``serving`` and a forward of each chunk.
    """
    if serving.spec.kv.dtype != other.spec.kv.dtype or serving.spec.model != other.spec.model:
        raise ValueError(
            f"both engines must run one model in one dtype, got {serving.spec.model} in {serving.spec.kv.dtype} and "
            f"{other.spec.model} in {other.spec.kv.dtype}"
        )
    gaps = {rank: _Gap() for rank in settings.ranks}
    engines = _Gap()
    for index in range(settings.n):
        item, _, _ = draw(ToggleSettings(n=settings.n, seed=settings.seed), index)
        with isolated(other):
            exact = _asked(other, settings, item)
        for rank, gap in gaps.items():
            with isolated(serving):
                first, patched, share = _served(serving, settings, item, rank)
            gap.add(first, patched)
            gap.served(patched, share)
            if rank == settings.ranks[0]:
                engines.add(first, exact)
        progress(1)
    return {
        "config": {
            **asdict(settings), "dtype": serving.spec.kv.dtype, "serving": serving.spec.name, "other": other.spec.name,
        },
        "kl": {**{f"rank {rank}": gap.summary() for rank, gap in gaps.items()}, ENGINES: engines.summary()},
    }  # fmt: skip


@dataclass
class _Gap:
    """What one gap was in every context so far."""

    found: list[float] = field(default_factory=list)
    changed: int = 0
    shares: list[float] = field(default_factory=list)
    lanes: dict[str, int] = field(default_factory=dict)

    def add(self, reference: Answer, answer: Answer) -> None:
        self.found.append(kl(reference.first_token_logprobs, answer.first_token_logprobs))
        self.changed += reference.token_ids != answer.token_ids

    def served(self, answer: Answer, share: float) -> None:
        self.shares.append(share)
        for lane, tokens in answer.usage.reused_tokens.items():
            self.lanes[lane] = self.lanes.get(lane, 0) + tokens

    def summary(self) -> dict[str, Any]:
        row = {**quantiles(self.found), "changed": self.changed}
        return {**row, "lanes": self.lanes, "share": float(np.median(self.shares))} if self.shares else row


def quantiles(values: list[float]) -> dict[str, Any]:
    """Median, 95th percentile with its bootstrap interval (95 %, seeded), mean, maximum and number."""
    array = np.asarray(values)
    draws = np.random.default_rng(0).choice(array, size=(_DRAWS, len(array)))
    low, high = np.quantile(np.quantile(draws, 0.95, axis=1), [0.025, 0.975])
    return {
        "median": float(np.median(array)), "p95": float(np.quantile(array, 0.95)),
        "p95_interval": [float(low), float(high)], "mean": float(array.mean()), "max": float(array.max()), "n": len(array),
    }  # fmt: skip


def _chunks(item: Item) -> list[Chunk]:
    return [Chunk.image(render(frame), keep_source=False) for frame in item.frames]


def _asked(engine: Engine, settings: GapSettings, item: Item) -> Answer:
    with Window(engine, system_prompt=settings.system_prompt, fidelity=Fidelity(mode="exact")) as window:
        window.extend(_chunks(item))
        return window.ask(item.questions[0].text, 1, logprobs=-1)


def _served(engine: Engine, settings: GapSettings, item: Item, rank: int) -> tuple[Answer, Answer, float]:
    """Answers by re-prefill and from patches, and the patches' share of bytes."""
    how: dict[str, Any] = {"layers": settings.layers, "layout": settings.layout}
    fidelity = Fidelity(mode="patched", rank=rank, **how)
    query = item.questions[0].text
    with Window(engine, system_prompt=settings.system_prompt, fidelity=fidelity) as window:
        window.extend(_chunks(item))
        first = window.ask(query, 1, logprobs=-1)
        window.compress()
        patched = window.ask(query, 1, logprobs=-1)
        patches = [p.kv.patch for p in window.snapshot().placed if p.kv is not None and p.kv.patch]
        held = [patch for patch in map(engine.repo.get_patch, patches) if patch is not None]
        share = float(np.mean([patch.share(engine.spec.kv) for patch in held])) if held else 0.0
        return first, patched, share
