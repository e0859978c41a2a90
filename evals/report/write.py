"""`write_report`: everything about some runs into one folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ctxwin.evals.report.figures import pictures, render
from ctxwin.evals.report.page import page
from ctxwin.evals.report.runs import Run, read_runs, tasks_of
from ctxwin.evals.report.text import markdown
from ctxwin.evals.score import TaskOf

_DRAWN = re.compile(r"\d{2,}-.*-(arms|bytes|layers|grid)(-\d+)?\.png")
"""Names of the figures of a report."""


def write_report(
    folders: Sequence[Path], out: Path | None = None, *, against: str | None = None, task_of: TaskOf | None = None
) -> Path:
    """Writes ``report.html`` (self-contained), ``report.md`` and ``figures/*.png``; returns the path of the page.

    Args:
        folders: of runs, shown side by side.
        out: folder of the report; the first run's by default.
        against: the arm that others are paired with; each task's best patch by default.
        task_of: from a name to its task; `ctxwin.evals.tasks.open_task` by default.

    Raises:
        ValueError: a folder without a run, or twice.
        ModuleNotFoundError: no matplotlib (``pip install 'ctxwin[evals]'``).
    """
    runs = read_runs(folders, against, task_of)
    out = folders[0] if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    drawn, files = _draw(runs, out)
    (out / "report.md").write_text(markdown(runs, files), encoding="utf-8")
    path = out / "report.html"
    path.write_text(page(runs, drawn), encoding="utf-8")
    return path


def _draw(runs: Sequence[Run], out: Path) -> tuple[dict[str, list[tuple[str, bytes]]], dict[str, list[str]]]:
    """Figures by task: captions with SVG for the page, and names of the PNG files that were written."""
    drawn: dict[str, list[tuple[str, bytes]]] = {}
    files: dict[str, list[str]] = {}
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    for older in folder.glob("*.png"):
        # An earlier report's figures of other runs must not stand beside this one's.
        if _DRAWN.fullmatch(older.name):
            older.unlink()
    for number, task in enumerate(tasks_of(runs), start=1):
        for picture in pictures(runs, task):
            # The number keeps tasks apart whose names differ in signs only.
            name = f"{number:02d}-{re.sub(r'[^A-Za-z0-9]+', '-', task).strip('-')}-{picture.name}.png"
            (folder / name).write_bytes(render(picture.figure, "png"))
            drawn.setdefault(task, []).append((picture.caption, render(picture.figure, "svg")))
            files.setdefault(task, []).append(f"figures/{name}")
    return drawn, files
