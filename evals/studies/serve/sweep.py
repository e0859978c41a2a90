"""Windows and users of a prefix cache under load: one trace, one vLLM, rising request rates.

Rates are served one after the other, all policies at one rate before the next, so whatever else the machine does affects all
of them. The trace continues from one rate to the next, like the sessions of a server, so no cache holds any of it beforehand.
A policy whose p95 is far beyond the bound is not driven further.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from ctxwin.evals.bench.provenance import provenance
from ctxwin.fidelity import Fidelity, Mode
from ctxwin.files import atomic_write
from ctxwin.profiles import resolve

from . import figures
from .figures import Cell, Check, Comparison, Slice, goodput
from .load import CLOCKS, Run, cell_of, open_loop
from .policies import POLICIES, Film, Policy, budget_of, make_policy
from .trace import Mix, arrivals, frames_of, trace

if TYPE_CHECKING:
    from ctxwin.engines.vllm.engine import VLLMEngine
    from ctxwin.evals.console import OnProgress

FORMAT = 2
STATE, RESULT, PICTURE = "state.json", "result.json", "ttft.png"
LADDER = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 1.9, 2.4, 3.0)
"""Rates unless given, in what the `append` policy serves when everything is asked at once."""
BURST = 2
"""Turns of every session that this capacity is measured with."""
_BURSTS = 2
BEYOND = 2.0
"""A policy is not driven further once its p95 is this many times the highest bound of interest."""


class State(TypedDict):
    """A run so far, as stored in its folder. What it holds is not measured again."""

    format: int
    settings: dict[str, Any]
    capacity: float | None
    plain_rate: float | None
    cells: list[Cell]
    slices: list[Slice]
    meta: dict[str, Any]


class Result(TypedDict):
    """What has been measured so far, as JSON.

    ``rows`` are cells without their single times, with ``goodput_per_s`` within the bound; ``ratio`` is that of ``comparison``
    at the bound; ``plain`` see `figures.plain_figures`, None where not measured.
    """

    rows: list[dict[str, Any]]
    comparison: Comparison
    ratio: float | None
    plain: dict[str, Any] | None
    checks: list[Check]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        windows: sessions on one engine.
        frames: in view.
        tokens: of a frame; 128 is the least that Qwen2-VL's own settings for video give one.
        answer: tokens of an answer.
        look_backs: share of turns that look back.
        rates: requests a second, rising; empty: by ``ladder``.
        ladder: see `LADDER`.
        duration: least seconds for which requests arrive at each rate.
        requests: least number of them that is to be expected; low rates take longer, so that their p95 means something.
        slo_s: bound on the time to the first token; None: from the prefix cache's own, see `figures`.
        policies: some of `POLICIES`.
        mode, rank: of the windows' fidelity.
        seed: of trace, arrivals and content.
        processes: see `VLLMEngine`. With few cores one process is the cheapest: a second one has nobody to run on, and every
            request would cross two pipes. A server runs ``async``.
        threads: CPU threads; 0 leaves the default.
        clock: see `load`.
    """

    windows: int = 32
    frames: int = 6
    tokens: int = 128
    answer: int = 8
    look_backs: float = 0.4
    rates: tuple[float, ...] = ()
    ladder: tuple[float, ...] = LADDER
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

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / STATE
        self.state: State = {
            "format": FORMAT,
            "settings": settings,
            "capacity": None,
            "plain_rate": None,
            "cells": [],
            "slices": [],
            "meta": {},
        }
        if not self._path.is_file():
            return
        try:
            found = json.loads(self._path.read_bytes())
            theirs, form = found["settings"], found["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path} must be the state of a run of this study; give another --out") from error
        if form != FORMAT or theirs != settings:
            differ = sorted(k for k in {*theirs, *settings} if theirs.get(k) != settings.get(k)) or ["format"]
            raise ValueError(
                f"{folder} holds a run with other settings ({', '.join(differ)}); repeat those, or give another --out"
            )
        self.state = found

    @property
    def cells(self) -> list[Cell]:
        """The cells measured so far."""
        return self.state["cells"]

    def cell(self, policy: str, index: int) -> Cell | None:
        """The cell of a policy at the ``index``-th rate, once it is measured."""
        return next((c for c in self.cells if (c["policy"], c["index"]) == (policy, index)), None)

    def save(self) -> None:
        """Writes the state so far."""
        atomic_write(self._path, json.dumps(self.state).encode() + b"\n")


