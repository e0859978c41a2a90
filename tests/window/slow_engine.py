"""An engine whose background forwards wait, and what windows that compute ahead keep free."""

from __future__ import annotations

import threading
from typing import Any

from window.fake import FakeEngine

RESERVED = 24
"""Tokens that windows keep free for a question and its answer."""


class SlowEngine(FakeEngine):
    """Its background forwards wait until they are told to go on, or are stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.waiting = False

    @property
    def busy(self) -> bool:
        return self.waiting

    def prefill(self, context: Any, target: Any, start: int, **options: Any) -> Any:
        stopped = options.get("stopped")
        if stopped is not None:
            self.begun.set()
            while not self.go_on.wait(0.001) and not stopped():
                pass
        return super().prefill(context, target, start, **options)
