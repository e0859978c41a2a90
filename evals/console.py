"""What the eval commands share: opening a model, numbers in options, what is printed, progress, one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.errors import CtxwinError

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from ctxwin.engines.hf.engine import HFEngine

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Model = Annotated[str, typer.Option(help="'tiny' (bundled), or a local folder or Hub name.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves the default.", min=0)]


def open_model(model: str, dtype: str, device: str, threads: int) -> HFEngine:
    """The transformers engine; the reader needs its model.

    Args:
        model: ``tiny``, a local folder or a Hub name; ``hf:`` in front changes nothing.
        dtype: of the arithmetic; '' takes the checkpoint's own.
        device: torch device.
        threads: CPU threads; 0 leaves torch's default.

    Raises ValueError for another engine's name or a device that is not there.
    """
    from ctxwin.engines.torchvision_repair import repair

    repair()  # before the first import of transformers
    import torch
    from transformers.utils import logging as hub_logging

    from ctxwin.engines.open import open_engine

    hub_logging.disable_progress_bar()
    if model.startswith(("vllm:", "tiny:vllm")):
        raise ValueError(f"evals read inside the model, which transformers allows and vLLM does not; got {model!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        raise ValueError(f"device must be one that torch has here, got {device!r}: {error}") from error
    if threads:
        torch.set_num_threads(threads)
    name = "tiny:hf" if model == "tiny" else model if model.startswith(("hf:", "tiny:")) else f"hf:{model}"
    return open_engine(name, dtype=dtype or None, device=device)  # type: ignore[return-value]


def numbers(text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdigit() for p in parts):
        raise ValueError(f"numbers must be a comma-separated list, got {text!r}")
    return [int(p) for p in parts]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def terminal() -> Any:
    """Where results are printed; nothing in them is markup, since names and paths may hold what looks like it."""
    from rich.console import Console

    # A file or a pipe gets whole rows.
    return Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=150)


def say(text: str, *, bold: bool = False) -> None:
    """A line as it is: no path in it is broken in two."""
    terminal().print(text, style="bold" if bold else None, highlight=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, so that ``--json`` stays clean; silent where that is no terminal."""
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with _bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """As `progress`, of one stage at a time: called with its name, what is done of it and how much there is."""
    from rich.progress import TimeElapsedColumn

    with _bar(TimeElapsedColumn()) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


def _bar(*columns: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    named = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*named, console=console, disable=not console.is_terminal, transient=True)


EXTRA = ("cv2", "matplotlib", "pyarrow", "rouge_score", "scipy", "srt")
"""Modules of the ``evals`` extra."""


@contextmanager
def errors() -> Iterator[None]:
    """Bad input and what the library raises on purpose become one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, CtxwinError, ModuleNotFoundError) as error:
        told = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in EXTRA:
            told = f"the evals need {error.name}, which is not installed; run pip install 'ctxwin[evals]'"
        typer.echo(f"error: {told}", err=True)
        raise typer.Exit(2) from error
