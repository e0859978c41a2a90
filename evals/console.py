"""What the eval commands share: opening a model, numbers in options, progress, one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.errors import CtxwinError

if TYPE_CHECKING:
    from ctxwin.engines.hf import HFEngine

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Model = Annotated[str, typer.Option(help="'tiny' (bundled), or a local folder or Hub name.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves the default.", min=0)]


def open_model(model: str, dtype: str, device: str, threads: int) -> HFEngine:
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


def numbers(text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not parts or not all(p.isdigit() for p in parts):
        raise ValueError(f"numbers must be a comma-separated list, got {text!r}")
    return [int(p) for p in parts]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def terminal() -> Any:
    from rich.console import Console

    # A file or a pipe gets whole rows.
    return Console() if sys.stdout.isatty() else Console(width=150)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, so that ``--json`` stays clean; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


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
