"""``ctxwin bench``: what edits of a window cost in time, measured here."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ctxwin.cli.commands import quiet
from ctxwin.evals.config import Config, preset

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.engines.vllm.engine import VLLMEngine
    from ctxwin.evals.bench.model import Sizes

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure what a window costs in time, on this machine."
)

Model = Annotated[
    str,
    typer.Option(
        help="A local model folder; without one, a random Qwen2-VL is written once (reuse: 0.5B, serve: 79M)."
    ),
]
ModelDir = Annotated[
    Path | None, typer.Option(help="Where that is written. Default: ctxwin/bench in your cache folder.")
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves the default (1 for the cpu clock of serve).", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.callback()
def bench() -> None:
    """Measure what a window costs in time, on this machine."""


@app.command("reuse")
def reuse(
    engine: Annotated[str, typer.Option(metavar="vllm|hf", help="Engine to measure.")] = "vllm",
    model: Model = "",
    model_dir: ModelDir = None,
    ops: Annotated[str, typer.Option(help="Edits, comma-separated.")] = "slide,recall,reorder,toggle",
    tokens: Annotated[str, typer.Option(help="Reused tokens, comma-separated.")] = "256,512,1024,2048",
    rank: Annotated[int, typer.Option(help="Rank of the stored patches.")] = 32,
    runs: Annotated[int, typer.Option(help="Paired runs of each figure.")] = 5,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of the model's weights and of the content.")] = 0,
    quick: Annotated[
        bool,
        preset("--quick", "At most three minutes on 2 cores: 79M parameters, 256 and 512 tokens, two runs.",
               tokens="256,512", runs=2, rank=16),
    ] = False,
    config: Config = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to this file.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time to the first token behind an edit: a window, the engine's own prefix cache, and the floor.

    The floor is the same prompt as a full hit of the prefix cache. Edits: the oldest chunk leaves (slide), an evicted one comes
    back with a stored patch (recall), one of three predecessors moves to the front (reorder), a chunk's clean view (toggle).
    """
    quiet()
    from ctxwin.evals.bench.model import Sizes
    from ctxwin.evals.bench.reuse import Settings, measure
    from ctxwin.evals.bench.serve.sweep import SIZES
    from ctxwin.evals.bench.show import check_lines, note_lines, reuse_table
    from ctxwin.evals.console import numbers, show, stages

    settings = Settings(_names(ops), tuple(dict.fromkeys(numbers(tokens))), rank, runs, seed)
    if engine not in ("vllm", "hf"):
        raise ValueError(f"--engine must be vllm or hf, got {engine!r}")
    _check_model(model, model_dir)
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out must lie in a folder that exists, got {str(out)!r}")
    if engine == "vllm":
        _need_vllm()
    with stages() as on_progress:
        on_progress("model", 0, 0)
        opened = _open(engine, _model(model, SIZES if quick else Sizes(), seed, model_dir), threads)
        try:
            result = measure(opened, settings, on_progress)
        finally:
            opened.close()
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result, as_json, reuse_table(result), *note_lines(result), *check_lines(result))


