"""``ctxwin doctor``: what is installed, what is broken, and how to fix it."""

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer
from typer import Option

from ctxwin.progress import step, waiting_for

MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "broken": "[red]broken[/]"}


def doctor(
    model: Annotated[
        str,
        typer.Argument(help="A model folder or Hub name: say what is served how; or the URL of a server: check it."),
    ] = "",
    as_json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check this environment, or a running server (key in CTXWIN_API_KEY), or say how MODEL would be served; 1 if one fails."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ctxwin.doctor import diagnose
    from ctxwin.doctor.server import examine

    if model and not model.startswith(("http://", "https://")):
        return _assess(model, as_json)
    with waiting_for(f"asking {model}" if model else "checking this environment"):
        if model:
            findings = examine(model, os.environ.get("CTXWIN_API_KEY", ""))
        else:
            findings = diagnose(lambda finding: step(f"checked {finding.name}"))
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        report = {"findings": [asdict(finding) for finding in findings], "healthy": not broken}
        typer.echo(json.dumps(report, indent=1))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            remedy = f"\n[bold]-> {escape(finding.remedy)}[/]" if finding.remedy else ""
            table.add_row(finding.name, MARKS[finding.status], escape(finding.what) + remedy)
        Console().print(table)
        typer.echo(f"{len(broken)} broken" if broken else "nothing is broken")
    if broken:
        raise typer.Exit(1)


def _assess(name: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    from ctxwin.doctor.models import assess

    with waiting_for(f"reading the config of {name}"):
        support = assess(name)
    console = Console(soft_wrap=True)
    is_served = support.standing in ("tested", "measured")
    if as_json:
        typer.echo(json.dumps(asdict(support), indent=1))
    elif not is_served:
        console.print(f"[red]{support.standing}[/] {escape(support.model)}: {escape(support.reason)}")
    else:
        engines = " and ".join(support.engines)
        served = f"[green]would be served[/] {escape(support.model)} ({support.kind}) on {engines}"
        states = f", and {support.state_bytes / 1e6:.1f} MB of states each" if support.state_bytes else ""
        small, large = (tokens * support.token_bytes / 1e6 for tokens in (256, 1024))
        lines = [served, f"KV: {escape(support.layout)}; {support.token_bytes:,} bytes a token"]
        lines += [f"a chunk of 256 tokens {small:.1f} MB, of 1,024 {large:.1f} MB{states}"]
        position_free = "position-free; blind, patched and kept ones where a probe or audits allow them"
        with_maps = "; others with position_free=True, which keeps maps beside the states"
        lines += [f"ways to serve: exact{with_maps if support.state_bytes else f' and {position_free}'}"]
        lines += [escape(support.reason)] if support.reason else []
        family = "no test holds this family: whether its keys turn is measured when it is opened, and refused if not"
        if support.standing == "tested":
            family = "its family is compared with transformers by the tests"
        console.print("\n".join([*lines, family]))
    if not is_served:
        raise typer.Exit(1)
