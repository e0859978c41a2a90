"""``ctxwin eval export``: answers of a run in the files that the data sets' own scoring scripts read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxwin.files import atomic_write
from ctxwin_evals.benchmarks.base import DataTask
from ctxwin_evals.benchmarks.mm_niah import MMNiah, result_name
from ctxwin_evals.samples import Sample, read_samples
from ctxwin_evals.score import Scorer, TaskOf


def export_run(folder: Path, arm: str, output: Path, *, task_of: TaskOf | None = None) -> dict[str, Path]:
    """Write a file for each task of a data set that an arm has answered; return them by task.

    MM-NIAH's are named as its script looks for them, others ``MODEL_TASK_ARM.json``. Items that the arm could not serve are left
    out. Raises ValueError for an arm that is not there, or a run without any such task.
    """
    samples, scorer = read_samples(folder), Scorer(task_of)
    model = re.sub(r"[^\w.-]+", "_", Path(str(samples.config.get("model", "model"))).name)
    by_task: dict[str, list[Sample]] = {}
    for row in samples.rows.values():
        by_task.setdefault(row.task, []).append(row)
    tasks = {name: task for name in by_task if isinstance(task := scorer.task(name), DataTask)}
    if not tasks:
        raise ValueError(f"{folder} must hold answers to a benchmark's data, got {', '.join(by_task) or 'no answers'}")
    arms = sorted({row.arm for name in tasks for row in by_task[name]})
    reference_only = arm == "reprefill" and arm not in arms  # every sample carries the answer of the exact re-prefill
    if not reference_only and arm not in arms:
        raise ValueError(f"arm must be one of reprefill, {', '.join(arms)}; got {arm!r}")
    files = {}
    for name, task in tasks.items():
        rows = {
            r.doc_id: _line(r, reference_only)
            for r in by_task[name]
            if (reference_only or r.arm == arm) and r.unscored is None
        }
        if not rows:
            continue
        split = next(iter(rows.values()))["meta"].get("split", task.split)
        title = f"{model}_{re.sub(r'[^A-Za-z0-9.-]+', '_', arm)}"
        files[name] = output / (
            result_name(title, name, split)
            if isinstance(task, MMNiah)
            else f"{title}_{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}.json"
        )
        atomic_write(files[name], task.export(list(rows.values())).encode())
    if not files:
        raise ValueError(f"arm {arm!r} must have served at least one item, got none")
    return files


def _line(row: Sample, of_reference: bool) -> Mapping[str, Any]:
    return {
        "doc_id": row.doc_id,
        "answer": row.reference if of_reference else row.answer,
        "target": row.target,
        "meta": row.meta,
    }
