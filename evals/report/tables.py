"""Tables as values: heads, and cells with a text and a key to sort by. Renderers are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxwin.evals.report.columns import COLUMNS, NONE, Cell, between, count, number, share, signed
from ctxwin.evals.report.runs import Run, configuration, tasks_of


@dataclass(frozen=True)
class Table:
    """A table: ``rows`` have one cell a column; the first ``labels`` columns are text, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    labels: int = 1


def arm_table(runs: Sequence[Run], task: str, *, more: bool = False) -> Table:
    """All arms of a task in all runs: what counts most, or with ``more`` the other figures."""
    entries = [(run, arm, figures) for run in runs for arm, figures in run.arms(task).items()]
    found = [figures for _, _, figures in entries]
    columns = [c for c in COLUMNS if c.short != more and (c.held(found) or c.name == "accuracy [95 %]")]
    rows = [(run, [Cell(arm), *(c.cell(figures) for c in columns)]) for run, arm, figures in entries]
    names = ("arm", *(c.name for c in columns))
    if more:
        return _table(runs, f"{task}: more figures", names, rows)
    about = tasks_of(runs)[task]
    kind = ", negative control" if about["control"] else ""
    left_out = [
        f"{arm}: {reason} ({count})" for _, arm, f in entries for reason, count in f.get("unscored_why", {}).items()
    ]
    unread = [f"{arm} ({f['unparsed']})" for _, arm, f in entries if f["accuracy"] is None]
    note = f"Left out. {'; '.join(left_out)}. " if left_out else ""
    if unread:
        note += f"No accuracy where the task's rule could read none of the answers: {', '.join(unread)}."
    return _table(runs, f"{task}: {about['about']}{kind}", names, rows, note=note.strip())


def paired_table(runs: Sequence[Run], task: str) -> Table | None:
    """Every arm minus the chosen one on the same items; None where there is nothing to pair."""
    found = [(run, pairs) for run in runs if (pairs := run.result["paired"].get(task)) and pairs["arms"]]
    names = ("arm", "minus", "n", "accuracy [95 %]", "gained", "lost", "McNemar p", "KL [95 %]", "eta [95 %]")
    rows = [
        (run, [
            Cell(arm), Cell(pairs["against"]), count(f["n"]), between(signed(f["accuracy"]), f["accuracy_ci95"], signed),
            count(f["gained"]), count(f["lost"]), number(f["mcnemar_p"]),
            between(signed(f["kl"]), f["kl_ci95"], signed), between(signed(f["eta"]), f["eta_ci95"], signed),
        ])
        for run, pairs in found
        for arm, f in pairs["arms"].items()
    ]  # fmt: skip
    others = " or ".join(dict.fromkeys(pairs["against"] for _, pairs in found))
    return _table(runs, f"{task}: each arm minus {others}", names, rows, labels=2) if rows else None


def matched_table(runs: Sequence[Run], task: str) -> Table | None:
    """Patches minus token arms at the same bytes; None without both."""
    names = ("patch", "bytes", "token arm", "between", "n", "accuracy [95 %]", "eta [95 %]",
             "eta to the larger setting [95 %]")  # fmt: skip
    rows = []
    for run in runs:
        for f in run.result["matched"].get(task, []):
            (low, high), shares = f["settings"], f["shares"]
            span = f"{low} {shares[0]:.1%}" + (f" and {high} {shares[1]:.1%}" if high not in (None, low) else "")
            above = (f["above"]["eta"], f["above"]["eta_ci95"]) if f["above"] else (None, None)
            cells = [
                Cell(f["patch"]), share(f["share"]), Cell(f["family"]), Cell(span), count(f["n"]),
                between(signed(f["accuracy"]), f["accuracy_ci95"], signed),
                between(signed(f["eta"]), f["eta_ci95"], signed), between(signed(above[0]), above[1], signed),
            ]  # fmt: skip
            rows.append((run, cells))
    return _table(runs, f"{task}: patches minus token arms at equal bytes", names, rows) if rows else None


