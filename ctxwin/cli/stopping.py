"""Ctrl-C, SIGTERM and SIGHUP at any time: one plain line and exit status 130, 143 or 129, within `_PATIENCE_S`.

Python raises KeyboardInterrupt wherever its main thread is: an import, a callback or a destructor may swallow it or turn it into
another error, and cleaning up may take forever. The signal is recorded, and a process that does not end in time ended by force.
"""

import _thread
import os
import signal
import sys
import time
from typing import Any, NoReturn

from ctxwin.process_exit import abandon, leave

INTERRUPTED = 130
_PATIENCE_S = 3.0
_PROCESS = os.getpid()
_pressed = 0  # the signal's number
_line = "\nstopped\n"  # tells the user; "" once it is told


def stop_imports(argv: list[str]) -> None:
    """End at once on Ctrl-C while the command line is imported; a server also on SIGTERM, with exit status 0."""

    def stop(number: int, _: Any) -> NoReturn:
        if number == signal.SIGINT:
            os.write(2, take_line().encode())
        os._exit(INTERRUPTED if number == signal.SIGINT else 0)

    signal.signal(signal.SIGINT, stop)
    if "serve" in argv[1:3]:
        signal.signal(signal.SIGTERM, stop)


def stop_commands() -> None:
    """Raise KeyboardInterrupt on Ctrl-C, SIGTERM and SIGHUP, and end by force if one comes again or has no effect."""
    signal.signal(signal.SIGINT, _interrupt)
    for number in (signal.SIGHUP, signal.SIGTERM):  # neither of a server, which handles SIGTERM; nohup ignores SIGHUP
        if signal.getsignal(signal.SIGTERM) == signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)


def pressed() -> bool:
    """Return True if one of these came, also if it caused another error."""
    return _pressed != 0


def status() -> int:
    """Return the exit status of a process that was stopped."""
    return 128 + (_pressed or signal.SIGINT)


def accept() -> None:
    """Treat Ctrl-C as the regular end of the command, which continues and sets its own exit status."""
    global _pressed
    _pressed = 0


def begin(advice: str) -> None:
    """Set what a stop of the command that begins tells the user to do."""
    global _line
    _line = f"\nstopped; {advice}\n"


def take_line() -> str:
    """Return the line that reports the stop; "" where it was taken, by whichever thread ends the process."""
    global _line
    line, _line = _line, ""
    return line


def end() -> NoReturn:
    """End this process in order, and report the stop if that has not been done. Main thread only."""
    sys.stderr.flush()
    os.write(2, take_line().encode())
    leave(status())


def _interrupt(number: int, frame: Any) -> None:
    global _pressed
    if number != signal.SIGINT and os.getpid() != _PROCESS:  # a child that was forked: who ends it expects it to die
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    if _pressed:
        _end_by_force()
    _pressed = number
    _thread.start_new_thread(_watch, ())  # `threading` takes locks that the interrupted code may hold
    raise KeyboardInterrupt


def _watch() -> None:
    time.sleep(_PATIENCE_S)
    if _pressed:
        _end_by_force()


def _end_by_force() -> NoReturn:
    os.write(2, take_line().encode())
    abandon(status())
