"""Shared parts of the studies' commands: options, and the path from settings to a shown result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ctxwin_evals.console import numbers, progress, show

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

S = TypeVar("S")
Measure = Callable[["HFEngine", S, Callable[[int], None]], dict[str, Any]]
"""(engine, settings, callback with the increment of work done) -> a result, JSON-able."""

Streams = Annotated[int, typer.Option(help="Independent streams.", min=1)]
Slides = Annotated[str, typer.Option(help="After how many slides to measure.")]
Questions = Annotated[int, typer.Option(help="Questions a stream and point.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of what is drawn.", min=0)]
SystemPrompt = Annotated[str, typer.Option(help="System prompt.")]
Output = Annotated[Path | None, typer.Option(help="Also write the result into this folder, as NAME.json.")]

SYSTEM_PROMPT = "You watch a camera."


def points(text: str) -> tuple[int, ...]:
    """The different numbers of a comma-separated list, ascending."""
    return tuple(sorted(set(numbers(text))))


def write_result(folder: Path | None, name: str, result: Mapping[str, Any]) -> None:
    """Write a result as JSON to ``name`` in a folder, which is created where missing; do nothing without a folder."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(
    name: str,
    measure: Measure[S],
    settings: S,
    engine: HFEngine,
    work: tuple[str, int],
    render: Callable[[dict[str, Any]], Sequence[Any]],
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure under a progress bar, write ``NAME.json`` into the folder, and show tables and lines, or the JSON.

    ``work`` is the unit that is counted, and its total.
    """
    with progress(*work) as advance:
        result = measure(engine, settings, advance)
    write_result(output, f"{name}.json", result)
    show(result, as_json, *render(result))
