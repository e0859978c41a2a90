"""``ctxwin eval``, loaded when it is used: `ctxwin --help` needs none of it."""

import typer

from ctxwin.cli.stopping import INTERRUPTED


def evaluate(ctx: typer.Context) -> None:
    """Measure how close reuse stays to a re-prefill (`ctxwin eval --help` lists its commands)."""
    from ctxwin_evals.cli import app as harness

    # Not standalone, so that errors and Ctrl-C are shown as for every other command; the result is the exit code.
    code = typer.main.get_command(harness).main(args=list(ctx.args), prog_name="ctxwin eval", standalone_mode=False)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    raise typer.Exit(code if isinstance(code, int) else 0)


def add_commands(app: typer.Typer) -> None:
    """Add ``eval`` to the command line of ctxwin."""
    context = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("eval", add_help_option=False, context_settings=context)(evaluate)
