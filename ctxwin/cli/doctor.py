"""``ctxwin doctor``: what is installed, what is broken, and how to fix it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from typer import Option

MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "broken": "[red]broken[/]"}


def doctor(
    fix: Annotated[bool, Option("--fix", help="Install the import hook that repairs torchvision for vLLM.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check this environment: libraries, vLLM build, compiler, shared memory; exit code 1 where something is broken."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ctxwin.doctor import diagnose
    from ctxwin.doctor import fix as repair

    errors = Console(stderr=True)
    with errors.status("checking") as status:
        found = diagnose(lambda finding: status.update(f"checked {finding.name}"))
    done = list(repair(found)) if fix else []
    if done:
        found = diagnose()
    broken = [finding for finding in found if finding.status == "broken"]
    if as_json:
        told = {"findings": [asdict(finding) for finding in found], "fixed": done, "healthy": not broken}
        typer.echo(json.dumps(told, indent=1))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in found:
            remedy = f"\n[bold]-> {escape(finding.remedy)}[/]" if finding.remedy else ""
            table.add_row(finding.name, MARKS[finding.status], escape(finding.what) + remedy)
        Console().print(table)
        for line in done:
            typer.echo(line)
        typer.echo(f"{len(broken)} broken" if broken else "nothing is broken")
    if broken:
        raise typer.Exit(1)
