"""Tables as values: columns with what they mean, cells with a text and a key to sort by. Renderers are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxwin.evals.report.runs import Run, configuration, tasks_of

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One entry: what is shown, and a number to sort by (None sorts last)."""

    text: str
    key: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of figures.

    Attributes:
        name: its head.
        about: what it means, a sentence.
        cell: from an arm's figures to the entry.
        short: also in terminals and markdown, where there is less room.
        held: whether any arm has it; a column that nobody has is left out.
    """

    name: str
    about: str
    cell: Callable[[Figures], Cell]
    short: bool = False

    def held(self, figures: Sequence[Figures]) -> bool:
        return self.short or any(self.cell(f).text != NONE for f in figures)


@dataclass(frozen=True)
class Table:
    """A table: ``rows`` have one cell a column; the first ``labels`` columns are text, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    labels: int = 1


NONE = "-"


def share(value: float | None) -> Cell:
    return Cell(NONE) if value is None else Cell(f"{value:.1%}", value)


def number(value: float | None) -> Cell:
    """Three decimals; small ones by their order of magnitude."""
    if value is None:
        return Cell(NONE)
    return Cell(f"{value:.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:.0e}", value)


def signed(value: float | None) -> Cell:
    if value is None:
        return Cell(NONE)
    return Cell(f"{value:+.3f}" if abs(value) >= 0.001 or value == 0 else f"{value:+.0e}", value)


def between(value: Cell, interval: Sequence[float] | None, show: Callable[[float | None], Cell] = number) -> Cell:
    """A figure with its interval."""
    if interval is None or value.text == NONE:
        return value
    return Cell(f"{value.text} [{show(interval[0]).text}, {show(interval[1]).text}]", value.key)


def _fixed(value: float | None) -> Cell:
    return Cell(NONE) if value is None else Cell(f"{value:.3f}", value)


def _flips(f: Figures) -> Cell:
    if f["flip_recover"] is None:
        return Cell(NONE)
    return Cell(f"{f['flip_recover']:.3f} of {f['flips']}", f["flip_recover"])


def _count(name: str) -> Callable[[Figures], Cell]:
    return lambda f: Cell(f"{f[name]:,.1f}".removesuffix(".0"), f[name]) if name in f else Cell(NONE)


def _left_out(f: Figures) -> Cell:
    unserved, unparsed = f["unscored"], f["unparsed"]
    return Cell(f"{unserved} + {unparsed}" if unserved or unparsed else "0", unserved + unparsed)


COLUMNS: tuple[Column, ...] = (
    Column("n", "Items that the arm served.", lambda f: Cell(str(f["n"]), f["n"]), short=True),
    Column(
        "clusters",
        "Groups of items that depend on each other (questions on one video, one document).",
        lambda f: Cell(str(f["clusters"]), f["clusters"]),
    ),
    Column(
        "left out",
        "Items that the arm has no meaning for + answers that the task's rule could not read. Neither counts as wrong.",
        _left_out,
    ),
    Column(
        "accuracy [95 %]",
        "Mean score under the task's own rule.",
        lambda f: between(_fixed(f["accuracy"]), f["ci95"], _fixed),
        short=True,
    ),
    Column(
        "to re-prefill",
        "Accuracy minus re-prefill's on the same items.",
        lambda f: between(signed(f["delta"]), f["delta_ci95"], signed),
    ),
    Column("agrees", "Share of items with re-prefill's prediction, right or wrong.", lambda f: share(f["agreement"])),
    Column("KL", "KL(re-prefill || arm) of the next token in nats, mean.", lambda f: number(f["kl"]), short=True),
    Column(
        "KL [95 %]",
        "The same with its interval.",
        lambda f: between(number(f["kl"]), f["kl_ci95"]),
    ),
    Column("KL p99", "Its 99th percentile over items.", lambda f: number(f["kl_p99"]), short=True),
    Column(
        "KL of answers",
        "As KL, averaged over the tokens of re-prefill's answer, which is forced.",
        lambda f: between(number(f.get("forced_kl")), f.get("forced_kl_ci95")),
    ),
    Column(
        "eta",
        "Share of the base's KL that is removed; the base is blind reuse, for slides the survivor as it is. "
        "'-' where the base's mean KL is under 0.01.",
        lambda f: _fixed(f["eta"]),
        short=True,
    ),
    Column("eta [95 %]", "The same with its interval.", lambda f: between(_fixed(f["eta"]), f["eta_ci95"], _fixed)),
    Column(
        "eta of answers",
        "As eta, by the KL of answers.",
        lambda f: between(_fixed(f.get("forced_eta")), f.get("forced_eta_ci95"), _fixed),
    ),
    Column(
        "flips back",
        "Of the items whose prediction the base changes, the share in which the arm restores re-prefill's.",
        _flips,
        short=True,
    ),
    Column(
        "harm",
        "Share of items in which the arm scores lower than re-prefill (re-prefill right, arm wrong).",
        lambda f: share(f["harm_rate"]),
        short=True,
    ),
    Column(
        "bytes",
        "Stored for the patched chunks beyond the KV they are applied to, over their KV in bf16.",
        lambda f: share(f["bytes_share"]),
        short=True,
    ),
    Column(
        "spent",
        "Bytes stored or computed anew when asked (a token computed anew costs its KV), over the KV that patches are "
        "applied to: the axis on which patches and token arms are compared.",
        lambda f: share(f["spent_share"]),
    ),
    Column(
        "computed",
        "Share of the chunks' tokens that went through the decoder when the question came.",
        lambda f: share(f["recomputed_share"]),
        short=True,
    ),
    Column("tokens", "Tokens of the prompt, mean.", _count("tokens")),
    Column("tokens computed", "Of them computed when asked, mean, the question apart.", _count("computed")),
    Column("forwards", "Decoder passes for them, mean.", _count("forwards")),
    Column("encodes", "Runs of the vision encoder, mean.", _count("encodes")),
    Column(
        "first token",
        "Median seconds to the first token, of the items that were timed.",
        lambda f: (
            Cell(f"{f['ttft_s']['median']:.3g} s of {f['ttft_s']['n']}", f["ttft_s"]["median"])
            if "ttft_s" in f
            else Cell(NONE)
        ),
    ),
)


