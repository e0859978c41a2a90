"""``ctxwin eval toggles``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.evals.console import Json, Model, Threads, errors, numbers, open_model, print_json, progress, terminal

if TYPE_CHECKING:
    from rich.table import Table


def toggles(
    n: Annotated[int, typer.Option(help="Contexts.", min=1)] = 80,
    frames: Annotated[str, typer.Option(help="Numbers of frames, cycled through.")] = "3,4,5,6",
    seed: Annotated[int, typer.Option(help="Seed of the contexts.", min=0)] = 0,
    model: Model = "tiny",
    system_prompt: Annotated[str, typer.Option(help="System prompt.")] = "You watch a camera.",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    threads: Threads = 0,
    output: Annotated[Path | None, typer.Option(help="Also write toggles.json into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Toggle chunks clean and back, and test which are disposable: against the truth, with the cost of each test."""
    with errors():
        from ctxwin.evals.toggles import ToggleSettings, measure

        settings = ToggleSettings(n, tuple(numbers(frames)), seed, system_prompt)
        engine = open_model(model, dtype, device, threads)
        with progress("contexts", n) as advance:
            result = measure(engine, settings, advance)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / "toggles.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if as_json:
            print_json(result)
        else:
            for table in toggles_tables(result):
                terminal().print(table)


def toggles_tables(result: dict[str, Any]) -> list[Table]:
    """The result for a terminal."""
    from rich.table import Table

    trips = Table(title="toggled clean and back (counts)", title_justify="left")
    for column in (
        "lane",
        "n",
        "clean meanwhile",
        "same lane",
        "same bytes",
        "identical logits",
        "other answer meanwhile",
    ):
        trips.add_column(column, justify="left" if column == "lane" else "right")
    for lane, t in result["toggles"].items():
        shown = (t[name] for name in ("n", "clean_lane", "same_lane", "same_bytes", "identical", "changed"))
        trips.add_row(lane, *(str(x) for x in shown))
    tests = Table(title="is a chunk disposable? the test's verdict against the truth", title_justify="left")
    columns = ("test", "truth", "n", "right", "drops needed", "keeps disposable", "asks", "forwards", "tokens")
    for i, column in enumerate(columns):
        tests.add_column(column, justify="left" if i < 2 else "right")
    for test, by_truth in result["disposability"].items():
        cost = result["cost"][test]
        for truth, c in by_truth.items():
            shares = (_shown(c[name]) for name in ("right", "wrongly_dropped", "wrongly_kept"))
            tests.add_row(
                test, truth, str(c["n"]), *shares, *(f"{cost[n]:.1f}" for n in ("asks", "forwards", "tokens"))
            )  # fmt: skip
    exact = result["cost"]["reprefill"]
    tests.caption = f"re-prefill with and without: {exact['forwards']:.1f} forwards, {exact['tokens']:.0f} tokens"
    return [trips, tests]


def _shown(share: dict[str, Any]) -> str:
    if share["share"] is None:
        return "-"
    return f"{share['share']:.3f} [{share['ci95'][0]:.3f}, {share['ci95'][1]:.3f}]"
