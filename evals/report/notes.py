"""What must be said beside the figures: caveats that depend on the runs, and what the columns mean."""

from __future__ import annotations

from collections.abc import Sequence

from ctxwin.evals.report.columns import COLUMNS
from ctxwin.evals.report.runs import Run, tasks_of
from ctxwin.evals.stats import RESAMPLES

SMALL = 100
"""Items under which a cell is called small."""


def caveats(runs: Sequence[Run]) -> list[str]:
    """Sentences a reader should know before the figures."""
    tasks = tasks_of(runs)
    cells = [f for run in runs for task in run.tasks for f in run.arms(task).values()]
    said = [
        "Every arm is held against an exact re-prefill of the same model on the same prompt; accuracy says what that is "
        "worth on the task, KL, eta and agreement how close the arm comes to it."
    ]
    if any(name.startswith("tiny/") for name in tasks):
        said.append(
            "Tasks named tiny/ are generated for the small bundled model. What holds there proves that the mechanism "
            "exists; it is no evidence about pretrained models."
        )
    if controls := [name for name, about in tasks.items() if about["control"]]:
        said.append(f"Negative controls, whose answers blind reuse should not change: {', '.join(controls)}.")
    if smallest := [f["n"] for f in cells if f["n"] < SMALL]:
        said.append(
            f"{len(smallest)} of {len(cells)} cells have fewer than {SMALL} items (the smallest {min(smallest)}): "
            "read their intervals, not their middles."
        )
    if any(f["unscored"] or f["unparsed"] for f in cells):
        said.append(
            "Items that an arm has no meaning for, and answers that the task's rule cannot read, are left out and "
            "counted apart; they are not wrong answers. Arms that leave out different items stand on different ones: "
            "compare them in the tables of differences, which use shared items only."
        )
    if any(f["clusters"] < f["n"] for f in cells):
        said.append(
            "Items come in clusters; intervals are cluster-robust, and McNemar's test, which takes items as independent, "
            "is left out there."
        )
    if any(run.result["paired"] for run in runs):
        said.append(
            "The patch that others are compared with was chosen on these items unless it was named, so its lead is a "
            "little flattered. The many differences are not corrected for their number."
        )
    return said


def meanings(short: bool = False) -> list[tuple[str, str]]:
    """Name and meaning of columns, of all or of those that every medium shows, and how intervals are made."""
    made = [(c.name, c.about) for c in COLUMNS if c.short or not short]
    made += [
        ("gained, lost", "Items that only the arm, or only the one it is compared with, gets right."),
        (
            "McNemar p",
            "Exact two-sided p of as many gained as lost; only where items are independent and scores 0 or 1.",
        ),
        (
            "between",
            "The token arm's settings on either side of the patch's bytes; each item's score and KL are interpolated "
            "between them. A bent curve is better than its chord, which flatters the patch: 'to the larger setting' gives "
            "the token arm at least the patch's bytes, and is the figure to quote.",
        ),
        (
            "[95 %]",
            "Shares: Wilson's interval, with clusters on the effective number of items. Differences to re-prefill: "
            f"Student's t on the cluster-robust standard error. All others: percentiles of {RESAMPLES:,} draws of whole "
            "clusters. '-' where one cluster leaves nothing to estimate from.",
        ),
    ]
    return made