@app.command("serve")
def serve(
    model: Model = "",
    model_dir: ModelDir = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where results go; a stopped run continues from there.")
    ] = Path("bench-serve"),
    windows: Annotated[int, typer.Option(help="Sessions on the engine.")] = 32,
    rates: Annotated[
        str, typer.Option(help="Requests a second, rising, comma-separated; default: by measurement.")
    ] = "",
    ladder: Annotated[
        str, typer.Option(help="Those rates, in what the append policy serves when all is asked at once.")
    ] = "0.3,0.5,0.7,0.85,1.0,1.2,1.5,1.9,2.4,3.0",
    duration: Annotated[float, typer.Option(help="Least seconds for which requests arrive at each rate.")] = 15.0,
    requests: Annotated[int, typer.Option(help="At least so many at each rate; low rates take longer.")] = 60,
    slo: Annotated[
        float, typer.Option(help="Bound on the time to the first token, in seconds; 0: by measurement.")
    ] = 0.0,
    policies: Annotated[str, typer.Option(help="Who serves, comma-separated.")] = "ctxwin,naive,trim,append",
    look_backs: Annotated[float, typer.Option(help="Share of turns that look back at a frame that left.")] = 0.4,
    frames: Annotated[int, typer.Option(help="Frames in view.")] = 6,
    tokens: Annotated[int, typer.Option(help="Tokens of a frame.")] = 128,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 8,
    fidelity: Annotated[str, typer.Option(metavar="auto|exact|patched|blind", help="Of the windows.")] = "patched",
    rank: Annotated[int, typer.Option(help="Rank of patches.")] = 32,
    plain_pairs: Annotated[
        int, typer.Option(help="Paired slices of plain traffic with and without the connector; 0: none.")
    ] = 6,
    plain_only: Annotated[
        bool, typer.Option("--plain-only", help="Plain traffic alone, with no windows beside it.")
    ] = False,
    processes: Annotated[str, typer.Option(metavar="single|multi|async", help="Where vLLM runs.")] = "single",
    clock: Annotated[
        str, typer.Option(metavar="wall|cpu", help="cpu: processor time of one thread, for a machine that is busy.")
    ] = "wall",
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of model, trace, arrivals and content.")] = 0,
    quick: Annotated[
        bool,
        preset("--quick", "At most three minutes on 2 cores: 6 sessions of 4 frames, three rates, no plain traffic.",
               windows=6, frames=4, ladder="0.5,1.0,2.0", duration=3.0, requests=12, plain_pairs=0),
    ] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Many windows on one vLLM under a rising request rate: ctxwin, naive, trim and append on one look-back trace.

    Sessions watch a video: frames arrive, the oldest leave, some turns look back. Latency counts from when a request was due.
    Shown are goodput, time to the first token and between tokens, the highest rates at equal p95, and what plain traffic
    notices of the connector. FOLDER gets state.json, result.json and ttft.png.
    """
    quiet()
    if clock == "cpu":
        threads = threads or 1
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch reads it; for other processes, too
    _check_model(model, model_dir)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, got the file {str(out)!r}")
    from ctxwin.evals.bench.serve import sweep
    from ctxwin.evals.bench.serve.plain import PlainSettings, measure_plain
    from ctxwin.evals.bench.serve.show import lines, picture, serve_table
    from ctxwin.evals.console import show, stages

    settings = sweep.Settings(
        windows, frames, tokens, answer, look_backs, _numbers("rates", rates), _numbers("ladder", ladder), duration, requests,
        slo or None, _names(policies), cast("Any", fidelity), rank, seed, processes, threads, clock,
    )  # fmt: skip
    plain = PlainSettings(pairs=plain_pairs, windows=0) if plain_only else PlainSettings(pairs=plain_pairs)
    traffic = {name: value for name, value in asdict(plain).items() if name != "pairs"}  # more pairs can be added
    if plain_only and not plain_pairs:
        raise ValueError("--plain-only needs at least one pair of slices, got --plain-pairs 0")
    _need_vllm()
    with stages() as on_progress:
        on_progress("model", 0, 0)
        folder = _model(model, sweep.SIZES, seed, model_dir)
        progress = sweep.Progress(out, sweep.settings_row(settings, folder, plain=traffic))
        if not plain_only:
            sweep.measure(lambda: _open_vllm(folder, processes), settings, progress, on_progress)
        measure_plain(folder, settings, plain, progress, on_progress)
        result = sweep.result_of(progress)
    (out / sweep.RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not plain_only:
        picture(result, out / sweep.PICTURE)
    show(result, as_json, *([] if plain_only else [serve_table(result)]), *lines(result))


def _names(text: str) -> tuple[str, ...]:
    """Names between commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--{option} must be comma-separated numbers, got {text!r}") from None


def _check_model(model: str, where: Path | None) -> None:
    if model and where is not None:
        raise ValueError("--model-dir is where a generated model goes; give it or --model, not both")
    if model and not Path(model).expanduser().is_dir():
        raise ValueError(f"--model must be a local model folder, got {model!r}")


def _need_vllm() -> None:
    from ctxwin.engines.open import require_vllm

    require_vllm()  # before a model is written


def _model(model: str, sizes: Sizes, seed: int, where: Path | None) -> str:
    """The folder of the model to measure; a generated one is written first where it is missing."""
    if model:
        return str(Path(model).expanduser())
    from ctxwin.evals.bench.model import ensure_model, model_folder

    typer.echo(f"model: random Qwen2-VL in {model_folder(sizes, seed, where)} (written once)", err=True)
    return str(ensure_model(sizes, seed, where)[0])


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


def _open_vllm(model: str, processes: str) -> VLLMEngine:
    from ctxwin.engines.torchvision_repair import repair

    repair()
    from ctxwin.engines.vllm.engine import VLLMEngine

    return VLLMEngine(model, processes=processes)
