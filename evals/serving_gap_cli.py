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
    rank: Annotated[
        str, typer.Option(help="Rank of every patch; several, e.g. 4,8,16,32, are measured in turn.")
    ] = "8",
    layers: Annotated[str, typer.Option(help="Layers that patches cover: all or deep.")] = "all",
    layout: Annotated[
        str, typer.Option(help="joint: directions of each patch's own; shared: the model's basis (ctxwin eval basis).")
    ] = "joint",
    seed: Annotated[int, typer.Option(help="Seed of the contexts.", min=0)] = 0,
    model: Model = "tiny",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    output: Annotated[Path | None, typer.Option(help="Also write engines.json and a picture into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """What a patch costs on vLLM in its own dtype, beside what vLLM and transformers differ by."""
    with errors():
        from ctxwin.evals.serving_gap import GapSettings, measure

        settings = GapSettings(n, _ranks(rank), layers, seed, layout=layout)
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
            from ctxwin.evals.serving_gap_figure import picture

            (output / "engines.png").write_bytes(picture(result))
        if as_json:
            print_json(result)
        else:
            terminal().print(engines_table(result))


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"rank must be a number or several with commas between, got {text!r}") from None


def engines_table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    from rich.table import Table

    from ctxwin.evals.serving_gap import ENGINES

    config = result["config"]
    title = (
        f"KL of the next token, {config['dtype']}: {config['serving']}'s re-prefill against its window of patches "
        f"({config['layout']}, {config['layers']} layers), and against {config['other']}'s re-prefill"
    )
    table = Table(title=title, title_justify="left")
    for column in ("gap", "bytes", "n", "median", "p95", "p95 interval", "max", "answers changed"):
        table.add_column(column, justify="left" if column == "gap" else "right")
    for name, row in result["kl"].items():
        low, high = row["p95_interval"]
        table.add_row(
            f"{config['other']}'s re-prefill" if name == ENGINES else f"patches, {name}",
            f"{row['share']:.1%}" if "share" in row else "", str(row["n"]), f"{row['median']:.2e}", f"{row['p95']:.2e}",
            f"{low:.1e} to {high:.1e}", f"{row['max']:.2e}", str(row["changed"]),
        )  # fmt: skip
    return table
