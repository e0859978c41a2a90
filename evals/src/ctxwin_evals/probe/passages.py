"""Strategies judged on passages of text before any window serves, by the measure and the bounds of audits.

A passage is a stream along which a window of `PLACED` chunks has slid once, and the text that follows. A strategy serves the
placed chunks, and the model reads the text as it stands, and a question where the passage has one. `ctxwin.audit.replay`
compares that with what exact serving gives, `ctxwin.audit.harm` says what is lost. A passage is a unit of evidence; none overlap.

**The first passages choose** (`CHOOSING`): they measure the floor of exact answers on this engine, what text owes to its
context, the smallest patches that seem to be enough, and whether survivors do or need removal patches.

**The others prove**, one after the other: patches, survivors, blind reuse. A strategy is safe once its mean harm, and that of
each in front of it, was shown to be within the budgets (`ctxwin.audit.confidence`). Where survivors cannot be shown so, their
removal patches are tried, at `FALLBACK` of the error; survivors and blind reuse then have the rest, every other test all of it.
Something not safe is called so only if the first one in this order that is not passes its test, or the fallback does: with a
chance of at most 1 - ``level``.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ctxwin.audit.confidence import ChangeDetector, is_below, units_like
from ctxwin.audit.harm import CAP, FLOOR_UNITS, Floor, Harm, Kind, Part, share_of
from ctxwin.audit.options import Options
from ctxwin.audit.record import Tally
from ctxwin.audit.replay import Exchange, Layouts, References, Replay
from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.segments import Segment
from ctxwin.fidelity import Fidelity
from ctxwin.kv.deficit import deficit
from ctxwin.profiles import compress_deficit
from ctxwin_evals.decoder import Reader
from ctxwin_evals.items import Item
from ctxwin_evals.patching import Patcher
from ctxwin_evals.serving import ServedGroup

PLACED = 4
"""Chunks of a window."""
NEXT = 32
"""Tokens of the following text that are scored, after the first, which is read."""
CHOOSING = FLOOR_UNITS
"""Passages that choose what the others prove."""
SHARES = (0.06, 0.12, 0.24, 0.48)
"""Bytes of patches that are tried, as parts of their chunks'."""
HOPEFUL = 0.6
"""Part of a budget that a strategy may take on the passages that choose, so that about two hundred others can prove it."""
LOST = 0.05
"""Largest part of what text owes to its context that the budget may be: a model that reads nothing loses nothing."""
FALLBACK = 0.2
"""Part of the error that may be made about removal patches where survivors were not shown to be safe without."""
_SEEN, _PLACED = tuple(range(PLACED + 1)), tuple(range(1, PLACED + 1))
_CHOOSING_TIME = 0.4
_NO_FLOOR = Floor()


@dataclass(frozen=True)
class Passage:
    """A stream of `PLACED` + 1 chunks, the 1 + `NEXT` tokens that follow, and a question about its end ("": none)."""

    chunks: tuple[Chunk, ...]
    following: tuple[int, ...]
    question: str = ""


@dataclass(frozen=True)
class Unit:
    """Measurements on one passage.

    Attributes:
        harms: by strategy, of each exchange; of text nats a token, from which no floor is subtracted.
        distances: how far exact answers are apart by part of the floor, see `References.distance`.
        owed: nats a token that the text loses behind another passage's chunks.
    """

    harms: Mapping[str, tuple[Harm, ...]]
    distances: Mapping[Part, tuple[float, bool | None]] = field(default_factory=dict)
    owed: float = 0.0


