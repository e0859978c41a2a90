"""The tasks by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from ctxwin.evals.items import Task
from ctxwin.evals.tasks.tiny import TASKS, WORLD_TASKS, TinyOptions, TinyTask

TURNOVERS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SUITES: dict[str, tuple[str, ...]] = {
    "tiny": tuple(f"tiny/{name}" for name in WORLD_TASKS),
}
"""Names that stand for several tasks."""


@dataclass(frozen=True)
class TaskOptions:
    """What items depend on beside their task; each task takes what concerns it.

    Attributes:
        tiny: of generated items.
    """

    tiny: TinyOptions = field(default_factory=TinyOptions)


def open_task(name: str, options: TaskOptions | None = None) -> Task:
    """The task of a name; reads no data. Raises ValueError, naming the tasks, for an unknown one."""
    options = TaskOptions() if options is None else options
    if name.startswith("tiny/"):
        return TinyTask(name, options.tiny)
    raise ValueError(f"a task must be one of {', '.join(task_names())}; got {name!r}")


def task_names() -> list[str]:
    """Every task, recalls at each of `TURNOVERS`."""
    names = []
    for name, kind in TASKS.items():
        names += [f"tiny/{name}@{t:g}" for t in TURNOVERS] if kind.setting == "recall" else [f"tiny/{name}"]
    return names


def expand(text: str) -> list[str]:
    """A comma-separated list of tasks and suites as names, in order, each once; ValueError where it is empty."""
    found: dict[str, None] = {}
    for part in (p.strip() for p in text.split(",")):
        if part:
            found |= dict.fromkeys(SUITES.get(part, (part,)))
    if not found:
        raise ValueError(f"tasks must name at least one of {', '.join([*SUITES, *task_names()])}; got {text!r}")
    return list(found)
