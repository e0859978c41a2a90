"""An engine in a process of its own, for `serve_plain`: one order a line on standard input, one result a line on standard output.

Started with a JSON object: ``model, processes, threads, seed, connector``. Without the connector it is vLLM with the very same
settings otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.evals.bench.serve_load import Row, open_loop
from ctxwin.evals.bench.serve_policies import Film, Served, Windows, _next, budget_of
from ctxwin.evals.bench.serve_trace import Mix, Turn, arrivals, frames_of, trace
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest

if TYPE_CHECKING:
    from ctxwin.engines.vllm.drivers import Driver
    from ctxwin.engines.vllm.engine import VLLMEngine

BESIDE_RATE = 0.5
"""Turns a second of each window beside plain traffic."""


def main() -> None:
    """Serves orders until the input ends."""
    start = json.loads(sys.argv[1])
    # vLLM writes to standard output, from other processes, too: results get a descriptor of their own.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(row: Row) -> None:
        results.write(json.dumps(row) + "\n")
        results.flush()

    try:
        with _opened(start) as (driver, engine):
            traffic = Traffic(driver, start["seed"])
            answer({"ready": True})
            for line in sys.stdin:
                answer(_slice(traffic, driver, engine, json.loads(line)))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


@contextmanager
def _opened(start: Row) -> Iterator[tuple[Driver, VLLMEngine | None]]:
    from ctxwin.engines.torchvision_repair import repair

    repair()
    import torch

    if start["threads"]:
        torch.set_num_threads(start["threads"])
    if start["connector"]:
        from ctxwin.engines.vllm.engine import VLLMEngine

        engine = VLLMEngine(start["model"], processes=start["processes"])
        try:
            yield engine._core.driver, engine
        finally:
            engine.close()
    else:
        with bare(start["model"], start["processes"]) as driver:
            yield driver, None


@contextmanager
def bare(model: str, processes: str) -> Iterator[Driver]:
    """vLLM without the connector, otherwise as ctxwin starts it. For a process of its own: it changes the environment."""
    from ctxwin.engines.vllm.core import read_model
    from ctxwin.engines.vllm.drivers import LoopDriver, StepDriver
    from ctxwin.engines.vllm.lifecycle.startup import with_connector
    from ctxwin.engines.vllm.transport import LocalTransport

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if processes == "single" else "1"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if processes != "single":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    served = read_model(model)
    transport = LocalTransport(served.kv)
    arguments = with_connector(str(served.checkpoint.path), {"dtype": served.dtype}, transport)
    for name in ("kv_transfer_config", "ec_transfer_config", "worker_extension_cls"):
        arguments.pop(name, None)
    if processes != "single":
        arguments.pop("async_scheduling", None)  # as the engine with the connector has it there
    arguments |= {"disable_log_stats": True, "use_tqdm_on_load": False, "skip_mm_profiling": True}
    path = str(served.checkpoint.path)
    if processes == "async":
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        async def made() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, **arguments))

        llm = asyncio.run_coroutine_threadsafe(made(), loop).result()
        driver: Driver = LoopDriver(llm, loop, llm.shutdown)
    else:
        from vllm import LLM

        driver = StepDriver(LLM(path, **arguments), _shut_down)
    try:
        yield driver
    finally:
        driver.close()
        transport.close()


def _shut_down(llm: Any) -> None:
    llm.llm_engine.renderer.shutdown()
    llm.llm_engine.engine_core.shutdown()


class Traffic:
    """Plain text requests of random ordinary tokens; every one is another."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self._driver, self._seed = driver, seed
        self.name, self.prompt, self.answer = "", 0, 0
        self._number = itertools.count()

    def serve(self, turn: Turn, heard: Callable[[], None]) -> Served:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        rng = np.random.default_rng(int(digest("plain", self._seed, self.name, turn.session)[:12], 16))
        ids = rng.integers(32, 256, self.prompt).tolist()
        sampling = SamplingParams(
            max_tokens=self.answer, temperature=0.0, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        ticket = self._driver.submit(dict(tokens_input(ids)), sampling, 0)
        tokens: list[int] = []
        while True:
            output = _next(ticket.outputs, self._driver)
            if isinstance(output, BaseException):
                raise output
            for token in output.outputs[0].token_ids:
                tokens.append(token)
                heard()
            if output.finished:
                return Served(tuple(tokens), len(ids), len(ids), 0)


def _requests(count: int) -> list[Turn]:
    return [Turn(i, 0, "now", -1, (), 0) for i in range(count)]


def _slice(traffic: Traffic, driver: Driver, engine: VLLMEngine | None, order: Row) -> Row:
    """The open loop where the order names a rate, then the burst where it names one; windows go on beside if it says so."""
    driver.reset_prefix_cache()  # the same requests on both sides, at any time
    traffic.prompt, traffic.answer = order["prompt"], order["answer"]
    found: Row = {}
    with _beside(engine, order) as asked:
        if order["rate"]:
            found |= _arriving(traffic, order)
        if order["burst"]:
            found |= _burst(traffic, order)
        found["window_asks"] = asked()
    return found | {"load": round(os.getloadavg()[0], 2)}


def _arriving(traffic: Traffic, order: Row) -> Row:
    """Evenly: of the few gaps that make a p99, chance meetings of prompts would otherwise say more than the engine."""
    traffic.name = f"{order['name']}/open"
    due = [number / order["rate"] for number in range(math.ceil(order["rate"] * order["seconds"]))]
    run = open_loop(traffic, _requests(len(due)), due, order["seconds"], clock=order["clock"])
    _raise(run.records)
    return {
        "gaps": [round(gap, 6) for r in run.records for gap in r.gaps],
        "ttfts": [round(r.ttft, 6) for r in run.records],
        "tokens": sum(len(r.heard) for r in run.records),
        "seconds": run.seconds,
    }


def _burst(traffic: Traffic, order: Row) -> Row:
    """Processor time is the burst's alone: all is asked at once, so both sides compute the same batches."""
    traffic.name = f"{order['name']}/burst"
    run = open_loop(traffic, _requests(order["burst"]), [0.0] * order["burst"], 0.0, clock=order["clock"])
    _raise(run.records)
    tokens = sum(len(r.heard) for r in run.records)
    return {"burst_tokens_per_s": tokens / run.seconds, "cpu_s_per_token": run.cpu_s / tokens}


def _raise(records: list[Any]) -> None:
    wrong = next((r.error for r in records if r.error), None)
    if wrong is not None:
        raise RuntimeError(f"a plain request failed: {wrong}")


@contextmanager
def _beside(engine: VLLMEngine | None, order: Row) -> Iterator[Callable[[], int]]:
    """Windows that watch and look back, until the block is left; gives how many asks they got answered."""
    wanted = order.get("beside")
    if not wanted or engine is None:
        yield lambda: 0
        return
    mix = Mix(wanted["windows"], wanted["frames"])
    name, rate = order["name"], BESIDE_RATE * wanted["windows"]
    seed = int(digest("beside", name)[:12], 16)
    due = arrivals(rate, 10 * order["seconds"], seed)
    turns = trace(mix, len(due), seed)
    seen = engine.view("bench-film")
    film = Film(seen, mix, wanted["tokens"], seed)
    film.shoot(frames_of(turns, mix, seed))
    fidelity = Fidelity(wanted["mode"], rank=wanted["rank"])
    budget = budget_of(engine, mix, wanted["tokens"], wanted["answer"])
    policy = Windows(engine.view("bench-ctxwin"), mix, film, budget, wanted["answer"], fidelity)
    policy.begin()
    stopped = threading.Event()
    asked = 0

    def run() -> None:
        nonlocal asked
        for turn, at, before in zip(turns, due, [0.0, *due], strict=False):
            if stopped.wait(at - before):
                return
            policy.serve(turn, lambda: None)
            asked += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lambda: asked
    finally:
        stopped.set()
        thread.join()
        policy.close()
        seen.close()


if __name__ == "__main__":
    main()
