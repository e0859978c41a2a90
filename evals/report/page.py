"""Runs as one self-contained HTML page: nothing is fetched, every name in it is escaped by the template."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import ctxwin
from ctxwin.evals.report import tables
from ctxwin.evals.report.notes import caveats, meanings
from ctxwin.evals.report.runs import Run, tasks_of
from ctxwin.evals.score import KNOWN

_FOLDER = Path(__file__).parent
_CELL = frozenset(
    {
        *KNOWN, *("n", "clusters", "unparsed", "accuracy", "kl_p99", "eta", "agreement", "flip_recover", "harm_rate"),
        *("bytes_share", "recomputed_share", "spent_share", "flips", "delta", "reference_accuracy", "base_accuracy"),
        *("forced_eta", "unscored", "recomputed"),
    }
)  # fmt: skip
"""Figures of every arm; the rest are an arm's own."""


def page(runs: Sequence[Run], pictures: Mapping[str, Sequence[tuple[str, bytes]]], title: str = "Fidelity") -> str:
    """The page's text.

    Args:
        runs: scored runs, shown side by side.
        pictures: by task, captions and SVG files.
        title: of the page.
    """
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    # The browser hashes what stands between the tags, line ends included.
    digest = hashlib.sha256(f"\n{script}\n".encode()).digest()
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        runs=", ".join(run.label for run in runs),
        version=ctxwin.__version__,
        caveats=caveats(runs),
        tasks=[_task(runs, name, i, pictures.get(name, ())) for i, name in enumerate(tasks_of(runs))],
        configuration=tables.configuration_table(runs),
        meanings=meanings(),
        about=dict(meanings()),
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        hash=Markup("sha256-" + base64.b64encode(digest).decode()),
    )


def _task(runs: Sequence[Run], name: str, number: int, pictures: Sequence[tuple[str, bytes]]) -> dict[str, object]:
    about = tasks_of(runs)[name]
    more = (
        tables.paired_table(runs, name),
        tables.matched_table(runs, name),
        tables.official_table(runs, name),
        tables.frames_table(runs, name),
        tables.own_table(runs, name, _CELL),
    )
    return {
        "name": name,
        "anchor": f"task-{number + 1}",
        "about": about["about"],
        "setting": about["setting"],
        "control": about["control"],
        "main": tables.arm_table(runs, name),
        "more": [table for table in more if table],
        "pictures": [
            {"caption": caption, "data": "data:image/svg+xml;base64," + base64.b64encode(svg).decode()}
            for caption, svg in pictures
        ],
    }
