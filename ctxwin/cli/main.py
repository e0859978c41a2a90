"""`ctxwin`: the commands.

Nothing heavy is imported here: `ctxwin --help` loads neither torch nor vLLM.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer
from typer import Option

from ctxwin.cli import audit, demo, doctor, library, stopping, store, view
from ctxwin.cli.commands import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="A context window whose edits are cache edits.",
)
_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}

app.add_typer(store.app, name="store")
app.add_typer(library.app, name="library")
app.command("demo")(demo.demo)
app.command("audit")(audit.audit)
app.command("view")(view.view)
app.command("doctor")(doctor.doctor)


def _version(requested: bool) -> None:
    if requested:
        from ctxwin import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options that every command has."""


def add_installed(to: typer.Typer) -> None:
    """Add the commands of the distributions that are installed beside this one.

    Each names, in the entry point group ``ctxwin.commands``, a function that takes the application and adds its command.
    """
    for point in sorted(entry_points(group="ctxwin.commands")):
        try:
            add_commands = point.load()
        except ImportError as error:
            to.command(point.name, hidden=True, context_settings=_ANY)(_unavailable(point, error))
        else:
            add_commands(to)


def _unavailable(point: EntryPoint, error: ImportError) -> Callable[[], None]:
    """A command in the place of one that does not import: it says so, and the other commands work."""

    def command() -> None:
        version = point.dist.version if point.dist else "unknown"
        raise ValueError(
            f"{point.name} of {point.value.partition('.')[0]} {version} does not fit this ctxwin ({error}); install the same "
            "version of both"
        ) from error

    return command


add_installed(app)


def main() -> None:
    """Run the command line with this process's arguments."""
    stopping.stop_commands()
    try:
        app(prog_name="ctxwin")
    except SystemExit:
        if stopping.pressed():
            stopping.end()
        raise
    except KeyboardInterrupt:  # before or after the command itself
        stopping.end()
