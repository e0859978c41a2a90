"""``ctxwin doctor``: what is installed, what is broken, and how to fix it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer
from typer import Option

MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "broken": "[red]broken[/]"}


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            help="A model folder or Hub name: say what would be served how; or the URL of a server: check it."
        ),
    ] = "",
    fix: Annotated[bool, Option("--fix", help="Install the import hook that repairs torchvision for vLLM.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check this environment, or a running server (key in CTXWIN_API_KEY), or say how MODEL would be served; 1 if one fails."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ctxwin.doctor import diagnose
    from ctxwin.doctor import fix as repair
    from ctxwin.doctor.server import examine

    if model and not model.startswith(("http://", "https://")):
        return _assess(model, as_json)
    errors = Console(stderr=True)
    with errors.status("checking") as status:
        if model:
            found = examine(model, os.environ.get("CTXWIN_API_KEY", ""))
        else:
            found = diagnose(lambda finding: status.update(f"checked {finding.name}"))
    done = list(repair(found)) if fix and not model else []
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


def _assess(name: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    from ctxwin.doctor.models import assess

    found, console = assess(name), Console(soft_wrap=True)
    served = found.standing in ("tested", "measured")
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
    elif not served:
        console.print(f"[red]{found.standing}[/] {escape(found.model)}: {escape(found.reason)}")
    else:
        lines = [f"[green]would be served[/] {escape(found.model)} ({found.kind}) on {' and '.join(found.engines)}"]
        lines += [f"KV: {escape(found.layout)}; {found.token_bytes:,} bytes a token"]
        lines += [
            f"a chunk of 256 tokens {256 * found.token_bytes / 1e6:.1f} MB, of 1,024 {1024 * found.token_bytes / 1e6:.1f} MB"
            + (f", and {found.state_bytes / 1e6:.1f} MB of states each" if found.state_bytes else "")
        ]
        ways = "position-free; blind, patched and kept ones where a probe or audits allow them"
        held = "; others with position_free=True, which keeps maps beside the states"
        lines += [f"ways to serve: exact{held if found.state_bytes else f' and {ways}'}"]
        lines += [escape(found.reason)] if found.reason else []
        lines += (
            ["its family is compared with transformers by the tests"]
            if found.standing == "tested"
            else ["no test holds this family: whether its keys turn is measured when it is opened, and refused if not"]
        )
        console.print("\n".join(lines))
    if not served:
        raise typer.Exit(1)
