"""Where windows get into a vLLM that starts: between its command line and its engine."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Prepared(Protocol):
    """What is put into a server; see `ctxwin.serve.vllm.server.Windows`."""

    def prepare(self, args: Namespace, given: Sequence[str]) -> None:
        """Puts into ``args`` what the engine and the server need."""


ENLISTED: list[Any] = []
"""What was put into this process's server, once its engine has been asked for: one at most."""


def enlist(made: Callable[[Namespace], Prepared], given: Sequence[str] | None = None) -> None:
    """Has the server that this process starts next prepared, by what ``made(args)`` returns, when its engine is asked for.

    vLLM's servers, and nothing else, make engine arguments of a namespace with an HTTP server's arguments in it.

    Args:
        given: the command line, to tell switches that were set to their default from those that were not set.
    """
    from vllm import AsyncEngineArgs

    inner = AsyncEngineArgs.from_cli_args.__func__

    def from_cli_args(cls: Any, args: Namespace) -> Any:
        if hasattr(args, "middleware") and not ENLISTED:
            windows = made(args)
            windows.prepare(args, sys.argv[1:] if given is None else given)
            ENLISTED.append(windows)
        return inner(cls, args)

    AsyncEngineArgs.from_cli_args = classmethod(from_cli_args)
