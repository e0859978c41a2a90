"""How every command ends: one line for an error with its remedy, an exit code, and what to do after Ctrl-C."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast, get_args

import typer
from typer.core import TyperGroup

from ctxwin.errors import CtxwinError, EngineFailed, WindowBusy
from ctxwin.extras import missing_extra

if TYPE_CHECKING:
    from ctxwin.fidelity import Mode

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

AFTER_CTRL_C = {
    "bench": "nothing is kept; give the same command again to start anew",
    "demo": "give the same command again to start anew",
    "eval": "`eval run` continues when the same command is given again: samples in its folder are not computed twice",
    "store": "nothing is half done; give the same command again",
}
"""What somebody who stopped a command should know, by the command's name."""

_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
_QUIET |= {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}


class Commands(TyperGroup):
    """Shows what went wrong in one line: exit code 2 for bad input, 1 for a failure that the input did not cause."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; its errors become one line and an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo(f"\nstopped; {AFTER_CTRL_C.get(ctx.invoked_subcommand, 'nothing was left running')}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except (CtxwinError, ValueError, OSError) as error:
            shown: BaseException = error
        except ModuleNotFoundError as error:
            told = missing_extra(error)
            if told is None:
                raise
            shown = told
        except Exception as error:
            # An unknown option carries the names that resemble it.
            if similar := getattr(error, "possibilities", None):
                error.message = f"{error.message}. Did you mean {' or '.join(similar)}?"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise
        if ctx.params.get("debug"):
            raise shown
        typer.echo(f"error: {one_line(shown)}", err=True)
        raise typer.Exit(FAILED if isinstance(shown, EngineFailed | WindowBusy) else BAD_INPUT)


def checked_mode(option: str, mode: str) -> Mode:
    """``mode`` as one of a `Fidelity`; ValueError for another one, by the name of the option."""
    from ctxwin.fidelity import Mode

    if mode not in get_args(Mode):
        raise ValueError(f"{option} must be auto, exact, patched or blind, got {mode!r}")
    return cast("Mode", mode)


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def quiet() -> None:
    """Keeps other libraries' progress bars and logs off the terminal, unless their variables are set already.

    A command that redraws a table or prints one JSON object shares the terminal with nobody.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def counted_alone() -> None:
    """Tries no ways to serve in the background: what a command counts and times is what it asked for."""
    os.environ.setdefault("CTXWIN_AUDITS", "0")
