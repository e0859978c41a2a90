"""The open loop: every turn is due at a time of its own, whether or not earlier ones are done, and waits where it must.

A session asks one thing at a time, so a turn also waits for earlier turns of its session. Latency counts from the time a turn
was due, so any queue shows.

There are two clocks. ``wall`` is what a user feels. ``cpu`` is the processor time of this process, and jumps to the next
arrival while nothing is being asked: what an otherwise idle machine with a single core would take, however busy this one is
with other things. It needs an engine in this process that computes with one thread.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .figures import Cell, quantiles
from .requests import Served
from .trace import Turn


class Clock:
    """Seconds since it was made, by the wall."""

    def __init__(self) -> None:
        self._start = self._read()

    def _read(self) -> float:
        return time.perf_counter()

    def now(self) -> float:
        return self._read() - self._start

    def wait(self, until: float, idle: Callable[[], bool]) -> None:
        """Returns at ``until``; ``idle`` says whether nothing is being served."""
        delay = until - self.now()
        if delay > 0:
            time.sleep(delay)


class CpuClock(Clock):
    """Seconds of this process's processor time, idle stretches skipped."""

    def _read(self) -> float:
        return time.process_time()

    def wait(self, until: float, idle: Callable[[], bool]) -> None:
        while (ahead := until - self.now()) > 0:
            if idle():
                self._start -= ahead
                return
            time.sleep(_POLL)


CLOCKS: dict[str, type[Clock]] = {"wall": Clock, "cpu": CpuClock}
_POLL = 0.004  # seconds of wall time; one check costs about 20 microseconds


class Serves(Protocol):
    """Whatever the turns are sent to."""

    def serve(self, turn: Turn, on_token: Callable[[], None]) -> Served: ...


@dataclass
class Record:
    """One turn. Times are seconds from the start of the run.

    Attributes:
        due: when it was meant to be asked; begun: when its session came to it.
        token_times: when each token of the answer came.
        served: None where the run was over first, or it failed.
        error: what it failed with.
    """

    turn: Turn
    due: float
    begun: float = math.inf
    token_times: list[float] = field(default_factory=list)
    served: Served | None = None
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token; infinite without one."""
        return self.token_times[0] - self.due if self.served is not None and self.token_times else math.inf

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in itertools.pairwise(self.token_times)]


@dataclass(frozen=True)
class Run:
    """One run of the open loop.

    Attributes:
        seconds: from the start to the end of arrivals, or to the last token where that is later.
        cpu_s: processor time of this process and its children meanwhile.
        load: the machine's load average (1 minute) at the start and at the end.
    """

    records: list[Record]
    seconds: float
    cpu_s: float
    load: tuple[float, float]


def open_loop(
    policy: Serves,
    turns: Sequence[Turn],
    due: Sequence[float],
    seconds: float,
    *,
    patience: float = math.inf,
    clock: str = "wall",
) -> Run:
    """Asks ``turns[i]`` at ``due[i]`` seconds.

    Args:
        due: ascending; as many as there are turns.
        seconds: for which requests arrive.
        patience: seconds behind ``seconds`` after which what has not begun is dropped.
        clock: one of `CLOCKS`.

    Turns that fail are recorded with their error; the run goes on.
    """
    if len(turns) != len(due):
        raise ValueError(f"every turn must have a time, got {len(turns)} turns and {len(due)} times")
    records = [Record(turn, at) for turn, at in zip(turns, due, strict=True)]
    sessions = sorted({turn.session for turn in turns})
    queues: dict[int, queue.SimpleQueue[Record | None]] = {s: queue.SimpleQueue() for s in sessions}
    waiting, counting = 0, threading.Lock()
    load, cpu, timer = os.getloadavg()[0], cpu_seconds(), CLOCKS[clock]()

    def session(asked: queue.SimpleQueue[Record | None]) -> None:
        nonlocal waiting
        while (record := asked.get()) is not None:
            record.begun = timer.now()
            if record.begun <= seconds + patience:
                _serve(policy, record, timer)
            with counting:
                waiting -= 1

    threads = [threading.Thread(target=session, args=(q,), name="bench-session", daemon=True) for q in queues.values()]
    for thread in threads:
        thread.start()

    def idle() -> bool:
        return not waiting

    for record in records:
        timer.wait(record.due, idle)
        with counting:
            waiting += 1
        queues[record.turn.session].put(record)
    for one in queues.values():
        one.put(None)
    for thread in threads:
        thread.join()
    last = max((r.token_times[-1] for r in records if r.token_times), default=0.0)
    return Run(records, max(seconds, last), cpu_seconds() - cpu, (load, os.getloadavg()[0]))


def _serve(policy: Serves, record: Record, timer: Clock) -> None:
    try:
        record.served = policy.serve(record.turn, lambda: record.token_times.append(timer.now()))
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"


def cpu_seconds() -> float:
    """Processor time of this process and of its living descendants so far; of those in clock ticks, usually 0.01 s."""
    import psutil  # comes with vLLM

    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += times.user + times.system
    return total


def cell_of(run: Run, policy: str, index: int, rate: float) -> Cell:
    """The figures of one run: of a policy at a rate, the ``index``-th."""
    records = run.records
    served = [r.served for r in records if r.served is not None]
    lanes: dict[str, int] = {}
    for one in served:
        for lane, tokens in one.lanes.items():
            lanes[lane] = lanes.get(lane, 0) + tokens
    kinds = sorted({r.turn.kind for r in records})
    return {
        "policy": policy,
        "index": index,
        "rate": rate,
        "requests": len(records),
        "completed": len(served),
        "dropped": sum(r.served is None and not r.error for r in records),
        "failed": sum(bool(r.error) for r in records),
        "errors": sorted({r.error for r in records if r.error})[:3],
        "seconds": run.seconds,
        "requests_per_s": len(served) / run.seconds,
        "ttft_s": quantiles([r.ttft for r in records]),
        "ttft_by_turn_s": {k: quantiles([r.ttft for r in records if r.turn.kind == k]) for k in kinds},
        "inter_token_s": quantiles([gap for r in records if r.served is not None for gap in r.gaps]),
        "wait_s": quantiles([r.begun - r.due for r in records]),
        "prompt_tokens": sum(s.prompt for s in served),
        "computed_tokens": sum(s.computed for s in served),
        "cached_tokens": sum(s.cached for s in served),
        "answer_tokens": sum(len(s.token_ids) for s in served),
        "loads": sum(s.loaded > 0 for s in served),
        "bytes_loaded": sum(s.loaded for s in served),
        "misses": sum(s.misses for s in served),
        "fallbacks": sum(s.fallbacks for s in served),
        "tokens_by_lane": lanes,
        "cpu_s_per_request": run.cpu_s / len(served) if served else None,
        "load": [round(x, 2) for x in run.load],
        "ttfts_s": [round(r.ttft, 5) if math.isfinite(r.ttft) else None for r in records],
    }
