"""Conditioning as a switch: toggling a chunk clean and back, and telling which chunks are disposable.

Everything runs on `ctxwin.Window`, as in production, over generated contexts whose truth without a frame is known (Kamera,
appendix E, "A near-free disposability test"). The paper measures neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

from ctxwin.chunk import Chunk
from ctxwin.evals.console import Device, Dtype, Json, Model, Threads, errors, new_table, numbers, open_model
from ctxwin.evals.stats import wilson
from ctxwin.evals.tasks.tiny import SPACE
from ctxwin.fidelity import Fidelity
from ctxwin.tiny.world import Item, answer, make_item, render
from ctxwin.tiny.world import Task as WorldTask
from ctxwin.window.window import Window

from .command import SYSTEM_PROMPT, Frames, Output, Seed, SystemPrompt, run
from .isolation import isolated

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.hf.engine import HFEngine

TESTS = {
    "evict": "asked again after the eviction, survivors kept: `Window.disposable`",
    "toggle": "asked again with everything that depends on it toggled clean",
    "clean": "asked again after the eviction, dependents re-formed: `Window.disposable(clean=True)`",
}
TRUTHS = ("generator", "reprefill")
_KINDS: tuple[WorldTask, ...] = ("multi_hop", "order", "single_hop")


@dataclass(frozen=True)
class ToggleSettings:
    """What a run does.

    Attributes:
        n: contexts; each is asked about one chunk in front of the frame that holds the answer.
        frames: numbers of frames, cycled through.
    """

    n: int = 80
    frames: tuple[int, ...] = (3, 4, 5, 6)
    seed: int = 0
    system_prompt: str = SYSTEM_PROMPT

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be >= 1, got {self.n}")
        if not self.frames or not all(3 <= f <= 6 for f in self.frames):
            raise ValueError(f"frames must be numbers from 3 to 6, got {list(self.frames)}")


@dataclass(frozen=True)
class RoundTrip:
    """One chunk toggled clean and back.

    Attributes:
        lane: it is served in.
        clean_lane: whether it was served as its canonical meanwhile.
        same_lane, same_bytes: whether lane, stored record and its bytes are what they were.
        identical: whether the whole next-token distribution is, bit for bit.
        changed: whether the answer was another one meanwhile.
    """

    lane: str
    clean_lane: bool
    same_lane: bool
    same_bytes: bool
    identical: bool
    changed: bool


@dataclass(frozen=True)
class Cost:
    """What a test computed; counted by the engine, everything included."""

    asks: int = 0
    forwards: int = 0
    tokens: int = 0


@dataclass
class Judged:
    """One chunk under all tests: whether the answer stays without it, by the truths and by the tests."""

    truths: dict[str, bool] = field(default_factory=dict)
    tests: dict[str, bool] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)


def measure(
    engine: HFEngine, settings: ToggleSettings, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Toggles the asked chunk of every context and judges one chunk in front of it.

    Returns ``{"config", "tests", "toggles": {lane: figures}, "disposability": {test: {truth: confusion}}, "cost"}``; a confusion
    counts chunks as ``{"n", "kept": {"needed", "disposable"}, "dropped": {"needed", "disposable"}, ...}`` with Wilson
    intervals: verdicts by row (``dropped``: the test says disposable), the truth inside.
    """
    trips: list[RoundTrip] = []
    judged: list[Judged] = []
    for index in range(settings.n):
        item, asked, judge = draw(settings, index)
        with isolated(engine):
            made, one = _one_context(engine, settings, item, asked, judge)
        trips += made
        judged.append(one)
        on_progress(1)
    return {
        "config": {**asdict(settings), "frames": list(settings.frames)},
        "tests": TESTS,
        "toggles": {
            lane: _round_trips([t for t in trips if t.lane == lane]) for lane in sorted({t.lane for t in trips})
        },
        "disposability": {
            test: {truth: confusion([(j.tests[test], j.truths[truth]) for j in judged]) for truth in TRUTHS}
            for test in TESTS
        },
        "cost": {name: _mean_cost([j.costs[name] for j in judged]) for name in (*TESTS, "reprefill")},
    }


