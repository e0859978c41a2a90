"""``ctxwin eval``: probe, basis, run, score, judge, report, export, ls."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.progress import progress
from ctxwin_evals import console
from ctxwin_evals.console import Config, Dtype, Engine, Json, Model, ModelArgument, OwnDtype, Threads
from ctxwin_evals.probe.cli import probe

if TYPE_CHECKING:
    from ctxwin_evals.score import Result

_ABOUT = "How close reuse stays to a full re-prefill."
_HELP = {"help_option_names": ["--help", "-h"]}
app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, context_settings=_HELP, help=_ABOUT
)
app.command("probe")(probe)

_RULES = "vlmevalkit, qwen-vl-utils, linspace, hf-qwen2-vl, lmms-eval"
_LAYOUT = "Factors of patches, as of patched:16: joint, per_layer, quantized (windows serve these) or shared."
_FRAMES = "2-6"
ALL_ARMS = "reprefill,blind,patched:1,patched:2,patched:4,patched:8,first_k:4,orbit:8,transfer:8"


@app.command()
def run(
    tasks: Annotated[str, typer.Argument(help="Tasks or suites, by commas; `ctxwin eval ls` lists them.")] = "tiny",
    arms: Annotated[str, typer.Option(help="Comma-separated; `ctxwin eval ls` lists them.")] = ALL_ARMS,
    n: Annotated[int, typer.Option(help="Items a task; 0: all of a data set.", min=0)] = 300,
    seed: Annotated[int, typer.Option(help="Seed of generated items.")] = 0,
    frames: Annotated[str, typer.Option(help="Numbers of frames of generated items, as 2-6 or 2,4.")] = _FRAMES,
    decoded: Annotated[bool, typer.Option(help="Pass generated frames through an mp4 file first.")] = False,
    data: Annotated[str, typer.Option(help="Benchmark data: a folder in the official layout, or hub:OWNER/NAME.")] = "",
    split: Annotated[str, typer.Option(help="Split of a benchmark; its first by default.")] = "",
    video_frames: Annotated[int, typer.Option(help="Frames sampled from a video.", min=1)] = 8,
    frame_rule: Annotated[str, typer.Option(help=f"Which frames: {_RULES}.")] = "vlmevalkit",
    max_pixels: Annotated[int, typer.Option(help="Scale pictures down to this area; 0 leaves them.", min=0)] = 0,
    as_video: Annotated[bool, typer.Option(help="Frames as one native video instead of pictures.")] = False,
    subtitles: Annotated[bool, typer.Option(help="Video-MME with subtitles of the sampled frames.")] = False,
    times: Annotated[bool, typer.Option(help="Put the time before each frame shown as a picture; unofficial.")] = False,
    skip_missing: Annotated[bool, typer.Option(help="Leave out items whose media are missing.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Longest answer; 0 takes the benchmark's.", min=0)] = 0,
    model: Model = "tiny",
    system_prompt: Annotated[str, typer.Option(help="System prompt of items without one.")] = "You watch a camera.",
    layout: Annotated[str, typer.Option(help=_LAYOUT)] = "joint",
    layers: Annotated[str, typer.Option(help="Patched layers: all or deep.")] = "all",
    engine: Engine = "hf",
    engine_options: console.EngineOptions = "{}",
    dtype: Dtype = "float32",
    device: console.Device = "cpu",
    output: Annotated[Path | None, typer.Option(help="Folder of the run; one that exists is continued.")] = None,
    config: Config = None,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Run arms over the items of tasks, score them against an exact re-prefill, print the table.

    Arms of slides and recalls add generated tasks of their own to generated tasks.

    An interrupted run is continued by the same command: samples that its folder holds are not computed again.
    """
    from ctxwin.files import atomic_write, check_writable
    from ctxwin.hashing import digest
    from ctxwin_evals.arms import parse_arms
    from ctxwin_evals.benchmarks import BENCHMARKS, DataOptions, DataTask
    from ctxwin_evals.results import write_lm_eval
    from ctxwin_evals.run import Runner, Settings, check_served, companions, plan_jobs
    from ctxwin_evals.score import scores
    from ctxwin_evals.tasks import check_data, expand, open_task
    from ctxwin_evals.tasks.tiny import TinyOptions

    area, longest = max_pixels or None, max_tokens or None
    data_options = DataOptions(
        data or None, split, video_frames, frame_rule, area, as_video, subtitles, times, skip_missing, longest
    )
    names = expand(tasks)
    if (frames != _FRAMES or decoded) and not any(name.rpartition(":")[2].startswith("tiny/") for name in names):
        raise ValueError(f"--frames and --decoded must be for tiny tasks, got {tasks}; of a video take --video-frames")
    if seed and all(name in BENCHMARKS for name in names):
        raise ValueError(f"--seed must be for generated tasks or protocols, got {tasks}, whose items are the data's")
    tiny = TinyOptions(seed, _frames(frames), decoded)
    check_data(data_options, tasks)
    opened = [open_task(name, tiny, data_options) for name in names]
    if not n and any(task.endless for task in opened):
        raise ValueError("n must be >= 1 for generated tasks, got 0")
    chosen = parse_arms(arms)
    if console.is_on_vllm(model, engine):
        chosen = [arm for arm in chosen if arms != ALL_ARMS or not arm.inside]
        check_served(chosen)
    opened += [open_task(name, tiny) for name in companions(chosen, opened)]
    jobs = plan_jobs(chosen, opened)
    # Reads annotations, so that missing data shows before a model is opened.
    total = sum(len(job.arms) * (n if job.task.endless else len(job.task.items(n or None))) for job in jobs)
    settings = Settings(system_prompt, layout, layers)  # type: ignore[arg-type]
    check_writable(output or Path("eval-output"))  # before a model is opened
    with console.open_model_on(engine, engine_options, model, dtype, device, threads) as served:
        # One folder a configuration, so that the same command continues its run and no other.
        described = settings.config(served) | {t.name: t.config() for t in opened}
        folder = output or Path("eval-output") / digest("run", described)[:12]
        runner = Runner(served, settings, folder, opened)
        with progress("samples", total) as advance:
            ran = runner.run(jobs, n or None, advance)
        encodes = served.counters.vision_encodes
    result = scores(runner.samples.only(ran), [arm.name for arm in chosen])
    tasks_of_data = {t.name: of for t in opened if isinstance(of := getattr(t, "base", t), DataTask)}
    left_out = {n: {"unreadable": len(t.odd), "missing": len(t.skipped)} for n, t in tasks_of_data.items()}
    result |= {"n": n, "left_out": left_out, "output": str(folder), "vision_encodes": encodes}
    atomic_write(folder / "results.json", f"{json.dumps(plainly(result), indent=1)}\n".encode())
    write_lm_eval(runner.samples, folder / "lm-eval")
    _show(result, as_json)


