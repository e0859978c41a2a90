"""Time to the first token of an ask after an edit: a window's, a prefix cache's, and the floor, in paired runs.

Each repetition asks for all three in turn, so that whatever else the machine does affects all of them.
Each starts as the first one did: the prefix cache is emptied and filled again by an ask before the edit, and all that an ask
would store is stored. The prefix cache's prompts are passed as token ids and ready embeddings, so their times include no
tokenising, decoding or vision encoding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ctxwin.engines.base import Engine
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.window.events import Event
from ctxwin.window.window import Window
from ctxwin_evals.bench.moves import MOVES, PATCHED, QUERY, Scene, ask, system_prompt_of
from ctxwin_evals.bench.provenance import load, provenance
from ctxwin_evals.console import OnProgress

SPEEDUP_SHARE = 0.75
"""A speedup must be at least this share of re-prefill / floor, the best that anybody could reach."""
OVER_FLOOR = 1.3
"""The longest that an ask without a forward may take, in floors."""
_PREPARING = 4
"""The cost of preparing a scene, in runs; used only to estimate the time left."""


Row = dict[str, Any]
"""One move at one size, JSON-able. Times are seconds to the first token, medians of the runs.

``speedup`` and ``over_floor`` are ratios of medians; those called paired are medians of the runs' own ratios.
``ttft_back_s`` is of the ask after the undone edit, where that is timed; ``cpu_s`` is processor time, which a busy machine
changes less, and None where the engine computes in another process. ``rank`` is 0 for moves without patches, ``prepared`` what
was formed beforehand.
"""


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        ops: names of `MOVES`.
        tokens: reused tokens, those of the system prompt and the query not counted.
        rank: of the patches of those moves that have any, quantized in the bytes of joint factors of this rank.
        runs: paired repetitions of each figure.
        seed: of the content.
    """

    ops: tuple[str, ...] = tuple(MOVES)
    tokens: tuple[int, ...] = (256, 512, 1024, 2048)
    rank: int = 16
    runs: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [op for op in self.ops if op not in MOVES]
        if unknown or not self.ops:
            raise ValueError(f"ops must be some of {', '.join(MOVES)}, got {', '.join(unknown) or 'none'}")
        if not self.tokens or min(self.tokens) < 16:
            raise ValueError(f"tokens must be numbers of at least 16, got {list(self.tokens)}")
        for name, least in (("rank", 1), ("runs", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def check(self, engine: Engine) -> None:
        """Raise ValueError where the longest prompt does not fit the engine."""
        most = max(self.tokens)
        # The slide's window holds a fifth chunk before the edit; a query, an answer and a system prompt come on top.
        needed = most + most // 4 + 64
        if needed > engine.spec.max_tokens:
            raise ValueError(
                f"tokens must leave room in the {engine.spec.max_tokens} that the model takes, got {most}, which needs {needed}"
            )


class Plain(NamedTuple):
    """Seconds to the first token of one prompt: with what the prefix cache held of it before the edit, and held as a whole.

    ``prefix_hit`` and ``local_hit`` are the prompt tokens that the cache had; ``..._cpu_s`` seconds of all of this process's
    threads on a CPU.
    """

    prefix_cache_s: float
    local_hit_s: float
    prefix_hit: int
    local_hit: int
    prefix_cpu_s: float = 0.0
    local_cpu_s: float = 0.0


class Run(NamedTuple):
    """One repetition of one move: seconds to the first token of the window's ask, and the prefix cache's side.

    ``engine_s`` is what the engine took from being called (the rest is the window's own work), ``back_s`` the first token of
    the ask after the undone edit, ``cpu_s`` seconds of all of this process's threads on a CPU during the whole ask.
    """

    ttft_s: float
    engine_s: float
    plain: Plain
    back_s: float | None = None
    cpu_s: float = 0.0


class Clocked:
    """An engine that remembers what its last answer took, and whose prefix cache can be emptied.

    A second run of the same edit would find the blocks of the first one in it, and measure nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last: Generation | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def local(self) -> bool:
        """True if the engine computes in this process."""
        return self.engine.spec.name != "vllm" or bool(self.core.driver.local)

    def fresh(self) -> None:
        """Empty the prefix cache, where the engine has one."""
        if self.engine.spec.name == "vllm":
            self.core.driver.reset_prefix_cache()

    def generate(self, *args: Any, **options: Any) -> Generation:
        """Generate as the engine does; the result is remembered."""
        self.last = self.engine.generate(*args, **options)
        return self.last


def measure(engine: Engine, settings: Settings, on_progress: OnProgress = lambda *_: None) -> dict[str, Any]:
    """All moves at all sizes.

    Args:
        engine: an open engine; its store takes the windows' KV.
        settings: what to measure.
        on_progress: called with what is being done, how much of it is done, and how much there is, in reused tokens.

    Returns:
        All rows and checks, JSON-able. Cost: two or three prefills of every prompt a run, and what `moves` prepares.

    Raises:
        ValueError: sizes that do not fit the engine, or a rank at which patches outweigh the KV they stand for.
    """
    settings.check(engine)
    load_before = load()
    clocked = Clocked(engine)
    cells = [(op, tokens) for tokens in sorted(settings.tokens) for op in settings.ops]
    done, total = 0, sum(tokens for _, tokens in cells) * (_PREPARING + settings.runs)
    rows: list[Row] = []
    for i, (op, tokens) in enumerate(cells):
        on_progress(f"{op} {tokens}: preparing", done, total)
        fidelity = Fidelity("patched", rank=settings.rank, orbit=True)
        counted, began = (engine.counters.prefill_forwards, engine.counters.prefill_tokens), time.perf_counter()
        # Content of its own for every cell: nothing is resident because an earlier cell had it.
        scene = MOVES[op](clocked, tokens, fidelity, settings.seed * 1000 + i)  # type: ignore[arg-type]  # by its methods
        prepared = {
            "forwards": engine.counters.prefill_forwards - counted[0],
            "tokens": engine.counters.prefill_tokens - counted[1],
            "seconds": round(time.perf_counter() - began, 3),
        }
        done += _PREPARING * tokens
        with scene.window:
            if i == 0:
                _repeat(clocked, scene, f"{settings.seed}/warm", 0)  # first calls of kernels take seconds
            _time_edit(clocked, scene)  # reads what is stored
            runs = []
            for run in range(settings.runs):
                on_progress(f"{op} {tokens}: run {run + 1}", done, total)
                run_times, event = _repeat(clocked, scene, f"{settings.seed}/{op}/{tokens}/{run}", run)
                runs.append(run_times)
                done += tokens
        assert event.answer is not None and event.lanes is not None
        usage, times = event.answer.usage, summary(runs, clocked.local)
        sizes = {p.id: p.tokens for p in event.state.placed}
        lanes: Counter[str] = Counter()
        for placement, lane in event.lanes.items():
            lanes[lane] += sizes[placement]
        rows.append(
            {
                "op": op,
                "tokens": tokens,
                "rank": settings.rank if op in PATCHED else 0,
                **times,
                "forward_free": usage.computed_tokens <= engine.encode_query(QUERY).tokens,
                "computed_tokens": usage.computed_tokens,
                "cached_tokens": usage.cached_tokens,
                "floor_computed_tokens": usage.prompt_tokens - times["local_hit_tokens"],
                "bytes_loaded": usage.bytes_loaded,
                "lanes": dict(lanes),
                "chunks": [
                    {"chunk": scene.names[i], "tokens": sizes[i], "lane": lane} for i, lane in event.lanes.items()
                ],
                "prepared": prepared,
            }
        )
        _check_patches(rows[-1])
    facts = provenance(engine)
    machine = facts["machine"]
    machine |= {"load_before": load_before, "load_after": machine.pop("load")}
    return {
        "rows": rows,
        "checks": checks(rows),
        "meta": {
            "engine": engine.spec.name,
            **facts,
            "settings": asdict(settings) | {"ops": list(settings.ops), "tokens": list(settings.tokens)},
            "query_tokens": engine.encode_query(QUERY).tokens,
            "system_prompt_tokens": engine.encode_system_prompt(system_prompt_of(engine)).tokens,
        },
    }


def _repeat(clocked: Clocked, scene: Scene, name: str, number: int) -> tuple[Run, Event]:
    """One repetition; who goes first changes from one to the next."""
    plain = _plain(clocked, scene, name) if number % 2 else None
    ours, event = _time_edit(clocked, scene)
    return Run(plain=plain or _plain(clocked, scene, name), **ours), event


def _time_edit(clocked: Clocked, scene: Scene) -> tuple[dict[str, Any], Event]:
    """The window's side of one repetition: an ask before the edit, the edit, and the ask that counts."""
    events: list[Event] = []
    back = None
    clocked.fresh()
    with scene.window.fork() as branch:
        ask(branch)
        scene.edit(branch)
        stop = branch.observe(events.append)
        cpu = time.process_time()
        ttft, engine = _first_token(clocked, branch)
        cpu = time.process_time() - cpu
        stop()
        if scene.back is not None:
            scene.back(branch)
            back, _ = _first_token(clocked, branch)
    ask_event = next(event for event in events if event.op == "ask")
    return {"ttft_s": ttft, "engine_s": engine, "cpu_s": cpu, "back_s": back}, ask_event


def _first_token(clocked: Clocked, window: Window) -> tuple[float, float]:
    """Seconds to the first token, and how many of them the engine took."""
    answer = window.ask(QUERY, max_tokens=1)
    assert clocked.last is not None
    return answer.usage.ttft_s, clocked.last.ttft_s


def _plain(clocked: Clocked, scene: Scene, name: str) -> Plain:
    """The prefix cache's side of it: an ask of the prompt before the edit, and two of the one after it."""
    clocked.fresh()
    system_prompt = clocked.encode_system_prompt(scene.window.system_prompt)
    with scene.window.fork() as branch:
        chunks = {i: branch.chunk(i) for i in scene.names}
        cached_chunks = [clocked.encode(chunks[i]) for i in scene.cached]
        scene.edit(branch)
        after = [clocked.encode(chunks[i]) for i in branch.ids]
    query = clocked.encode_query(QUERY)
    return ask_plainly(clocked.engine, [system_prompt, *cached_chunks], [system_prompt, *after], query, name)


def ask_plainly(
    engine: Engine, previous: Sequence[Encoded], after: Sequence[Encoded], query: Encoded, run: str
) -> Plain:
    """Ask ``query`` after ``previous`` (not timed), then twice after ``after``, as a user of a prefix cache does.

    On vLLM that is its own prefix cache, in a space of its own for each repetition, which ``run`` names; no KV is loaded or
    captured. For an engine without a prefix cache, the KV of the common front stays where it was computed.
    """
    segments = _lay_out(after)
    if engine.spec.name == "vllm":
        salt = digest("plain", run)
        _time_plainly(engine, _lay_out(previous), query, salt)
        first, first_cpu = _time_plainly(engine, segments, query, salt)
        repeat, repeat_cpu = _time_plainly(engine, segments, query, salt)
        return Plain(first.ttft_s, repeat.ttft_s, first.cached_tokens, repeat.cached_tokens, first_cpu, repeat_cpu)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(previous, after, strict=False)))
    front, whole = _capture(engine, segments[:same], query), _capture(engine, segments, query)
    first, first_cpu = _time_plainly(engine, [*front, *segments[same:]], query, "")
    repeat, repeat_cpu = _time_plainly(engine, whole, query, "")
    hits = sum(part.tokens for part in after[:same]), sum(part.tokens for part in after)
    return Plain(first.ttft_s, repeat.ttft_s, *hits, first_cpu, repeat_cpu)


