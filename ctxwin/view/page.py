"""`render`: a trace as one self-contained HTML page. Nothing is fetched; the page holds its data as JSON."""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template
from markupsafe import Markup

from ctxwin.view.palette import LANES
from ctxwin.view.totals import in_words, totals
from ctxwin.view.trace import Recording, read_trace

LIMIT = 2000
"""Default number of operations shown: the newest ones."""
_FOLDER = Path(__file__).parent
_SCRIPTS = ("model.js", "draw.js", "details.js", "page.js")
_SIGNS = {
    "new": ("+", "arrived"), "back": ("↩", "came back"), "again": ("↻", "placed again (a restored version)"),
    "moved": ("↕", "changed places"), "left": ("×", "left; can come back"),
}  # fmt: skip


def render(trace_path: str | Path, out: str | Path, *, limit: int = LIMIT) -> Path:
    """Write the page of a trace; return its path.

    Args:
        trace_path: written by `ctxwin.view.trace.Trace`; a run may still be writing it.
        out: the HTML file; replaced where it exists.
        limit: most operations shown, the newest ones.

    Raises:
        ValueError: a file that is not a trace, a limit below 1, or a page in the trace's own place.
        OSError: a file that cannot be read or written.
    """
    if Path(out).resolve() == Path(trace_path).resolve():
        raise ValueError(f"out must be another file than the trace, got {str(out)!r} for both; name one with --out")
    Path(out).write_text(page(read_trace(trace_path), Path(trace_path).name, limit=limit), encoding="utf-8")
    return Path(out)


def page(recording: Recording, title: str, *, limit: int = LIMIT, live: str | None = None) -> str:
    """Return the page's HTML. ``live``: path of further lines (server-sent events) on the same origin."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    lanes = {lane: list(entry) for lane, entry in LANES.items()}
    left_out = max(0, sum(line["kind"] == "event" for line in recording.lines) - limit)
    data = {"lanes": lanes, "limit": limit, "left_out": left_out, "live": live, "lines": newest(recording.lines, limit)}
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    template = Template((_FOLDER / "page.html").read_text(encoding="utf-8"), autoescape=True, undefined=StrictUndefined)
    text: str = template.render(
        title=title,
        models=sorted({event["model"] for event in recording.events if "model" in event}),
        version=recording.header.get("version", "?"),
        summary=in_words(totals(recording)),
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        lanes=LANES,
        signs=_SIGNS,
        # The data contain no "<", so that no text in them can end the element.
        data=Markup(json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")),
        script=Markup(script),
        hash=Markup("sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
    )
    return text


def newest(lines: Iterable[Mapping[str, Any]], limit: int) -> list[Mapping[str, Any]]:
    """Return the newest ``limit`` events with their chunks and notes."""
    lines = list(lines)
    events = [line for line in lines if line["kind"] == "event"]
    if len(events) <= limit:
        return lines
    numbers = {event["n"] for event in events[-limit:]}
    chunks = {entry["chunk"] for event in events[-limit:] for entry in event["placed"]}

    def is_recent(line: Mapping[str, Any]) -> bool:
        if line["kind"] == "chunk":
            return line["n"] in chunks
        return (line["n"] if line["kind"] == "event" else line["of"]) in numbers

    return [line for line in lines if is_recent(line)]
