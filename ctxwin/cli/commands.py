"""The end of every command: one line for an error with its remedy, an exit code, and advice after Ctrl-C."""

from __future__ import annotations

import errno
import os
import select
from typing import TYPE_CHECKING, Any, NoReturn, cast, get_args

import typer
from typer.core import TyperGroup

from ctxwin.cli import stopping
from ctxwin.errors import CtxwinError, EngineFailed, StoreFull, StoreUnavailable, WindowBusy
from ctxwin.extras import COMMAND_EXTRAS, missing_extra

if TYPE_CHECKING:
    from ctxwin.fidelity import Mode

FAILED, BAD_INPUT = 1, 2
_FAILURES = EngineFailed | WindowBusy | StoreFull | StoreUnavailable

AFTER_CTRL_C = {  # by the command's name
    "bench": "nothing is kept; give the same command again to start anew",
    "demo": "give the same command again to start anew",
    "eval": "`eval run`, and a probe of texts, continue when the same command is given again: nothing is computed twice",
    "library": "what was added stays; give the same command again, `add` with --replace",
    "store": "nothing is half done; give the same command again",
}

_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
_QUIET |= {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}


class Commands(TyperGroup):
    """Shows errors in one line: exit code 2 for bad input, 1 for a failure that the input did not cause."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; ValueError for one whose distribution is not installed."""
        name = args[0] if args else ""
        stopping.begin(AFTER_CTRL_C.get(name, "nothing was left running"))
        if name in COMMAND_EXTRAS and self.get_command(ctx, name) is None:
            raise ValueError(f"{name} is not installed; run pip install 'ctxwin[{COMMAND_EXTRAS[name]}]'")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn its errors into one line and an exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            self._exit_stopped()
        except (CtxwinError, ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError) and _reader_has_left():
                raise  # nobody reads on, as behind `| head`: ends without a word
            reported: BaseException = error
        except ModuleNotFoundError as error:
            explained = missing_extra(error)
            if explained is None and not stopping.pressed():
                raise
            reported = explained or error
        except Exception as error:
            if stopping.pressed() and not isinstance(error, typer.Exit):
                self._exit_stopped()
            # An unknown option carries the names that resemble it.
            if similar := getattr(error, "possibilities", None):
                error.message = f"{error.message}. Did you mean {' or '.join(similar)}?"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise
        if stopping.pressed():
            self._exit_stopped()
        if ctx.params.get("debug"):
            raise reported
        typer.echo(f"error: {one_line(reported)}", err=True)
        disk_failed = isinstance(reported, OSError) and reported.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        raise typer.Exit(FAILED if disk_failed or isinstance(reported, _FAILURES) else BAD_INPUT)

    def _exit_stopped(self) -> NoReturn:
        typer.echo(stopping.take_line(), err=True, nl=False)
        raise typer.Exit(stopping.status()) from None


def checked_mode(mode: str) -> Mode:
    """Return the value of ``--mode`` as a mode of `Fidelity`. Raises ValueError for another one."""
    from ctxwin.fidelity import Mode

    if mode not in get_args(Mode):
        raise ValueError(f"--mode must be auto, exact, patched or blind, got {mode!r}")
    return cast("Mode", mode)


def _reader_has_left() -> bool:
    (poll := select.poll()).register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks; of the system's errors without their numbers."""
    if isinstance(error, OSError) and error.strerror:
        name = error.filename2 or error.filename  # the former is what a file was to become
        remedy = "; make room and give the same command again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return error.strerror + (f": {name!r}{remedy}" if name else "")
    return " ".join(str(error).split()) or type(error).__name__


def quiet() -> None:
    """Keep other libraries' progress bars and logs off the terminal, unless their variables are set already.

    They would interfere with a command that redraws a table or prints one JSON object.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def disable_audits() -> None:
    """Disable background audits, so that a command counts and times only its own asks."""
    os.environ.setdefault("CTXWIN_AUDITS", "0")
