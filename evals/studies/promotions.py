"""Error rate and speed of promotions: streams of simulated windows under the rule in force, and under one that counts asks.

``python -m evals.studies.promotions [--streams 1000] [--windows 2000] [--seed 0] [--json]``

Four kinds of stream, of windows with 20 asks each. ``independent``: each ask is harmed independently. ``paired``: each ask is
tried with two questions, which are harmed together. ``clustered``: all asks of a window are harmed together. ``five ways``: the
same for five strategies at once, of which none may be promoted. If the true harm is above the budget of 1 %, a promotion is an
error; if there is none, the time to promotion counts. ``demotions`` counts the answers that a promoted strategy serves until it
is demoted, when harm begins at once, or after 500 harmless answers.

The rule in force is that of `ctxwin.audit.evidence`, for many streams at a time; windows follow one another. ``by asks`` is the
rule it replaced: every trial counts as independent (a mixture of bets on a Bernoulli share), each strategy has the entire
probability of error, of which attempts take geometric parts, and every 50th answer is audited.
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

from ctxwin.audit.confidence import ALARM, BETS, HIGHER, SUSPICION, Change, ratio
from ctxwin.audit.evidence import BEHIND, PAUSE, STRATEGIES, UNIT_TRIALS, error_of
from ctxwin.audit.record import UNIT_PARTS
from ctxwin.audit.sampling import FIRST, SPARSE

Array = NDArray[np.float64]
BUDGET, LEVEL, ASKS = 0.01, 0.95, 20
KINDS = ("independent", "paired", "clustered", "five ways")
HARMS = (0.0, 0.0101, 0.02, 0.03)
CHANGES = (1.0, 0.3, 0.1, 0.05, 0.03)
RATE = 0.02
FIVE = ("survivor", "patched", "orbit", "partial", "blind")
_OLD_BETS = ((0.5, 0.0), (0.125, 1 / 16), (0.125, 1 / 8), (0.125, 1 / 4), (0.125, 1 / 2))
_OLD_HIGHER, _OLD_SPENT, _OLD_SUSPICION, _OLD_EVERY = (0.05, 0.2, 0.5), 0.8, 2.0, 50


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


def draw_harms(kind: str, harm: float, streams: int, rng: np.random.Generator) -> Array:
    """Draw the harms of the asks of one window in each stream: (streams, asks), or twice as many if paired."""
    if kind == "independent":
        return (rng.random((streams, ASKS)) < harm).astype(float)
    if kind == "paired":
        return np.repeat((rng.random((streams, ASKS)) < harm).astype(float), 2, axis=1)
    return np.repeat((rng.random((streams, 1)) < harm).astype(float), ASKS, axis=1)


def by_windows(
    windows: Iterator[Array], draws: np.random.Generator, strategy: str, budget: float = BUDGET, *, once: bool = False
) -> Result:
    """Apply the rule in force to one strategy; see `ctxwin.audit.evidence`.

    Args:
        windows: harms of the asks of each window in turn, (streams, asks).
        draws: generator that chooses the asks to try.
        once: end a stream with its first decision of any kind.
    """
    first = next(windows)
    streams, asks = first.shape
    per_ask = asks // ASKS if asks >= ASKS else 1
    waits = np.zeros(streams, np.int64)  # remaining windows of a pause
    attempt, trials = np.zeros(streams, np.int64), np.zeros(streams, np.int64)
    done = Result.of(streams)
    bets, rises = np.zeros((streams, len(BETS))), np.zeros((streams, len(HIGHER)))
    ring = np.full((BEHIND, streams), -1.0)  # means of the units that do not count yet; -1: none
    log_weights = np.log([weight for weight, _ in BETS])
    for index, harms in enumerate(_chain(first, windows)):
        live = ~done.promoted & (waits == 0) & ~(once & (done.rejected >= 0))
        waits = np.maximum(0, waits - 1)
        # The unit that began BEHIND windows ago counts now that one more begins.
        mean = ring[index % BEHIND]
        counts = live & (mean >= 0)
        if counts.any():
            parts: Array = np.ceil(mean * UNIT_PARTS - 1e-9) / UNIT_PARTS
            with np.errstate(divide="ignore"):
                grown = np.stack([np.log(ratio(parts, part * budget, budget)) for _, part in BETS], 1)
            bets = np.where(counts[:, None], bets + grown, bets)
        ring[index % BEHIND] = -1.0
        # Its trials: with each, units that do not count yet are evidence of a rise, too.
        total, count = np.zeros(streams), np.zeros(streams, np.int64)
        alarmed = np.zeros(streams, bool)
        for ask in range(asks // per_ask):
            drawn = live & ~alarmed & (draws.random(streams) * (ask + 1) < SPARSE)
            for at in range(ask * per_ask, (ask + 1) * per_ask):
                take = drawn & (count < UNIT_TRIALS)
                total, count = total + np.where(take, harms[:, at], 0.0), count + take
                trials += take
                risen = _grow(rises, total / np.maximum(count, 1), budget)
                alarmed |= take & (risen.mean(1) >= ALARM)
        tried = live & (count > 0)
        ring[index % BEHIND] = np.where(tried & ~alarmed, total / np.maximum(count, 1), -1.0)
        rises = np.where(tried[:, None], _grow(rises, total / np.maximum(count, 1), budget), rises)
        if alarmed.any():
            attempt += alarmed
            done.rejected[alarmed & (done.rejected < 0)] = index + 1
            waits = np.where(alarmed, math.ceil(PAUSE / max(1, asks // per_ask)), waits)
            bets[alarmed], rises[alarmed], ring[:, alarmed] = 0.0, 0.0, -1.0
        goals = np.array([-math.log(error_of(strategy, k, LEVEL)) for k in range(int(attempt.max()) + 1)])
        wealth = np.logaddexp.reduce(bets + log_weights, axis=1)
        now = live & ~alarmed & (wealth >= goals[attempt])
        done.windows[now], done.trials[now] = index + 1, trials[now]
        if (done.promoted | (once & (done.rejected >= 0))).all():
            break
    return done


def by_asks(windows: Iterator[Array], budget: float = BUDGET) -> Result:
    """Apply the rule that counts every trial as independent to one strategy."""
    first = next(windows)
    streams, trials = first.shape[0], 0
    done = Result.of(streams)
    waits, attempt = np.zeros(streams, np.int64), np.zeros(streams, np.int64)
    bets, rises = np.zeros((streams, len(_OLD_BETS))), np.zeros((streams, len(_OLD_HIGHER)))
    log_weights = np.log([weight for weight, _ in _OLD_BETS])
    with np.errstate(divide="ignore"):
        factors = np.log([[ratio(h, part * budget, budget) for _, part in _OLD_BETS] for h in (0.0, 1.0)])
    rising = np.array([[ratio(h, q, budget) for q in _OLD_HIGHER] for h in (0.0, 1.0)])
    for index, harms in enumerate(_chain(first, windows)):
        for column in harms.astype(int).T:
            trials += 1
            live = (waits == 0) & ~done.promoted
            waits = np.maximum(0, waits - 1)
            bets = np.where(live[:, None], bets + factors[column], bets)
            rises = np.where(live[:, None], np.maximum(rises, 1.0) * rising[column], rises)
            alarmed = live & (rises.mean(1) >= ALARM)
            if alarmed.any():
                attempt += alarmed
                waits = np.where(alarmed, PAUSE, waits)
                bets[alarmed], rises[alarmed] = 0.0, 0.0
            goals = -math.log((1 - LEVEL) * _OLD_SPENT) - attempt * math.log(1 - _OLD_SPENT)
            now = live & ~alarmed & (np.logaddexp.reduce(bets + log_weights, axis=1) >= goals)
            done.windows[now], done.trials[now] = index + 1, trials
        if done.promoted.all():
            break
    return done


def demotions(harm: float, streams: int, seed: int, *, onset: int, limit: int = 20_000) -> dict[str, float]:
    """Return the median number of answers until a promoted strategy is demoted, if harm begins after ``onset`` answers."""
    rng, resting = np.random.default_rng(seed), Change(BUDGET).resting
    new, old = np.zeros((streams, len(HIGHER))), np.zeros((streams, len(_OLD_HIGHER)))
    shares, detected = np.zeros(streams), {"by windows": np.full(streams, np.inf), "by asks": np.full(streams, np.inf)}
    for answer in range(1, onset + limit + 1):
        harmed = (rng.random(streams) < (harm if answer > onset else 0.0)).astype(float)
        rate = np.where(new.mean(1) >= SUSPICION * resting, 1.0, max(RATE, FIRST / (FIRST + answer - 1)))
        audited = rng.random(streams) < rate
        new = np.where(audited[:, None], _grow(new, harmed, BUDGET), new)
        shares += np.where(old.mean(1) >= _OLD_SUSPICION, 1.0, 1 / _OLD_EVERY)
        audited, shares = shares >= 1 - 1e-9, np.where(shares >= 1 - 1e-9, 0.0, shares)
        grown = np.stack([np.maximum(old[:, i], 1) * ratio(harmed, q, BUDGET) for i, q in enumerate(_OLD_HIGHER)], 1)
        old = np.where(audited[:, None], grown, old)
        for name, wealth in (("by windows", new), ("by asks", old)):
            detected[name][(wealth.mean(1) >= ALARM) & (detected[name] > answer)] = answer
        if all(np.isfinite(times).all() for times in detected.values()):
            break
    return {name: float(np.median(np.minimum(times, onset + limit))) - onset for name, times in detected.items()}


def cell(
    kind: str, harm: float, streams: int, windows: int, seed: int, rules: Sequence[str] = ("by windows", "by asks")
) -> dict[str, Any]:
    """Compute one cell of the table: the rules on the same streams."""
    strategies = FIVE if kind == "five ways" else FIVE[:1]
    results: dict[str, list[Result]] = {rule: [] for rule in rules}
    for number, strategy in enumerate(strategies):

        def draw_windows(number: int = number) -> Iterator[Array]:
            rng = np.random.default_rng([seed, number])
            return (draw_harms(kind, harm, streams, rng) for _ in range(windows))

        for rule, outcomes in results.items():
            draws = np.random.default_rng([seed, number, 1])
            outcomes.append(
                by_windows(draw_windows(), draws, strategy) if rule == "by windows" else by_asks(draw_windows())
            )
    row: dict[str, Any] = {"kind": kind, "harm": harm, "streams": streams}
    for name, outcomes in results.items():
        row[name] = {"promoted": float(np.mean(np.any([result.promoted for result in outcomes], axis=0)))}
        first = outcomes[0]
        if first.promoted.mean() > 0.5:
            promoted = first.promoted
            row[name] |= {
                "windows": float(np.median(first.windows[promoted])),
                "trials": float(np.median(first.trials[promoted])),
            }
    return row


def _grow(wealth: Array, harm: Array, limit: float) -> Array:
    """Vectorised `Change.take` over many streams."""
    return np.stack([(wealth[:, i] + 1) * ratio(harm, q, limit) for i, q in enumerate(HIGHER)], 1).clip(max=1e300)


def _chain(first: Array, others: Iterator[Array]) -> Iterator[Array]:
    yield first
    yield from others


def table(rows: Sequence[dict[str, Any]], changes: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = ["| stream | true harm | promoted, by windows | by asks | median to promotion, by windows | by asks |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["kind"], f"{row['harm']:.2%}", *(f"{row[n]['promoted']:.1%}" for n in ("by windows", "by asks"))]
        for name in ("by windows", "by asks"):
            has_median = "windows" in row[name] and not row["harm"]
            cells.append(f"{row[name]['windows']:.0f} windows, {row[name]['trials']:.0f} trials" if has_median else "")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| harm begins | harm | answers until demoted, by windows | by asks |", "|---|---|---|---|"]
    for row in changes:
        when = f"after {row['behind']} answers" if row["behind"] else "at once"
        lines.append(f"| {when} | {row['harm']:.0%} | {row['by windows']:.0f} | {row['by asks']:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="of each cell")
    parser.add_argument("--windows", type=int, default=2000, help="of each stream")
    parser.add_argument("--answers", type=int, default=20_000, help="of each stream in which harm begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    rows = [cell(kind, harm, options.streams, options.windows, options.seed) for kind in KINDS for harm in HARMS]
    changes = [
        {
            "behind": onset,
            "harm": harm,
            **demotions(harm, options.streams, options.seed, onset=onset, limit=options.answers),
        }
        for onset in (0, 500)
        for harm in CHANGES
    ]
    setup = {"budget": BUDGET, "level": LEVEL, "ways": {name: STRATEGIES[name].share for name in FIVE}}
    text = json.dumps({**setup, "cells": rows, "changes": changes}, indent=1) if options.json else table(rows, changes)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
