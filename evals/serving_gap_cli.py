"""``ctxwin eval engines``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.evals.console import Json, Model, errors, print_json, progress, terminal

if TYPE_CHECKING:
    from rich.table import Table


def engines(
    n: Annotated[int, typer.Option(help="Contexts.", min=1)] = 200,
    rank: Annotated[int, typer.Option(help="Rank of every patch.", min=1)] = 8,
    layers: Annotated[str, typer.Option(help="Layers that patches cover: all or deep.")] = "all",
    seed: Annotated[int, typer.Option(help="Seed of the contexts.", min=0)] = 0,
    model: Model = "tiny",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    output: Annotated[Path | None, typer.Option(help="Also write engines.json into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """What a patch costs on vLLM in its own dtype, beside what vLLM and transformers differ by."""
    with errors():
        from ctxwin.evals.serving_gap import GapSettings, measure

        settings = GapSettings(n, rank, layers, seed)
        from ctxwin.engines.open import open_engine

        name = model.removeprefix("hf:").removeprefix("vllm:")
        with (
            open_engine(name, engine="vllm", dtype=dtype) as serving,
            open_engine(name, engine="hf", dtype=dtype) as other,
            progress("contexts", n) as advance,
        ):
            result = measure(serving, other, settings, advance)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / "engines.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if as_json:
            print_json(result)
        else:
            terminal().print(engines_table(result))


def engines_table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    from rich.table import Table

    config = result["config"]
    title = (
        f"KL of the next token, {config['dtype']}, rank {config['rank']} ({config['layers']} layers, "
        f"{result['share']:.1%} of the KV's bytes)"
    )
    table = Table(title=title, title_justify="left")
    for column in ("gap", "n", "median", "p95", "p95 interval", "max", "answers changed"):
        table.add_column(column, justify="left" if column == "gap" else "right")
    for name, row in result["kl"].items():
        low, high = row["p95_interval"]
        table.add_row(
            result["gaps"][name], str(row["n"]), f"{row['median']:.2e}", f"{row['p95']:.2e}", f"{low:.1e} to {high:.1e}",
            f"{row['max']:.2e}", str(row["changed"]),
        )  # fmt: skip
    return table
