"""An engine and a store that refuse the event loop's thread, and wait at a call that a test names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ctxwin.engines.results import Generation
from ctxwin.store.memory import MemoryStore
from store.wrappers import WrapperStore
from window.fake import FakeEngine


def _guarded(base: type, name: str) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        self.enter(name)
        return getattr(base, name)(self, *args, **options)

    return call


class _GuardedStore(WrapperStore):
    def __init__(self, enter: Callable[[str], None]) -> None:
        super().__init__(MemoryStore())
        self.enter = enter


class GuardedEngine(FakeEngine):
    """See the module.

    Attributes:
        home: the thread that no call may come from: the event loop's.
        gate: the call that sets ``entered`` and waits for ``go``, once; ``token`` is that behind the first token of an answer.
        asked: answers that began; tokens: of all answers.
    """

    def __init__(self, home: int | None = None, gate: str = "") -> None:
        self.home, self.gate = home, gate
        self.entered, self.go = threading.Event(), threading.Event()
        self.asked = self.tokens = 0
        super().__init__(_GuardedStore(self.enter))

    def enter(self, name: str) -> None:
        assert threading.get_ident() != self.home, f"{name} runs on the event loop"
        if name == self.gate:
            self.gate = ""
            self.entered.set()
            assert self.go.wait(300)

    def generate(self, *args: Any, on_token: Callable[[int, str], bool] | None = None, **options: Any) -> Generation:
        def relay(token: int, text: str) -> bool:
            self.tokens += 1
            more = on_token is None or on_token(token, text)
            self.enter("token")
            return more

        self.asked += 1
        self.enter("generate")
        return super().generate(*args, on_token=relay, **options)


for _name in ("encode_system_prompt", "encode", "encode_query", "encode_exchange", "prefill", "attended"):
    setattr(GuardedEngine, _name, _guarded(FakeEngine, _name))
for _name in ("get", "put", "delete", "contains", "list", "lease", "release"):
    setattr(_GuardedStore, _name, _guarded(WrapperStore, _name))
