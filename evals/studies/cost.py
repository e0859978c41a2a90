"""Predicted against measured cost of an ask, on models of several shapes.

A window of each shape is appended to, slid, reordered and asked at random; before every ask its plan says how many
milliseconds it will take to the first token, from nothing but what the asks before took. The machine is shared, so the same
is done twice: by the wall's clock, and by the processor time of this process, which waiting for others does not enter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.cost import CostModel
from ctxwin.engines.open import open_engine
from ctxwin.evals.bench.model import SMALL, Sizes, ensure_model
from ctxwin.evals.console import Json, Threads, errors, new_table, open_model, progress, show, write_result
from ctxwin.fidelity import Fidelity, Mode
from ctxwin.window.ask import Question
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.base import Engine

SHAPES: dict[str, Sizes | None] = {
    "tiny": None,
    "wide": Sizes(768, 4, 12, 2, 3072, vocabulary=8_000, vision_depth=2),
    "small": SMALL,
}
"""The bundled model (6 layers of 128), 4 wide layers, and 12 narrower ones with a vocabulary of 32,000."""
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
_SYSTEM_PROMPT = "You watch a camera."


@dataclass(frozen=True)
class CostSettings:
    """What a run does.

    Attributes:
        asks: asks a shape, clock and fidelity; ``first`` of them are also reported apart.
        chunks: most chunks in the window; tokens: most tokens of one.
    """

    asks: int = 120
    first: int = 20
    chunks: int = 8
    tokens: int = 160
    seed: int = 0


@dataclass(frozen=True)
class Timed:
    """One ask: what the plan said and what the clock saw up to the first token, in milliseconds; and its tokens."""

    computed: int
    said: float
    took: float


def measure(
    engine: Engine, settings: CostSettings, mode: Mode, clock: str, advance: Callable[[int], None]
) -> list[Timed]:
    """Asks a window that is edited at random; the engine learns from nothing but these asks."""
    engine.__dict__["costs"] = costs = CostModel(CLOCKS[clock])
    # Other content in each run: an engine's own prefix cache would find that of the run before.
    rng = np.random.default_rng((settings.seed, settings.asks, *f"{mode}/{clock}".encode()))
    timed = []
    with Window(engine, _SYSTEM_PROMPT, fidelity=Fidelity(mode)) as window:
        for _ in range(settings.asks):
            _edit(window, rng, settings)
            plan, query = window.plan(), " ".join(["color"] * int(rng.integers(1, 24)))
            asked, tokens = engine.encode_query(query).tokens, window.tokens
            said = plan.ms + costs.forward_ms(asked, tokens)
            first: list[float] = []
            began = costs.clock()

            def heard(token: int, text: str, first: list[float] = first) -> bool:
                first.append(costs.clock())
                return True

            window.answer(Question.of(query, 2), on_token=heard)
            took = (first[0] if first else costs.clock()) - began
            timed.append(Timed(plan.computed_tokens + asked, said, 1e3 * took))
            advance(1)
    for prefix in ("span/", "patch/"):
        for key in list(engine.store.list(prefix)):
            engine.repo.delete(key)
    return timed


def _edit(window: Window, rng: np.random.Generator, settings: CostSettings) -> None:
    """New chunks of any size; slides, recalls and reorders now and then, so that asks compute little or much."""
    for _ in range(int(rng.integers(0, 3)) or not window.ids):
        count = int(np.exp(rng.uniform(np.log(4), np.log(settings.tokens))))
        window.append(Chunk.tokens([int(i) for i in rng.integers(20, 300, count)]))
    while len(window.ids) > settings.chunks:
        window.slide(1)
    draw = rng.uniform()
    if draw < 0.1:
        window.reorder([window.ids[i] for i in rng.permutation(len(window.ids))])
    elif draw < 0.3 and window.evicted:
        window.recall(window.evicted[int(rng.integers(len(window.evicted)))], int(rng.integers(len(window.ids) + 1)))


def summary(timed: list[Timed]) -> dict[str, Any]:
    """Relative errors of the predictions: medians and the ninth decile, and what was measured."""
    errors_of = np.array([abs(t.said / t.took - 1) for t in timed])
    return {
        "n": len(timed),
        "median_error": float(np.median(errors_of)),
        "p90_error": float(np.quantile(errors_of, 0.9)),
        "took_ms": [float(np.quantile([t.took for t in timed], q)) for q in (0.05, 0.5, 0.95)],
        "computed": [int(np.quantile([t.computed for t in timed], q)) for q in (0.05, 0.5, 0.95)],
    }


def cost_table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    columns = "shape|lanes|clock|n|median error|p90|first asks|ms: 5 %|median|95 %"
    made = new_table("Predicted against measured cost of an ask, to the first token", columns, left=(0, 1, 2))
    for row in result["rows"]:
        shares = (row["median_error"], row["p90_error"], row["first"]["median_error"])
        shown = [*(f"{100 * x:.1f} %" for x in shares), *(f"{x:.1f}" for x in row["took_ms"])]
        made.add_row(row["shape"], row["mode"], row["clock"], str(row["n"]), *shown)
    return made


def main(
    shapes: Annotated[str, typer.Option(help=f"Which of {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    asks: Annotated[int, typer.Option(help="Asks a shape, fidelity and clock.", min=30)] = 120,
    seed: Annotated[int, typer.Option(help="Seed of the edits.", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="The bundled model alone, 40 asks.")] = False,
    engine: Annotated[str, typer.Option(help="hf, or vllm in this process.")] = "hf",
    threads: Threads = 1,
    output: Annotated[Path | None, typer.Option(help="Also write cost.json into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """How well a plan's milliseconds fit what an ask takes."""
    with errors():
        wanted = ["tiny"] if quick else [s.strip() for s in shapes.split(",")]
        if engine not in ("hf", "vllm"):
            raise ValueError(f"engine must be hf or vllm, got {engine!r}")
        if unknown := set(wanted) - set(SHAPES):
            raise ValueError(f"shapes must be of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
        settings = CostSettings(asks=40 if quick else asks, seed=seed)
        modes: tuple[Mode, ...] = ("patched", "exact")
        rows = []
        total = len(wanted) * len(modes) * len(CLOCKS) * settings.asks
        with TemporaryDirectory() as folder, progress("asks", total) as advance:
            for shape in wanted:
                sizes = SHAPES[shape]
                model = "tiny" if sizes is None else str(ensure_model(sizes, 0, Path(folder))[0])
                opened: Engine
                if engine == "vllm":
                    opened = open_engine(model, engine="vllm", dtype="float32", max_model_len=2048)
                else:
                    opened = open_model(model, "float32", "cpu", threads)
                for mode in modes:
                    for clock in CLOCKS:
                        timed = measure(opened, settings, mode, clock, advance)
                        apart = {"first": summary(timed[: settings.first]), **summary(timed[settings.first :])}
                        rows.append({"shape": shape, "mode": mode, "clock": clock, **apart})
                opened.close()
        result = {"config": {**asdict(settings), "engine": engine, "threads": threads}, "rows": rows}
        write_result(output, "cost.json", result)
        note = (
            f"The first {settings.first} asks, while the model learns, stand in a column of their own and nowhere else."
        )
        show(result, as_json, cost_table(result), note)


if __name__ == "__main__":
    typer.run(main)
