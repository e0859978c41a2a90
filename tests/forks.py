"""Calls in a forked process, and what they raise there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence

from ctxwin.errors import EngineFailed


def refusals(calls: Sequence[Callable[[], object]]) -> list[str]:
    """Return the message of the `EngineFailed` that each call raises in a fork of this process, "" where it raises none.

    Fails where the fork waits for longer than a minute, or ends by another error.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own would wait for the call, too
            signal.alarm(60)
            os.write(writer, json.dumps([_refusal(call) for call in calls]).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        written = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the forked process waits, or failed"
    return list(json.loads(written))


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except EngineFailed as error:
        return str(error)
    return ""
