"""``ctxwin audit``: promotions and demotions of serving strategies, with dates and evidence."""

import json
import sys
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

    from ctxwin.audit import records
    from ctxwin.tiny import checkpoint_dir

    rows = [_to_json(record) for record in records(str(checkpoint_dir()) if model == "tiny" else model)]
    if as_json:
        typer.echo(json.dumps({"records": rows}, indent=1))
        return
    if not rows:
        typer.echo(
            f"nothing was audited {'yet' if model is None else f'of {model} yet'}: windows of Fidelity('auto') are audited "
            "while they serve a model without a profile"
        )
        return
    for record in rows:
        tenant = f", tenant {record['tenant']}" if record["tenant"] else ""
        by = "" if record["reference"] == "stricter" else f", by the {record['reference']} reference"
        budgets = f"{record['budget']:.1%} of scored answers lost, text {record['excess_budget']:g} nats a token beyond the floor"
        table = Table(
            title=f"{record['model']} on {record['engine']} in {record['dtype']}{tenant}{by}: at most {budgets}, at "
            f"{record['level']:.0%} for all strategies together; {record['floor']['said']}",
            title_justify="left",
            box=None,
        )
        columns = "strategy|standing|windows|scored|lost|at most|text|excess|at most|mean KL|tokens saved|served|since"
        for name in columns.split("|"):
            table.add_column(name, justify="left" if name in ("strategy", "standing", "since") else "right")
        for strategy, row in record["ways"].items():
            saved = "" if row["saved"] is None else f"{row['saved']:.0%}"
            kl = "" if row["kl"] is None else f"{row['kl']:.2g}"
            scored, text = row["scored"], row["text"]
            counts = [str(row["windows"]), str(scored["answers"]), f"{scored['harm']:g}", f"{scored['upper']:.2%}"]
            texts = str(text["answers"]), f"{text['mean']:+.2g}", f"{text['upper']:.2g}"
            counts += texts if text["answers"] else [""] * 3
            table.add_row(strategy, row["standing"], *counts, kl, saved, str(row["served"]), row["since"])
        Console(width=None if sys.stdout.isatty() else 250).print(table)  # a pipe cuts no column off
        for decision in record["decisions"]:
            typer.echo(f"{decision['date']}  {decision['said']}")


def _to_json(record: Any) -> dict[str, Any]:
    from ctxwin.audit.harm import CAP
    from ctxwin.audit.strategies import error_of

    hidden = {"strategies": {"__all__": {"open", "past"}}, "floor": {"cut": {"units"}, "references": {"units"}}}
    fields: dict[str, Any] = record.model_dump(exclude=hidden, by_alias=True)
    fields["floor"]["said"] = str(record.floor)
    for part in ("cut", "references"):
        difference = getattr(record.floor, part)
        fields["floor"][part] |= {"windows": len(difference.units), "mean": difference.mean}
    for name, evidence in record.strategies.items():
        row, error = fields["ways"][name], error_of(name, evidence.attempt, record.level)
        row |= {"windows": evidence.units, "trials": evidence.trials}
        for kind, unit in (("scored", 1.0), ("text", CAP)):
            tally = getattr(evidence, kind)
            row[kind] |= {"mean": tally.mean, "upper": unit * tally.upper(error)}
        standings = {"promoted": evidence.promoted, "stopped": evidence.stopped, "paused": evidence.pause}
        row["standing"] = next((name for name, holds in standings.items() if holds), "on trial")
        row["kl"] = evidence.kl_sum / evidence.trials if evidence.trials else None
        row["saved"] = 1 - evidence.computed / evidence.exact_computed if evidence.exact_computed else None
    for row, decision in zip(fields["decisions"], record.decisions, strict=True):
        row["said"] = str(decision)
    return fields