def official_table(runs: Sequence[Run], task: str) -> Table | None:
    """The data set's own aggregates, one a line, since there can be many; None where it has none."""
    entries = [(run, arm, f["official"]) for run in runs for arm, f in run.arms(task).items() if "official" in f]
    if not entries:
        return None
    keys = dict.fromkeys(key for _, _, official in entries for key in official)
    heads = [arm if len(runs) == 1 else f"{run.label}: {arm}" for run, arm, _ in entries]
    rows = tuple((Cell(key), *(_official(key, official.get(key)) for _, _, official in entries)) for key in keys)
    return Table(f"{task}: the data set's own figures", ("figure", *heads), rows)


_COUNTS = {"n", "empty_cells", "under_1000", "unscored", "complete", "videos", "without_subtitles"}
"""Official figures that count something, by the first part of their names; a value alone does not tell 1 from 100 %."""


def _official(name: str, value: float | None) -> Cell:
    """A share, or a count as a whole number."""
    return number(value) if value is None or name.partition("/")[0] not in _COUNTS else Cell(f"{value:.0f}", value)


def own_table(runs: Sequence[Run], task: str) -> Table | None:
    """Figures that arms left of their own accord; None where there is none."""
    # What was computed anew has a column of its own.
    entries = [
        (run, arm, {k: v for k, v in f.get("own", {}).items() if k != "recomputed"})
        for run in runs
        for arm, f in run.arms(task).items()
    ]
    keys = list(dict.fromkeys(key for _, _, own in entries for key in own))
    rows = [(run, [Cell(arm), *(number(own.get(key)) for key in keys)]) for run, arm, own in entries if own]
    return _table(runs, f"{task}: the arms' own figures, means", ("arm", *keys), rows) if rows else None


def frames_table(runs: Sequence[Run], task: str) -> Table | None:
    """Accuracy by number of placed chunks; None where all items have as many."""
    entries = [(run, arm, f["by_frames"]) for run in runs for arm, f in run.arms(task).items()]
    counts = sorted({int(count) for _, _, found in entries for count in found})
    if len(counts) < 2:
        return None
    rows = [(run, [Cell(arm), *(_of(found.get(str(c))) for c in counts)]) for run, arm, found in entries]
    names = ("arm", *(f"{c} chunks" for c in counts))
    return _table(runs, f"{task}: accuracy by number of placed chunks", names, rows)


def _of(some: Mapping[str, Any] | None) -> Cell:
    """An accuracy, and of how many items."""
    if some is None or some["accuracy"] is None:
        return Cell(NONE)
    return Cell(f"{some['accuracy']:.3f} of {some['n']}", some["accuracy"])


def configuration_table(runs: Sequence[Run]) -> Table:
    """One line a setting; the note names those that differ."""
    found = [configuration(run) for run in runs]
    keys = list(dict.fromkeys(key for flat in found for key in flat))
    values = {key: [flat.get(key, NONE) for flat in found] for key in keys}
    differ = [key for key, some in values.items() if len(set(some)) > 1 and key not in ("samples", "started")]
    rows = tuple((Cell(key), *(Cell(v) for v in some)) for key, some in values.items())
    note = f"The runs differ in {', '.join(differ)}." if differ else ""
    return Table("Configuration", ("setting", *(run.label for run in runs)), rows, note, labels=1 + len(runs))


def _table(
    runs: Sequence[Run],
    title: str,
    names: Sequence[str],
    rows: Sequence[tuple[Run, Sequence[Cell]]],
    *,
    labels: int = 1,
    note: str = "",
) -> Table:
    """A table with the run of each row in front, where there are several."""
    lead = int(len(runs) > 1)
    made = tuple((*([Cell(run.label)] * lead), *cells) for run, cells in rows)
    return Table(title, (*["run"] * lead, *names), made, note, labels + lead)