class Sweep:
    """One run over all rates. The engine is opened, and a policy made ready, when something is to be measured with it."""

    def __init__(
        self, open_engine: Callable[[], VLLMEngine], settings: Settings, progress: Progress, on_progress: OnProgress
    ) -> None:
        self._open, self._settings, self._progress, self._on_progress = open_engine, settings, progress, on_progress
        self._mix = settings.mix()
        self._engine: VLLMEngine | None = None
        self._film: Film | None = None
        self._policies: dict[str, Policy] = {}
        self._at: dict[str, int] = {}
        self._done = self._total = 0

    def run(self) -> None:
        """Measures whatever is missing from the run's folder."""
        s = self._settings
        rates = self._rates()
        self._total = len(rates) * len(s.policies)
        first = 0 if s.rates else _BURSTS * BURST * s.windows
        for index, rate in enumerate(rates):
            seconds = max(s.duration, s.requests / rate)
            due = arrivals(rate, seconds, s.seed + index)
            for name in s.policies:
                if self._progress.cell(name, index) is None and not _saturated(self._progress.cells, name, s.slo_s):
                    made = self._serve(name, first, due, seconds)
                    self._progress.cells.append(cell_of(made, name, index, rate))
                    self._progress.save()
                self._done += 1
            first += len(due)

    def close(self) -> None:
        """Closes what was opened."""
        for policy in self._policies.values():
            policy.close()
        if self._film is not None:
            self._film.engine.close()
        if self._engine is not None:
            self._engine.close()

    def _rates(self) -> tuple[float, ...]:
        """The rates given, or those by what `append` serves when all turns are asked at once; measured once a run.

        Twice, of which the second counts: the first one also pays for first calls of kernels.
        """
        state = self._progress.state
        if self._settings.rates:
            return self._settings.rates
        capacity = state["capacity"]
        if capacity is None:
            turns = BURST * self._settings.windows
            for again in range(_BURSTS):
                run = self._serve("append", again * turns, [0.0] * turns, 0.0)
            capacity = state["capacity"] = cell_of(run, "append", -1, 0.0)["requests_per_s"]
            self._progress.save()
        return tuple(float(f"{capacity * share:.3g}") for share in self._settings.ladder)

    def _serve(self, name: str, first: int, due: Sequence[float], seconds: float) -> Run:
        """Serves the turns from number ``first`` on, as many as there are times, in an open loop.

        A policy that has not just served the turns in front is first made ready as it would be behind them.
        """
        s = self._settings
        engine, film = self._opened()
        turns = trace(self._mix, first + len(due), s.seed)
        self._tell(f"{name}: making frames")
        film.shoot(frames_of(turns, self._mix, s.seed))
        if name not in self._policies:
            budget = budget_of(engine, self._mix, s.tokens, s.answer)
            self._policies[name] = make_policy(name, engine, film, budget, s.answer, s.fidelity)
        policy = self._policies[name]
        if self._at.pop(name, None) != first:
            policy.begin(turns[:first], lambda session: self._tell(f"{name}: session {session} made ready"))
        self._tell(f"{name}: {len(due)} requests in {seconds:.0f} s")
        run = open_loop(policy, turns[first:], due, seconds, clock=s.clock)
        self._at[name] = first + len(due)
        return run

    def _opened(self) -> tuple[VLLMEngine, Film]:
        if self._engine is None or self._film is None:
            self._tell("starting vLLM")
            self._engine = engine = self._open()
            self._film = Film(engine.view("bench-film"), self._mix, self._settings.tokens, self._settings.seed)
            if not self._progress.state["meta"]:
                fidelity = resolve(self._settings.fidelity, engine.spec.model).model_dump(mode="json")
                date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                self._progress.state["meta"] = {"date": date, **provenance(engine), "fidelity": fidelity}
        return self._engine, self._film

    def _tell(self, what: str) -> None:
        self._on_progress(what, self._done, self._total)


def measure(
    open_engine: Callable[[], VLLMEngine], settings: Settings, progress: Progress, on_progress: OnProgress
) -> Result:
    """All policies at all rates; what ``progress`` holds is not measured again.

    Args:
        open_engine: called when something is to be measured; the engine is closed at the end.
        settings: what to measure.
        progress: where every cell goes.
        on_progress: called with what is being done, how many cells are done, and how many there are.

    Raises:
        ValueError: sizes that do not fit the model.
    """
    sweep = Sweep(open_engine, settings, progress, on_progress)
    try:
        sweep.run()
        return result_of(progress)
    finally:
        sweep.close()


def _saturated(cells: Sequence[Cell], name: str, slo_s: float | None) -> bool:
    """Whether a higher rate would say nothing more about this policy, which is far beyond every bound of interest."""
    points = figures.curves(cells).get(name)
    base = figures.base_p95(cells)
    bounds = [b for b in (slo_s, None if base is None else base * max(figures.BOUNDS)) if b is not None]
    if not points or not bounds:
        return False
    _, p95 = points[-1]
    return p95 is None or p95 > BEYOND * max(bounds)


def result_of(progress: Progress) -> Result:
    """The result of what has been measured so far."""
    state = progress.state
    compared = figures.comparisons(state["cells"], state["settings"]["slo_s"])
    slo, at_slo = compared["slo_s"], compared["at_slo"]
    rows = []
    for cell in sorted(state["cells"], key=lambda c: (c["index"], POLICIES.index(c["policy"]))):
        row = {name: value for name, value in cell.items() if name not in ("ttfts_s", "index")}
        rows.append(row | {"goodput_per_s": None if slo is None else goodput(cell, slo)})
    plain = figures.plain_figures(state["slices"]) if state["slices"] else None
    return {
        "rows": rows,
        "comparison": compared,
        "ratio": None if at_slo is None else at_slo["ratio"],
        "plain": plain,
        "checks": figures.checks(at_slo, plain),
        "meta": state["meta"] | {"settings": state["settings"], "capacity_per_s": state["capacity"]},
    }


def settings_row(settings: Settings, model: str, **more: Any) -> dict[str, Any]:
    """Settings as they are kept beside a run: what differs makes another run."""
    kept: dict[str, Any] = json.loads(json.dumps(asdict(settings) | {"model": model} | more))
    return kept
