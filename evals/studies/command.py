"""Shared parts of the studies' commands."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxwin.cli.commands import one_line
from ctxwin.errors import CtxwinError
from ctxwin.extras import missing_extra

Seed = Annotated[int, typer.Option(help="Seed of what is drawn.", min=0)]
Output = Annotated[Path | None, typer.Option(help="Also write the result into this folder, as NAME.json.")]

SYSTEM_PROMPT = "You watch a camera."


def write_result(folder: Path | None, name: str, result: Mapping[str, Any]) -> None:
    """Write a result as JSON to ``name`` in a folder, which is created where missing; do nothing without a folder."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@contextmanager
def errors() -> Iterator[None]:
    """Turn bad input, and errors that the library raises on purpose, into one line and exit code 2."""
    try:
        yield
    except BrokenPipeError:
        raise  # see `ctxwin.cli.commands`
    except (ValueError, TypeError, OSError, CtxwinError, ModuleNotFoundError) as error:
        message = (missing_extra(error) if isinstance(error, ModuleNotFoundError) else None) or error
        typer.echo(f"error: {one_line(message)}", err=True)
        raise typer.Exit(2) from error
