"""``python -m evals.studies.serve``: many windows on one vLLM under a rising request rate."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ctxwin.cli.bench import Model, ModelDir
from ctxwin.cli.commands import quiet
from ctxwin.evals.console import Config, Json, Threads, errors, preset, show, stages

if TYPE_CHECKING:
    from ctxwin.engines.vllm.engine import VLLMEngine


def main(
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
        str, typer.Option(help="Those rates, in what the append policy serves when everything is asked at once.")
    ] = "0.3,0.5,0.7,0.85,1.0,1.2,1.5,1.9,2.4,3.0",
    duration: Annotated[float, typer.Option(help="Seconds for which requests arrive at each rate, at least.")] = 15.0,
    requests: Annotated[int, typer.Option(help="Requests at each rate, at least; low rates take longer.")] = 60,
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
    plain_only: Annotated[bool, typer.Option("--plain-only", help="Plain traffic alone, without any windows.")] = False,
    processes: Annotated[str, typer.Option(metavar="single|multi|async", help="Where vLLM runs.")] = "single",
    clock: Annotated[
        str, typer.Option(metavar="wall|cpu", help="cpu: processor time of one thread, for a busy machine.")
    ] = "wall",
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of model, trace, arrivals and content.")] = 0,
    quick: Annotated[
        bool,
        preset(
            "--quick",
            "At most three minutes on 2 cores: 6 sessions of 4 frames, three rates, no plain traffic.",
            windows=6,
            frames=4,
            ladder="0.5,1.0,2.0",
            duration=3.0,
            requests=12,
            plain_pairs=0,
        ),
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Many windows on one vLLM under a rising request rate: ctxwin, naive, trim and append on one look-back trace.

    Sessions watch a video: frames arrive, the oldest leave, some turns look back. Latency counts from when a request was due.
    Shown are goodput, time to the first token and between tokens, the highest rates at equal p95, and what plain traffic
    notices of the connector. FOLDER gets state.json, result.json and ttft.png; give the same command again to continue a
    run that was stopped. The cpu clock needs one thread, which it chooses by itself.
    """
    quiet()
    if clock == "cpu":
        threads = threads or 1
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch reads it, and for child processes
    with errors():
        from ctxwin.engines.open import require_vllm
        from ctxwin.evals.bench.model import SMALL, check_model, open_model

        from . import sweep
        from .plain import PlainSettings, measure_plain
        from .show import lines, picture, serve_table

        check_model(model, model_dir)
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out must be a folder, got the file {str(out)!r}")
        settings = sweep.Settings(
            windows=windows,
            frames=frames,
            tokens=tokens,
            answer=answer,
            look_backs=look_backs,
            rates=_numbers("rates", rates),
            ladder=_numbers("ladder", ladder),
            duration=duration,
            requests=requests,
            slo_s=slo or None,
            policies=tuple(dict.fromkeys(part.strip() for part in policies.split(",") if part.strip())),
            mode=cast("Any", fidelity),
            rank=rank,
            seed=seed,
            processes=processes,
            threads=threads,
            clock=clock,
        )
        plain = PlainSettings(pairs=plain_pairs, windows=0) if plain_only else PlainSettings(pairs=plain_pairs)
        traffic = {name: value for name, value in asdict(plain).items() if name != "pairs"}  # more pairs can be added
        if plain_only and not plain_pairs:
            raise ValueError("--plain-only needs at least one pair of slices, got --plain-pairs 0")
        require_vllm()  # before a model is written
        with stages() as on_progress:
            on_progress("model", 0, 0)
            folder = open_model(model, SMALL, seed, model_dir)
            progress = sweep.Progress(out, sweep.settings_row(settings, folder, plain=traffic))
            if not plain_only:
                sweep.measure(lambda: _open(folder, processes), settings, progress, on_progress)
            measure_plain(folder, settings, plain, progress, on_progress)
            result = sweep.result_of(progress)
        (out / sweep.RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if not plain_only:
            picture(result, out / sweep.PICTURE)
        show(result, as_json, *([] if plain_only else [serve_table(result)]), *lines(result))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--{option} must be comma-separated numbers, got {text!r}") from None


def _open(model: str, processes: str) -> VLLMEngine:
    from ctxwin.engines.torchvision_repair import repair

    repair()
    from ctxwin.engines.vllm.engine import VLLMEngine

    return VLLMEngine(model, processes=processes)


if __name__ == "__main__":
    typer.run(main)
