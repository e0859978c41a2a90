"""Time to the first token of an ask after an edit: a window's, four users' of a prefix cache, and the floor.

Each repetition asks for all of them, in an order drawn anew, so that whatever else the machine does affects all alike. Each
starts as the first did: the prefix cache is emptied and filled again by an ask before the edit, and all that an ask would store
is stored, or the content is new. Prompts of others are token ids and ready embeddings.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.progress import OnProgress
from ctxwin.window.events import Event
from ctxwin.window.window import Window
from ctxwin_evals.bench.moves import ARMS, COMPUTED, MOVES, PATCHED, QUERY, Scene, ask, system_prompt_of
from ctxwin_evals.bench.peers import Peer
from ctxwin_evals.bench.provenance import load, provenance
from ctxwin_evals.stats import bootstrap_median

BOUNDS = dict.fromkeys(("slide", "recall", "fork", "toggle"), ("floor", 1.1))
BOUNDS |= {"steady": ("floor", 1.03), "reorder": ("floor", 1.15), "oldest": ("append", 1.0)}
"""The most that a window's ask may take, in times of another's."""
Row = dict[str, Any]
"""One move at one size, JSON-able.

``arms`` has the window (``ctxwin``), `ARMS` and peers. Of each: ``ttft_s``, seconds to the first token; ``ratio``, the window's
in times of it, run by run; ``computed_tokens``, the query's too; ``cpu_s`` and ``cpu_ratio`` by processor time, which other work
changes less, None where the engine computes in another process. They are medians with intervals of 95 % (None for one run); a
move of several asks counts their mean. ``cleverest`` is the fastest user of the prefix cache, ``untouched`` the tokens
in blocks that the last edit left as they stood.
"""


@dataclass(frozen=True)
class Settings:
    """Names of `MOVES`, reused tokens (system prompt and query apart), and the rank in whose bytes patches are quantized."""

    ops: tuple[str, ...] = tuple(MOVES)
    tokens: tuple[int, ...] = (512, 2048, 4096)
    rank: int = 16
    runs: int = 7
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

    def check(self, room: int) -> None:
        """Raise ValueError where the longest prompt does not fit in the ``room`` of a model, in tokens."""
        needed = 2 * max(self.tokens) + 64  # who appends holds twice the window
        if needed > room:
            raise ValueError(f"tokens must leave room in the {room} of the model, got {max(self.tokens)}: {needed}")


class Sample(NamedTuple):
    """One repetition of one arm: seconds to the first token, tokens computed, and seconds of this process's threads on a CPU."""

    ttft_s: float
    computed: float
    cpu_s: float


def measure(
    engine: Engine,
    settings: Settings,
    on_progress: OnProgress = lambda *_: None,
    peers: Mapping[str, Peer] | None = None,
) -> dict[str, Any]:
    """All moves at all sizes: rows, and their checks, JSON-able. ``peers`` are asked for the same, by name.

    Raises ValueError for sizes that do not fit the engine, or a rank at which patches outweigh the KV they stand for.
    Cost: two to eight prefills of every prompt a run, and what `moves` prepares.
    """
    settings.check(engine.spec.max_tokens)
    load_before = load()
    bench = _Bench(engine, peers or {})
    cells = [(op, tokens) for tokens in sorted(settings.tokens) for op in settings.ops]
    done, total = 0, sum(tokens for _, tokens in cells) * (1 + settings.runs)
    rows: list[Row] = []
    for i, (op, tokens) in enumerate(cells):
        on_progress(f"{op} of {tokens} tokens, preparing; tokens in all", done, total)
        counters, start = engine.counters, replace(engine.counters)
        # Content of its own for every cell: nothing is resident because an earlier cell had it.
        seed, fidelity = settings.seed * 1000 + i, Fidelity("patched", rank=settings.rank, orbit=True)
        scene = MOVES[op](engine, tokens, fidelity, seed)
        names = ("prefill_forwards", "prefill_tokens")
        prepared = {name: getattr(counters, name) - getattr(start, name) for name in names}
        done += tokens
        # First calls of kernels take seconds; what is stored is read.
        bench.repeat(scene, f"{settings.seed}/warm/{i}") if i == 0 else bench.time_edits(scene)
        runs = []
        for run in range(settings.runs):
            on_progress(f"{op} of {tokens} tokens, run {run + 1}; tokens in all", done, total)
            if op in COMPUTED:
                scene.window.close()
                scene = MOVES[op](engine, tokens, fidelity, seed + 10**6 * (run + 1))
            runs.append(bench.repeat(scene, f"{settings.seed}/{op}/{tokens}/{run}"))
            done += tokens
        scene.window.close()
        row = {"op": op, "tokens": tokens, "rank": settings.rank if op in PATCHED else 0, **summary(runs, bench.local)}
        rows.append(row | _lanes_of(bench.event) | {"prepared": prepared})
        if op in PATCHED and not {"patched", "orbit"} & set(rows[-1]["lanes"]):
            raise ValueError(
                f"rank must be so small that a patch weighs less than the KV it stands for, got {settings.rank} for {op} at "
                f"{tokens} tokens; lower the rank or raise the tokens"
            )
    facts = provenance(engine)
    facts["machine"]["load_before"] = load_before
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


