"""``ctxwin bench serve``: windows and users of a prefix cache under load."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ctxwin.cli.commands import quiet

if TYPE_CHECKING:
    from ctxwin.engines.vllm.engine import VLLMEngine


def serve(
    model: Annotated[
        str, typer.Option(help="A local model folder; without one, a random 79M Qwen2-VL is written once.")
    ] = "",
    model_dir: Annotated[
        Path | None, typer.Option(help="Where that is written. Default: ctxwin/bench in your cache folder.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where results go; a killed run continues from there.")
    ] = Path("bench-serve"),
    windows: Annotated[int, typer.Option(help="Sessions on the engine.")] = 32,
    rates: Annotated[
        str, typer.Option(help="Requests a second, rising, comma-separated; default: by measurement.")
    ] = "",
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
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the default (1 for the cpu clock).", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of model, trace, arrivals and content.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
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
    if model and model_dir is not None:
        raise ValueError("--model-dir is where a generated model goes; give it or --model, not both")
    if model and not Path(model).expanduser().is_dir():
        raise ValueError(f"--model must be a local model folder, got {model!r}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, got the file {str(out)!r}")
    from ctxwin.evals.bench import serve as bench
    from ctxwin.evals.bench.serve_plain import PlainSettings, measure_plain
    from ctxwin.evals.bench.serve_show import lines, picture, serve_table
    from ctxwin.evals.console import print_json, say, stages, terminal

    settings = bench.Settings(
        windows, frames, tokens, answer, look_backs, _rates(rates), duration, requests, slo or None,
        tuple(dict.fromkeys(p.strip() for p in policies.split(",") if p.strip())), cast("Any", fidelity), rank, seed,
        processes, threads, clock,
    )  # fmt: skip
    plain = PlainSettings(pairs=plain_pairs, windows=0) if plain_only else PlainSettings(pairs=plain_pairs)
    traffic = {name: value for name, value in asdict(plain).items() if name != "pairs"}  # more pairs can be added
    if plain_only and not plain_pairs:
        raise ValueError("--plain-only needs at least one pair of slices, got --plain-pairs 0")
    with stages() as told:
        told("model", 0, 1)
        folder = _model(model, model_dir, seed)
        progress = bench.Progress(out, bench.settings_row(settings, folder, plain=traffic))
        if not plain_only:
            bench.measure(lambda: _open(folder, processes), settings, progress, told)
        measure_plain(folder, settings, plain, progress, told)
        result = bench.result_of(progress)
    (out / bench.RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not plain_only:
        picture(result, out / bench.PICTURE)
    if as_json:
        print_json(result)
        return
    if not plain_only:
        terminal().print(serve_table(result))
    for line in lines(result):
        say(line)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--rates must be comma-separated numbers, got {text!r}") from None


def _model(model: str, where: Path | None, seed: int) -> str:
    if model:
        return str(Path(model).expanduser())
    from ctxwin.evals.bench.model import ensure_model
    from ctxwin.evals.bench.serve import SIZES

    folder, _ = ensure_model(SIZES, seed, where)
    return str(folder)


def _open(model: str, processes: str) -> VLLMEngine:
    from ctxwin.engines.torchvision_repair import repair

    repair()  # before the first import of transformers
    from ctxwin.engines.vllm.engine import VLLMEngine

    return VLLMEngine(model, processes=processes)
