"""Does a cheap signal tell when a stored patch may be reused? Divergence of the antecedents as a gate.

``python -m evals.studies.gate RUN_FOLDER [--arm stale:8]`` over samples of ``ctxwin eval run tiny-drift --arms stale:8``.
Source: Kamera, appendix D ("Divergent antecedents": false reuse at a coverage; medians of safe and unsafe reuse).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ctxwin.evals.samples import Sample
from ctxwin.evals.stats import wilson

COVERAGES = (0.1, 0.25, 0.5, 0.75, 1.0)


def gate(rows: Iterable[Sample], coverages: Sequence[float] = COVERAGES) -> dict[str, Any]:
    """How well "reuse below a divergence" keeps re-prefill's answers.

    A reuse is safe where the stale patch gives re-prefill's answer. Thresholds are quantiles of the divergence, so that each
    coverage reuses at least that share of the items (ties are reused together).

    Args:
        rows: samples of one arm with ``divergence``, ``answer`` and ``reference``; those that were not scored are left out.
        coverages: shares of items to reuse, 0..1.

    Returns:
        ``n``, ``unsafe`` (count), ``median`` of safe and of unsafe reuses (None where there are none), ``auc`` (chance that an
        unsafe reuse diverges more than a safe one, ties half; None where one kind is missing), and ``at``: for each
        coverage the ``threshold``, the ``coverage`` reached, and ``false_reuse`` with its Wilson interval: the share of what
        is reused that is unsafe.

    Raises:
        ValueError: no samples with a divergence, or rows of several arms.
    """
    listed = [row for row in rows if row.unscored is None]
    if not listed or any("divergence" not in row.extra for row in listed):
        raise ValueError("rows must be samples with a divergence (arms stale, update, refresh), got none or others")
    if len(arms := {row.arm for row in listed}) > 1:
        raise ValueError(f"rows must be of one arm, got {sorted(arms)}")
    apart = np.array([row.extra["divergence"] for row in listed])
    unsafe = np.array([row.answer != row.reference for row in listed])
    found = []
    for share in coverages:
        threshold = float(np.quantile(apart, share, method="higher"))
        reused = apart <= threshold
        wrong, n = int(unsafe[reused].sum()), int(reused.sum())
        found.append(
            {
                "threshold": threshold,
                "coverage": n / len(listed),
                "false_reuse": wrong / n,
                "ci95": list(wilson(wrong, n)),
            }
        )
    both = 0 < unsafe.sum() < len(unsafe)
    return {
        "n": len(listed),
        "unsafe": int(unsafe.sum()),
        "median": {
            "safe": float(np.median(apart[~unsafe])) if (~unsafe).any() else None,
            "unsafe": float(np.median(apart[unsafe])) if unsafe.any() else None,
        },
        "auc": _auc(apart[unsafe], apart[~unsafe]) if both else None,
        "at": found,
    }


def _auc(above: np.ndarray, below: np.ndarray) -> float:
    return float(stats.mannwhitneyu(above, below).statistic) / (len(above) * len(below))


def main() -> None:
    """Prints the gate over a run's samples, all its tasks together."""
    from rich.console import Console
    from rich.table import Table

    from ctxwin.evals.samples import read_samples

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of a run")
    parser.add_argument("--arm", default="stale:8")
    options = parser.parse_args()
    try:
        made = gate(row for row in read_samples(options.folder).rows.values() if row.arm == options.arm)
    except ValueError as error:
        parser.error(str(error))
    table = Table("coverage", "divergence at most", "false reuse")
    for row in made["at"]:
        low, high = row["ci95"]
        shown = f"{row['false_reuse']:.3f} [{low:.3f}, {high:.3f}]"
        table.add_row(f"{row['coverage']:.2f}", f"{row['threshold']:.3f}", shown)
    console = Console()
    console.print(table)
    console.print(f"{made['unsafe']} of {made['n']} unsafe; medians {made['median']}; AUC {made['auc']}")


if __name__ == "__main__":
    main()
