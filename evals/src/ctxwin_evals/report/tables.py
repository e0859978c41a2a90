"""Runs side by side, and their tables as values: cells with a text and a key to sort by. `text` and `page` render them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxwin_evals.metrics import Figures
from ctxwin_evals.samples import read_samples
from ctxwin_evals.score import Result, TaskOf, scores


@dataclass(frozen=True)
class Run:
    """A scored run: a label that tells it from the others, its samples' folder, and what `ctxwin_evals.score.scores` made."""

    label: str
    folder: Path
    result: Result

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks of which anything could be scored."""
        return [name for name in self.result["tasks"] if self.arms(name)]

    def arms(self, task: str) -> dict[str, Figures]:
        """Figures of a task by arm; arms that served nothing are left out."""
        return {arm: figures[task] for arm, figures in self.result["arms"].items() if task in figures}


def read_runs(folders: Sequence[Path], against: str | None = None, task_of: TaskOf | None = None) -> list[Run]:
    """Score the samples of some folders, see `ctxwin_evals.score.scores`; no model is opened.

    Raises ValueError for no folder, one folder twice, or one without a run.
    """
    if not folders:
        raise ValueError("a report must be of at least one run, got none")
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"folders must be named once each, got {', '.join(map(str, folders))}")
    results = [scores(read_samples(folder), against=against, task_of=task_of) for folder in folders]
    names = [str(result["config"].get("name") or path.name) for result, path in zip(results, paths, strict=True)]
    for longer in ([f"{name} ({path.name})" for name, path in zip(names, paths, strict=True)], map(str, paths)):
        # Where names are not enough, the folder's name and then its whole path tell runs apart.
        times = Counter(names)
        names = [more if times[name] > 1 else name for name, more in zip(names, longer, strict=True)]
    return [Run(*parts) for parts in zip(names, paths, results, strict=True)]


def tasks_of(runs: Sequence[Run]) -> dict[str, Mapping[str, Any]]:
    """Return descriptions of the tasks of all runs, by name, in order of appearance."""
    return {name: run.result["tasks"][name] for run in runs for name in run.tasks}


def configuration(run: Run) -> dict[str, str]:
    """A run's configuration with nested names joined by dots, as text."""
    flat = {
        "samples": str(run.folder),
        "started": run.result["created"] or "unknown",
        **dict(_flat(_merge_config(run.result["config"]))),
    }
    if run.result["basis_bytes"]:
        flat["shared basis"] = f"{run.result['basis_bytes']:,} bytes, once for the model; not in the bytes columns"
    return flat


