"""``ctxwin audit``: which ways to serve were promoted or given up, when, and on what evidence."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from typer import Argument, Option


def audit(
    model: Annotated[str | None, Argument(help="A folder, a Hub name or tiny; all models by default.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what audits of real answers have found on this machine's models, and which lanes they admit."""
    from rich.console import Console
    from rich.table import Table

    from ctxwin.tiny import checkpoint_dir
    from ctxwin.trust import records

    found = records(str(checkpoint_dir()) if model == "tiny" else model)
    told = [_told(record) for record in found]
    if as_json:
        typer.echo(json.dumps({"records": told}, indent=1))
        return
    if not told:
        typer.echo(
            f"nothing was audited {'yet' if model is None else f'of {model} yet'}: windows of Fidelity('auto') are audited "
            "while they serve a model without a profile"
        )
        return
    for record in told:
        tenant = f", tenant {record['tenant']}" if record["tenant"] else ""
        by = "" if record["reference"] == "stricter" else f", by the {record['reference']} reference"
        table = Table(
            title=f"{record['model']} on {record['engine']} in {record['dtype']}{tenant}{by}: at most {record['budget']:.1%} "
            f"of the answers may change, at {record['level']:.0%}",
            title_justify="left",
            box=None,
        )
        for name in ("way", "standing", "trials", "changed", "at most", "mean KL", "tokens saved", "served", "since"):
            table.add_column(name, justify="left" if name in ("way", "standing", "since") else "right")
        for way, row in record["ways"].items():
            saved = "" if row["saved"] is None else f"{row['saved']:.0%}"
            kl = "" if row["kl"] is None else f"{row['kl']:.2g}"
            cells = [row["standing"], row["trials"], row["harms"], f"{row['upper']:.2%}", kl, saved, row["served"]]
            table.add_row(way, *map(str, cells), row["since"])
        Console().print(table)
        for decision in record["decisions"]:
            typer.echo(f"{decision['date']}  {decision['said']}")


def _told(record: Any) -> dict[str, Any]:
    """A record with what follows from its counts."""
    told: dict[str, Any] = record.model_dump()
    for name, evidence in record.ways.items():
        row = told["ways"][name]
        row["upper"] = evidence.upper(record.level)
        row["standing"] = "promoted" if evidence.promoted else "paused" if evidence.pause else "on trial"
        row["kl"] = evidence.kl_sum / evidence.trials if evidence.trials else None
        row["saved"] = 1 - evidence.computed / evidence.exact_computed if evidence.exact_computed else None
    for row, decision in zip(told["decisions"], record.decisions, strict=True):
        row["said"] = str(decision)
    return told