class PassageReplays:
    """Passages served by an engine with any strategy: ``survivor``, ``blind``, ``patched:SHARE`` and ``removal:SHARE`` of bytes.

    Args:
        engine: the model as it serves.
        passages: the units, in the order of their numbers.
        system_prompt: of all windows.
        max_tokens: longest answer to a question.
    """

    def __init__(self, engine: Engine, passages: Sequence[Passage], system_prompt: str, max_tokens: int = 8) -> None:
        self._engine, self._passages = engine, passages
        self._system_prompt, self._max_tokens = system_prompt, max_tokens
        self._replay, self._reader = Replay(engine, lambda: False), Reader(engine)

    def _group(self, index: int) -> ServedGroup:
        """Return a passage's chunks as a window that has slid once, whose KV is computed where it is needed."""
        chunks, name = self._passages[index % len(self._passages)].chunks, str(index)
        item = Item(
            "probe/texts", index, lambda: chunks, len(chunks), _PLACED, "", None, name, name, name, before=_SEEN,
            meta={"stream_window": PLACED},
        )  # fmt: skip
        reader: Any = self._reader
        return ServedGroup(reader, [item], Patcher(reader.spec), self._system_prompt)

    def measure(self, index: int, strategies: Sequence[str], exactness: bool = False) -> Unit:
        """Measure strategies on a passage; ``exactness``: also the distances of exact answers and what the text owes.

        Cost: forwards over five chunks in pieces and, for patches and blind reuse, over three of them again.
        """
        passage, group = self._passages[index], self._group(index)
        exact, bare = group.segments(0, _PLACED, list(group.exact[0])), group.segments(0, _PLACED, None)
        first = self._engine.encode(Chunk.tokens(passage.following[:1]))
        exchanges = [Exchange("", passage.following[1:], False, NEXT, greedy=False, raw=first)]
        if passage.question:
            exchanges.append(self._replay.answer(exact, passage.question, self._max_tokens))
        layouts: Layouts = {
            "placed": lambda: exact, "cut": lambda: bare, "stream": lambda: group.segments(0, _SEEN, None),
        }  # fmt: skip
        references = [
            References(self._replay, exchange, layouts, {"placed": rows}, own=True)
            for exchange, rows in zip(exchanges, self._replay.score(exact, exchanges), strict=True)
        ]
        harms: dict[str, tuple[Harm, ...]] = {}
        for strategy in strategies:
            segments = self._serve(group, exact, strategy)
            scores = zip(references, self._replay.score(segments, exchanges), strict=True)
            reference: Literal["stricter", "window"] = "stricter" if strategy == "survivor" else "window"
            harms[strategy] = tuple(
                one.compare(rows, reference, _NO_FLOOR, partial(one.value_over, segments)).harm for one, rows in scores
            )
        if not exactness:
            return Unit(harms)
        parts: tuple[tuple[Part, str], ...] = (("cut", "cut"), ("references", "stream"))
        distances = {part: d for part, name in parts if (d := references[0].distance(name)) is not None}
        elsewhere = self._group(index + 1).segments(0, _PLACED, None)
        owed = references[0].divergence(self._replay.score(elsewhere, exchanges[:1])[0])
        return Unit(harms, distances, 0.0 if owed is None else owed.nats)

    def _serve(self, group: ServedGroup, exact: Sequence[Segment], strategy: str) -> list[Segment]:
        """Return the layout of a strategy: survivors, or canonicals behind the first chunk, which is exact."""
        name, _, share = strategy.partition(":")
        slid, spec = name in ("survivor", "removal"), self._engine.spec
        segments = group.segments(0, _PLACED, group.survivors[0] if slid else group.canonical[0])
        if not slid:
            segments[1] = exact[1]
        fidelity = Fidelity("patched", bytes_share=float(share or 1))
        for i in range(1 if slid else 2, len(segments)):
            segment, true = replace(segments[i], approximate=True), exact[i].span
            if share and true is not None and segment.span is not None:
                lost = deficit(true, segment.span, spec.kv)
                segment = replace(segment, patch=compress_deficit(lost, spec.model, spec.kv, fidelity))
            segments[i] = segment
        return segments


