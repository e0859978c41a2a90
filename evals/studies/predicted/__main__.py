"""``python -m evals.studies.predicted``; see `ctxwin.evals.studies.predicted.study`."""

from __future__ import annotations

from typing import Annotated

import typer

from ctxwin.evals.console import Device, Dtype, Json, Model, Threads, errors, numbers, open_model, preset

from ..command import SYSTEM_PROMPT, Frames, Output, Seed, SystemPrompt, run
from .study import VARIANTS, PredictedSettings, measure, tables

QUICK = {"n": 12, "contexts": 24, "frames": "2,3"}


def main(
    n: Annotated[int, typer.Option(help="Items of every task.", min=2)] = 300,
    contexts: Annotated[int, typer.Option(help="Contexts that predictors are fitted on.", min=12)] = 240,
    frames: Frames = "2,3,4,5,6",
    tasks: Annotated[str, typer.Option(help="Generated tasks.")] = "multi_hop,order,graded,single_hop",
    rank: Annotated[int, typer.Option(help="Directions of the model's shared basis.", min=1)] = 54,
    variants: Annotated[str, typer.Option(help=f"Predictors: {', '.join(VARIANTS)}; or all.")] = "all",
    arms: Annotated[str, typer.Option(help="Other arms, as in `ctxwin eval run`.")] = (
        "mpic:4,mpic:16,cacheblend:0.15,cacheblend:0.3,layers:0.25"
    ),
    seed: Seed = 21,
    quick: Annotated[bool, preset("--quick", "A look at what comes out, in a minute.", **QUICK)] = False,
    model: Model = "tiny",
    system_prompt: SystemPrompt = SYSTEM_PROMPT,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Serve chunks behind neighbours they were never seen with: predicted patches against every other reuse."""
    with errors():
        chosen = tuple(VARIANTS) if variants == "all" else tuple(v.strip() for v in variants.split(","))
        named = tuple(task.strip() for task in tasks.split(","))
        counts = tuple(numbers(frames))
        settings = PredictedSettings(n, contexts, counts, named, rank, chosen, arms, seed, system_prompt)
        engine = open_model(model, dtype, device, threads)
        work = "predictors and items", settings.steps
        run("predicted", measure, settings, engine, work, tables, output, as_json)


if __name__ == "__main__":
    typer.run(main)
