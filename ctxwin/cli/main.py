"""`ctxwin`: the commands, and how their errors are shown.

Nothing heavy is imported here: `ctxwin --help` loads neither torch nor vLLM.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ctxwin.cli import bench, demo, doctor, serve, store, view
from ctxwin.errors import CtxwinError, EngineFailed, WindowBusy

BAD_INPUT, FAILED = 2, 1


class Commands(TyperGroup):
    """Shows what went wrong in one line: exit code 2 for bad input, 1 for a failure that the input did not cause."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (CtxwinError, ValueError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {one_line(error)}", err=True)
            code = FAILED if isinstance(error, EngineFailed | WindowBusy) else BAD_INPUT
            raise typer.Exit(code) from None


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A context window whose edits are cache edits.",
)
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.demo)
app.command("view")(view.view)
app.command("doctor")(doctor.doctor)
app.command("serve", context_settings=serve.CONTEXT)(serve.serve)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Options of every command."""


@app.command()
def version() -> None:
    """Print the version."""
    from ctxwin import __version__

    typer.echo(__version__)


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
        if (error.name or "").startswith("ctxwin"):
            remedy = "the evals are not part of this install; reinstall ctxwin from a release or a full checkout"
        else:
            remedy = f"the evals need {error.name}; run pip install 'ctxwin[evals]'"
        raise ValueError(remedy) from error
    command = typer.main.get_command(harness) if isinstance(harness, typer.Typer) else harness
    try:
        command.main(args=list(ctx.args), prog_name="ctxwin eval")
    except SystemExit as end:
        raise typer.Exit(end.code if isinstance(end.code, int) else FAILED if end.code else 0) from None


def main() -> None:
    """Runs the command line with this process's arguments."""
    sys.exit(app(prog_name="ctxwin"))
