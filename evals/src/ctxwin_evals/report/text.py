"""Tables for a terminal (rich) and for a document (markdown), and what must be said beside the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxwin_evals.report import tables
from ctxwin_evals.report.tables import Run, tasks_of
from ctxwin_evals.score import Result
from ctxwin_evals.stats import RESAMPLES

if TYPE_CHECKING:
    from rich.table import Table as RichTable

SMALL = 100
"""Items under which a cell is called small."""


def caveats(runs: Sequence[Run]) -> list[str]:
    """Sentences a reader should know before the figures; they depend on the runs."""
    tasks = tasks_of(runs)
    cells = [f for run in runs for task in run.tasks for f in run.arms(task).values()]
    controls = [name for name, about in tasks.items() if about["control"]]
    small = [f["n"] for f in cells if f["n"] < SMALL]
    applicable = {
        "Every arm is held against an exact re-prefill of the same model on the same prompt; accuracy says what that is "
        "worth on the task, KL, eta and agreement how close the arm comes to it.": True,
        "Tasks named tiny/ are generated for the small bundled model. What holds there proves that the mechanism "
        "exists; it is no evidence about pretrained models.": any(name.startswith("tiny/") for name in tasks),
        f"Negative controls, whose answers blind reuse should not change: {', '.join(controls)}.": bool(controls),
        f"{len(small)} of {len(cells)} cells have fewer than {SMALL} items (the smallest {min(small, default=0)}): "
        "read their intervals, not their middles.": bool(small),
        "Items that an arm could not serve, and answers that the task's rule cannot read, are left out and "
        "counted apart; they are not wrong answers. Arms that leave out different items stand on different ones: "
        "compare them in the tables of differences, which use shared items only.": any(
            f["unscored"] or f["unparsed"] for f in cells
        ),
        "Items come in clusters; intervals are cluster-robust, and McNemar's test, which takes items as independent, "
        "is left out there.": any(f["clusters"] < f["n"] for f in cells),
        "The patch that others are compared with was chosen on these items unless it was named, so its lead is a "
        "little flattered. Differences are not corrected for their number.": any(run.result["paired"] for run in runs),
    }
    return [text for text, holds in applicable.items() if holds]


_OTHERS = {
    "gained, lost": "Items that only the arm, or only the one it is compared with, gets right.",
    "McNemar p": "Exact two-sided p of as many gained as lost; only where items are independent and scores 0 or 1.",
    "between": "The token arm's settings on either side of the patch's bytes; each item's score and KL are interpolated "
    "between them. A bent curve is better than its chord, which flatters the patch: 'to the larger setting' gives "
    "the token arm at least the patch's bytes, and is the figure to quote.",
    "[95 %]": "Shares: Wilson's interval, with clusters on the effective number of items. Differences to re-prefill: "
    f"Student's t on the cluster-robust standard error. All others: percentiles of {RESAMPLES:,} draws of whole "
    "clusters. '-' where one cluster leaves nothing to estimate from.",
}


def meanings(*, short: bool = False) -> dict[str, str]:
    """Return the meaning of the columns, all or those that every medium shows, and of the intervals."""
    return {name: about for name, about in tables.ABOUT.items() if not short or name in tables.MAIN} | _OTHERS


def rich_tables(result: Result) -> list[RichTable]:
    """One table a task of one scored run (see `ctxwin_evals.score.scores`).

    Each is as wide as its figures; a console that is narrower shows them all where it prints with ``crop=False``.
    """
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    run = Run("", Path(), result)
    rendered = []
    for task in run.tasks:
        table = tables.arm_table([run], task)
        caption = Text(table.note) if table.note else None
        drawn = RichTable(title=Text(table.title), title_justify="left", caption=caption)
        for i, column in enumerate(table.columns):
            drawn.add_column(Text(column), justify="left" if i < table.labels else "right", no_wrap=True)
        for row in table.rows:
            drawn.add_row(*(Text(cell.text) for cell in row))  # texts, since names may hold what rich reads as markup
        drawn.width = Console(width=1000).measure(drawn).maximum
        rendered.append(drawn)
    return rendered


def markdown(runs: Sequence[Run], figures: Mapping[str, Sequence[str]] | None = None) -> str:
    """Render runs side by side as Markdown: tables for each task, differences, configuration, what the columns mean.

    ``figures`` are file names of pictures by task, shown under its table.
    """
    lines = ["# Fidelity", "", *(f"- {text}" for text in caveats(runs)), ""]
    for task in tasks_of(runs):
        main = tables.arm_table(runs, task)
        lines += [f"## {_escape(main.title)}", "", *_table(main), ""]
        for make in (tables.paired_table, tables.matched_table, tables.official_table):
            if more := make(runs, task):
                lines += [f"### {_escape(more.title)}", "", *_table(more), ""]
        lines += [f"![{_escape(task)}]({name})" for name in (figures or {}).get(task, ())]
        lines += [""] if figures else []
    lines += ["## Configuration", "", *_table(tables.configuration_table(runs)), "", "## What the columns mean", ""]
    return "\n".join([*lines, *(f"- **{name}**: {about}" for name, about in meanings(short=True).items())]) + "\n"


def _table(table: tables.Table) -> list[str]:
    marks = ["---" if i < table.labels else "---:" for i in range(len(table.columns))]
    lines = [_line(table.columns), _line(marks), *(_line([cell.text for cell in row]) for row in table.rows)]
    return [*lines, "", _escape(table.note)] if table.note else lines


def _line(columns: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escape, columns)) + " |"


def _escape(text: str) -> str:
    """Text that can neither end its cell or line nor start markup of its own."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
