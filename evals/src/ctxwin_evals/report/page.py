"""Reports as files: HTML pages that fetch nothing and in which the template escapes every name, markdown and figures."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import ctxwin
from ctxwin.files import atomic_write
from ctxwin_evals.report import tables
from ctxwin_evals.report.figures import pictures, render
from ctxwin_evals.report.tables import Run, Table, read_runs, tasks_of
from ctxwin_evals.report.text import caveats, markdown, meanings
from ctxwin_evals.score import TaskOf

_FOLDER = Path(__file__).parent
_DRAWN = re.compile(r"\d{2,}-.*-(arms|bytes|layers|grid)(-\d+)?\.png")
"""Names of the figures of a report."""
Drawn = tuple[str, bytes]
"""A caption and an SVG file."""


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading with a softer remark, tables, pictures below them, and sentences.

    ``more`` are tables that open on demand; the first one is open.
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
    meanings: Mapping[str, str] | None = None,
    verdict: tuple[str, str] | None = None,
) -> str:
    """The text of a page: heading, a soft line below it, a finding and its sentence, notes, sections, meanings of columns."""
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    # The browser hashes what stands between the tags, line ends included.
    digest = hashlib.sha256(f"\n{script}\n".encode()).digest()
    loader = FileSystemLoader(_FOLDER)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["data"] = lambda svg: "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return environment.get_template("page.html").render(
        title=title,
        about=f"{about} · ctxwin {ctxwin.__version__}",
        notes=notes,
        sections=sections,
        meanings=meanings or {},
        verdict=verdict,
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        hash=Markup("sha256-" + base64.b64encode(digest).decode()),
    )


def page(runs: Sequence[Run], drawn: Mapping[str, Sequence[Drawn]], title: str = "Fidelity") -> str:
    """The page of scored runs, shown side by side; ``drawn`` holds their figures by task."""
    sections = []
    for name, about in tasks_of(runs).items():
        control = " · negative control" if about["control"] else ""
        more = [
            tables.paired_table(runs, name),
            tables.arm_table(runs, name, more=True),
            tables.matched_table(runs, name),
            tables.official_table(runs, name),
            tables.frames_table(runs, name),
            tables.own_table(runs, name),
        ]
        soft, main = f"{about['about']} · {about['setting']}{control}", tables.arm_table(runs, name)
        sections.append(Section(name, soft, [main], drawn.get(name, ()), [table for table in more if table]))
    sections.append(Section("Configuration", tables=[tables.configuration_table(runs)]))
    return render_page(title, ", ".join(run.label for run in runs), caveats(runs), sections, meanings())


def write_report(
    folders: Sequence[Path], out: Path | None = None, *, against: str | None = None, task_of: TaskOf | None = None
) -> Path:
    """Write ``report.html`` (self-contained), ``report.md`` and ``figures/*.png``; return the path of the page.

    ``out`` is the first run's folder by default; the rest is as in `read_runs`, which raises ValueError. Raises
    ModuleNotFoundError without matplotlib (``pip install 'ctxwin[evals]'``).
    """
    runs = read_runs(folders, against, task_of)
    out = folders[0] if out is None else out
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for older in (out / "figures").glob("*.png"):
        # An earlier report's figures of other runs must not stand beside this one's.
        if _DRAWN.fullmatch(older.name):
            older.unlink()
    drawn: dict[str, list[Drawn]] = {}
    files: dict[str, list[str]] = {}
    for number, task in enumerate(tasks_of(runs), start=1):
        for picture in pictures(runs, task):
            # The number keeps tasks apart whose names differ in signs only.
            name = f"figures/{number:02d}-{re.sub(r'[^A-Za-z0-9]+', '-', task).strip('-')}-{picture.name}.png"
            atomic_write(out / name, render(picture.figure, "png"))
            drawn.setdefault(task, []).append((picture.caption, render(picture.figure, "svg")))
            files.setdefault(task, []).append(name)
    atomic_write(out / "report.md", markdown(runs, files).encode())
    return atomic_write(out / "report.html", page(runs, drawn).encode())