class OrderedTests:
    """Tests of strategies in a fixed order, with a ``fallback`` for the second one ("": none); see the module."""

    def __init__(self, order: Sequence[str], options: Options, fallback: str = "") -> None:
        self.order, self.options, self.fallback = tuple(order), options, fallback
        first, *others = self.order
        error = 1 - options.level
        rest = error * (1 - FALLBACK) if fallback else error
        self._errors = {first: error, **dict.fromkeys(others, rest), **({fallback: error - rest} if fallback else {})}
        self._limits: dict[Kind, float] = {"scored": options.budget, "text": options.excess_budget / CAP}
        self._tallies: dict[str, dict[Kind, Tally]] = {s: {"scored": Tally(), "text": Tally()} for s in self._errors}
        self._shown: set[str] = set()

    def add(self, strategy: str, harms: Sequence[Harm]) -> None:
        """Add the harms of one unit, beyond the floor."""
        tallies = self._tallies[strategy]
        for kind, tally in tallies.items():
            if some := [harm for harm in harms if harm.kind == kind]:
                total = math.fsum(harm.amount for harm in some)
                undecided = tally.undecided + sum(harm.undecided for harm in some)
                counts = {"answers": tally.answers + len(some), "harm": tally.harm + total, "undecided": undecided}
                share = share_of(kind, total / len(some))
                tallies[kind] = tally.model_copy(update=counts).with_unit(share, self._limits[kind])
        occurring = [(tally, self._limits[kind]) for kind, tally in tallies.items() if tally.answers]
        if occurring and all(
            is_below(tally.harm_counts(), limit, self._errors[strategy]) for tally, limit in occurring
        ):
            self._shown.add(strategy)

    def is_safe(self, strategy: str) -> bool:
        """Return True if it, and each strategy in front of it, was shown to be within the budgets."""
        return {*self._preceding(strategy), strategy} <= self._shown

    def is_given_up(self, strategy: str) -> bool:
        """Return True if so much harm was seen that it will hardly be shown to be safe (`confidence.ChangeDetector`)."""
        if strategy in self._shown:
            return False
        return any(ChangeDetector(self._limits[kind], t.wealth).alarmed for kind, t in self._tallies[strategy].items())

    def is_open(self, strategy: str) -> bool:
        """Return True if another unit of it may decide: all in front of it are safe, and it is neither shown nor given up."""
        if strategy == self.fallback and self.order[1] in self._shown:
            return False
        return (
            self._preceding(strategy) <= self._shown and strategy not in self._shown and not self.is_given_up(strategy)
        )

    def _preceding(self, strategy: str) -> set[str]:
        return {*self.order[: 1 if strategy == self.fallback else self.order.index(strategy)]}

    def rows(self) -> list[dict[str, Any]]:
        """Return the evidence on each strategy by kind of answer; JSON-able.

        ``mean`` and ``upper``, a bound of a unit's mean, are nats a token beyond the floor, or values lost; ``share`` and
        ``limit`` are mean and budget as parts of 1. ``units_like`` units like these would show it safe; None: none would.
        """
        rows = []
        for strategy, tallies in self._tallies.items():
            error = self._errors[strategy]
            for kind, tally in tallies.items():
                if counts := tally.harm_counts():
                    limit, units, scale = self._limits[kind], sum(counts.values()), CAP if kind == "text" else 1.0
                    rows.append(
                        {"strategy": strategy, "kind": kind, "safe": self.is_safe(strategy), "mean": tally.mean}
                        | {"units": units, "upper": scale * tally.upper(error), "budget": scale * limit}
                        | {"share": sum(harm * n for harm, n in counts.items()) / units, "limit": limit}
                        | {"undecided": tally.undecided, "units_like": units_like(counts, limit, error)}
                    )
        return rows


@dataclass(frozen=True)
class Verdict:
    """Judgement of a model's text.

    Attributes:
        tests: of the strategies, on the passages that prove.
        floor: differences of exact answers on this engine.
        owed: nats a token that text owes to its context.
        reads: that less two standard errors is large enough for the budget to say anything.
        trials: the same of each strategy that was tried, on the passages that choose.
    """

    tests: OrderedTests
    floor: Floor
    owed: float
    reads: bool
    trials: Mapping[str, OrderedTests]

    def _is_safe(self, strategy: str) -> bool:
        return strategy in (*self.tests.order, self.tests.fallback) and self.tests.is_safe(strategy)

    @property
    def finding(self) -> Literal["binds", "chains", "unclear", "unread"]:
        """As in `ctxwin.profiles.Profile`."""
        if not self.reads:
            return "unread"
        if self._is_safe("blind"):
            return "chains"
        return "binds" if self._is_safe(self.tests.order[0]) or "blind" not in self.tests.order else "unclear"

    @property
    def fidelity(self) -> Fidelity:
        """The meaning of ``auto``: exact where nothing was shown to be safe."""
        patched, sliding = self.tests.order[:2]
        if self._is_safe("blind"):
            return Fidelity("blind")
        if not self._is_safe(patched):
            return Fidelity("exact")
        survivors: Literal["slid", "removal", "refresh"] = "refresh"
        if self._is_safe(sliding):
            survivors = "slid" if sliding == "survivor" else "removal"
        elif self._is_safe(self.tests.fallback):
            survivors = "removal"
        return Fidelity("patched", bytes_share=float(patched.partition(":")[2]), survivors=survivors)

    def __str__(self) -> str:
        if self.finding == "unread":
            return f"no verdict: text owes its context {self.owed:.2g} nats a token, too little to lose any; keep exact"
        trial, patched = self.trials["blind"].rows()[0], self.tests.order[0]
        loss = f"blind reuse loses {trial['mean']:.2g} nats a token of text"
        rows = {row["strategy"]: row for row in self.tests.rows() if row["kind"] == "text"}
        if self.finding == "chains":
            return f"chains at query time: {loss}, at most {rows['blind']['upper']:.2g}"
        start = "binds at prefill" if self.finding == "binds" else "undecided"
        if not self._is_safe(patched):
            return f"{start}: {loss}, and no patch was shown to be safe; keep exact"
        share, upper = float(patched.partition(":")[2]), rows[patched]["upper"]
        return f"{start}: {loss}; patches of {share:.0%} of the bytes lose at most {upper:.2g}"

    def describe(self) -> dict[str, Any]:
        """Return verdict and evidence, JSON-able."""
        rows, options = self.tests.rows(), self.tests.options
        verdict: dict[str, Any] = {"finding": self.finding, "evidence": "text", "sentence": str(self)}
        verdict |= {"reasons": [_reason(row) for row in rows]}
        verdict |= {"limits": {name: getattr(options, name) for name in ("budget", "excess_budget", "level")}}
        evidence: dict[str, Any] = {"strategies": rows, "floor": str(self.floor), "owed": self.owed}
        evidence |= {"trials": [row for trial in self.trials.values() for row in trial.rows()]}
        return {"verdict": verdict, "fidelity": self.fidelity.model_dump(exclude_defaults=True), **evidence}


