"""Runs that stand side by side in a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxwin.evals.metrics import Figures
from ctxwin.evals.samples import read_samples
from ctxwin.evals.score import Result, TaskOf, scores


@dataclass(frozen=True)
class Run:
    """A scored run: a label that tells it from the others, its samples' folder, and what `ctxwin.evals.score.scores` made."""

    label: str
    folder: Path
    result: Result

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks of which anything could be scored."""
        return [name for name in self.result["tasks"] if self.arms(name)]

    def arms(self, task: str) -> dict[str, Figures]:
        """Figures of a task by arm; arms that served nothing are left out."""
        return {arm: made[task] for arm, made in self.result["arms"].items() if task in made}


def read_runs(folders: Sequence[Path], against: str | None = None, task_of: TaskOf | None = None) -> list[Run]:
    """Scores the samples of some folders, see `ctxwin.evals.score.scores`; no model is opened.

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
    return [Run(*made) for made in zip(names, paths, results, strict=True)]


def tasks_of(runs: Sequence[Run]) -> dict[str, Mapping[str, Any]]:
    """What the tasks of all runs are, by name, in order of appearance."""
    return {name: run.result["tasks"][name] for run in runs for name in run.tasks}


def configuration(run: Run) -> dict[str, str]:
    """A run's configuration with nested names joined by dots, as text."""
    flat = {
        "samples": str(run.folder),
        "started": run.result["created"] or "unknown",
        **dict(_flat(_merged(run.result["config"]))),
    }
    if run.result["basis_bytes"]:
        flat["shared basis"] = f"{run.result['basis_bytes']:,} bytes, once for the model; not in the bytes columns"
    return flat


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what all tasks have in common said once, as ``tasks.*``."""
    tasks = config.get("tasks", {})
    if len(tasks) < 2:
        return dict(config)
    first = next(iter(tasks.values()))
    common = {k: v for k, v in first.items() if all(k in task and task[k] == v for task in tasks.values())}
    own = {name: {k: v for k, v in task.items() if k not in common} for name, task in tasks.items()}
    return {**config, "tasks": {"*": common, **{name: task for name, task in own.items() if task}}}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)