def draw(settings: ToggleSettings, index: int) -> tuple[Item, int, int]:
    """A context, the frame that holds the answer, and the one in front of it to judge.

    Where the answer needs context, that is as often as not the legend that decides.
    """
    rng = np.random.default_rng((SPACE, settings.seed, 0x746F6767, index))
    count = settings.frames[index // len(_KINDS) % len(settings.frames)]
    item = make_item(rng, _KINDS[index % len(_KINDS)], count)
    while not item.questions[0].frame:  # nothing stands in front
        item = make_item(rng, _KINDS[index % len(_KINDS)], count)
    question = item.questions[0]
    others = [i for i in range(question.frame) if i not in question.antecedents[-1:]]
    if question.antecedents and (not others or rng.random() < 0.5):
        return item, question.frame, question.antecedents[-1]
    return item, question.frame, others[int(rng.integers(len(others)))]


def _one_context(
    engine: HFEngine, settings: ToggleSettings, item: Item, asked: int, judge: int
) -> tuple[list[RoundTrip], Judged]:
    query = item.questions[0].text
    rest = [frame for i, frame in enumerate(item.frames) if i != judge]
    without = answer(rest, query)
    one = Judged()
    one.truths["generator"] = without == item.questions[0].answer
    chunks = [Chunk.image(render(frame), keep_source=False) for frame in item.frames]
    # An exact window evicts by prefilling again: the answer of a re-prefill with and without the chunk.
    with _placed(engine, settings, chunks, query, "exact") as window, _counted(engine, one, "reprefill", 2):
        one.truths["reprefill"] = window.disposable(window.ids[judge], query, 1).disposable
    with _placed(engine, settings, chunks, query, "patched") as window:
        with _counted(engine, one, "evict", 2):
            one.tests["evict"] = window.disposable(window.ids[judge], query, 1).disposable
        with _counted(engine, one, "clean", 2):
            one.tests["clean"] = window.disposable(window.ids[judge], query, 1, clean=True).disposable
        with _counted(engine, one, "toggle", 2):
            one.tests["toggle"] = toggled_same(window, window.ids[judge], query)
        trips = [round_trip(engine, window, window.ids[asked], query)]
        window.compress()
        trips.append(round_trip(engine, window, window.ids[asked], query))
    return trips, one


def toggled_same(window: Window, placement: str, query: str) -> bool:
    """Whether the answer stays while all that depends on a chunk is toggled clean; the window is left as it was.

    It asks whether any context in front was needed, not whether this one was: a clean view is without all of it.
    """
    dependents = window.dependents(placement)
    conditioned = [c.id for c in window.chunks if c.id in dependents and c.conditioned]
    kept = window.ask(query, 1).token_ids
    for other in conditioned:
        window.toggle(other, conditioned=False)
    clean = window.ask(query, 1).token_ids
    for other in conditioned:
        window.toggle(other, conditioned=True)
    return kept == clean


def round_trip(engine: HFEngine, window: Window, placement: str, query: str) -> RoundTrip:
    """Toggles a chunk clean and back, asking each time."""

    def look() -> tuple[str, int, list[torch.Tensor]]:
        entry = next(c for c in window.chunks if c.id == placement)
        kv = window.snapshot().find(placement).kv
        assert kv is not None
        found = engine.repo.get_span(kv.span)
        tensors = [] if found is None else [found[0].k.clone(), found[0].v.clone()]
        patch = engine.repo.get_patch(kv.patch) if kv.patch else None
        return (
            entry.lane,
            entry.bytes,
            tensors + ([] if patch is None else [t.clone() for t in patch.tensors().values()]),
        )

    first = window.ask(query, 1, logprobs=-1)
    lane, nbytes, tensors = look()
    window.toggle(placement, conditioned=False)
    meanwhile = window.ask(query, 1, logprobs=-1)
    clean_lane = look()[0]
    window.toggle(placement, conditioned=True)
    again = window.ask(query, 1, logprobs=-1)
    lane_after, nbytes_after, tensors_after = look()
    return RoundTrip(
        lane=lane,
        clean_lane=clean_lane == "canonical",
        same_lane=lane == lane_after,
        same_bytes=nbytes == nbytes_after
        and len(tensors) == len(tensors_after) > 0
        and all(torch.equal(a, b) for a, b in zip(tensors, tensors_after, strict=True)),
        identical=first.first_token_logprobs == again.first_token_logprobs,
        changed=first.token_ids != meanwhile.token_ids,
    )


@contextmanager
def _placed(
    engine: HFEngine, settings: ToggleSettings, chunks: Sequence[Chunk], query: str, mode: str
) -> Iterator[Window]:
    """A window that holds a context and has been asked once, so that every chunk is conditioned."""
    with isolated(engine), Window(engine, settings.system_prompt, fidelity=Fidelity(mode)) as window:  # type: ignore[arg-type]
        window.extend(chunks)
        window.ask(query, 1)
        yield window


@contextmanager
def _counted(engine: HFEngine, one: Judged, name: str, asks: int) -> Iterator[None]:
    counters = engine.counters
    forwards, tokens = counters.prefill_forwards, counters.prefill_tokens
    yield
    one.costs[name] = Cost(asks, counters.prefill_forwards - forwards, counters.prefill_tokens - tokens)


def confusion(pairs: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Counts and shares of (test says disposable, it is).

    ``wrongly_dropped`` is the share of needed chunks that the test would drop, ``wrongly_kept`` that of disposable ones it
    would keep; each with its Wilson interval, None where there are none.
    """

    def count(says: bool, truly: bool) -> int:
        return sum(pair == (says, truly) for pair in pairs)

    right = count(True, True) + count(False, False)
    return {
        "n": len(pairs),
        "dropped": {"disposable": count(True, True), "needed": count(True, False)},
        "kept": {"disposable": count(False, True), "needed": count(False, False)},
        "right": _share(right, len(pairs)),
        "wrongly_dropped": _share(count(True, False), count(True, False) + count(False, False)),
        "wrongly_kept": _share(count(False, True), count(True, True) + count(False, True)),
    }


def _share(part: int, whole: int) -> dict[str, Any]:
    return {"share": part / whole, "ci95": list(wilson(part, whole))} if whole else {"share": None, "ci95": None}


def _round_trips(trips: Sequence[RoundTrip]) -> dict[str, Any]:
    counted = {
        f: sum(getattr(t, f) for t in trips) for f in ("clean_lane", "same_lane", "same_bytes", "identical", "changed")
    }
    return {"n": len(trips), **counted}


def _mean_cost(costs: Sequence[Cost]) -> dict[str, float]:
    return {name: float(np.mean([getattr(c, name) for c in costs])) for name in ("asks", "forwards", "tokens")}


def toggles_tables(result: dict[str, Any]) -> list[Table]:
    """The result for a terminal."""
    columns = "lane|n|clean meanwhile|same lane|same bytes|identical logits|other answer meanwhile"
    trips = new_table("toggled clean and back (counts)", columns)
    for lane, t in result["toggles"].items():
        shown = (t[name] for name in ("n", "clean_lane", "same_lane", "same_bytes", "identical", "changed"))
        trips.add_row(lane, *(str(x) for x in shown))
    columns = "test|truth|n|right|drops needed|keeps disposable|asks|forwards|tokens"
    tests = new_table("is a chunk disposable? the test's verdict against the truth", columns, left=(0, 1))
    for test, by_truth in result["disposability"].items():
        cost = result["cost"][test]
        for truth, c in by_truth.items():
            shares = (_shown(c[name]) for name in ("right", "wrongly_dropped", "wrongly_kept"))
            tests.add_row(
                test, truth, str(c["n"]), *shares, *(f"{cost[n]:.1f}" for n in ("asks", "forwards", "tokens"))
            )
    exact = result["cost"]["reprefill"]
    tests.caption = f"re-prefill with and without: {exact['forwards']:.1f} forwards, {exact['tokens']:.0f} tokens"
    return [trips, tests]


def _shown(share: dict[str, Any]) -> str:
    if share["share"] is None:
        return "-"
    return f"{share['share']:.3f} [{share['ci95'][0]:.3f}, {share['ci95'][1]:.3f}]"


def main(
    n: Annotated[int, typer.Option(help="Contexts.", min=1)] = 80,
    frames: Frames = "3,4,5,6",
    seed: Seed = 0,
    model: Model = "tiny",
    system_prompt: SystemPrompt = SYSTEM_PROMPT,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Toggle chunks clean and back, and test which are disposable: against the truth, with the cost of each test."""
    with errors():
        settings = ToggleSettings(n, tuple(numbers(frames)), seed, system_prompt)
        engine = open_model(model, dtype, device, threads)
        run("toggles", measure, settings, engine, ("contexts", n), toggles_tables, output, as_json)


if __name__ == "__main__":
    typer.run(main)
