"""Tables for a terminal (rich) and for a document (markdown)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxwin.evals.report import tables
from ctxwin.evals.report.notes import caveats, meanings
from ctxwin.evals.report.runs import Run, tasks_of
from ctxwin.evals.score import Result

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def rich_tables(result: Result, label: str = "") -> list[RichTable]:
    """One table a task of one scored run (see `ctxwin.evals.score.scores`)."""
    from rich.table import Table as RichTable
    from rich.text import Text

    run = Run(label, Path(), result)
    made = []
    for task in run.tasks:
        table = tables.arm_table([run], task)
        drawn = RichTable(
            title=Text(table.title), title_justify="left", caption=Text(table.note) if table.note else None
        )
        for i, column in enumerate(table.columns):
            drawn.add_column(Text(column), justify="left" if i < table.labels else "right", no_wrap=True)
        for row in table.rows:
            drawn.add_row(*(Text(cell.text) for cell in row))  # texts, since names may hold what rich reads as markup
        made.append(drawn)
    return made


def markdown(runs: Run | Sequence[Run] | Result, figures: Mapping[str, Sequence[str]] | None = None) -> str:
    """Runs side by side as a document: tables a task, differences, configuration, what the columns mean.

    Args:
        runs: scored runs, or the result of one.
        figures: file names of pictures by task, to be shown under its table.
    """
    several = [runs] if isinstance(runs, Run) else [Run("run", Path(), runs)] if isinstance(runs, dict) else list(runs)
    lines = ["# Fidelity", "", *(f"- {text}" for text in caveats(several)), ""]
    for task in tasks_of(several):
        main = tables.arm_table(several, task)
        lines += [f"## {_escaped(main.title)}", "", *_table(main), ""]
        for more in (
            tables.paired_table(several, task),
            tables.matched_table(several, task),
            tables.official_table(several, task),
        ):
            if more:
                lines += [f"### {_escaped(more.title)}", "", *_table(more), ""]
        lines += [f"![{_escaped(task)}]({name})" for name in (figures or {}).get(task, ())]
        lines += [""] if figures else []
    lines += ["## Configuration", "", *_table(tables.configuration_table(several)), "", "## What the columns mean", ""]
    lines += [f"- **{name}**: {about}" for name, about in meanings(short=True)]
    return "\n".join(lines) + "\n"


def _table(table: tables.Table) -> list[str]:
    lines = [_line(table.columns), _line(["---" if i < table.labels else "---:" for i in range(len(table.columns))])]
    lines += [_line([cell.text for cell in row]) for row in table.rows]
    return [*lines, "", _escaped(table.note)] if table.note else lines


def _line(columns: Sequence[str]) -> str:
    return "| " + " | ".join(_escaped(c) for c in columns) + " |"


def _escaped(text: str) -> str:
    """Text that cannot end its cell, line, or start markup of its own."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