def arm_table(runs: Sequence[Run], task: str, short: bool = False) -> Table:
    """All arms of a task in all runs."""
    entries = [(run, arm, figures) for run in runs for arm, figures in run.arms(task).items()]
    found = [figures for _, _, figures in entries]
    columns = [c for c in COLUMNS if (c.short if short else c.held(found)) and not (not short and _doubled(c))]
    names, label = _labelled(runs, ("arm", *(c.name for c in columns)))
    rows = [(*label(run), Cell(arm), *(c.cell(figures) for c in columns)) for run, arm, figures in entries]
    about = tasks_of(runs)[task]
    kind = ", negative control" if about["control"] else ""
    left_out = {arm: f["unscored_why"] for _, arm, f in entries if "unscored_why" in f}
    why = "; ".join(f"{arm}: {reason} ({count})" for arm, w in left_out.items() for reason, count in w.items())
    return Table(
        f"{task}: {about['about']}{kind}",
        names,
        tuple(rows),
        f"Left out. {why}." if why else "",
        len(names) - len(columns),
    )


def _doubled(column: Column) -> bool:
    """Figures that the page shows with their interval."""
    return column.name in ("KL", "eta")


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
            counts = [Cell(NONE) if f[k] is None else Cell(str(f[k]), f[k]) for k in ("gained", "lost")]
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
            (low, high), (low_share, high_share) = f["settings"], f["shares"]
            span = f"{low} {low_share:.1%}" + (f" and {high} {high_share:.1%}" if high not in (None, low) else "")
            above = f["above"] or {"eta": None, "eta_ci95": None}
            rows.append(
                (
                    *label(run), Cell(f["patch"]), share(f["share"]), Cell(f["family"]), Cell(span), Cell(str(f["n"]), f["n"]),
                    between(signed(f["accuracy"]), f["accuracy_ci95"], signed),
                    between(signed(f["eta"]), f["eta_ci95"], signed),
                    between(signed(above["eta"]), above["eta_ci95"], signed),
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
    rows = tuple((Cell(key), *(_counted(official.get(key)) for _, _, official in entries)) for key in keys)
    return Table(f"{task}: the data set's own figures", ("figure", *heads), rows)


def _counted(value: float | None) -> Cell:
    """A share, or a count as a whole number."""
    return Cell(f"{value:.0f}", value) if value is not None and value > 1 and value == int(value) else number(value)


def own_table(runs: Sequence[Run], task: str, known: frozenset[str]) -> Table | None:
    """Figures that arms left of their own accord: every number that is not in ``known``; None where there is none."""
    entries = [
        (run, arm, {k: v for k, v in f.items() if k not in known and isinstance(v, int | float)})
        for run in runs
        for arm, f in run.arms(task).items()
    ]
    keys = list(dict.fromkeys(key for _, _, own in entries for key in own))
    if not keys:
        return None
    names, label = _labelled(runs, ("arm", *keys))
    rows = [(*label(run), Cell(arm), *(number(own.get(key)) for key in keys)) for run, arm, own in entries if own]
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
