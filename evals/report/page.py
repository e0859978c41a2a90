"""Self-contained HTML pages of tables and figures: nothing is fetched, every name is escaped by the template."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import ctxwin
from ctxwin.evals.report import tables
from ctxwin.evals.report.notes import caveats, meanings
from ctxwin.evals.report.runs import Run, tasks_of
from ctxwin.evals.report.tables import Table

_FOLDER = Path(__file__).parent
Drawn = tuple[str, bytes]
"""A caption and an SVG file."""


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title, about: its heading, and what stands softly beside it.
        tables: shown.
        pictures: shown below them.
        more: tables that open on demand, the first one open.
        facts: sentences, shown below.
    """

    title: str
    about: str = ""
    tables: Sequence[Table] = ()
    pictures: Sequence[Drawn] = ()
    more: Sequence[Table] = ()
    facts: Sequence[str] = ()


def render_page(
    title: str,
    about: str,
    notes: Sequence[str],
    sections: Sequence[Section],
    meanings: Sequence[tuple[str, str]] = (),
    verdict: tuple[str, str] | None = None,
) -> str:
    """A page's text.

    Args:
        title: its heading.
        about: a soft line below it.
        notes: what a reader should know before the figures.
        sections: in order.
        meanings: names of columns, and what they mean.
        verdict: a finding and the sentence that is shown first.
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
    environment.filters["data"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return environment.get_template("page.html").render(
        title=title,
        about=f"{about} · ctxwin {ctxwin.__version__}",
        notes=notes,
        sections=sections,
        meanings=meanings,
        heads=dict(meanings),
        verdict=verdict,
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        hash=Markup("sha256-" + base64.b64encode(digest).decode()),
    )


def page(runs: Sequence[Run], pictures: Mapping[str, Sequence[Drawn]], title: str = "Fidelity") -> str:
    """The page of scored runs, shown side by side; ``pictures`` by task."""
    sections = [_task(runs, name, pictures.get(name, ())) for name in tasks_of(runs)]
    sections.append(Section("Configuration", tables=[tables.configuration_table(runs)]))
    return render_page(title, ", ".join(run.label for run in runs), caveats(runs), sections, meanings())


def _task(runs: Sequence[Run], name: str, pictures: Sequence[Drawn]) -> Section:
    about = tasks_of(runs)[name]
    more = (
        tables.paired_table(runs, name),
        tables.arm_table(runs, name, more=True),
        tables.matched_table(runs, name),
        tables.official_table(runs, name),
        tables.frames_table(runs, name),
        tables.own_table(runs, name),
    )
    control = " · negative control" if about["control"] else ""
    return Section(
        name,
        f"{about['about']} · {about['setting']}{control}",
        [tables.arm_table(runs, name)],
        pictures,
        [table for table in more if table],
    )
