"""``ctxwin bench``: what edits of a window cost in time, measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.cli.bench_serve import serve
from ctxwin.cli.commands import quiet

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure what a window costs in time, on this machine."
)

app.command("serve")(serve)


@app.callback()
def bench() -> None:
    """Measure what a window costs in time, on this machine."""


@app.command("reuse")
def reuse(
    engine: Annotated[str, typer.Option(metavar="vllm|hf", help="Engine to measure.")] = "vllm",
    model: Annotated[
        str, typer.Option(help="A local model folder; without one, a random 0.5B Qwen2-VL is written once.")
    ] = "",
    model_dir: Annotated[
        Path | None, typer.Option(help="Where that is written. Default: ctxwin/bench in your cache folder.")
    ] = None,
    ops: Annotated[str, typer.Option(help="Edits, comma-separated.")] = "slide,recall,reorder,toggle",
    tokens: Annotated[str, typer.Option(help="Reused tokens, comma-separated.")] = "256,512,1024,2048",
    rank: Annotated[int, typer.Option(help="Rank of the stored patches.")] = 32,
    runs: Annotated[int, typer.Option(help="Paired runs of each figure.")] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the default.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the model's weights and of the content.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Time to the first token behind an edit: a window, the engine's own prefix cache, and the floor.

    The floor is the same prompt as a full hit of the prefix cache. Edits: the oldest chunk leaves (slide), an evicted one comes
    back with a stored patch (recall), one of three predecessors moves to the front (reorder), a chunk's clean view (toggle).
    """
    quiet()
    measured = _settings(ops, tokens, rank, runs, seed)
    if engine not in ("vllm", "hf"):
        raise ValueError(f"--engine must be vllm or hf, got {engine!r}")
    if model and model_dir is not None:
        raise ValueError("--model-dir is where a generated model goes; give it or --model, not both")
    if model and not Path(model).expanduser().is_dir():
        raise ValueError(f"--model must be a local model folder, got {model!r}")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out must lie in a folder that exists, got {str(out)!r}")
    if engine == "vllm":
        from ctxwin.engines.open import require_vllm

        require_vllm()  # before a model of 1 GB is written
    from ctxwin.evals.bench.reuse import measure
    from ctxwin.evals.bench.show import check_lines, note_lines, reuse_table
    from ctxwin.evals.console import print_json, say, stages, terminal

    with stages() as told:
        told("model", 0, 1)
        opened = _open(engine, _model(model, model_dir, seed), threads)
        try:
            result = measure(opened, measured, told)
        finally:
            opened.close()
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(result)
        return
    terminal().print(reuse_table(result))
    for line in (*note_lines(result), *check_lines(result)):
        say(line)


def _settings(ops: str, tokens: str, rank: int, runs: int, seed: int) -> Any:
    from ctxwin.evals.bench.reuse import Settings
    from ctxwin.evals.console import numbers

    names = tuple(dict.fromkeys(part.strip() for part in ops.split(",") if part.strip()))
    return Settings(names, tuple(dict.fromkeys(numbers(tokens))), rank, runs, seed)


def _model(model: str, where: Path | None, seed: int) -> str:
    """The folder of the model to measure; a generated one is written first where it is missing."""
    if model:
        return str(Path(model).expanduser())
    from ctxwin.evals.bench.model import Sizes, cache_folder, ensure_model

    typer.echo(f"model: random 0.5B Qwen2-VL in {where or cache_folder()} (about 1 GB, written once)", err=True)
    folder, _ = ensure_model(Sizes(), seed, where)
    return str(folder)


def _open(engine: str, model: str, threads: int) -> Engine:
    from ctxwin.engines.torchvision_repair import repair

    repair()  # before the first import of transformers
    import torch
    from transformers.utils import logging as hub_logging

    from ctxwin.engines.open import open_engine

    hub_logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    return open_engine(f"{engine}:{model}")