def _merge_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what all tasks have in common said once, as ``tasks.*``."""
    tasks = config.get("tasks", {})
    if len(tasks) < 2:
        return dict(config)
    first = next(iter(tasks.values()))
    common = {k: v for k, v in first.items() if all(k in task and task[k] == v for task in tasks.values())}
    distinct = {name: {k: v for k, v in task.items() if k not in common} for name, task in tasks.items()}
    return {**config, "tasks": {"*": common, **{name: task for name, task in distinct.items() if task}}}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)


NONE = "-"


@dataclass(frozen=True)
class Cell:
    """One entry: its text, and a number to sort by (None sorts last)."""

    text: str
    key: float | None = None


@dataclass(frozen=True)
class Format:
    """How a kind of figure is written: called with a figure, and its interval where there is one, it makes the cell."""

    write: Callable[[float], str]

    def __call__(self, value: float | None, interval: Sequence[float] | None = None) -> Cell:
        if value is None:
            return Cell(NONE)
        text = self.write(value)
        if interval is not None:
            text += f" [{self.write(interval[0])}, {self.write(interval[1])}]"
        return Cell(text, value)


def _small(sign: str) -> Format:
    """Three decimals; small figures by their order of magnitude."""
    return Format(lambda v: f"{v:{sign}.3f}" if abs(v) >= 0.001 or v == 0 else f"{v:{sign}.0e}")


share, fixed, number, signed = Format("{:.1%}".format), Format("{:.3f}".format), _small(""), _small("+")
count, whole, mean = Format(str), Format("{:.0f}".format), Format(lambda v: f"{v:,.1f}".removesuffix(".0"))


def _of(value: float | None, n: int) -> Cell:
    """A figure, and of how many items."""
    return Cell(NONE) if value is None else Cell(f"{value:.3f} of {n}", value)


MAIN: dict[str, Callable[[Figures], Cell]] = {
    "n": lambda f: count(f["n"]),
    "accuracy [95 %]": lambda f: fixed(f["accuracy"], f["ci95"]),
    "harm": lambda f: share(f["harm_rate"]),
    "bytes": lambda f: share(f["bytes_share"]),
    "computed": lambda f: share(f["recomputed_share"]),
    "KL": lambda f: number(f["kl"]),
    "eta": lambda f: fixed(f["eta"]),
    "flips back": lambda f: _of(f["flip_recover"], f["flips"]),
}
"""Columns of the main table, which every medium shows."""
MORE: dict[str, Callable[[Figures], Cell]] = {
    "clusters": lambda f: count(f["clusters"]),
    "left out": lambda f: (
        Cell(f"{f['unscored']} + {f['unparsed']}", n) if (n := f["unscored"] + f["unparsed"]) else Cell(NONE)
    ),
    "to re-prefill": lambda f: signed(f["delta"], f["delta_ci95"]),
    "agrees": lambda f: share(f["agreement"]),
    "KL [95 %]": lambda f: number(f["kl"], f["kl_ci95"]),
    "KL p99": lambda f: number(f["kl_p99"]),
    "KL of answers": lambda f: number(f.get("forced_kl"), f.get("forced_kl_ci95")),
    "eta [95 %]": lambda f: fixed(f["eta"], f["eta_ci95"]),
    "eta of answers": lambda f: fixed(f.get("forced_eta"), f.get("forced_eta_ci95")),
    "spent": lambda f: share(f["spent_share"]),
    "tokens": lambda f: mean(f["tokens"]),
    "tokens computed": lambda f: mean(f["computed"]),
    "forwards": lambda f: mean(f["forwards"]),
    "encodes": lambda f: mean(f["encodes"]),
}
"""Columns of the table of further figures, which only the page has room for."""
ABOUT = {
    "n": "Items that the arm served.",
    "accuracy [95 %]": "Mean score under the task's own rule.",
    "harm": "Share of items in which the arm scores lower than re-prefill (re-prefill right, arm wrong), of those in which both "
    "answers can be read.",
    "bytes": "Stored for the patched chunks beyond the KV they are applied to, over their KV in bf16.",
    "computed": "Share of the chunks' tokens that went through the decoder when the question came.",
    "KL": "KL(re-prefill || arm) of the next token in nats, mean.",
    "eta": "Share of the base's KL that is removed; the base is blind reuse, for slides the survivor as it is. "
    "'-' where the base's mean KL is under 0.01.",
    "flips back": "Of the items whose prediction the base changes, the share in which the arm restores re-prefill's.",
    "clusters": "Groups of items that depend on each other (questions on one video, one document).",
    "left out": "Items that could not be served or measured + answers that the task's rule could not read. Neither counts as "
    "wrong, unless by the data set's own figures.",
    "to re-prefill": "Accuracy minus re-prefill's on the same items.",
    "agrees": "Share of items with re-prefill's prediction, right or wrong.",
    "KL [95 %]": "KL with its interval.",
    "KL p99": "Its 99th percentile over items.",
    "KL of answers": "As KL, averaged over the tokens of re-prefill's answer, which is forced.",
    "eta [95 %]": "eta with its interval.",
    "eta of answers": "As eta, by the KL of answers.",
    "spent": "Bytes stored or replaced when asked (a token computed anew costs its KV), over the KV that patches are "
    "applied to: the axis on which patches and token arms are compared.",
    "tokens": "Tokens of the prompt, mean.",
    "tokens computed": "Of them computed when asked, mean, the question apart.",
    "forwards": "Decoder passes for them, mean.",
    "encodes": "Runs of the vision encoder, mean.",
}
"""What each column means, a sentence."""


@dataclass(frozen=True)
class Table:
    """A table: ``rows`` have one cell a column; the first ``labels`` columns are text, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    labels: int = 1


