"""``python tests/benchmark_data {mm-niah,video-mme,egoschema,milebench,musique} --out DIR --n N --seed S``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

if not __package__:  # started as a folder: its parent is where the package is found
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctxwin.cli.commands import Commands

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Small data sets in the layouts of the benchmarks."
)
T = TypeVar("T", int, float)

Out = Annotated[Path, typer.Option(help="Data folder; an existing one gets the files added or replaced.")]
Seed = Annotated[int, typer.Option(help="Of everything drawn.", min=0)]
Size = Annotated[int, typer.Option(help="Side of pictures and frames in pixels.")]


@app.command("mm-niah")
def mm_niah(
    out: Out,
    n: Annotated[int, typer.Option(help="Rows a task.")] = 12,
    seed: Seed = 0,
    lengths: Annotated[
        str, typer.Option(help="Tokens of the documents, comma-separated; cycled through.")
    ] = "200,1200,4000",
    split: Annotated[str, typer.Option(help="val or test.")] = "val",
    image_size: Size = 224,
) -> None:
    """Six tasks: documents with needles in text or pictures."""
    from benchmark_data import write_mm_niah

    rows = write_mm_niah(out, n, seed, split, _numbers(lengths, int), image_size)
    _say(out, sum(len(r) for r in rows.values()))


@app.command("video-mme")
def video_mme(
    out: Out,
    n: Annotated[int, typer.Option(help="Questions; three a video.")] = 12,
    seed: Seed = 0,
    seconds: Annotated[str, typer.Option(help="Length of short, medium and long videos.")] = "4,6,8",
    image_size: Size = 224,
) -> None:
    """Videos of moving shapes, with subtitles and multiple-choice questions."""
    from benchmark_data import write_video_mme

    _say(out, len(write_video_mme(out, n, seed, _numbers(seconds, float), image_size)))


@app.command("milebench")
def milebench(
    out: Out,
    n: Annotated[int, typer.Option(help="Samples a set.")] = 12,
    seed: Seed = 0,
    steps: Annotated[int, typer.Option(help="Events shown in a sample.")] = 4,
    image_size: Size = 224,
) -> None:
    """Four temporal sets: rows of frames with multiple-choice questions."""
    from benchmark_data import write_milebench

    made = write_milebench(out, n, seed, steps, image_size)
    _say(out, sum(len(part["data"]) for part in made.values()))


@app.command("egoschema")
def egoschema(
    out: Out,
    n: Annotated[int, typer.Option(help="Questions, a video each.")] = 12,
    seed: Seed = 0,
    hub: Annotated[bool, typer.Option(help="The parquet files of the hub instead of the repository's JSON.")] = False,
    image_size: Size = 224,
) -> None:
    """Videos of moving shapes with five-way questions, every other one of the public subset."""
    from benchmark_data import write_egoschema

    _say(out, len(write_egoschema(out, n, seed, hub, image_size)))


@app.command("musique")
def musique(out: Out, n: Annotated[int, typer.Option(help="Questions of each split.")] = 12, seed: Seed = 0) -> None:
    """Questions of two to four hops over twenty paragraphs."""
    from benchmark_data import write_musique

    _say(out, sum(map(len, write_musique(out, n, seed).values())))


def _numbers(text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"a list must be numbers separated by commas, got {text!r}") from None


def _say(out: Path, items: int) -> None:
    typer.echo(f"{items} items in {out}")


if __name__ == "__main__":
    app(prog_name="python tests/benchmark_data")
