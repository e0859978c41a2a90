"""Plain traffic on an engine without the connector, on one with it, and with windows beside it: in paired slices.

Two engines in processes of their own (`Worker`, which runs this module), both up at once; one is idle while the other is
measured. A pair of slices is the same requests on both: an open loop each, for the time between tokens, then bursts in turn,
for the throughput. Which side goes first changes from pair to pair and from burst to burst, so that whatever else the machine
does affects both alike. Every pair has engines of its own: where a process's memory happens to lie makes it faster or slower
by percents for as long as it lives, so pairs of the same two processes would agree with one another and say little about the
connector.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ctxwin.errors import EngineFailed
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest

from .figures import BESIDE, SIDES, Slice
from .load import Record, open_loop
from .policies import Film, Windows, budget_of
from .requests import Served, request
from .trace import Mix, Turn, arrivals, frames_of, trace

if TYPE_CHECKING:
    from ctxwin.engines.vllm.drivers import Driver
    from ctxwin.engines.vllm.engine import VLLMEngine
    from ctxwin.evals.console import OnProgress

    from .sweep import Progress, Settings

_WARM_S = 3.0
SHARE = 0.5
"""Rate of the open loop, of what the engine without the connector serves at once."""
BESIDE_RATE = 0.5
"""Turns a second of each window beside plain traffic."""
Order = dict[str, Any]
"""What a worker is to measure, see `_order`; it answers with the part of a `Slice` that it measured."""


@dataclass(frozen=True)
class PlainSettings:
    """Plain traffic.

    Attributes:
        pairs: of slices; 0: none.
        seconds: of the open loop in each slice; requests arrive evenly.
        prompt, answer: tokens of each request.
        burst: requests asked at once, for the throughput; bursts: as often in each slice, of which the median counts.
        windows: sessions beside the traffic in as many slices more; their figures are for information.
    """

    pairs: int = 6
    seconds: float = 8.0
    prompt: int = 64
    answer: int = 24
    burst: int = 32
    bursts: int = 3
    windows: int = 4

    def __post_init__(self) -> None:
        leasts = {"pairs": 0, "prompt": 2, "answer": 3, "burst": 1, "bursts": 1, "windows": 0}
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} of plain traffic must be at least {least}, got {getattr(self, name)}")
        if not self.seconds > 0:
            raise ValueError(f"seconds of plain traffic must be positive, got {self.seconds}")


class Worker:
    """One engine in a process of its own; its log goes to ``log``.

    Raises EngineFailed where it ends early, naming the log.
    """

    def __init__(self, start: Order, log: Path) -> None:
        self._log = log
        paths = [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evals.studies.serve.plain", json.dumps(start)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends by itself at the end of its input
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ready(self) -> None:
        """Waits until the engine is up."""
        self._read()

    def do(self, order: Order) -> Order:
        """Sends an order, waits for its result."""
        stdin: IO[bytes] | None = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # said below
        return self._read()

    def _read(self) -> Order:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(
                f"an engine for plain traffic ended early (exit {self._process.wait()}); see {self._log}"
            )
        found: Order = json.loads(line)
        if "error" in found:
            raise EngineFailed(f"an engine for plain traffic failed: {found['error']}; see {self._log}")
        return found


def measure_plain(
    model: str, settings: Settings, plain: PlainSettings, progress: Progress, on_progress: OnProgress
) -> None:
    """Adds the pairs that are missing to ``progress``. Cost: for each, starting two engines (half a minute) and the slices."""
    slices: list[Slice] = progress.state["slices"]
    sides = [*SIDES, *([BESIDE] if plain.windows else [])]
    known = {(s["pair"], s["side"]) for s in slices}
    missing = [p for p in range(plain.pairs) if any((p, side) not in known for side in sides)]
    for done, pair in enumerate(missing):
        on_progress(f"plain traffic: pair {pair + 1}", done, len(missing))
        with _engines(model, settings, progress.folder) as workers:
            rate = _warm(workers, plain, settings, progress)
            found = _pair(workers, pair, rate, plain, settings)
        slices[:] = [s for s in slices if s["pair"] != pair] + found  # a pair is of one time, or nothing
        progress.save()


@contextmanager
def _engines(model: str, settings: Settings, folder: Path) -> Iterator[dict[str, Worker]]:
    start = {"model": model, "processes": settings.processes, "threads": settings.threads, "seed": settings.seed}
    with ExitStack() as stack:
        workers = {
            side: stack.enter_context(Worker(start | {"connector": side == "with"}, folder / f"plain-{side}.log"))
            for side in SIDES
        }
        for worker in workers.values():
            worker.ready()
        yield workers


def _warm(workers: dict[str, Worker], plain: PlainSettings, settings: Settings, progress: Progress) -> float:
    """The rate of the open loop, behind first calls of kernels, which take seconds, on both sides."""
    burst = _order(plain, settings.clock, "warm", burst=plain.burst)
    for worker in workers.values():
        worker.do(burst)
    rate = progress.state["plain_rate"]
    if rate is None:
        found = workers["without"].do(burst)
        rate = progress.state["plain_rate"] = float(f"{SHARE * found['burst_tokens_per_s'] / plain.answer:.3g}")
    for worker in workers.values():
        worker.do(_order(plain, settings.clock, "warm", rate=rate) | {"seconds": min(_WARM_S, plain.seconds)})
    return rate


def _pair(workers: dict[str, Worker], pair: int, rate: float, plain: PlainSettings, settings: Settings) -> list[Slice]:
    order = list(SIDES) if pair % 2 else list(reversed(SIDES))
    opened = _order(plain, settings.clock, str(pair), rate=rate)
    found = {side: workers[side].do(opened) for side in order}
    bursts: dict[str, list[Order]] = {side: [] for side in SIDES}
    for number in range(plain.bursts):
        asked = _order(plain, settings.clock, f"{pair}/{number}", burst=plain.burst)
        for side in order if number % 2 else reversed(order):
            bursts[side].append(workers[side].do(asked))
    for side in SIDES:
        for name in ("burst_tokens_per_s", "cpu_s_per_token"):
            found[side][name] = statistics.median(b[name] for b in bursts[side])
    if plain.windows:
        beside = {
            "windows": plain.windows,
            "frames": settings.frames,
            "tokens": settings.tokens,
            "answer": settings.answer,
            "mode": settings.mode,
            "rank": settings.rank,
        }
        both = _order(plain, settings.clock, str(pair), rate=rate, burst=plain.burst)
        found[BESIDE] = workers["with"].do(both | {"beside": beside})
    made: list[Any] = [{"pair": pair, "side": side, "rate": rate} | row for side, row in found.items()]
    return made


def _order(plain: PlainSettings, clock: str, name: str, *, rate: float = 0.0, burst: int = 0) -> Order:
    return {
        "name": name,
        "rate": rate,
        "seconds": plain.seconds,
        "prompt": plain.prompt,
        "answer": plain.answer,
        "burst": burst,
        "clock": clock,
    }


def main() -> None:
    """A worker: an engine that serves orders, one JSON object a line, until its standard input ends."""
    start = json.loads(sys.argv[1])
    # vLLM writes to standard output, from other processes, too: results get a descriptor of their own.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(row: Order) -> None:
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
def _opened(start: Order) -> Iterator[tuple[Driver, VLLMEngine | None]]:
    """vLLM with the connector, and an engine on it; or the very same vLLM without."""
    from ctxwin.engines.torchvision_repair import repair

    repair()
    import torch

    from ctxwin.engines.vllm.core import Core
    from ctxwin.engines.vllm.engine import VLLMEngine

    if start["threads"]:
        torch.set_num_threads(start["threads"])
    if start["connector"]:
        with VLLMEngine(start["model"], processes=start["processes"]) as engine:
            yield engine.core.driver, engine
        return
    core = Core.start(start["model"], start["processes"], {}, connector=False)
    core.retain()
    try:
        yield core.driver, None
    finally:
        core.release()


class Traffic:
    """Plain text requests of random ordinary tokens; every one is another."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self._driver, self._seed = driver, seed
        self.name, self.prompt, self.answer = "", 0, 0

    def serve(self, turn: Turn, on_token: Callable[[], None]) -> Served:
        """One request, named by the turn's session."""
        from vllm.inputs.engine import tokens_input

        rng = np.random.default_rng(int(digest("plain", self._seed, self.name, turn.session)[:12], 16))
        ids = rng.integers(32, 256, self.prompt).tolist()
        return request(self._driver, dict(tokens_input(ids)), self.answer, on_token)