Row = Mapping[str, Cell | str]
"""Cells by column; plain text has no key."""


def tabulate(title: str, rows: Iterable[Row], *, note: str = "", labels: int = 1) -> Table:
    """A table of rows; columns stand in the order in which they first appear, and a cell that a row lacks is `NONE`."""
    entries = list(rows)
    columns = tuple(dict.fromkeys(name for row in entries for name in row))
    cells = ((row.get(name, NONE) for name in columns) for row in entries)
    cell_rows = tuple(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row) for row in cells)
    return Table(title, columns, cell_rows, note, labels)


def arm_table(runs: Sequence[Run], task: str, *, more: bool = False) -> Table:
    """All arms of a task in all runs: what counts most, or with ``more`` the other figures."""
    entries = [(run, arm, figures) for run in runs for arm, figures in run.arms(task).items()]
    columns = {
        name: read
        for name, read in (MORE if more else MAIN).items()
        if name == "accuracy [95 %]" or any(read(f).text != NONE for _, _, f in entries)
    }
    rows = [(run, {"arm": arm} | {name: read(f) for name, read in columns.items()}) for run, arm, f in entries]
    if more:
        return _table(runs, f"{task}: more figures", rows)
    about = tasks_of(runs)[task]
    notes = []
    if left_out := [f"{arm}: {why} ({n})" for _, arm, f in entries for why, n in f.get("unscored_why", {}).items()]:
        notes.append(f"Left out. {'; '.join(left_out)}.")
    if unread := [f"{arm} ({f['unparsed']} of {f['n']})" for _, arm, f in entries if f["unparsed"]]:
        notes.append(f"In neither accuracy nor harm, since the task's rule could not read them: {', '.join(unread)}.")
    patched = [run.result["config"] for run, arm, _ in entries if arm.startswith("patched:") and "@" not in arm]
    if (layouts := {config.get("layout", "joint") for config in patched}) - {"quantized"}:
        factors = f"patched:M has {' and '.join(sorted(layouts))} factors of rank M"
        notes.append(f"{factors}; windows serve quantized ones in as many bytes, patched:M@quantized.")
    kind = ", negative control" if about["control"] else ""
    return _table(runs, f"{task}: {about['about']}{kind}", rows, note=" ".join(notes))


def paired_table(runs: Sequence[Run], task: str) -> Table | None:
    """Every arm minus the chosen one on the same items; None where there is nothing to pair."""
    comparisons = [(run, pairs) for run in runs if (pairs := run.result["paired"].get(task)) and pairs["arms"]]
    rows: list[tuple[Run, Row]] = []
    for run, pairs in comparisons:
        for arm, f in pairs["arms"].items():
            cells: Row = {
                "arm": arm,
                "minus": pairs["against"],
                "n": count(f["n"]),
                "accuracy [95 %]": signed(f["accuracy"], f["accuracy_ci95"]),
                "gained": count(f["gained"]),
                "lost": count(f["lost"]),
                "McNemar p": number(f["mcnemar_p"]),
                "KL [95 %]": signed(f["kl"], f["kl_ci95"]),
                "eta [95 %]": signed(f["eta"], f["eta_ci95"]),
            }
            rows.append((run, cells))
    others = " or ".join(dict.fromkeys(pairs["against"] for _, pairs in comparisons))
    return _table(runs, f"{task}: each arm minus {others}", rows, labels=2) if rows else None


