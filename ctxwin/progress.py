"""Progress of operations that take seconds: one transient line on a terminal, log lines elsewhere.

Nothing is ever written to stdout, where results go. ``CTXWIN_PROGRESS=0`` keeps the line off a terminal, too.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

SWITCH = "CTXWIN_PROGRESS"
"""Environment variable; 0: no line on terminals."""
_log = logging.getLogger("ctxwin.progress")
_current: ContextVar[Callable[[str], None] | None] = ContextVar("ctxwin_progress", default=None)


@contextlib.contextmanager
def waiting_for(activity: str) -> Iterator[None]:
    """Show ``activity`` until the block ends, and its duration. Within another one, it is a step of that."""
    if _current.get() is not None:
        step(activity)
        yield
        return
    began = time.monotonic()
    with _line(activity) if _on_a_terminal() else contextlib.nullcontext(_logged(activity)) as show:
        mark = _current.set(show)
        try:
            yield
        finally:
            _current.reset(mark)
    _log.info("%s: done after %.1f s", activity, time.monotonic() - began)


def step(activity: str) -> None:
    """Show the current step of the enclosing `waiting_for`; do nothing outside of one."""
    show = _current.get()
    if show is not None:
        show(activity)


def _on_a_terminal() -> bool:
    return os.environ.get(SWITCH, "") != "0" and bool(getattr(sys.stderr, "isatty", lambda: False)())


def _logged(activity: str) -> Callable[[str], None]:
    _log.info("%s", activity)
    return lambda step: _log.info("%s: %s", activity, step)


@contextlib.contextmanager
def _line(activity: str) -> Iterator[Callable[[str], None]]:
    """Show a line with the elapsed seconds; other output to stdout and stderr is not redirected."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(escape(activity))
        yield lambda step: bar.update(task, description=escape(f"{activity}: {step}"))
