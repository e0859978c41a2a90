"""`ctxwin`: the commands.

Nothing heavy is imported here: `ctxwin --help` loads neither torch nor vLLM.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer import Option

from ctxwin.cli import audit, bench, demo, doctor, fleet, library, mcp, serve, store, view
from ctxwin.cli.commands import INTERRUPTED, Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A context window whose edits are cache edits.",
)
app.add_typer(store.app, name="store")
app.add_typer(library.app, name="library")
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.demo)
app.command("audit")(audit.audit)
app.command("view")(view.view)
app.command("mcp")(mcp.mcp)
app.command("doctor")(doctor.doctor)
app.command("serve", context_settings=serve.CONTEXT)(serve.serve)
app.command("fleet", context_settings=serve.CONTEXT)(fleet.fleet)


def _version(wanted: bool) -> None:
    if wanted:
        from ctxwin import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options that every command has."""


@app.command(
    "eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def evaluate(ctx: typer.Context) -> None:
    """Measure how close reuse stays to a re-prefill (`ctxwin eval --help` lists its commands)."""
    try:
        from ctxwin.evals.cli import app as harness
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ctxwin.evals"):
            raise
        raise ValueError(
            "the evals are not part of this install; reinstall ctxwin from a release or a full checkout"
        ) from error
    command = typer.main.get_command(harness)
    # Not standalone, so that errors and Ctrl-C are shown as for every other command; the result is the exit code.
    code = command.main(args=list(ctx.args), prog_name="ctxwin eval", standalone_mode=False)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    raise typer.Exit(code if isinstance(code, int) else 0)


def main() -> None:
    """Runs the command line with this process's arguments."""
    sys.exit(app(prog_name="ctxwin"))
