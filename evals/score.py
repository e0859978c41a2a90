"""Scoring: from samples to the table of figures, without a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from ctxwin.evals.metrics import Outcome, cell
from ctxwin.evals.samples import Row, Samples
from ctxwin.evals.tasks import TASKS


def outcome(row: Row) -> Outcome:
    """The scored part of a sample; ValueError for an unscored one."""
    if "unscored" in row:
        raise ValueError(f"sample {row['index']} of {row['task']!r} is unscored: {row['unscored']}")
    return Outcome(**{f.name: row[f.name] for f in fields(Outcome)})


def table(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """``{arm: {task: figures}}``; see `metrics.cell`. Unscored samples are counted apart, never as wrong.

    Each cell also has ``by_frames``: accuracy by number of placed frames, and the means of the extra figures that an
    arm left on its samples. Raises ValueError where there is nothing scored at all.
    """
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["arm"], row["task"]].append(row)
    arms: dict[str, dict[str, dict[str, Any]]] = {}
    order = list(TASKS)
    for (arm, task), samples in sorted(found.items(), key=lambda item: order.index(item[0][1])):
        scored = [row for row in sorted(samples, key=lambda row: row["index"]) if "unscored" not in row]
        if not scored:
            continue
        figures: dict[str, Any] = cell([outcome(row) for row in scored])
        figures["unscored"] = len(samples) - len(scored)
        figures["by_frames"] = _by_frames(scored)
        for name in ("moved", "recomputed", "orders"):
            values = [row[name] for row in scored if name in row]
            if values:
                figures[name] = sum(values) / len(values)
        arms.setdefault(arm, {})[task] = figures
    if not arms:
        raise ValueError("a run must have at least one scored sample, got none")
    return arms


def scores(samples: Samples, names: Sequence[str] | None = None, n: int | None = None) -> dict[str, Any]:
    """The result of a run: its configuration, ``basis_bytes``, and the table.

    Args:
        samples: of the run.
        names: arms to take, in order; all by default.
        n: take the first ``n`` items of every task; all by default.

    Raises:
        ValueError: an arm without samples, or no samples at all.
    """
    rows = [row for row in samples.rows.values() if n is None or row["index"] < n]
    held = {row["arm"] for row in rows}
    missing = [name for name in names or () if name not in held]
    if missing:
        raise ValueError(f"the run must hold samples of {', '.join(missing)}, got none")
    made = table(row for row in rows if names is None or row["arm"] in names)
    order = names if names is not None else list(dict.fromkeys(row["arm"] for row in rows))
    basis = samples.folder / "basis.safetensors"
    config = {k: v for k, v in samples.config.items() if k != "format"}
    return {
        "suite": samples.config.get("suite", "tiny"),
        "config": config,
        "basis_bytes": basis.stat().st_size if basis.exists() else 0,
        "arms": {name: made.get(name, {}) for name in order},  # empty: nothing of it could be scored
    }


def _by_frames(rows: Sequence[Row]) -> dict[str, dict[str, float | int]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["frames"]].append(row)
    return {
        str(frames): {"n": len(some), "accuracy": sum(r["answer"] == r["truth"] for r in some) / len(some)}
        for frames, some in sorted(found.items())
    }
