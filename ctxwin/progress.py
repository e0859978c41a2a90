"""Progress of operations that take seconds: one transient line on a terminal, log lines elsewhere; and of long commands.

Nothing is ever written to stdout, where results go. ``CTXWIN_PROGRESS=0`` keeps the line off a terminal, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

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


OnProgress = Callable[[str, int, int], None]
"""Called with the current stage, the amount done and the total; a total of 0 means unknown."""


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress and an estimate of the time left on standard error; ``--json`` stays clean.

    Yields a function that is called with how many more are done. A terminal gets a bar, a file or a pipe a line now and then.
    """
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        tell(what, done, total)

    with stages() as tell:
        tell(what, 0, total)
        yield advance


@contextlib.contextmanager
def stages(console: Console | None = None) -> Iterator[OnProgress]:
    """As `progress`, for work in named stages; yields an `OnProgress`. ``console``: what prints lines above the bar meanwhile."""
    from rich import progress as bars
    from rich.console import Console

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    times = bars.TimeElapsedColumn(), bars.TimeRemainingColumn()
    columns = bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.MofNCompleteColumn(), *times
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total or None)


class _Lines:
    """Progress off a terminal: a line when a stage begins, and one every `EVERY` seconds at most."""

    EVERY, KEPT = 10.0, 0.05  # what takes less was kept from an earlier run, and says nothing of the pace

    def __init__(self) -> None:
        self._began = self._last = self._next = time.monotonic()
        self._stage, self._before = "", 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or now - self._last < self.KEPT:
            self._stage, self._began, self._before = stage, now, done
        self._last = now
        if now >= self._next or not done:
            self._next = now + self.EVERY
            sys.stderr.write(f"{progress_line(stage, done, total, now - self._began, self._before)}\n")


def progress_line(stage: str, done: int, total: int, seconds: float, before: int = 0) -> str:
    """One line of progress: the stage, the amount done, and the time left at the pace of what was done after ``before``."""
    if not total:
        return stage
    line = f"{stage}: {done} of {total}"
    if before < done < total:
        remaining = seconds * (total - done) / (done - before)
        line += f", about {remaining:.0f} s left" if remaining < 100 else f", about {remaining / 60:.0f} min left"
    return line
