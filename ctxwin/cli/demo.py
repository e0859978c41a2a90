"""`ctxwin demo`: a windowed agent watches a video, and shows what its window costs."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ctxwin.cli.commands import checked_mode, disable_audits, quiet

EARNING = "0,1,2,3,4,5,6,7"  # enough to reject a lane that does harm; a promotion takes hundreds of windows


def demo(
    video: Annotated[Path | None, Argument(help="A video; default: a rendered clip of the bundled world.")] = None,
    engine: Annotated[str | None, Option(metavar="vllm|hf", help="Default: vLLM where it works, else hf.")] = None,
    model: Annotated[str, Option(help="A folder or Hub name; a text model reads a log; 'tiny' is bundled.")] = "tiny",
    out: Annotated[Path, Option(help="Folder for the results.")] = Path("demo-output"),
    seed: Annotated[int, Option(help="Seed of the clip, the moves and the questions.")] = 0,
    seeds: Annotated[str, Option(metavar="N,N,...", help="Several runs, pooled; instead of --seed.")] = "",
    steps: Annotated[int | None, Option(help="Most questions per run. Default: to the end of the video.")] = None,
    window: Annotated[int, Option(metavar="FRAMES", help="Most frames in the window.")] = 6,
    frames: Annotated[int, Option(help="Frames of the rendered clip; most frames taken from a video.")] = 28,
    fps: Annotated[float, Option(help="Frames per second to take from a video.")] = 1.0,
    ask: Annotated[list[str] | None, Option(metavar="QUESTION", help="A question on your video; repeatable.")] = None,
    mode: Annotated[str, Option(metavar="auto|exact|patched|blind", help="Fidelity; auto: by the profile.")] = "auto",
    rank: Annotated[int | None, Option(help="Rank of stored patches, with --mode patched.")] = None,
    no_profile: Annotated[
        bool,
        Option("--no-profile", help="Take the profile away: lanes are tried while it runs (450 asks, eight windows)."),
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the summary as JSON and nothing else.")] = False,
) -> None:
    """Watch a video through a window: slides, look-backs, branches, another order, and what each costs.

    Writes a page that shows every step (view.html), result.json, timeline.png (and a dark one), the rendered clip and the
    recorded run (run.jsonl) into --out.
    """
    quiet()
    disable_audits()
    from rich.console import Console

    from ctxwin.demo.agent import Step
    from ctxwin.demo.earning import without_profile
    from ctxwin.demo.figures import can_draw, final_tables, step_line
    from ctxwin.demo.run import Options, prepare, run, source_of
    from ctxwin.fidelity import Fidelity
    from ctxwin.opening import open_engine
    from ctxwin.progress import stages

    if rank is not None and rank < 1:
        raise ValueError(f"--rank must be at least 1, got {rank}")
    if no_profile and mode != "auto":
        raise ValueError(f"--no-profile needs --mode auto, got --mode {mode}")
    if rank is not None and mode != "patched":
        raise ValueError(f"--rank needs --mode patched, got --mode {mode}")
    fidelity = Fidelity(checked_mode(mode), **({} if rank is None else {"rank": rank}))
    options = Options(
        video=video,
        out=out,
        seeds=_seeds(seed, seeds or (EARNING if no_profile else "")),
        steps=steps,
        window=window,
        frames=frames,
        fps=fps,
        questions=tuple(ask or ()),
        fidelity=fidelity,
    )
    name = _engine_name(model, engine)
    footage = prepare(options)
    console = Console(stderr=as_json)  # with --json the table must not mix with the result
    if video is not None and model == "tiny":
        note = "note: the bundled model knows only its own generated world; name another one with --model to get real answers"
        typer.echo(note, err=True)
    if not sys.stderr.isatty():
        typer.echo("opening the engine", err=True)
    with contextlib.ExitStack() as stack:
        if no_profile:
            name = _engine_name(str(stack.enter_context(without_profile(model))), engine)
        opened = stack.enter_context(open_engine(name))
        tell = stack.enter_context(stages(console))
        title = f"frames of {source_of(opened, options)} on {opened.spec.name}"
        tell(title, 0, 0)

        def on_step(step: Step, watched: int, frames: int) -> None:
            console.print(step_line(step, console), soft_wrap=True)
            tell(title, watched, frames)

        result = run(opened, options, footage, on_step)
    if as_json:
        typer.echo(json.dumps(result["summary"], indent=1))
        return
    console.print(final_tables(result["summary"]))
    drawn = can_draw()
    wrote = f"wrote {out / 'view.html'} (open it in a browser), result.json{' and timeline.png' if drawn else ''}"
    console.print(wrote, highlight=False, soft_wrap=True)
    if not drawn:
        typer.echo("no timeline.png: matplotlib is not installed; run pip install 'ctxwin[evals]'", err=True)


def _engine_name(model: str, engine: str | None) -> str:
    if engine not in (None, "vllm", "hf"):
        raise ValueError(f"--engine must be vllm or hf, got {engine!r}")
    if model == "tiny":
        return f"tiny:{engine}" if engine else "tiny"
    if engine is not None:
        return f"{engine}:{model}"
    from ctxwin.opening import vllm_installed

    return f"vllm:{model}" if vllm_installed() else f"hf:{model}"


def _seeds(seed: int, seeds: str) -> tuple[int, ...]:
    if not seeds:
        return (seed,)
    try:
        return tuple(int(part) for part in seeds.split(","))
    except ValueError:
        raise ValueError(f"--seeds must be integers separated by commas, got {seeds!r}") from None