def _lay_out(encoded: Sequence[Encoded]) -> list[Segment]:
    """Return consecutive segments from position 0, without KV."""
    segments, at = [], 0
    for part in encoded:
        segments.append(Segment(part, at))
        at += part.advance
    return segments


def _capture(engine: Engine, segments: Sequence[Segment], query: Encoded) -> list[Segment]:
    """Return ``segments`` with the KV of one forward over them."""
    if not segments:
        return []
    captures = [replace(segment, capture=True) for segment in segments]
    captured = engine.generate(captures, query, Sampling(max_tokens=1)).captured
    return [replace(segment, span=captured[i]) for i, segment in enumerate(segments)]


def _time_plainly(engine: Engine, segments: Sequence[Segment], query: Encoded, salt: str) -> tuple[Generation, float]:
    """The answer, and the CPU seconds it took."""
    began = time.process_time()
    generation = engine.generate(segments, query, Sampling(max_tokens=1), salt=salt)
    return generation, time.process_time() - began


def summary(runs: Sequence[Run], local: bool = True) -> Row:
    """The figures of one cell's runs; ``local``: whether the engine computes in this process."""
    ours = [r.ttft_s for r in runs]
    cache, floor = [r.plain.prefix_cache_s for r in runs], [r.plain.local_hit_s for r in runs]
    speedups = [c / o for c, o in zip(cache, ours, strict=True)]
    over = [o / f for o, f in zip(ours, floor, strict=True)]
    ttft, prefix, hit = median(ours), median(cache), median(floor)
    by_name = {"ttft_s": ours, "ttft_prefix_cache_s": cache, "ttft_local_hit_s": floor}
    by_name |= {"speedup": speedups, "over_floor": over}
    return {
        "ttft_s": ttft,
        "ttft_prefix_cache_s": prefix,
        "ttft_local_hit_s": hit,
        "speedup": prefix / ttft,
        "over_floor": ttft / hit,
        "speedup_paired": median(speedups),
        "over_floor_paired": median(over),
        "ttft_back_s": _median([r.back_s for r in runs if r.back_s is not None]),
        "phases_s": {"window": median(r.ttft_s - r.engine_s for r in runs), "engine": median(r.engine_s for r in runs)},
        "quartiles": {name: quartiles(some) for name, some in by_name.items()},
        "cpu_s": _cpu_seconds(runs) if local else None,
        "runs": len(runs),
        "prefix_hit_tokens": runs[-1].plain.prefix_hit,
        "local_hit_tokens": runs[-1].plain.local_hit,
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper quartile; of a single value, that value twice."""
    bounds: list[float] = np.quantile(values, (0.25, 0.75)).tolist()
    return bounds


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _cpu_seconds(runs: Sequence[Run]) -> dict[str, float | None]:
    return {
        "ask": median(r.cpu_s for r in runs),
        "prefix_cache": median(r.plain.prefix_cpu_s for r in runs),
        "local_hit": median(r.plain.local_cpu_s for r in runs),
        "over_floor_paired": _median([r.cpu_s / r.plain.local_cpu_s for r in runs if r.plain.local_cpu_s]),
    }


def _check_patches(row: Row) -> None:
    if row["op"] in PATCHED and not {"patched", "orbit"} & set(row["lanes"]):
        raise ValueError(
            f"rank must be so small that a patch weighs less than the KV it stands for, got {row['rank']} for "
            f"{row['op']} at {row['tokens']} tokens (lanes {row['lanes']}); lower the rank or raise the tokens"
        )


def checks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the checks of every move at its largest size.

    ``speedup``: at least `SPEEDUP_SHARE` of re-prefill / floor, the most that can be had; re-prefill is the ask after the edit
    with a prefix cache. ``over_floor``: at most `OVER_FLOOR` floors; only for what is served without a forward.
    """
    most = max((row["tokens"] for row in rows), default=0)
    results: list[dict[str, Any]] = []

    def check(name: str, row: Row, bound: float, holds: bool) -> None:
        same = {"check": name, "op": row["op"], "tokens": row["tokens"], "value": row[name]}
        results.append(same | {"bound": bound, "holds": holds})

    for row in (r for r in rows if r["tokens"] == most):
        bound = SPEEDUP_SHARE * row["ttft_prefix_cache_s"] / row["ttft_local_hit_s"]
        check("speedup", row, bound, row["speedup"] >= bound)
        if row["forward_free"]:
            check("over_floor", row, OVER_FLOOR, row["over_floor"] <= OVER_FLOOR)
    return results
