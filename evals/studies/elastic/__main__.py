"""``python -m evals.studies.elastic``: Elastic Cache's own claims on a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ctxwin.evals.arms.base import SHARE
from ctxwin.evals.console import Device, Dtype, Json, Threads, errors, open_model, progress, show, write_result
from ctxwin.evals.metrics import rouge_l

from .ablations import ABLATIONS
from .exchanges import generated, read_exchanges
from .quality import QualitySettings, measure_quality
from .report import plot_quality, quality_table, speed_table
from .speed import Shape, SpeedSettings, measure_speed, random_engine


def main(
    model: Annotated[str, typer.Argument(help="'tiny' (bundled), or a local folder or Hub name.")] = "tiny",
    data: Annotated[
        Path | None, typer.Option(help="JSON lines of {prompt, answer, image?}; generated exchanges by default.")
    ] = None,
    n: Annotated[int, typer.Option(help="Exchanges; 0: all of the file.", min=0)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of generated exchanges and of timed prompts.", min=0)] = 0,
    methods: Annotated[
        str, typer.Option(help="Comma-separated: elastic, h2o, local, and the ablations' names.")
    ] = "elastic,h2o,local",
    ablations: Annotated[
        bool, typer.Option(help="The paper's table 3 and figure 3 instead, at a budget of 0.5.")
    ] = False,
    budgets: Annotated[str, typer.Option(help="Comma-separated KV budgets, 0 to 1.")] = "1.0,0.8,0.6,0.5,0.4,0.2",
    moment: Annotated[
        str, typer.Option(help="prompt: thin out behind the first question, as the paper; window: before it.")
    ] = "prompt",
    max_tokens: Annotated[int, typer.Option(help="Longest generated answer of a file's exchange.")] = 128,
    system_prompt: Annotated[str, typer.Option(help="System prompt.")] = "You watch a camera.",
    speed: Annotated[
        str, typer.Option(help="Also time BATCHxPROMPT+NEW, comma-separated, such as 8x1024+512; empty: no timing.")
    ] = "",
    speed_budget: Annotated[float, typer.Option(help="KV budget of the timing.")] = 0.2,
    speed_repeats: Annotated[int, typer.Option(help="Timed runs of each cache.", min=1)] = 5,
    speed_model: Annotated[
        str, typer.Option(help="What is timed: random:LAYERS of 13 million random parameters each, or as MODEL.")
    ] = "random:8",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    output: Annotated[Path | None, typer.Option(help="Also write elastic.json and elastic.png here.")] = None,
    as_json: Json = False,
) -> None:
    """Perplexity, ROUGE-L, latency and KV bytes under Elastic Cache, H2O and a local cache, over KV budgets.

    ROUGE-L is against the full cache's own greedy answers.
    """
    with errors():
        if ablations:
            methods, budgets = ",".join(["elastic", *ABLATIONS]), "0.5"
        names = tuple(m.strip() for m in methods.split(",") if m.strip())
        settings = QualitySettings(names, _budgets(budgets), moment, system_prompt, max_tokens)  # type: ignore[arg-type]
        shapes = tuple(Shape.parse(part) for part in speed.split(",") if part.strip())
        random_layers = _random_layers(speed_model)
        timing = SpeedSettings(shapes, names[0], speed_budget, speed_repeats, seed) if shapes else None
        if data is None and not n:
            raise ValueError("n must be >= 1 for generated exchanges, got 0")
        exchanges = generated(n, seed) if data is None else read_exchanges(data, n or None)
        rouge_l("a", "a")  # whether the scorer is installed shows before the model has worked
        engine = open_model(model, dtype, device, threads)
        total = len(exchanges) * (1 + len(settings.methods) * len(settings.budgets))
        with progress("exchanges", total) as advance:
            result = measure_quality(engine, exchanges, settings, advance)
        result["config"] |= {"model": engine.spec.identity, "data": str(data) if data else f"generated, seed {seed}"}
        if timing is not None:
            if random_layers:
                opened = random_engine(random_layers, dtype, device)
            else:
                opened = engine if speed_model == model else open_model(speed_model, dtype, device, threads)
            with progress("timed runs", 2 * len(shapes) * (speed_repeats + 1)) as advance:
                result["speed"] = measure_speed(opened, timing, advance)
        write_result(output, "elastic.json", result)
        if output is not None:
            plot_quality(result, output / "elastic.png")
        tables = [quality_table(result)] if timing is None else [quality_table(result), speed_table(result["speed"])]
        show(
            result, as_json, *tables, *([] if output is None else [f"wrote {output / 'elastic.json'} and elastic.png"])
        )


def _budgets(text: str) -> tuple[float, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    shares = tuple(float(part) for part in parts if re.fullmatch(SHARE, part))
    if not parts or len(set(shares)) != len(parts):
        raise ValueError(f"budgets must be different numbers 0..1, separated by commas, got {text!r}")
    return shares


def _random_layers(name: str) -> int:
    """Layers of ``random:LAYERS``; 0 for a model by its name."""
    kind, _, layers = name.partition(":")
    if kind != "random":
        return 0
    if not layers.isdigit() or int(layers) < 1:
        raise ValueError(f"speed-model must be random:LAYERS or a model, got {name!r}")
    return int(layers)


if __name__ == "__main__":
    typer.run(main)
