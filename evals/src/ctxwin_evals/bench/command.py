"""``ctxwin bench``: what edits of a window cost in time, measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ctxwin.cli.commands import disable_audits, quiet
from ctxwin_evals.console import Config, Json, Threads, preset

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure what a window costs in time, on this machine."
)

Model = Annotated[str, typer.Option(help="A local model folder; by default a random Qwen2-VL, generated once.")]
ModelDir = Annotated[
    Path | None, typer.Option(help="Where to generate that. Default: ctxwin/bench in your cache folder.")
]


@app.callback()
def bench() -> None:
    """Measure what a window costs in time, on this machine."""


@app.command("reuse")
def reuse(
    engine: Annotated[str, typer.Option(metavar="vllm|hf", help="Engine to measure.")] = "vllm",
    model: Model = "",
    model_dir: ModelDir = None,
    ops: Annotated[str, typer.Option(help="Edits, comma-separated.")] = "slide,recall,reorder,toggle,ahead",
    tokens: Annotated[str, typer.Option(help="Reused tokens, comma-separated.")] = "256,512,1024,2048",
    rank: Annotated[int, typer.Option(help="Rank of the stored patches.")] = 32,
    runs: Annotated[int, typer.Option(help="Paired runs of each figure.")] = 5,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of the model's weights and of the content.")] = 0,
    quick: Annotated[
        bool,
        preset(
            "--quick",
            "At most three minutes on 2 cores: 79M parameters instead of 494M, 256 and 512 tokens, two runs.",
            tokens="256,512",
            runs=2,
            rank=16,
        ),
    ] = False,
    config: Config = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Time to the first token after an edit: a window, the engine's own prefix cache, and the floor.

    The floor is the same prompt as a full hit of the prefix cache. Edits: the oldest chunk leaves (slide), an evicted one comes
    back with a stored patch (recall), one of three predecessors moves to the front (reorder), a chunk's clean view (toggle),
    the oldest leaves an exact window while the engine idles (ahead).
    """
    quiet()
    disable_audits()
    from ctxwin.opening import open_engine, require_vllm
    from ctxwin_evals.bench.model import SMALL, Sizes, check_model, open_model
    from ctxwin_evals.bench.reuse import Settings, measure
    from ctxwin_evals.bench.show import check_lines, note_lines, reuse_table
    from ctxwin_evals.console import numbers, prepare, show, stages

    names = tuple(dict.fromkeys(part.strip() for part in ops.split(",") if part.strip()))
    settings = Settings(ops=names, tokens=tuple(dict.fromkeys(numbers(tokens))), rank=rank, runs=runs, seed=seed)
    if engine not in ("vllm", "hf"):
        raise ValueError(f"--engine must be vllm or hf, got {engine!r}")
    check_model(model, model_dir)
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out must lie in a folder that exists, got {str(out)!r}")
    if engine == "vllm":
        require_vllm()  # before a model is written
    with stages() as on_progress:
        on_progress("model", 0, 0)
        prepare(threads)
        folder = open_model(model, SMALL if quick else Sizes(), seed, model_dir)
        opened = open_engine(f"{engine}:{folder}")
        try:
            result = measure(opened, settings, on_progress)
        finally:
            opened.close()
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result, as_json, reuse_table(result), *note_lines(result), *check_lines(result))


def add_commands(to: typer.Typer) -> None:
    """Add ``bench`` to the command line of ctxwin."""
    to.add_typer(app, name="bench")