@app.command()
def score(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    arms: Annotated[str, typer.Option(help="Only these arms.")] = "",
    n: Annotated[int, typer.Option(help="Only the first n items of every task; 0: all.", min=0)] = 0,
    against: Annotated[str, typer.Option(help="The arm that others are paired with; the best patch by default.")] = "",
    as_json: Json = False,
) -> None:
    """Score the samples of a run again, without a model; its lm-eval files are written anew."""
    from ctxwin_evals.arms import parse_arms
    from ctxwin_evals.results import write_lm_eval
    from ctxwin_evals.samples import read_samples
    from ctxwin_evals.score import scores

    names = [arm.name for arm in parse_arms(arms)] if arms else None
    samples = read_samples(folder)
    result = scores(samples, names, n or None, against=against or None)
    result["output"] = str(folder)
    _show(result, as_json)
    try:
        write_lm_eval(samples, folder / "lm-eval", names, n or None)
    except OSError as error:  # a folder that is only read
        typer.echo(f"lm-eval's files are left as they are: {error}", err=True)


@app.command()
def judge(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    model: Annotated[str, typer.Option(help="The judge, as its server calls it.")],
    url: Annotated[str, typer.Option(help="Its OpenAI-compatible address, as http://host:8000/v1.")],
    by: Annotated[str, typer.Option(help="rating, dimensions (MMDU's) or wins (over re-prefill's answer).")] = "rating",
    as_json: Json = False,
) -> None:
    """Have a model judge a run's answers: against texts as references (mmdu, sparkles), or against re-prefill's answers.

    The key is OPENAI_API_KEY. The judge does not see the arm. Its replies are kept, so that the same command goes on.
    """
    import os

    from ctxwin.extras import optional_imports
    from ctxwin_evals.judge import RULES, Judge, judged, to_judge
    from ctxwin_evals.samples import read_samples

    with optional_imports():
        from openai import OpenAI, OpenAIError

    samples = read_samples(folder)
    with OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY") as client:
        rater, total = Judge(client, model, folder), len(to_judge(samples, by))
        try:
            with progress("answers", total) as advance:
                result = judged(samples, rater, by, advance)
        except OpenAIError as error:
            raise ValueError(f"the judge must answer at {url}, got {error}; run again: answers are kept") from error
    main, rows = RULES[by][1], result["rows"]
    shown = main, "task", "arm", "n", "unrated", "ci95", "equal"
    others = [name for name in max(rows, key=len) if name not in shown]
    columns = ["task", "arm", "n", main, "95 %", *others, "unrated", "as re-prefill"]
    table = console.new_table(f"judged by {model}", "|".join(columns), left=(0, 1))
    for row in rows:
        means = ["-" if row.get(name) is None else f"{row[name]:.2f}" for name in (main, *others)]
        span = "-" if row["ci95"] is None else "[{:.2f}, {:.2f}]".format(*row["ci95"])
        counts = str(row["unrated"]), f"{row['equal']:.1%}"
        table.add_row(row["task"], row["arm"], str(row["n"]), means[0], span, *means[1:], *counts)
    console.show(result, as_json, table)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, shown side by side.")],
    against: Annotated[str, typer.Option(help="The arm that others are paired with; the best patch by default.")] = "",
    output: Annotated[Path | None, typer.Option(help="Folder of the report; the first run's by default.")] = None,
) -> None:
    """Write report.html (one file that needs nothing else), report.md and figures of one run or several."""
    from ctxwin_evals.report import write_report

    console.say(f"wrote {write_report(folders, output, against=against or None)}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    arm: Annotated[str, typer.Option(help="Whose answers; `reprefill` are the model's own.")] = "reprefill",
    output: Annotated[Path | None, typer.Option(help="Folder to write into; the run's by default.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run's answers as the data sets' own scoring scripts read them: a file for each task of a data set."""
    from ctxwin_evals.results import export_run

    files = export_run(folder, arm, output or folder)
    texts = {task: str(path) for task, path in files.items()}
    console.show({"files": texts}, as_json, *(f"{task}: {path}" for task, path in texts.items()))


@app.command("ls")
def list_(as_json: Json = False) -> None:
    """List the tasks and the arms."""
    from ctxwin_evals.arms import ARM_FORMS, ARMS
    from ctxwin_evals.tasks import SUITES, open_task, task_names
    from ctxwin_evals.tasks.protocols import PROTOCOLS

    opened = [open_task(name) for name in task_names()]
    tasks = {t.name: {"about": t.about, "setting": t.setting, "control": t.control} for t in opened}
    arms: dict[str, dict[str, Any]] = {}
    for kind in ARMS.values():
        about = (kind.__doc__ or "").splitlines()[0]
        arms[kind.form] = {"about": about, "source": kind.source, "settings": list(kind.settings)}
    if as_json:
        listed = {"tasks": tasks, "suites": {k: list(v) for k, v in SUITES.items()}, "protocols": list(PROTOCOLS)}
        console.print_json({**listed, "arms": arms, "forms": ARM_FORMS})
        return
    for title, entries in (("tasks", tasks), ("arms", arms)):
        columns = ["name", *next(iter(entries.values()))]
        table = console.new_table(title, "|".join(columns), left=range(len(columns)))
        for name, entry in entries.items():
            table.add_row(name, *(", ".join(v) if isinstance(v, list) else str(v) for v in entry.values()))
        console.terminal().print(table)
    console.terminal().print("suites: " + "; ".join(f"{name} = {', '.join(of)}" for name, of in SUITES.items()))
    console.terminal().print(f"protocols on any task's items, as recall@0.5:video-mme: {', '.join(PROTOCOLS)}")
    console.terminal().print(ARM_FORMS)


def plainly(result: Result) -> dict[str, Any]:
    """A result as it is printed: generated tasks without their suite's name, ``multi_hop`` for ``tiny/multi_hop``.

    An arm that names its turnover (``stale:8@0.5``) runs on one recall alone, which is then just ``recall``.
    """

    def short(task: str, arm: str = "") -> str:
        name = task.removeprefix("tiny/")
        return "recall" if name.startswith("recall@") and re.fullmatch(r"(stale|update|recall):.+@.+", arm) else name

    shortened: dict[str, Any] = {
        key: {short(task): figures for task, figures in result[key].items()} for key in ("tasks", "paired", "matched")
    }
    shortened["arms"] = {
        arm: {short(task, arm): figures for task, figures in cells.items()} for arm, cells in result["arms"].items()
    }
    return {**result, **shortened}


@app.command()
def basis(
    model: ModelArgument = "tiny",
    images: Annotated[Path | None, typer.Option(help="Folder of pictures and videos to fit on.")] = None,
    contexts: Annotated[int, typer.Option(help="Sequences of chunks to fit on.", min=1)] = 120,
    rank: Annotated[int, typer.Option(help="Directions to keep; patches may use fewer.", min=1)] = 64,
    layers: Annotated[str, typer.Option(help="Layers that patches cover: deep or all.")] = "deep",
    seed: Annotated[int, typer.Option(help="Seed of the contexts.", min=0)] = 0,
    max_pixels: console.MaxPixels = 0,
    output: Annotated[Path | None, typer.Option(help="File to write; by default the one that windows find.")] = None,
    dtype: OwnDtype = "float32",
    device: console.Device = "cpu",
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Fit the directions that all patches of a model share, for Fidelity("patched", advanced={"layout": "shared"})."""
    from ctxwin.files import check_writable
    from ctxwin.profiles import BASIS_NAME, find_basis, write_basis
    from ctxwin_evals.shared_basis import contexts_for, fit

    if layers not in ("all", "deep"):
        raise ValueError(f"layers must be all or deep, got {layers!r}")
    if output is not None:
        if output.exists():
            raise ValueError(f"output must be a new file, got {str(output)!r}, which exists; choose another")
        check_writable(output.parent)  # before minutes of fitting
    with console.open_model(model, dtype, device, threads) as engine, progress("contexts", contexts) as advance:
        name = engine.spec.model
        items = contexts_for(engine, contexts, seed, images, max_pixels or None)
        shared_basis = fit(engine, items, rank, layers, advance)  # type: ignore[arg-type]
        share = shared_basis.rank * shared_basis.basis.right.element_size() / engine.spec.kv.span_bytes(1)
    path = write_basis(shared_basis, name, output)
    own_basis, fitted = find_basis(name), shared_basis.basis
    count, layers_kept = fitted.meta["deficits"], list(fitted.layers)
    in_use = own_basis is not None and own_basis.id == shared_basis.id
    about = {"id": shared_basis.id, "rank": shared_basis.rank, "layers": layers_kept, "bytes": fitted.nbytes}
    about |= {"deficits": count, "share": share, "date": shared_basis.date, "file": str(path), "followed": in_use}
    console.show(
        about,
        as_json,
        f"{shared_basis.rank} directions over layers {layers_kept}, {fitted.nbytes:,} bytes once for the model",
        f"fitted on {count} chunks of {contexts} contexts; a patch of all directions takes {share:.1%} of its chunk's KV "
        "in bf16",
        str(path) + ("" if in_use else f": windows find it once it lies beside the weights as {BASIS_NAME}"),
    )


def _frames(text: str) -> tuple[int, ...]:
    low, dash, high = text.partition("-")
    if dash and low.strip().isdigit() and high.strip().isdigit():
        return tuple(range(int(low), int(high) + 1))
    return tuple(console.numbers(text))


def _show(result: Result, as_json: bool) -> None:
    if as_json:
        console.print_json(plainly(result))
        return
    from ctxwin_evals.report import rich_tables

    for table in rich_tables(result):
        console.terminal().print(table, crop=False)  # a narrow terminal breaks lines; no figure is lost
    if result["basis_bytes"]:
        console.terminal().print(f"shared basis: {result['basis_bytes']:,} bytes, once for the model")
    console.terminal().print(f"samples and results: {result['output']}")