def _reason(row: Mapping[str, Any]) -> str:
    unit = "nats a token beyond the floor" if row["kind"] == "text" else "of the values"
    loss = f"{row['strategy']} loses {row['mean']:.2g} {unit} on {row['units']} passages, at most {row['upper']:.2g}"
    if row["safe"]:
        return f"{loss}: safe, within {row['budget']:.2g}"
    more = f"{row['units_like']} like these would show it" if row["units_like"] else "more like these would not show it"
    return f"{loss}: not shown to be safe, within {row['budget']:.2g}; {more}"


def judge(
    measure: Callable[[int, Sequence[str], bool], Unit],
    count: int,
    options: Options,
    seconds: float = math.inf,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Verdict:
    """Judge strategies on passages until all are decided, ``count`` passages are used or ``seconds`` have passed.

    Args:
        measure: `PassageReplays.measure`, or what has its results.
        progress: called with the stage, the amount done and the total.
    """
    begun = time.monotonic()

    def late(stage: str, done: int, total: int, until: float) -> bool:
        progress(stage, done, total)
        return time.monotonic() - begun > until * seconds

    if count < 2:
        raise ValueError(f"passages must be at least 2, to choose by and to prove on, got {count}; give more text")
    first, units = min(CHOOSING, count // 2), list[Unit]()
    tried = [*(f"patched:{share:g}" for share in SHARES), "survivor", "blind"]
    for index in range(first):
        units.append(measure(index, tried, True))
        if late("what exact answers differ by", index + 1, first, _CHOOSING_TIME):
            break
    floor = Floor()
    for number, unit in enumerate(units):
        for part, distance in unit.distances.items():
            extended = getattr(floor, part).extended(str(number), *distance)
            floor = floor.model_copy(update={part: extended})
    trials = {strategy: OrderedTests([strategy], options) for strategy in tried}
    for strategy, trial in trials.items():
        for unit in units:
            trial.add(strategy, _beyond(unit.harms[strategy], strategy, floor))
    hopeful = [s for s in tried if all(row["share"] <= HOPEFUL * row["limit"] for row in trials[s].rows())]
    patched = next((s for s in hopeful if s.startswith("patched")), tried[len(SHARES) - 1])
    removal = patched.replace("patched", "removal")
    sliding, fallback = ("survivor", removal) if "survivor" in hopeful else (removal, "")
    owed = [unit.owed for unit in units]
    low = statistics.fmean(owed) - 2 * statistics.stdev(owed) / math.sqrt(len(owed)) if len(owed) > 1 else 0.0
    reads, blind = low * LOST >= options.excess_budget, trials["blind"]
    tests = OrderedTests((patched, sliding, *(() if blind.is_given_up("blind") else ("blind",))), options, fallback)
    verdict = Verdict(tests, floor, statistics.fmean(owed), reads, trials)
    for strategy in (*tests.order, *filter(None, [tests.fallback])) if reads else ():
        for index in range(len(units), count):
            if not tests.is_open(strategy):
                break
            tests.add(strategy, _beyond(measure(index, [strategy], False).harms[strategy], strategy, floor))
            if late(f"what {strategy} loses", index + 1, count, 1.0):
                return verdict
    return verdict


def _beyond(harms: Sequence[Harm], strategy: str, floor: Floor) -> list[Harm]:
    nats = floor.nats(remembers=strategy == "survivor")
    return [replace(harm, amount=harm.amount - nats) if harm.kind == "text" else harm for harm in harms]