class _Bench:
    """An engine whose prefix cache can be emptied, so that no run finds the blocks of another, and its peers.

    Attributes:
        event: of the window's ask that was timed last.
        local: whether the engine computes in this process.
    """

    event: Event

    def __init__(self, engine: Engine, peers: Mapping[str, Peer]) -> None:
        self.engine, self.peers, self.paged = engine, peers, engine.spec.name == "vllm"
        driver = engine.core.driver if self.paged else None  # type: ignore[attr-defined]  # the engine's on vLLM
        self.local, self._empty = driver is None or bool(driver.local), driver and driver.reset_prefix_cache

    def fresh(self) -> None:
        """Empty the prefix cache, where the engine has one."""
        self._asked = set[str]()  # salts of prompts that it holds
        if self._empty:
            self._empty()

    def repeat(self, scene: Scene, name: str) -> dict[str, Sample]:
        """Return one repetition of all arms. Those with the same prompts are asked once."""
        query, first = self.engine.encode_query(QUERY), dict[tuple[str, ...], str]()
        system_prompt = self.engine.encode_system_prompt(scene.window.system_prompt)
        chunks = {label: self.engine.encode(chunk) for label, chunk in scene.chunks.items()}
        prompts = {
            arm: [[system_prompt, *(chunks[label] for label in prompt.split())] for prompt in scene.prompts[arm]]
            for arm in ARMS
        }
        for arm in ARMS:
            first.setdefault(scene.prompts[arm], arm)
        samples = dict[str, Sample]()
        order = ["ctxwin", *first.values(), *self.peers]
        Random(name).shuffle(order)
        self.fresh()
        for arm in order:
            if arm == "ctxwin":
                samples[arm] = self.time_edits(scene)
            elif arm in self.peers:
                samples[arm] = Sample(*self.peers[arm].time_prompts(prompts["prefix"], query, digest(name, arm)))
            else:  # what was asked before is asked once for all of one ask, whose prompts have nothing more in common
                labels = scene.prompts[arm]
                samples[arm] = self.time_prompts(prompts[arm], query, digest(name, labels[0], labels[2:] and arm))
        names = ("ctxwin", *ARMS, *self.peers)
        return {name: samples[first.get(scene.prompts.get(name, ()), name)] for name in names}

    def time_edits(self, scene: Scene) -> Sample:
        """The window's side of one repetition: an ask before the edits, and each edit with the ask that counts."""
        events, samples = list[Event](), list[Sample]()
        self.fresh()
        with ExitStack() as stack:
            branch = stack.enter_context(scene.window.fork())
            ask(branch)
            for edit in scene.edits:
                edited = edit(branch)
                subject = stack.enter_context(edited) if isinstance(edited, Window) else branch
                stop, cpu = subject.observe(events.append), time.process_time()
                usage = subject.ask(QUERY, max_tokens=1).usage
                samples.append(Sample(usage.ttft_s, usage.computed_tokens, time.process_time() - cpu))
                stop()
        self.event = next(event for event in reversed(events) if event.op == "ask")
        return _mean(samples)

    def time_prompts(self, prompts: Sequence[Sequence[Encoded]], query: Encoded, salt: str) -> Sample:
        """Ask ``query`` after each prompt, as a user of a prefix cache does; the first is not timed.

        On vLLM that is its own prefix cache, in a space of its own, which ``salt`` names; no KV is loaded or captured. For an
        engine without a prefix cache, the KV of the longest front that an earlier prompt had stays where it was computed.
        """
        layouts, samples = [_lay_out(prompt) for prompt in prompts], list[Sample]()
        if self.paged and salt not in self._asked:
            self.engine.generate(layouts[0], query, Sampling(max_tokens=1), salt=salt)
            self._asked.add(salt)
        for i, layout in enumerate(layouts[1:], 1):
            if not self.paged:
                pairs = (zip(layout, earlier, strict=False) for earlier in layouts[:i])
                same = max(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both)) for both in pairs)
                layout = [*_capture(self.engine, layout[:same], query), *layout[same:]]
            cpu = time.process_time()
            generation = self.engine.generate(layout, query, Sampling(max_tokens=1), salt=salt if self.paged else "")
            samples.append(Sample(generation.ttft_s, generation.computed_tokens, time.process_time() - cpu))
        return _mean(samples)


