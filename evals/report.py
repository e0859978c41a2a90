"""Tables of a scored run: for a terminal (rich), for a document (markdown), and a picture of the rank sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.evals.tasks import TASKS

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("arm", "n", "accuracy [95 %]", "KL", "KL p99", "eta", "flips back", "harm", "bytes")


def cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    """One row of a table, in the order of `COLUMNS`."""
    low, high = figures["ci95"]
    recovered = figures["flip_recover"]
    return [
        name,
        str(figures["n"]),
        f"{figures['accuracy']:.3f} [{low:.3f}, {high:.3f}]",
        _small(figures["kl"]),
        _small(figures["kl_p99"]),
        "-" if figures["eta"] is None else f"{figures['eta']:.3f}",
        "-" if recovered is None else f"{recovered:.3f} of {figures['flips']}",
        f"{figures['harm_rate']:.1%}",
        "-" if figures["bytes_share"] is None else f"{figures['bytes_share']:.1%}",
    ]


def by_task(result: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """``{task: {arm: figures}}``, tasks in their own order."""
    return {
        task: {arm: made[task] for arm, made in result["arms"].items() if task in made}
        for task in TASKS
        if any(task in made for made in result["arms"].values())
    }


def rich_tables(result: Mapping[str, Any]) -> list[Table]:
    """One table a task."""
    from rich.table import Table

    tables = []
    for task, arms in by_task(result).items():
        made = Table(title=f"{task}: {TASKS[task].about}", title_justify="left")
        for i, column in enumerate(COLUMNS):
            made.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        for arm, figures in arms.items():
            made.add_row(*cells(arm, figures))
        tables.append(made)
    return tables


def markdown(result: Mapping[str, Any]) -> str:
    """The whole run as a document: configuration, one table a task, what the columns mean."""
    config = result["config"]
    lines = [
        "# Fidelity",
        "",
        f"Items: seed {config['seed']}, {_span(config['frames'])} frames, "
        f"{'decoded from mp4' if config['decoded'] else 'as rendered'}. Patches: {config['layout']}, layers "
        f"{config['layers']}, weight {config['weight']}, {config['dtype']}. KV: {config['kv']}.",
    ]
    if result["basis_bytes"]:
        lines.append(f"Shared basis: {result['basis_bytes']:,} bytes, once for the model; not in the bytes column.")
    for task, arms in by_task(result).items():
        lines += ["", f"## {task}", "", f"{TASKS[task].about[0].upper()}{TASKS[task].about[1:]}.", ""]
        lines += [_line(COLUMNS), _line(["---", *["---:"] * (len(COLUMNS) - 1)])]
        lines += [_line(cells(arm, figures)) for arm, figures in arms.items()]
        unscored = {arm: figures["unscored"] for arm, figures in arms.items() if figures["unscored"]}
        if unscored:
            counts = ", ".join(f"{arm} {count}" for arm, count in unscored.items())
            lines += ["", f"Unscored, since no other order exists: {counts}."]
    lines += [
        "",
        "KL: KL(re-prefill || arm) of the next token in nats, mean and 99th percentile. eta: share of the base's KL "
        "that is removed; the base is blind reuse, for slides the survivor as it is; '-' where the base's mean KL is "
        "under 0.01. Flips back: of the items whose answer the base changes, the share that is restored. Harm: "
        "re-prefill right, arm wrong. Bytes: stored for the patched chunks beyond the KV they are applied to, over "
        "their KV in bf16.",
        "",
    ]
    return "\n".join(lines)


def plot_sweep(result: Mapping[str, Any], path: Path) -> bool:
    """Draws accuracy and eta of ``patched:M`` over bytes; returns False where there are fewer than two ranks.

    Raises ModuleNotFoundError without matplotlib (``pip install 'ctxwin[evals]'``).
    """
    tasks = {}
    for task, arms in by_task(result).items():
        points = sorted(
            (f["bytes_share"], f["accuracy"], *f["ci95"], f["eta"], name)
            for name, f in arms.items()
            if name.startswith("patched:") and f["bytes_share"]
        )
        if len(points) > 1:
            tasks[task] = points
    if not tasks:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for task, points in tasks.items():
        share = [100 * p[0] for p in points]
        (line,) = left.plot(share, [p[1] for p in points], marker="o", label=task)
        left.fill_between(share, [p[2] for p in points], [p[3] for p in points], alpha=0.15, color=line.get_color())
        for name in ("reprefill", "blind"):
            figures = result["arms"].get(name, {}).get(task)
            if figures:
                style = ":" if name == "blind" else "--"
                left.axhline(figures["accuracy"], color=line.get_color(), linewidth=0.8, linestyle=style)
        if all(p[4] is not None for p in points):
            right.plot(share, [p[4] for p in points], marker="o", label=task, color=line.get_color())
    left.set_ylabel("accuracy (dashed: re-prefill, dotted: blind)")
    right.set_ylabel("eta")
    for axis in (left, right):
        axis.set_xlabel("patch bytes, % of the chunk's KV in bf16")
        axis.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=144)
    return True


def _small(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 or value == 0 else f"{value:.0e}"


def _span(frames: list[int]) -> str:
    low, high = min(frames), max(frames)
    whole = low < high and sorted(frames) == list(range(low, high + 1))
    return f"{low} to {high}" if whole else ", ".join(map(str, frames))


def _line(columns: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(columns) + " |"
