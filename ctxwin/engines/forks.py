"""Forked processes: they lack their parent's threads, for which torch would wait for ever."""

import os

from ctxwin.errors import EngineFailed

REMEDY = 'start it by multiprocessing.get_context("spawn"), or before any engine is opened'
_process: int | None = None
"""The process that has last opened an engine."""


def note_engine() -> None:
    """Note that this process opens an engine. Raises EngineFailed where `check_process` does."""
    global _process
    check_process()
    _process = os.getpid()


def check_process() -> None:
    """Raise EngineFailed in a fork of a process with an engine, where torch computes with several threads."""
    if _process in (None, os.getpid()):
        return
    import torch  # an engine has loaded it; `import ctxwin` does without

    if torch.get_num_threads() > 1:
        raise EngineFailed(
            f"this process was forked from one that has opened an engine, and lacks its threads; {REMEDY}"
        )
