"""Calls that an interrupt ends at each place where Python handles signals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from types import FrameType


def interrupts(call: Callable[[], object]) -> Iterator[int]:
    """Call again and again, each time interrupted one place later, until a call ends before its interrupt; yield the place.

    Signals are handled where a function of Python begins and behind a call of one in C, the lock of a ``with`` block apart.
    """
    for place in count():
        if _ends(call, place):
            return
        yield place


def _ends(call: Callable[[], object], place: int) -> bool:
    left = place

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == -1:
                raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        sys.setprofile(interrupt)
        call()
        sys.setprofile(None)
    return left >= 0
