"""``ctxwin eval``: run, score, report, drift, ls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.errors import CtxwinError

if TYPE_CHECKING:
    from ctxwin.engines.hf import HFEngine

app = typer.Typer(no_args_is_help=True, add_completion=False, help="How close reuse stays to a full re-prefill.")

ALL_ARMS = "reprefill,blind,patched:1,patched:2,patched:4,patched:8,first_k:4,orbit:8,transfer:8"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Model = Annotated[str, typer.Option(help="'tiny' (bundled), or a local folder or Hub name.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves the default.", min=0)]


@app.command()
def run(
    tasks: Annotated[str, typer.Argument(help="Comma-separated tasks or suites; `ctxwin eval ls` lists them.")] = "tiny",
    arms: Annotated[str, typer.Option(help="Comma-separated; `ctxwin eval ls` lists them.")] = ALL_ARMS,
    n: Annotated[int, typer.Option(help="Items a task; 0: all of a data set.", min=0)] = 300,
    seed: Annotated[int, typer.Option(help="Seed of generated items.")] = 0,
    frames: Annotated[str, typer.Option(help="Numbers of frames of generated items, as 2-6 or 2,4.")] = "2-6",
    decoded: Annotated[bool, typer.Option(help="Pass generated frames through an mp4 file first.")] = False,
    model: Model = "tiny",
    header: Annotated[str, typer.Option(help="System prompt of every context.")] = "You watch a camera.",
    layout: Annotated[str, typer.Option(help="Patch factors: joint, per_layer or shared.")] = "joint",
    layers: Annotated[str, typer.Option(help="Patched layers: all or deep.")] = "all",
    weight: Annotated[str, typer.Option(help="How truncation is measured: none, balanced or output.")] = "none",
    patch_dtype: Annotated[str, typer.Option(help="Stored factors: bfloat16, float16 or float32.")] = "bfloat16",
    timed: Annotated[int, typer.Option(help="Time the first so many items of a task, each alone.", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="The model's arithmetic: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Folder of the run; one that exists is continued.")] = None,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run arms over the items of tasks, score them against an exact re-prefill, print the table.

    A run that was interrupted is continued by the same command: what is in the folder is not computed again.
    """
    with _errors():
        from ctxwin.evals.arms import parse_arms
        from ctxwin.evals.run import Runner, Settings, plan_jobs
        from ctxwin.evals.score import scores
        from ctxwin.evals.tasks import TaskOptions, expand, open_task
        from ctxwin.evals.tasks.tiny import TinyOptions

        options = TaskOptions(TinyOptions(seed, _frames(frames), decoded))
        opened = [open_task(name, options) for name in expand(tasks)]
        if not n and any(task.endless for task in opened):
            raise ValueError("n must be >= 1 for generated tasks, got 0")
        chosen = parse_arms(arms)
        jobs = plan_jobs(chosen, opened)
        settings = Settings(header, layout, layers, weight, patch_dtype, timed=timed)  # type: ignore[arg-type]
        engine = _open(model, dtype, device, threads)
        folder = output or _default_folder(settings.config(engine) | {t.name: t.config() for t in opened})
        runner = Runner(engine, settings, folder, opened)
        total = sum(len(job.arms) * (n or len(job.task.items())) for job in jobs)
        with _progress("samples", total) as advance:
            runner.run(jobs, n or None, advance)
        result = scores(runner.samples, [arm.name for arm in chosen], n or None)
        result |= {"n": n, "output": str(folder), "vision_encodes": engine.counters.vision_encodes}
        (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        _show(result, as_json)


@app.command()
def score(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    arms: Annotated[str, typer.Option(help="Only these arms.")] = "",
    n: Annotated[int, typer.Option(help="Only the first n items of every task; 0: all.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Score the samples of a run again, without a model."""
    with _errors():
        from ctxwin.evals.arms import parse_arms
        from ctxwin.evals.samples import read_samples
        from ctxwin.evals.score import scores

        names = [arm.name for arm in parse_arms(arms)] if arms else None
        result = scores(read_samples(folder), names, n or None)
        _show(result | {"output": str(folder)}, as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, shown side by side.")],
    against: Annotated[str, typer.Option(help="The arm that others are paired with; the best patch by default.")] = "",
    output: Annotated[Path | None, typer.Option(help="Folder of the report; the first run's by default.")] = None,
) -> None:
    """Write report.html (one file that needs nothing else), report.md and figures of one run or several."""
    with _errors():
        from ctxwin.evals.report import write_report

        path = write_report(folders, output, against=against or None)
        _console().print(f"wrote {path}", soft_wrap=True)


@app.command()
def drift(
    streams: Annotated[int, typer.Option(help="Independent streams.", min=1)] = 12,
    window: Annotated[int, typer.Option(help="Frames in the window.", min=2)] = 4,
    slides: Annotated[str, typer.Option(help="After how many slides to measure.")] = "1,8,32,128",
    questions: Annotated[int, typer.Option(help="Questions a stream and point.", min=1)] = 6,
    refresh_every: Annotated[
        int, typer.Option(help="The refreshed run re-forms everything placed every so many slides.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the streams.", min=0)] = 0,
    model: Model = "tiny",
    header: Annotated[str, typer.Option(help="System prompt.")] = "You watch a camera.",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    threads: Threads = 0,
    output: Annotated[Path | None, typer.Option(help="Also write drift.json into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Slide a window along a stream: how far its answers drift from a re-prefill, with and without refresh."""
    with _errors():
        from ctxwin.evals.drift import DriftSettings, drift_table, measure

        points = tuple(sorted({int(p) for p in _numbers(slides)}))
        settings = DriftSettings(streams, window, points, questions, refresh_every, seed, header)
        engine = _open(model, dtype, device, threads)
        with _progress("streams", 2 * streams) as advance:
            result = measure(engine, settings, advance)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / "drift.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if as_json:
            _print_json(result)
        else:
            _console().print(drift_table(result))
            _console().print(result["note"])


@app.command("ls")
def list_(as_json: Json = False) -> None:
    """List the tasks and the arms."""
    from ctxwin.evals.arms import ARM_FORMS, ARMS
    from ctxwin.evals.tasks import SUITES, open_task, task_names

    opened = [open_task(name) for name in task_names()]
    tasks: dict[str, dict[str, Any]] = {
        t.name: {"about": t.about, "setting": t.setting, "control": t.control} for t in opened
    }
    arms: dict[str, dict[str, Any]] = {
        kind.form: {
            "about": (kind.__doc__ or "").splitlines()[0], "source": kind.source, "settings": list(kind.settings)
        }
        for kind in ARMS.values()
    }  # fmt: skip
    if as_json:
        _print_json(
            {"tasks": tasks, "suites": {k: list(v) for k, v in SUITES.items()}, "arms": arms, "forms": ARM_FORMS}
        )
        return
    from rich.table import Table

    listed: list[tuple[str, dict[str, dict[str, Any]]]] = [("tasks", tasks), ("arms", arms)]
    for title, entries in listed:
        made = Table(title=title, title_justify="left")
        columns = list(next(iter(entries.values())))
        for column in ("name", *columns):
            made.add_column(column)
        for name, entry in entries.items():
            made.add_row(name, *(", ".join(v) if isinstance(v, list) else str(v) for v in entry.values()))
        _console().print(made)
    _console().print("suites: " + "; ".join(f"{name} = {', '.join(of)}" for name, of in SUITES.items()))
    _console().print(ARM_FORMS)


def _open(model: str, dtype: str, device: str, threads: int) -> HFEngine:
    """The transformers engine; the reader needs its model."""
    from ctxwin.engines._torchvision import repair

    repair()  # before the first import of transformers
    import torch
    from transformers.utils import logging as hub_logging

    from ctxwin.engines.open import open_engine

    hub_logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    name = "tiny:hf" if model == "tiny" else model if model.startswith("hf:") else f"hf:{model}"
    return open_engine(name, dtype=dtype, device=device)  # type: ignore[return-value]


def _default_folder(config: dict[str, Any]) -> Path:
    """One folder a configuration, so that the same command continues its run and no other."""
    from ctxwin.identity import digest

    return Path("eval-output") / digest("run", config)[:12]


def _frames(text: str) -> tuple[int, ...]:
    low, dash, high = text.partition("-")
    if dash and low.strip().isdigit() and high.strip().isdigit():
        return tuple(range(int(low), int(high) + 1))
    return tuple(_numbers(text))


def _numbers(text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdigit() for p in parts):
        raise ValueError(f"numbers must be a comma-separated list, got {text!r}")
    return [int(p) for p in parts]


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(result)
        return
    from ctxwin.evals.report import rich_tables

    for made in rich_tables(result):
        _console().print(made)
    if result["basis_bytes"]:
        _console().print(f"shared basis: {result['basis_bytes']:,} bytes, once for the model")
    _console().print(f"samples and results: {result['output']}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def _console() -> Any:
    from rich.console import Console

    # A file or a pipe gets whole rows.
    return Console() if sys.stdout.isatty() else Console(width=150)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, so that ``--json`` stays clean; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def _errors() -> Iterator[None]:
    """Bad input and what the library raises on purpose become one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, CtxwinError, ModuleNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
