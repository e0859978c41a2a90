"""Tables as values: heads, and cells with a text and a key to sort by. Renderers are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctxwin.evals.report.columns import COLUMNS, NONE, Cell, between, number, share, signed
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
    names, label = _labelled(runs, ("arm", *(c.name for c in columns)))
    rows = [(*label(run), Cell(arm), *(c.cell(figures) for c in columns)) for run, arm, figures in entries]
    if more:
        return Table(f"{task}: more figures", names, tuple(rows), labels=len(names) - len(columns))
    about = tasks_of(runs)[task]
    kind = ", negative control" if about["control"] else ""
    left_out = [
        f"{arm}: {reason} ({count})" for _, arm, f in entries for reason, count in f.get("unscored_why", {}).items()
    ]
    unread = [f"{arm} ({f['unparsed']})" for _, arm, f in entries if f["accuracy"] is None]
    note = f"Left out. {'; '.join(left_out)}. " if left_out else ""
    if unread:
        note += f"No accuracy where the task's rule could read none of the answers: {', '.join(unread)}."
    return Table(f"{task}: {about['about']}{kind}", names, tuple(rows), note.strip(), len(names) - len(columns))


def paired_table(runs: Sequence[Run], task: str) -> Table | None:
    """Every arm minus the chosen one on the same items; None where there is nothing to pair."""
    rows, others = [], []
    names, label = _labelled(
        runs, ("arm", "minus", "n", "accuracy [95 %]", "gained", "lost", "McNemar p", "KL [95 %]", "eta [95 %]")
    )
    for run in runs:
        found = run.result["paired"].get(task)
        if not found or not found["arms"]:
            continue
        others.append(found["against"])
        for arm, f in found["arms"].items():
            counts = [Cell(NONE) if n is None else Cell(str(n), n) for n in (f["gained"], f["lost"])]
            rows.append(
                (
                    *label(run), Cell(arm), Cell(found["against"]), Cell(str(f["n"]), f["n"]),
                    between(signed(f["accuracy"]), f["accuracy_ci95"], signed), *counts, number(f["mcnemar_p"]),
                    between(signed(f["kl"]), f["kl_ci95"], signed), between(signed(f["eta"]), f["eta_ci95"], signed),
                )
            )  # fmt: skip
    title = f"{task}: each arm minus {' or '.join(dict.fromkeys(others))}"
    return Table(title, names, tuple(rows), labels=len(names) - 7) if rows else None


def matched_table(runs: Sequence[Run], task: str) -> Table | None:
    """Patches minus token arms at the same bytes; None without both."""
    heads = (
        "patch",
        "bytes",
        "token arm",
        "between",
        "n",
        "accuracy [95 %]",
        "eta [95 %]",
        "eta to the larger setting [95 %]",
    )
    names, label = _labelled(runs, heads)
    rows = []
    for run in runs:
        for f in run.result["matched"].get(task, []):
            (low, high), shares = f["settings"], f["shares"]
            span = f"{low} {shares[0]:.1%}" + (f" and {high} {shares[1]:.1%}" if high not in (None, low) else "")
            above = (f["above"]["eta"], f["above"]["eta_ci95"]) if f["above"] else (None, None)
            rows.append(
                (
                    *label(run), Cell(f["patch"]), share(f["share"]), Cell(f["family"]), Cell(span), Cell(str(f["n"]), f["n"]),
                    between(signed(f["accuracy"]), f["accuracy_ci95"], signed),
                    between(signed(f["eta"]), f["eta_ci95"], signed),
                    between(signed(above[0]), above[1], signed),
                )
            )  # fmt: skip
    return Table(f"{task}: patches minus token arms at equal bytes", names, tuple(rows)) if rows else None


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
    entries = [(run, arm, f["own"]) for run in runs for arm, f in run.arms(task).items() if "own" in f]
    # What was computed anew has a column of its own.
    keys = list(dict.fromkeys(key for _, _, own in entries for key in own if key != "recomputed"))
    if not keys:
        return None
    names, label = _labelled(runs, ("arm", *keys))
    some = [entry for entry in entries if any(key in keys for key in entry[2])]
    rows = [(*label(run), Cell(arm), *(number(own.get(key)) for key in keys)) for run, arm, own in some]
    return Table(f"{task}: the arms' own figures, means", names, tuple(rows), labels=len(names) - len(keys))


def frames_table(runs: Sequence[Run], task: str) -> Table | None:
    """Accuracy by number of placed chunks; None where all items have as many."""
    entries = [(run, arm, f["by_frames"]) for run in runs for arm, f in run.arms(task).items()]
    counts = sorted({int(count) for _, _, found in entries for count in found})
    if len(counts) < 2:
        return None
    names, label = _labelled(runs, ("arm", *(f"{c} chunks" for c in counts)))
    rows = []
    for run, arm, found in entries:
        some = [found.get(str(c), {"n": 0, "accuracy": None}) for c in counts]
        cells = (
            Cell(NONE if s["accuracy"] is None else f"{s['accuracy']:.3f} of {s['n']}", s["accuracy"]) for s in some
        )
        rows.append((*label(run), Cell(arm), *cells))
    return Table(f"{task}: accuracy by number of placed chunks", names, tuple(rows), labels=len(names) - len(counts))


def configuration_table(runs: Sequence[Run]) -> Table:
    """One line a setting; the note names those that differ."""
    found = [configuration(run) for run in runs]
    keys = list(dict.fromkeys(key for flat in found for key in flat))
    values = {key: [flat.get(key, NONE) for flat in found] for key in keys}
    differ = [key for key, some in values.items() if len(set(some)) > 1 and key not in ("samples", "started")]
    rows = tuple((Cell(key), *(Cell(v) for v in some)) for key, some in values.items())
    note = f"The runs differ in {', '.join(differ)}." if differ else ""
    return Table("Configuration", ("setting", *(run.label for run in runs)), rows, note, labels=1 + len(runs))


def _labelled(runs: Sequence[Run], names: Sequence[str]) -> tuple[tuple[str, ...], Callable[[Run], tuple[Cell, ...]]]:
    """A leading column with the run's label where there are several."""
    if len(runs) == 1:
        return tuple(names), lambda run: ()
    return ("run", *names), lambda run: (Cell(run.label),)
