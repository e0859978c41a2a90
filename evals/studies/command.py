"""What the studies' commands share: their options, and the way from settings to a shown result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ctxwin.evals.console import numbers, progress, show, write_result

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

S = TypeVar("S")
Measure = Callable[["HFEngine", S, Callable[[int], None]], dict[str, Any]]
"""(engine, settings, called with how much more is done) -> a result, JSON-able."""

Streams = Annotated[int, typer.Option(help="Independent streams.", min=1)]
Slides = Annotated[str, typer.Option(help="After how many slides to measure.")]
Questions = Annotated[int, typer.Option(help="Questions a stream and point.", min=1)]
Frames = Annotated[str, typer.Option(help="Numbers of frames, cycled through.")]
Seed = Annotated[int, typer.Option(help="Seed of what is drawn.", min=0)]
SystemPrompt = Annotated[str, typer.Option(help="System prompt.")]
Output = Annotated[Path | None, typer.Option(help="Also write the result into this folder, as NAME.json.")]

SYSTEM_PROMPT = "You watch a camera."


def points(text: str) -> tuple[int, ...]:
    """The different numbers of a comma-separated list, ascending."""
    return tuple(sorted(set(numbers(text))))


def run(
    name: str,
    measure: Measure[S],
    settings: S,
    engine: HFEngine,
    work: tuple[str, int],
    shown: Callable[[dict[str, Any]], Sequence[Any]],
    output: Path | None,
    as_json: bool,
) -> None:
    """Measures under a progress bar, writes ``NAME.json`` into the folder, and shows tables and lines, or the JSON.

    ``work`` says what is counted, and how much of it there is.
    """
    with progress(*work) as advance:
        result = measure(engine, settings, advance)
    write_result(output, f"{name}.json", result)
    show(result, as_json, *shown(result))
