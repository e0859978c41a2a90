"""The tasks by name."""

from dataclasses import fields

from ctxwin_evals.benchmarks import BENCHMARKS, DataOptions, DataTask, benchmark, milebench, mm_niah, video_mme, videos
from ctxwin_evals.items import Task
from ctxwin_evals.tasks import pages
from ctxwin_evals.tasks.tiny import TASKS, WORLD_TASKS, TinyOptions, TinyTask

_SLIDES = ("slide_distractor", "slide_needed", "slide_repeated")
_DIVERGENT = ("reorder", "duplicate", "replace-one", "replace-all")


def _tiny(*kinds: str) -> tuple[str, ...]:
    """Generated tasks, each at every listed amount."""
    names: list[str] = []
    for kind in kinds:
        amount = TASKS[kind].amount
        names += [f"tiny/{kind}@{a:g}" for a in amount.listed] if amount else [f"tiny/{kind}"]
    return tuple(names)


SUITES: dict[str, tuple[str, ...]] = {
    "tiny": _tiny(*WORLD_TASKS),
    "tiny-slide": _tiny(*_SLIDES, "history"),
    "tiny-recall": _tiny("recall"),
    "tiny-reorder": _tiny("reorder"),
    "tiny-drift": _tiny(*(f"divergent-{kind}" for kind in _DIVERGENT), "excess", "superset", "changed"),
    "tiny-all": _tiny(*TASKS),
    "mm-niah": tuple(mm_niah.MMNiah.names),
    "milebench": tuple(milebench.MileBench.names),
}
"""Names that stand for several tasks."""


def open_task(name: str, tiny: TinyOptions | None = None, data: DataOptions | None = None) -> Task:
    """The task of a name; reads no data. Raises ValueError, naming the tasks, for an unknown one.

    ``PROTOCOL:TASK`` is a protocol of `ctxwin_evals.tasks.protocols` on another task's items.
    """
    from ctxwin_evals.tasks.protocols import ProtocolTask

    tiny, (protocol, colon, base) = tiny or TinyOptions(), name.partition(":")
    if colon:
        return ProtocolTask(protocol, open_task(base, tiny, data), tiny.seed)
    if name.startswith("tiny/"):
        return TinyTask(name, tiny)
    if name in pages.NAMES:
        return pages.TwoPages(name, tiny.seed)
    if name in BENCHMARKS:
        return benchmark(name, data)
    raise ValueError(f"a task must be one of {', '.join(task_names())}; got {name!r}")


def check_data(options: DataOptions, tasks: str) -> None:
    """Raise ValueError for options that none of some tasks (a list as `expand` takes it) reads."""
    given = {f.name for f in fields(options) if getattr(options, f.name) != f.default}
    opened = [benchmark(base) for name in expand(tasks) if (base := name.rpartition(":")[2]) in BENCHMARKS]
    for kind, what, read in (
        (DataTask, "a benchmark's tasks", given),
        (videos.VideoTask, "tasks of videos", {"frames", "frame_rule", "as_video", "times"}),
        (video_mme.VideoMME, "video-mme", {"subtitles"}),
    ):
        if (idle := given & read) and not any(isinstance(task, kind) for task in opened):
            names = ", ".join("--video-frames" if n == "frames" else f"--{n.replace('_', '-')}" for n in sorted(idle))
            raise ValueError(f"{names} must be for {what}, got {tasks}; name the task (`ctxwin eval ls` lists them)")


def task_names() -> list[str]:
    """Every task, at each amount it lists; protocols on other tasks' items are not listed (see `open_task`)."""
    return [*_tiny(*TASKS), *pages.NAMES, *BENCHMARKS]


def expand(text: str) -> list[str]:
    """A comma-separated list of tasks and suites as names, in order, each once; ValueError where it is empty.

    ``PROTOCOL:SUITE`` stands for the protocol on each task of the suite.
    """
    names: dict[str, None] = {}
    for part in (p.strip() for p in text.split(",")):
        protocol, colon, base = part.rpartition(":")
        if part:
            names |= dict.fromkeys(protocol + colon + name for name in SUITES.get(base, (base,)))
    if not names:
        raise ValueError(f"tasks must name at least one of {', '.join([*SUITES, *task_names()])}; got {text!r}")
    return list(names)
