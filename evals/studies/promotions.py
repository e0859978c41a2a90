"""Error rate and speed of promotions: streams of simulated windows under the rule that serves.

``python -m evals.studies.promotions [--streams 1000] [--windows 1000] [--seed 0] [--json]``

Streams of windows with 20 asks each (`KINDS`): ``independent``: each scored ask loses its value independently. ``paired``: each
ask is tried with two questions, which share their fate. ``clustered``: all asks of a window share it. ``five ways``: the same
for five strategies at once, of which none may be promoted. ``text``: all asks of a window exceed the floor by 0.1 nats, or are
below it. ``mixed``: both kinds of asks in each window, of which one is harmed by windows, in every second stream the scored
ones. ``drift``: windows lose values at a rate that swings between 0 and twice its mean, so that the average of the windows
so far is never within the budget.

Harm is given as a multiple of the budgets. Where it is above 1, a promotion is an error; if there is none, the time to promotion
counts. ``demotions`` counts the answers that a promoted strategy serves until it is demoted, when harm begins at once, or after
500 harmless answers.

The rule is that of `ctxwin.audit.evidence`, for many streams at a time; windows follow one another.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxwin.audit.confidence import ALARM, BETS, HIGHER, SUSPICION, ChangeDetector, ratio
from ctxwin.audit.evidence import BEHIND, PAUSE, PAUSE_DOUBLINGS, UNIT_TRIALS
from ctxwin.audit.harm import CAP
from ctxwin.audit.record import UNIT_PARTS
from ctxwin.audit.sampling import FIRST, SPARSE
from ctxwin.audit.strategies import error_of

Array = NDArray[np.float64]
Windows = Iterator[tuple[Array, NDArray[np.bool_]]]
"""Harm of the asks of each window in turn, a number in [0, 1] or negative, and which of them are text: (streams, asks)."""
BUDGET, EXCESS_BUDGET, LEVEL, ASKS = 0.01, 0.01, 0.95, 20
KINDS = ("independent", "paired", "clustered", "five ways", "text", "mixed", "drift")
HARMS = (0.0, 1.01, 1.5, 2.0)
CHANGES = (1.0, 0.3, 0.1, 0.05, 0.03)
RATE = 0.02
FIVE = ("survivor", "patched", "orbit", "partial", "blind")
EXCESS, PERIOD = 0.1, 400
"""Nats by which the text of a harmed window exceeds the floor; windows of one swing of a drift."""


@dataclass(frozen=True)
class Result:
    """Window and trial at which each stream promoted a strategy, and the window of its first rejection; -1: never."""

    windows: NDArray[np.int64]
    trials: NDArray[np.int64]
    rejected: NDArray[np.int64]

    @classmethod
    def of(cls, streams: int) -> Result:
        """Return a result without decisions."""
        return cls(*(np.full(streams, -1, np.int64) for _ in range(3)))

    @property
    def promoted(self) -> NDArray[np.bool_]:
        """True for each stream that promoted the strategy."""
        return self.windows >= 0


class Tallies:
    """Evidence of many streams on one kind of answer; vectorised `Ledger`."""

    def __init__(self, limit: float, streams: int) -> None:
        self._limit, self._higher = limit, [q for q in HIGHER if q > limit]
        self._bets, self._rises = np.zeros((streams, len(BETS))), np.zeros((streams, len(self._higher)))
        self._ring = np.full((BEHIND, streams), np.nan)  # means of the units that do not count yet
        self.occurred = np.zeros(streams, bool)

    def count(self, index: int, live: NDArray[np.bool_]) -> None:
        """Count the unit that began `BEHIND` windows ago, now that one more begins."""
        mean = self._ring[index % BEHIND]
        counts = live & ~np.isnan(mean)
        if counts.any():
            parts: Array = np.ceil(np.nan_to_num(mean) * UNIT_PARTS - 1e-9) / UNIT_PARTS
            with np.errstate(divide="ignore"):
                grown = np.stack([np.log(ratio(parts, part * self._limit, self._limit)) for _, part in BETS], 1)
            self._bets = np.where(counts[:, None], self._bets + grown, self._bets)
        self._ring[index % BEHIND] = np.nan

    def alarmed(self, total: Array, count: Array) -> NDArray[np.bool_]:
        """Return True for each stream that is rejected if the open window counts as it is."""
        mean = np.clip(total / np.maximum(count, 1), 0, 1)
        return np.asarray((count > 0) & (self._grown(mean).mean(1) >= ALARM), bool)

    def end(self, index: int, total: Array, count: Array, tried: NDArray[np.bool_]) -> None:
        """End a window of the streams in which it was ``tried``."""
        tried = tried & (count > 0)
        mean = np.clip(total / np.maximum(count, 1), 0, 1)
        self._ring[index % BEHIND] = np.where(tried, mean, np.nan)
        self._rises = np.where(tried[:, None], self._grown(mean), self._rises)
        self.occurred |= tried

    def reset(self, which: NDArray[np.bool_]) -> None:
        """Begin another attempt of these streams."""
        self._bets[which], self._rises[which], self._ring[:, which], self.occurred[which] = 0.0, 0.0, np.nan, False

    def passes(self, goals: Array) -> NDArray[np.bool_]:
        """Return True for each stream whose wealth reaches its goal, or that has no such answers."""
        logs = self._bets + np.log([weight for weight, _ in BETS])
        return np.asarray(~self.occurred | (np.logaddexp.reduce(logs, axis=1) >= goals), bool)

    def _grown(self, harm: Array) -> Array:
        return grow(self._rises, harm, self._limit, self._higher)


def draw_window(
    kind: str, harm: float, streams: int, index: int, rng: np.random.Generator
) -> tuple[Array, NDArray[np.bool_]]:
    """Draw the harms of the asks of one window in each stream, and which of them are text; see the module and `Windows`."""
    rate, text = harm * BUDGET, np.zeros((streams, ASKS), bool)
    if kind == "independent":
        return (rng.random((streams, ASKS)) < rate).astype(float), text
    if kind == "paired":
        harms = np.repeat((rng.random((streams, ASKS)) < rate).astype(float), 2, axis=1)
        return harms, np.zeros(harms.shape, bool)
    if kind == "drift":
        rate *= 1 + math.cos(2 * math.pi * index / PERIOD)
    lost = (rng.random((streams, 1)) < rate).astype(float)
    excess = np.where(rng.random((streams, 1)) < harm * EXCESS_BUDGET / EXCESS, EXCESS / CAP, -EXCESS_BUDGET / CAP)
    if kind == "text":
        return np.repeat(excess, ASKS, axis=1), ~text
    if kind == "mixed":
        text = rng.random((streams, ASKS)) < 0.5
        values = (np.arange(streams) % 2 == 0)[:, None]
        return np.where(text, np.where(values, -EXCESS_BUDGET / CAP, excess), np.where(values, lost, 0.0)), text
    return np.repeat(lost, ASKS, axis=1), text


def by_windows(windows: Windows, draws: np.random.Generator, strategy: str, *, once: bool = False) -> Result:
    """Apply the rule (`ctxwin.audit.evidence`) to one strategy; ``once`` ends a stream with its first decision of any kind."""
    first = next(windows)
    streams, asks = first[0].shape
    per_ask = asks // ASKS if asks >= ASKS else 1
    waits = np.zeros(streams, np.int64)  # remaining windows of a pause
    attempt, trials = np.zeros(streams, np.int64), np.zeros(streams, np.int64)
    done = Result.of(streams)
    kinds = Tallies(BUDGET, streams), Tallies(EXCESS_BUDGET / CAP, streams)
    for index, (harms, texts) in enumerate(_chain(first, windows)):
        live = ~done.promoted & (waits == 0) & ~(once & (done.rejected >= 0))
        waits = np.maximum(0, waits - 1)
        for kind in kinds:
            kind.count(index, live)
        # Its trials: with each, units that do not count yet are evidence of a rise, too.
        total, count = np.zeros((2, streams)), np.zeros((2, streams))
        alarmed = np.zeros(streams, bool)
        for ask in range(asks // per_ask):
            drawn = live & ~alarmed & (draws.random(streams) * (ask + 1) < SPARSE)
            for at in range(ask * per_ask, (ask + 1) * per_ask):
                take = drawn & (count.sum(0) < UNIT_TRIALS)
                for number, of_kind in enumerate((~texts[:, at], texts[:, at])):
                    total[number] += np.where(take & of_kind, harms[:, at], 0.0)
                    count[number] += take & of_kind
                    alarmed |= take & kinds[number].alarmed(total[number], count[number])
                trials += take
        for number, kind in enumerate(kinds):
            kind.end(index, total[number], count[number], live & ~alarmed)
        if alarmed.any():
            done.rejected[alarmed & (done.rejected < 0)] = index + 1
            pause = PAUSE * 2 ** np.minimum(attempt, PAUSE_DOUBLINGS) / max(1, asks // per_ask)
            waits = np.where(alarmed, np.ceil(pause).astype(np.int64), waits)
            attempt += alarmed
            for kind in kinds:
                kind.reset(alarmed)
        goals = np.array([-math.log(error_of(strategy, k, LEVEL)) for k in range(int(attempt.max()) + 1)])[attempt]
        occurred = kinds[0].occurred | kinds[1].occurred
        now = live & ~alarmed & occurred & kinds[0].passes(goals) & kinds[1].passes(goals)
        done.windows[now], done.trials[now] = index + 1, trials[now]
        if (done.promoted | (once & (done.rejected >= 0))).all():
            break
    return done


def demotions(harm: float, streams: int, seed: int, *, onset: int, limit: int = 20_000) -> float:
    """Return the median number of answers until a promoted strategy is demoted, if harm begins after ``onset`` answers."""
    rng, resting = np.random.default_rng(seed), ChangeDetector(BUDGET).resting
    wealth, detected = np.zeros((streams, len(HIGHER))), np.full(streams, np.inf)
    for answer in range(1, onset + limit + 1):
        harmed = (rng.random(streams) < (harm if answer > onset else 0.0)).astype(float)
        rate = np.where(wealth.mean(1) >= SUSPICION * resting, 1.0, max(RATE, FIRST / (FIRST + answer - 1)))
        audited = rng.random(streams) < rate
        wealth = np.where(audited[:, None], grow(wealth, harmed, BUDGET, HIGHER), wealth)
        detected[(wealth.mean(1) >= ALARM) & (detected > answer)] = answer
        if np.isfinite(detected).all():
            break
    return float(np.median(np.minimum(detected, onset + limit))) - onset


def cell(kind: str, harm: float, streams: int, windows: int, seed: int) -> dict[str, Any]:
    """Compute one cell of the table."""
    outcomes: list[Result] = []
    for number, strategy in enumerate(FIVE if kind == "five ways" else FIVE[:1]):
        rng, draws = np.random.default_rng([seed, number]), np.random.default_rng([seed, number, 1])
        drawn = (draw_window(kind, harm, streams, index, rng) for index in range(windows))
        outcomes.append(by_windows(drawn, draws, strategy))
    first = outcomes[0]
    row: dict[str, Any] = {"kind": kind, "harm": harm, "streams": streams}
    row["promoted"] = float(np.mean(np.any([result.promoted for result in outcomes], axis=0)))
    if first.promoted.mean() > 0.5:
        row["windows"] = float(np.median(first.windows[first.promoted]))
        row["trials"] = float(np.median(first.trials[first.promoted]))
    return row


def grow(wealth: Array, harm: Array, limit: float, higher: Sequence[float]) -> Array:
    """Vectorised `ChangeDetector.take` over many streams."""
    return np.stack([(wealth[:, i] + 1) * ratio(harm, q, limit) for i, q in enumerate(higher)], 1).clip(max=1e300)


def _chain(first: tuple[Array, NDArray[np.bool_]], others: Windows) -> Windows:
    yield first
    yield from others


def table(rows: Sequence[dict[str, Any]], changes: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = ["| stream | true harm, in budgets | promoted | median to promotion |", "|---|---|---|---|"]
    for row in rows:
        has_median = "windows" in row and not row["harm"]
        median = f"{row['windows']:.0f} windows, {row['trials']:.0f} trials" if has_median else ""
        lines.append(f"| {row['kind']} | {row['harm']:g} | {row['promoted']:.1%} | {median} |")
    lines += ["", "| harm begins | harm | answers until demoted |", "|---|---|---|"]
    for row in changes:
        when = f"after {row['behind']} answers" if row["behind"] else "at once"
        lines.append(f"| {when} | {row['harm']:.0%} | {row['answers']:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="of each cell")
    parser.add_argument("--windows", type=int, default=1000, help="of each stream")
    parser.add_argument("--answers", type=int, default=20_000, help="of each stream in which harm begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    cells = [(kind, harm) for kind in KINDS for harm in HARMS if kind != "drift" or harm != 1.01]
    rows = [cell(kind, harm, options.streams, options.windows, options.seed) for kind, harm in cells]
    changes = [
        {
            "behind": onset,
            "harm": harm,
            "answers": demotions(harm, options.streams, options.seed, onset=onset, limit=options.answers),
        }
        for onset in (0, 500)
        for harm in CHANGES
    ]
    setup = {"budget": BUDGET, "excess_budget": EXCESS_BUDGET, "level": LEVEL}
    text = json.dumps({**setup, "cells": rows, "changes": changes}, indent=1) if options.json else table(rows, changes)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
