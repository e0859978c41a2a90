"""What a patch costs on a serving engine in its own dtype, beside what two engines differ by anyway.

In bfloat16 a re-prefill is itself an approximation: two engines that prefill the same tokens disagree by their rounding. A patch
that stays within that disagreement costs nothing that a change of engine would not. Everything runs on
`ctxwin.Window`, over the generated contexts of `toggles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.open import open_engine
from ctxwin.evals.console import Dtype, Json, Model, errors, new_table, progress, show, write_result
from ctxwin.evals.report.figures import BASE, OTHER, PATCH
from ctxwin.evals.report.figures import render as rendered
from ctxwin.fidelity import Fidelity
from ctxwin.tiny.world import render
from ctxwin.window.ask import kl
from ctxwin.window.window import Window

from .isolation import isolated
from .toggles import ToggleSettings, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from ctxwin.engines.base import Engine
    from ctxwin.tiny.world import Item
    from ctxwin.window.answer import Answer

ENGINES = "engines"
_DRAWS = 2000
_LEAST = 1e-12  # a logarithmic axis has no zero


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
    serving: Engine, other: Engine, settings: GapSettings, on_progress: Callable[[int], None] = lambda done: None
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
        on_progress(1)
    return {
        "config": {
            **asdict(settings),
            "dtype": serving.spec.kv.dtype,
            "serving": serving.spec.name,
            "other": other.spec.name,
        },
        "kl": {**{f"rank {rank}": gap.summary() for rank, gap in gaps.items()}, ENGINES: engines.summary()},
    }


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
        "median": float(np.median(array)),
        "p95": float(np.quantile(array, 0.95)),
        "p95_interval": [float(low), float(high)],
        "mean": float(array.mean()),
        "max": float(array.max()),
        "n": len(array),
    }


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


def picture(result: dict[str, Any]) -> bytes:
    """A PNG of what `serving_gap.measure` returns; ModuleNotFoundError without matplotlib."""
    return rendered(draw_gap(result), "png")


def draw_gap(result: dict[str, Any]) -> Figure:
    """Median, p95 with its interval and maximum by rank; the engines' own median and p95 as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axis = figure.subplots()
    config, found = result["config"], result["kl"]
    ranks = sorted(config["ranks"])
    rows = [found[f"rank {rank}"] for rank in ranks]
    at = range(len(ranks))
    axis.set_yscale("log")
    for name, mark in (("max", "^"), ("p95", "o"), ("median", "s")):
        colour = OTHER if name == "max" else PATCH
        axis.plot(
            at, [max(row[name], _LEAST) for row in rows], mark, color=colour, linestyle="-", label=f"patches, {name}"
        )
    for x, row in zip(at, rows, strict=True):
        axis.plot([x, x], [max(end, _LEAST) for end in row["p95_interval"]], color=PATCH, linewidth=4, alpha=0.3)
    for name, style in (("p95", "--"), ("median", ":")):
        axis.axhline(
            max(found[ENGINES][name], _LEAST), color=BASE, linestyle=style, label=f"the engines' re-prefills, {name}"
        )
    axis.set_xticks(at, [f"rank {rank}\n{row['share']:.0%} of bytes" for rank, row in zip(ranks, rows, strict=True)])
    axis.set_ylabel("KL of the next token, nats")
    axis.set_title(
        f"{config['serving']} in {config['dtype']}, n = {config['n']}: windows of {config['layout']} patches against re-prefill",
        fontsize=10,
    )
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"rank must be a number or several with commas between, got {text!r}") from None


def engines_table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    config = result["config"]
    title = (
        f"KL of the next token, {config['dtype']}: {config['serving']}'s re-prefill against its window of patches "
        f"({config['layout']}, {config['layers']} layers), and against {config['other']}'s re-prefill"
    )
    table = new_table(title, "gap|bytes|n|median|p95|p95 interval|max|answers changed")
    for name, row in result["kl"].items():
        low, high = row["p95_interval"]
        table.add_row(
            f"{config['other']}'s re-prefill" if name == ENGINES else f"patches, {name}",
            f"{row['share']:.1%}" if "share" in row else "",
            str(row["n"]),
            f"{row['median']:.2e}",
            f"{row['p95']:.2e}",
            f"{low:.1e} to {high:.1e}",
            f"{row['max']:.2e}",
            str(row["changed"]),
        )
    return table


def main(
    n: Annotated[int, typer.Option(help="Contexts.", min=1)] = 200,
    rank: Annotated[
        str, typer.Option(help="Rank of every patch; several, e.g. 4,8,16,32, are measured in turn.")
    ] = "8",
    layers: Annotated[str, typer.Option(help="Layers that patches cover: all or deep.")] = "all",
    layout: Annotated[
        str, typer.Option(help="joint: directions of each patch's own; shared: the model's basis (ctxwin eval basis).")
    ] = "joint",
    seed: Annotated[int, typer.Option(help="Seed of the contexts.", min=0)] = 0,
    model: Model = "tiny",
    dtype: Dtype = "bfloat16",
    output: Annotated[Path | None, typer.Option(help="Also write engines.json and a picture into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """What a patch costs on vLLM in its own dtype, beside what vLLM and transformers differ by."""
    with errors():
        settings = GapSettings(n, _ranks(rank), layers, seed, layout=layout)
        name = model.removeprefix("hf:").removeprefix("vllm:")
        with (
            open_engine(name, engine="vllm", dtype=dtype) as serving,
            open_engine(name, engine="hf", dtype=dtype) as other,
            progress("contexts", n) as advance,
        ):
            result = measure(serving, other, settings, advance)
        write_result(output, "engines.json", result)
        if output is not None:
            (output / "engines.png").write_bytes(picture(result))
        show(result, as_json, engines_table(result))


if __name__ == "__main__":
    typer.run(main)
