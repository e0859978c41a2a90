"""Plain traffic on an engine without the connector, on one with it, and with windows beside it: in paired slices.

Two engines in processes of their own (`serve_worker`), both up at once; one is idle while the other is measured. A pair of
slices is the same requests on both: an open loop each, for the time between tokens, then bursts in turn, for the throughput.
Who goes first changes from pair to pair and from burst to burst, so that what else the machine does meets both sides alike.
Every pair has engines of its own: where a process's memory happens to lie makes it faster or slower by percents for as long as
it lives, so pairs of the same two processes would agree with one another and say little about the connector.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ctxwin.errors import EngineFailed
from ctxwin.evals.bench.reuse import quartiles
from ctxwin.evals.bench.serve_load import Row, quantiles

if TYPE_CHECKING:
    from ctxwin.evals.bench.serve import Progress, Settings, Told

SIDES = ("without", "with")
BESIDE = "windows"
_WARM_S = 3.0
LEVEL = 0.95
"""Of the intervals."""
SHARE = 0.5
"""Rate of the open loop, of what the engine without the connector serves at once."""


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

    def __init__(self, start: Row, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ctxwin.evals.bench.serve_worker", json.dumps(start)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

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

    def do(self, order: Row) -> Row:
        """Sends an order, waits for its result."""
        stdin: IO[bytes] | None = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # said below
        return self._read()

    def _read(self) -> Row:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(
                f"an engine for plain traffic ended early (exit {self._process.wait()}); see {self._log}"
            )
        found: Row = json.loads(line)
        if "error" in found:
            raise EngineFailed(f"an engine for plain traffic failed: {found['error']}; see {self._log}")
        return found


def measure_plain(model: str, settings: Settings, plain: PlainSettings, progress: Progress, told: Told) -> None:
    """Adds the pairs that are missing to ``progress``. Cost: for each, starting two engines (half a minute) and the slices."""
    slices: list[Row] = progress.state["slices"]
    sides = [*SIDES, *([BESIDE] if plain.windows else [])]
    known = {(s["pair"], s["side"]) for s in slices}
    missing = [p for p in range(plain.pairs) if any((p, side) not in known for side in sides)]
    for done, pair in enumerate(missing):
        told(f"plain traffic: pair {pair + 1}", done, len(missing))
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
    if "plain_rate" not in progress.state:
        found = workers["without"].do(burst)
        progress.state["plain_rate"] = float(f"{SHARE * found['burst_tokens_per_s'] / plain.answer:.3g}")
    rate: float = progress.state["plain_rate"]
    for worker in workers.values():
        worker.do(_order(plain, settings.clock, "warm", rate=rate) | {"seconds": min(_WARM_S, plain.seconds)})
    return rate


def _pair(workers: dict[str, Worker], pair: int, rate: float, plain: PlainSettings, settings: Settings) -> list[Row]:
    order = list(SIDES) if pair % 2 else list(reversed(SIDES))
    opened = _order(plain, settings.clock, str(pair), rate=rate)
    found = {side: workers[side].do(opened) for side in order}
    bursts: dict[str, list[Row]] = {side: [] for side in SIDES}
    for number in range(plain.bursts):
        asked = _order(plain, settings.clock, f"{pair}/{number}", burst=plain.burst)
        for side in order if number % 2 else reversed(order):
            bursts[side].append(workers[side].do(asked))
    for side in SIDES:
        for name in ("burst_tokens_per_s", "cpu_s_per_token"):
            found[side][name] = statistics.median(b[name] for b in bursts[side])
    if plain.windows:
        beside = {
            "windows": plain.windows, "frames": settings.frames, "tokens": settings.tokens, "answer": settings.answer,
            "mode": settings.mode, "rank": settings.rank,
        }  # fmt: skip
        both = _order(plain, settings.clock, str(pair), rate=rate, burst=plain.burst)
        found[BESIDE] = workers["with"].do(both | {"beside": beside})
    return [{"pair": pair, "side": side, "rate": rate} | row for side, row in found.items()]


def _order(plain: PlainSettings, clock: str, name: str, *, rate: float = 0.0, burst: int = 0) -> Row:
    return {
        "name": name, "rate": rate, "seconds": plain.seconds, "prompt": plain.prompt, "answer": plain.answer,
        "burst": burst, "clock": clock,
    }  # fmt: skip


def figures(slices: Sequence[Row]) -> Row:
    """Figures by side over all slices, and the ratios of the pairs: with the connector over without it.

    ``ratios``: the median of the pairs' own ratios with its ``interval`` (see `median_interval`) and their quartiles, and the
    ratio of the values over all slices together (``pooled``): p50 and p99 between tokens, throughput when ``burst`` requests
    are asked at once, processor time a token of those, which what else the machine does changes least.
    """
    sides = {}
    for side in (*SIDES, BESIDE):
        own = [s for s in slices if s["side"] == side]
        if not own:
            continue
        sides[side] = {
            "slices": len(own),
            "inter_token_s": quantiles([gap for s in own for gap in s["gaps"]]),
            "ttft_s": quantiles([t for s in own for t in s["ttfts"]]),
            "tokens_per_s": sum(s["tokens"] for s in own) / sum(s["seconds"] for s in own),
            "burst_tokens_per_s": statistics.median(s["burst_tokens_per_s"] for s in own),
            "cpu_s_per_token": statistics.median(s["cpu_s_per_token"] for s in own),
            "window_asks": sum(s.get("window_asks", 0) for s in own),
        }
    return {
        "rate": slices[0]["rate"],
        "sides": sides,
        "ratios": {
            "inter_token_p50": _ratio(slices, lambda s: quantiles(s["gaps"])["p50"])
            | {"pooled": _over(sides, lambda side: side["inter_token_s"]["p50"])},
            "inter_token_p99": _ratio(slices, lambda s: quantiles(s["gaps"])["p99"])
            | {"pooled": _over(sides, lambda side: side["inter_token_s"]["p99"])},
            "throughput": _ratio(slices, lambda s: s["burst_tokens_per_s"])
            | {"pooled": _over(sides, lambda side: side["burst_tokens_per_s"])},
            "cpu_per_token": _ratio(slices, lambda s: s["cpu_s_per_token"])
            | {"pooled": _over(sides, lambda side: side["cpu_s_per_token"])},
        },
    }


def _ratio(slices: Sequence[Row], value: Any) -> Row:
    by = {(s["pair"], s["side"]): value(s) for s in slices}
    pairs = [p for p, side in by if side == "with" and (p, "without") in by]
    ratios = [by[p, "with"] / by[p, "without"] for p in pairs]
    if not ratios:
        return {"median": None, "interval": None, "quartiles": None, "pairs": 0}
    return {
        "median": statistics.median(ratios), "interval": median_interval(ratios), "quartiles": quartiles(ratios),
        "pairs": len(ratios),
    }  # fmt: skip


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Interval that covers the median of what independent values are drawn from with probability `LEVEL` or more.

    The k-th lowest and k-th highest value, exact whatever the distribution: the median lies beyond one of them as rarely as a
    fair coin falls fewer than k times on one of its sides. None for fewer than six values, of which not even the lowest and
    the highest are far enough apart; a bootstrap of so few would give an interval, and one that is too narrow.
    """
    n = len(values)
    k, beyond = 0, 2 * 0.5**n  # chance that the median is beyond the (k + 1)-th lowest or highest
    while beyond <= 1 - LEVEL:
        k += 1
        beyond += 2 * math.comb(n, k) * 0.5**n
    ordered = sorted(values)
    return [ordered[k - 1], ordered[n - k]] if k else None


def _over(sides: Row, value: Any) -> float | None:
    if not all(side in sides for side in SIDES):
        return None
    return float(value(sides["with"]) / value(sides["without"]))
