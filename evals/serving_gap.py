"""What a patch costs on a serving engine in its own dtype, beside what two engines differ by anyway.

In bfloat16 a re-prefill is itself an approximation: two engines that prefill the same tokens disagree by their rounding. A patch
that stays within that disagreement costs nothing that a change of engine would not. Everything runs on
`ctxwin.Window`, over the generated contexts of `ctxwin.evals.toggles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.asking import kl
from ctxwin.chunk import Chunk
from ctxwin.evals.isolation import isolated
from ctxwin.evals.toggles import ToggleSettings, draw
from ctxwin.fidelity import Fidelity
from ctxwin.tiny.world import render
from ctxwin.window import Window

if TYPE_CHECKING:
    from ctxwin.answer import Answer
    from ctxwin.engines.base import Engine
    from ctxwin.tiny.world import Item

GAPS = {
    "patch": "the serving engine's re-prefill against its window of patches",
    "engines": "the serving engine's re-prefill against the other engine's",
}
_DRAWS = 2000


@dataclass(frozen=True)
class GapSettings:
    """What a run does.

    Attributes:
        n: contexts.
        rank: of every chunk's patch.
        layers: that patches cover: all, or deep.
    """

    n: int = 200
    rank: int = 8
    layers: str = "all"
    seed: int = 0
    header: str = "You watch a camera."

    def __post_init__(self) -> None:
        if self.n < 1 or self.rank < 1:
            raise ValueError(f"n and rank must be >= 1, got {self.n} and {self.rank}")
        if self.layers not in ("all", "deep"):
            raise ValueError(f"layers must be all or deep, got {self.layers!r}")


def measure(
    serving: Engine, other: Engine, settings: GapSettings, progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """The KL (nats, over the whole vocabulary of the next token) of each gap, and answers that it changes.

    Args:
        serving: the engine that serves windows; ``other``: the one whose re-prefill it is held against. Same model and
            dtype, raise ValueError otherwise.

    Returns:
        ``{"config", "gaps", "kl": {gap: {median, p95, p95_interval, mean, max, changed, n}}, "lanes": {lane: tokens},
        "share"}``; ``share`` is the bytes of the patches over those of the KV they stand for. Cost: two prefills of every
        context, and one forward of each of its chunks.
    """
    if serving.spec.kv.dtype != other.spec.kv.dtype or serving.spec.model != other.spec.model:
        raise ValueError(
            f"both engines must run one model in one dtype, got {serving.spec.model} in {serving.spec.kv.dtype} and "
            f"{other.spec.model} in {other.spec.kv.dtype}"
        )
    found: dict[str, list[float]] = {name: [] for name in GAPS}
    changed = dict.fromkeys(GAPS, 0)
    lanes: dict[str, int] = {}
    shares: list[float] = []
    for index in range(settings.n):
        item, _, _ = draw(ToggleSettings(n=settings.n, seed=settings.seed), index)
        with isolated(serving), isolated(other):
            exact = _asked(other, settings, item)
            answers, used, share = _served(serving, settings, item)
        answers["engines"] = exact
        first = answers.pop("reprefill")
        for name in GAPS:
            found[name].append(kl(first.first_token_logprobs, answers[name].first_token_logprobs))
            changed[name] += first.token_ids != answers[name].token_ids
        for lane, tokens in used.items():
            lanes[lane] = lanes.get(lane, 0) + tokens
        shares.append(share)
        progress(1)
    return {
        "config": {
            **asdict(settings), "dtype": serving.spec.kv.dtype, "serving": serving.spec.name, "other": other.spec.name,
        },
        "gaps": GAPS,
        "kl": {name: {**quantiles(values), "changed": changed[name]} for name, values in found.items()},
        "lanes": lanes,
        "share": float(np.median(shares)),
    }  # fmt: skip


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
    with Window(engine, header=settings.header, fidelity=Fidelity(mode="exact")) as window:
        window.extend(_chunks(item))
        return window.ask(item.questions[0].text, 1, logprobs=-1)


def _served(engine: Engine, settings: GapSettings, item: Item) -> tuple[dict[str, Answer], dict[str, int], float]:
    """Answers by re-prefill and from patches; the lanes of the latter, and its patches' share of bytes."""
    layers: Any = settings.layers
    fidelity = Fidelity(mode="patched", rank=settings.rank, layers=layers)
    query = item.questions[0].text
    with Window(engine, header=settings.header, fidelity=fidelity) as window:
        window.extend(_chunks(item))
        answers = {"reprefill": window.ask(query, 1, logprobs=-1)}
        window.compress()
        answers["patch"] = window.ask(query, 1, logprobs=-1)
        patches = [p.kv.patch for p in window.snapshot().placed if p.kv is not None and p.kv.patch]
        held = [patch for patch in map(engine.repo.get_patch, patches) if patch is not None]
        share = float(np.mean([patch.share(engine.spec.kv) for patch in held])) if held else 0.0
        return answers, dict(answers["patch"].usage.reused_tokens), share