def _mean(samples: Sequence[Sample]) -> Sample:
    return Sample(*(fmean(values) for values in zip(*samples, strict=True)))


def _lay_out(encoded: Sequence[Encoded]) -> list[Segment]:
    """Return consecutive segments from position 0, without KV."""
    segments, at = [], 0
    for part in encoded:
        segments.append(Segment(part, at))
        at += part.advance
    return segments


def _capture(engine: Engine, segments: Sequence[Segment], query: Encoded) -> list[Segment]:
    """Return ``segments`` with the KV of one forward over them."""
    captures = [replace(segment, capture=True) for segment in segments]
    captured = engine.generate(captures, query, Sampling(max_tokens=1)).captured
    return [replace(segment, span=captured[i]) for i, segment in enumerate(segments)]


def _lanes_of(event: Event) -> Row:
    """How the ask that was timed last was served."""
    assert event.answer is not None and event.lanes is not None
    entries, lanes = {p.id: p for p in event.state.placed}, Counter[str]()
    chunks = []
    for placement, lane in event.lanes.items():
        entry = entries[placement]
        lanes[lane] += entry.tokens
        chunks.append({"chunk": entry.chunk.label, "tokens": entry.tokens, "lane": lane})
    usage, fields = event.answer.usage, {"lanes": dict(lanes), "chunks": chunks}
    return {"bytes_loaded": usage.bytes_loaded, "untouched": usage.cached_tokens, **fields}


def summary(runs: Sequence[Mapping[str, Sample]], local: bool = True) -> Row:
    """The figures of one cell's runs; ``local``: whether the engine computes in this process."""
    ours, arms = [run["ctxwin"] for run in runs], dict[str, Any]()
    for name in runs[0]:
        theirs = [run[name] for run in runs]
        here = local and all(sample.cpu_s > 0 for sample in theirs)  # a peer computes in another process
        pairs = list(zip(ours, theirs, strict=True))
        arms[name] = {
            "ttft_s": _figure([t.ttft_s for t in theirs]),
            "ratio": _figure([o.ttft_s / t.ttft_s for o, t in pairs]),
            "computed_tokens": theirs[-1].computed,
            "cpu_s": median(t.cpu_s for t in theirs) if here else None,
            "cpu_ratio": _figure([o.cpu_s / t.cpu_s for o, t in pairs]) if here else None,
        }
    cleverest = min(ARMS[1:], key=lambda name: arms[name]["ttft_s"]["median"])
    return {"runs": len(runs), "arms": arms, "cleverest": cleverest}


def _figure(values: Sequence[float]) -> dict[str, Any]:
    interval = bootstrap_median(values)
    return {"median": median(values), "interval": interval and list(interval)}


def checks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return ratios beside their `BOUNDS`; the ``verdict`` is ``open`` where the interval has the bound within it."""
    results = []
    for row in (row for row in rows if row["op"] in BOUNDS):
        against, bound = BOUNDS[row["op"]]
        ratio = row["arms"][against]["ratio"]
        low, high = ratio["interval"] or (0.0, float("inf"))
        verdict = "holds" if high <= bound else "exceeded" if low > bound else "open"
        same = {"op": row["op"], "tokens": row["tokens"], "against": against, "bound": bound}
        results.append(same | ratio | {"verdict": verdict})
    return results