def matched_table(runs: Sequence[Run], task: str) -> Table | None:
    """Patches minus token arms at the same bytes; None without both."""
    rows: list[tuple[Run, Row]] = []
    for run in runs:
        for f in run.result["matched"].get(task, []):
            (low, high), shares, above = f["settings"], f["shares"], f["above"]
            span = f"{low} {shares[0]:.1%}" + (f" and {high} {shares[1]:.1%}" if high not in (None, low) else "")
            cells: Row = {
                "patch": f["patch"],
                "bytes": share(f["share"]),
                "token arm": f["family"],
                "between": span,
                "n": count(f["n"]),
                "accuracy [95 %]": signed(f["accuracy"], f["accuracy_ci95"]),
                "eta [95 %]": signed(f["eta"], f["eta_ci95"]),
                "eta to the larger setting [95 %]": signed(above["eta"], above["eta_ci95"]) if above else NONE,
            }
            rows.append((run, cells))
    return _table(runs, f"{task}: patches minus token arms at equal bytes", rows) if rows else None


_COUNTS = {"n", "empty_cells", "under_1000", "unscored", "complete", "videos", "without_subtitles"}
"""Official figures that count something, by the first part of their names; a value alone does not tell 1 from 100 %."""


def official_table(runs: Sequence[Run], task: str) -> Table | None:
    """The data set's own aggregates, one per line, since there can be many; None where it has none."""
    rows: dict[str, dict[str, Cell | str]] = {}
    for run in runs:
        for arm, figures in run.arms(task).items():
            head = arm if len(runs) == 1 else f"{run.label}: {arm}"
            for key, value in figures.get("official", {}).items():
                show = whole if key.partition("/")[0] in _COUNTS else number
                rows.setdefault(key, {"figure": key})[head] = show(value)
    unserved = any(figures.get("unscored") for run in runs for figures in run.arms(task).values())
    note = "Items that an arm could not serve count as empty answers here, as in its export." if unserved else ""
    return tabulate(f"{task}: the data set's own figures", rows.values(), note=note) if rows else None


def own_table(runs: Sequence[Run], task: str) -> Table | None:
    """Figures that arms recorded themselves; None where there are none."""
    rows = []
    for run in runs:
        for arm, f in run.arms(task).items():
            # The share computed anew has its own column.
            if measures := {key: number(value) for key, value in f.get("own", {}).items() if key != "recomputed"}:
                rows.append((run, {"arm": arm} | measures))
    return _table(runs, f"{task}: the arms' own figures, means", rows) if rows else None


def frames_table(runs: Sequence[Run], task: str) -> Table | None:
    """Accuracy by number of placed chunks; None where all items have as many."""
    entries = [(run, arm, f["by_frames"]) for run in runs for arm, f in run.arms(task).items()]
    counts = sorted({int(count) for _, _, by_count in entries for count in by_count})
    if len(counts) < 2:
        return None
    rows = []
    for run, arm, by_count in entries:
        some = {c: by_count.get(str(c), {"accuracy": None, "n": 0}) for c in counts}
        rows.append((run, {"arm": arm} | {f"{c} chunks": _of(f["accuracy"], f["n"]) for c, f in some.items()}))
    return _table(runs, f"{task}: accuracy by number of placed chunks", rows)


def configuration_table(runs: Sequence[Run]) -> Table:
    """One line a setting; the note names those that differ."""
    configurations = [configuration(run) for run in runs]
    keys = dict.fromkeys(key for flat in configurations for key in flat)
    values = {key: [flat.get(key, NONE) for flat in configurations] for key in keys}
    differ = [key for key, some in values.items() if len(set(some)) > 1 and key not in ("samples", "started")]
    rows = tuple((Cell(key), *map(Cell, some)) for key, some in values.items())
    note = f"The runs differ in {', '.join(differ)}." if differ else ""
    return Table("Configuration", ("setting", *(run.label for run in runs)), rows, note, labels=1 + len(runs))


def _table(
    runs: Sequence[Run], title: str, rows: Iterable[tuple[Run, Row]], *, labels: int = 1, note: str = ""
) -> Table:
    """A table with the run of each row in front, where there are several."""
    lead = len(runs) > 1
    labelled = [{"run": run.label, **row} if lead else row for run, row in rows]
    return tabulate(title, labelled, note=note, labels=labels + lead)
