"""Plain traffic on an engine without the connector, on one with it, and with windows beside it: in paired slices.

Two engines in processes of their own (`serve_worker`), both up all the time; one is idle while the other is measured. A pair of
slices is the same requests on both, one right behind the other, who goes first changing from pair to pair.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
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
SHARE = 0.5
"""Rate of the open loop, of what the engine without the connector serves at once."""


@dataclass(frozen=True)
class PlainSettings:
    """Plain traffic.

    Attributes:
        pairs: of slices; 0: none.
        seconds: of the open loop in each slice, behind which ``burst`` requests are asked at once, for the throughput.
        prompt, answer: tokens of each request.
        windows: sessions beside the traffic in as many slices more; their figures are for information.
    """

    pairs: int = 6
    seconds: float = 6.0
    prompt: int = 64
    answer: int = 24
    burst: int = 12
    windows: int = 4

    def __post_init__(self) -> None:
        for name, least in (("pairs", 0), ("prompt", 2), ("answer", 3), ("burst", 1), ("windows", 0)):
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
    """Adds the slices that are missing to ``progress``. Cost: starting two engines, and the slices."""
    slices: list[Row] = progress.state["slices"]
    sides = [*SIDES, *([BESIDE] if plain.windows else [])]
    missing = [
        (pair, side)
        for pair in range(plain.pairs)
        for side in (sides if pair % 2 else [*reversed(SIDES), *sides[2:]])
        if not any((s["pair"], s["side"]) == (pair, side) for s in slices)
    ]
    if not missing:
        return
    told("starting engines for plain traffic", 0, 1)
    start = {"model": model, "processes": settings.processes, "threads": settings.threads, "seed": settings.seed}
    with ExitStack() as stack:
        workers = {
            side: stack.enter_context(
                Worker(start | {"connector": side == "with"}, progress.folder / f"plain-{side}.log")
            )
            for side in SIDES
        }
        for worker in workers.values():
            worker.ready()
        beside = {
            "windows": plain.windows, "frames": settings.frames, "tokens": settings.tokens, "answer": settings.answer,
            "mode": settings.mode, "rank": settings.rank,
        }  # fmt: skip
        if "plain_rate" not in progress.state:
            for side in (*SIDES, SIDES[0]):  # first calls of kernels take seconds; the last one counts
                found = workers[side].do(_order(plain, 0.0, "warm", settings.clock))
            requests = found["burst_tokens_per_s"] / plain.answer
            progress.state["plain_rate"] = float(f"{SHARE * requests:.3g}")
        else:
            for side in SIDES:
                workers[side].do(_order(plain, 0.0, "warm", settings.clock))
        rate = progress.state["plain_rate"]
        for done, (pair, side) in enumerate(missing):
            told(f"plain traffic: pair {pair + 1}, {side}", done, len(missing))
            order = _order(plain, rate, str(pair), settings.clock) | ({"beside": beside} if side == BESIDE else {})
            found = workers["without" if side == "without" else "with"].do(order)
            slices.append({"pair": pair, "side": side, "rate": rate} | found)
            progress.save()


def _order(plain: PlainSettings, rate: float, name: str, clock: str) -> Row:
    return {
        "name": name, "rate": rate, "seconds": plain.seconds, "prompt": plain.prompt, "answer": plain.answer,
        "burst": plain.burst, "clock": clock,
    }  # fmt: skip


def figures(slices: Sequence[Row]) -> Row:
    """Figures by side over all slices, and the ratios of the pairs: with the connector over without it.

    ``ratios``: the median and quartiles of the pairs' own ratios, and of the values over all slices together (``pooled``):
    p50 and p99 between tokens, throughput when ``burst`` requests are asked at once, processor time a token (which what else
    the machine does changes least). A slice's p99 is a handful of gaps; the pooled one stands on as many as there are slices.
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
        return {"median": None, "quartiles": None, "pairs": 0}
    return {"median": statistics.median(ratios), "quartiles": quartiles(ratios), "pairs": len(ratios)}


def _over(sides: Row, value: Any) -> float | None:
    if not all(side in sides for side in SIDES):
        return None
    return float(value(sides["with"]) / value(sides["without"]))