def _slice(traffic: Traffic, driver: Driver, engine: VLLMEngine | None, order: Order) -> Order:
    """The open loop where the order names a rate, then the burst where it names one; windows go on beside if it says so."""
    driver.reset_prefix_cache()  # the same requests on both sides, at any time
    traffic.prompt, traffic.answer = order["prompt"], order["answer"]
    found: Order = {}
    with _beside(engine, order) as asked:
        if order["rate"]:
            found |= _arriving(traffic, order)
        if order["burst"]:
            found |= _burst(traffic, order)
        found["window_asks"] = asked()
    return found | {"load": round(os.getloadavg()[0], 2)}


def _turns(count: int) -> list[Turn]:
    """As many turns, each of a session of its own."""
    return [Turn(i, 0, "now", -1, (), 0) for i in range(count)]


def _arriving(traffic: Traffic, order: Order) -> Order:
    """Evenly: of the few gaps that make a p99, chance meetings of prompts would otherwise say more than the engine."""
    traffic.name = f"{order['name']}/open"
    due = [number / order["rate"] for number in range(math.ceil(order["rate"] * order["seconds"]))]
    run = open_loop(traffic, _turns(len(due)), due, order["seconds"], clock=order["clock"])
    _raise(run.records)
    return {
        "gaps": [round(gap, 6) for r in run.records for gap in r.gaps],
        "ttfts": [round(r.ttft, 6) for r in run.records],
        "tokens": sum(len(r.token_times) for r in run.records),
        "seconds": run.seconds,
    }


def _burst(traffic: Traffic, order: Order) -> Order:
    """Processor time is the burst's alone: all is asked at once, so both sides compute the same batches."""
    traffic.name = f"{order['name']}/burst"
    run = open_loop(traffic, _turns(order["burst"]), [0.0] * order["burst"], 0.0, clock=order["clock"])
    _raise(run.records)
    tokens = sum(len(r.token_times) for r in run.records)
    return {"burst_tokens_per_s": tokens / run.seconds, "cpu_s_per_token": run.cpu_s / tokens}


def _raise(records: Sequence[Record]) -> None:
    wrong = next((r.error for r in records if r.error), None)
    if wrong is not None:
        raise RuntimeError(f"a plain request failed: {wrong}")


@contextmanager
def _beside(engine: VLLMEngine | None, order: Order) -> Iterator[Callable[[], int]]:
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
    policy = Windows(engine.view("bench-ctxwin"), film, budget, wanted["answer"], fidelity)
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
