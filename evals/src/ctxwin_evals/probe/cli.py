"""``ctxwin eval probe MODEL``: does this model lose anything when KV is reused out of context, and what setting is safe?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.progress import stages
from ctxwin_evals import console
from ctxwin_evals.console import Config, Device, Engine, EngineOptions, Json, MaxPixels, ModelArgument, say
from ctxwin_evals.probe import FOLDER

if TYPE_CHECKING:
    from ctxwin_evals.probe.contexts import Source

REPORT, RESULT = "probe.html", "probe.json"
_SMALL = 50_000_000
"""Parameters of a decoder whose threads would only wait for each other."""
_OUTPUT = "Folder for report, result and profile; by default the report goes to probe-output and the profile beside the weights."
_THREADS = "CPU threads; 0: one for a small model, else torch's default."
_DTYPE = "The model's arithmetic; '' is the checkpoint's own. By default float32 on hf, the checkpoint's own on vllm."
_BUDGET = "Largest share of values of answers about texts that reuse may lose."
_EXCESS = "Largest mean loss of text, in nats a token beyond what exact answers differ by."
_QUESTIONS = "Your own questions, one per line; with --images or --texts."


def probe(
    model: ModelArgument = "tiny",
    images: Annotated[Path | None, typer.Option(help="Folder of pictures and videos to probe with.")] = None,
    texts: Annotated[Path | None, typer.Option(help="Folder of text files to probe with.")] = None,
    questions: Annotated[Path | None, typer.Option(help=_QUESTIONS)] = None,
    output: Annotated[Path | None, typer.Option(help=_OUTPUT)] = None,
    minutes: Annotated[float, typer.Option(help="Time after which stages are cut short.")] = 4.0,
    flips: Annotated[float, typer.Option(help="Largest share of answers about pictures that reuse may change.")] = 0.05,
    budget: Annotated[float, typer.Option(help=_BUDGET)] = 0.01,
    excess_budget: Annotated[float, typer.Option(help=_EXCESS)] = 0.01,
    max_tokens: Annotated[int, typer.Option(help="Longest answer about your own material.", min=1)] = 8,
    max_pixels: MaxPixels = 0,
    profile: Annotated[bool, typer.Option(help="Write the profile that Fidelity('auto') follows.")] = True,
    engine: Engine = "hf",
    engine_options: EngineOptions = "{}",
    dtype: Annotated[str | None, typer.Option(help=_DTYPE)] = None,
    device: Device = "cpu",
    threads: Annotated[int, typer.Option(help=_THREADS, min=0)] = 0,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Measure whether blind KV reuse changes this model's answers, and the cheapest patch that is safe.

    Writes probe.html and probe.json, and a profile that `Fidelity("auto")` follows from then on: patched or blind where
    that was shown to be safe, exact everywhere else. The same command continues an interrupted probe of texts.
    """
    from ctxwin.audit import Options
    from ctxwin.files import check_writable
    from ctxwin_evals.probe.folder import Images
    from ctxwin_evals.probe.generated import Scenes, World
    from ctxwin_evals.probe.probe import Probe
    from ctxwin_evals.probe.texts import probe_texts
    from ctxwin_evals.probe.verdict import Limits

    if not minutes > 0:
        raise ValueError(f"minutes must be > 0, got {minutes}")
    limits, options = Limits(flips=flips), Options(budget, excess_budget)
    own_questions = _check_questions(images, texts, questions)
    check_writable(output or Path(FOLDER))  # before minutes of measuring
    with console.open_model_on(engine, engine_options, model, dtype, device, threads) as opened:
        text_model: Any = getattr(opened, "text_model", None)
        if not threads and text_model is not None and sum(p.numel() for p in text_model.parameters()) < _SMALL:
            import torch

            torch.set_num_threads(1)
        if images is not None and not opened.spec.vision:
            raise ValueError(f"{opened.spec.model!r} reads text only; give it --texts DIR or nothing, not --images")
        sources: list[Source] = [World(), Scenes()]
        if images is not None:
            sources = [Images(images, own_questions, max_tokens, max_pixels or None)]
        with stages() as advance:
            if texts is not None or not opened.spec.vision:
                limited = max_tokens, options, 60 * minutes, advance
                result = probe_texts(opened, texts, own_questions, *limited, output)
            else:
                result = Probe(opened, sources, limits, seconds=60 * minutes, progress=advance).run()
    result["files"] = write(result, opened.spec.model, output, profile)
    if as_json:
        console.print_json(result)
    else:
        show(result, opened.spec.model)


def write(result: dict[str, Any], model: str, output: Path | None, profile: bool) -> dict[str, str]:
    """Write report, result and profile; return where they are."""
    from ctxwin.files import atomic_write
    from ctxwin.profiles import write_profile
    from ctxwin_evals.probe.probe import as_profile
    from ctxwin_evals.probe.report import html

    folder = output or Path(FOLDER)
    # Measurements first, so that they are not lost where a profile cannot be written.
    atomic_write(folder / RESULT, f"{json.dumps(result, indent=1)}\n".encode())
    atomic_write(folder / REPORT, html(result).encode())
    files = {"report": str(folder / REPORT), "result": str(folder / RESULT)}
    if profile:
        files["profile"] = str(write_profile(as_profile(result, model), model, output))
    return files


def show(result: dict[str, Any], model: str) -> None:
    """Print the verdict, what it rests on, and where the rest is (the result's ``files``)."""
    from ctxwin.profiles import find_profile

    verdict, files, limits = result["verdict"], result["files"], result["verdict"]["limits"]
    safe = "at most {flips:.0%} other answers, by the end of a 95 % interval"
    if "budget" in limits:
        safe = "at most {budget:.1%} of the values and {excess_budget:g} nats a token of text lost, with {level:.0%} confidence"
    say(verdict["sentence"], bold=True)
    for reason in verdict["reasons"]:
        say(f"  {reason}")
    say(f"measured on {result['source']['about']} in {result['seconds']:.0f} s; safe means {safe.format(**limits)}")
    fidelity = ", ".join(f"{name}={value}" for name, value in result["fidelity"].items())
    profile = find_profile(model)
    if "profile" not in files:
        say(f"safe: {fidelity} (no profile was written)")
    elif profile is not None and profile.date == result["date"]:
        say(f"Fidelity('auto') now means {fidelity}: {files['profile']}")
    else:
        say(f"safe: {fidelity}; Fidelity('auto') follows it once this lies beside the weights: {files['profile']}")
    say(f"report: {files['report']}")


def _check_questions(images: Path | None, texts: Path | None, questions: Path | None) -> list[str]:
    """The user's questions; ValueError for a bad argument, before a model is loaded."""
    from ctxwin_evals.probe.folder import PICTURES, TEXTS, VIDEOS, files_of, read_questions

    if images is not None and texts is not None:
        raise ValueError("a probe takes --images or --texts, got both; run it once for each")
    if images is not None:
        files_of(images, (*PICTURES, *VIDEOS), "pictures or videos")
    elif texts is not None:
        files_of(texts, TEXTS, "text files")
    elif questions is not None:
        raise ValueError("questions need --images or --texts: generated contexts have their own")
    return [] if questions is None else read_questions(questions)
