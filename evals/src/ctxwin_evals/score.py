"""Scoring: from samples to figures, without a model. Unscored is not wrong, and no data is an error."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NotRequired, TypedDict

import numpy as np

from ctxwin_evals.benchmarks import mm_niah
from ctxwin_evals.items import Scored, Task, grouped
from ctxwin_evals.metrics import Figures, Match, Outcome, Pair, Setting, best_patched, cell, matched, paired
from ctxwin_evals.samples import Sample, Samples

LENGTHS = (0, *mm_niah.LENGTHS)
"""Lower edges in tokens of MM-NIAH's bins of context length, and the bin under 1,000 that its own figure leaves out."""
DEPTH = 1 / mm_niah.DEPTHS
"""Width of a bin of the needle's depth, 0 (front) to 1 (end)."""
TaskOf = Callable[[str], Task]
Cells = Mapping[str, Mapping[str, Figures]]
"""Figures by arm and task."""


class Pairs(TypedDict):
    """The arm that the others of a task are paired with, and what each has over it."""

    against: str
    arms: dict[str, Pair]


class Matched(Match):
    """A patch against a token arm at the patch's bytes."""

    patch: str
    share: float
    family: str


class Result(TypedDict):
    """The result of a run; ``basis_bytes`` are of all shared bases, ``paired`` and ``matched`` by task, as ``tasks``: about,
    setting, control and version of each `ctxwin_evals.items.Task`.

    The command adds ``n`` (as asked for), ``left_out`` (rows of data sets, by task: ``unreadable`` ones, and those whose media
    are ``missing``), ``output`` (the run's folder) and ``vision_encodes``.
    """

    suite: str
    config: dict[str, Any]
    created: str
    basis_bytes: int
    tasks: dict[str, dict[str, Any]]
    arms: dict[str, dict[str, Figures]]
    paired: dict[str, Pairs]
    matched: dict[str, list[Matched]]
    n: NotRequired[int]
    left_out: NotRequired[dict[str, dict[str, int]]]
    output: NotRequired[str]
    vision_encodes: NotRequired[int]


class Scorer:
    """Scores samples by their task's rule, each text of an item once.

    ``task_of`` turns a name into its task; `ctxwin_evals.tasks.open_task` by default.
    """

    def __init__(self, task_of: TaskOf | None = None) -> None:
        self._task_of = task_of
        self._tasks: dict[str, Task] = {}
        self._scored: dict[tuple[str, int, str], Scored] = {}

    def task(self, name: str) -> Task:
        """The task of a name, opened once."""
        if name not in self._tasks:
            from ctxwin_evals.tasks import open_task

            self._tasks[name] = (self._task_of or open_task)(name)
        return self._tasks[name]

    def scored(self, row: Sample, field: str = "answer") -> Scored:
        """A sample's ``answer``, ``reference`` or ``base`` under its task's rule."""
        text: str = getattr(row, field)
        key = row.task, row.index, text
        if key not in self._scored:
            self._scored[key] = self.task(row.task).score(text, row.target, row.meta)
        return self._scored[key]

    def outcome(self, row: Sample) -> Outcome:
        """The scored part of a sample.

        Raises ValueError for a sample that its arm could not serve, or that names no cluster.
        """
        if row.unscored is not None:
            raise ValueError(f"sample {row.index} of {row.task!r} is unscored: {row.unscored}")
        if not row.cluster:
            raise ValueError(f"sample {row.index} of {row.task!r} must name its cluster, got {row.cluster!r}")
        scores = []
        for field in ("answer", "reference", "base"):
            scored = self.scored(row, field)
            # Answers that the rule reads nothing in are compared as they stand: two of them need not be the same.
            scores.append(scored if scored.prediction else replace(scored, prediction=getattr(row, field).strip()))
        return Outcome(row, *scores)

    def official(self, rows: Sequence[Sample]) -> dict[str, float]:
        """The data set's own aggregates over samples of one arm on one task, an empty answer for one that was not served."""
        records = []
        for row in rows:
            scored = self.scored(row)
            records.append(
                {"score": scored.score, "prediction": scored.prediction, **scored.metrics}
                | row.model_dump(include={"target", "meta", "doc_id", "answer", "question", "index"})
            )
        return dict(self.task(rows[0].task).official(records))


class Table:
    """Samples (given in any order) by task and arm with their outcomes; all figures are made from it.

    Raises ValueError where there is nothing scored at all.
    """

    def __init__(self, rows: Iterable[Sample], scorer: Scorer) -> None:
        self.scorer = scorer
        self.rows: dict[str, dict[str, list[Sample]]] = {}
        self.unserved: dict[tuple[str, str], list[Sample]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.index):
            samples = self.rows.setdefault(row.task, {}).setdefault(row.arm, [])
            if row.unscored is not None:
                self.unserved[row.task, row.arm].append(row)
            else:
                samples.append(row)
        self.outcomes = {
            (task, arm): {row.index: scorer.outcome(row) for row in some}
            for task, arms in self.rows.items()
            for arm, some in arms.items()
            if some
        }
        if not self.outcomes:
            raise ValueError("a run must have at least one scored sample, got none")

    def arms(self) -> dict[str, dict[str, Figures]]:
        """All figures by arm and task."""
        by_arm: dict[str, dict[str, Figures]] = {}
        for (task, arm), outcomes in self.outcomes.items():
            figures = cell(list(outcomes.values()))
            self._add(figures, task, arm)
            by_arm.setdefault(arm, {})[task] = figures
        return by_arm

    def _add(self, figures: Figures, task: str, arm: str) -> None:
        """Items that could not be served, costs, groups of items, the arm's own figures, official aggregates."""
        rows = self.rows[task][arm]
        scores = [self.scorer.scored(row).score for row in rows]
        unserved = self.unserved.get((task, arm), [])
        figures["unscored"] = len(unserved)
        frames = grouped(zip(rows, scores, strict=True), lambda scored: scored[0].frames)
        figures["by_frames"] = {
            str(count): _accuracy([score for _, score in some]) for count, some in sorted(frames.items())
        }
        if unserved:
            figures["unscored_why"] = dict(Counter(row.unscored or "" for row in unserved))
        for name in ("tokens", "computed", "forwards", "encodes"):
            figures[name] = fmean([getattr(row, name) for row in rows])
        figures["spent_share"] = self._spent(task, arm)
        if extra := dict.fromkeys(name for row in rows for name in row.extra):
            figures["own"] = {name: fmean([row.extra[name] for row in rows if name in row.extra]) for name in extra}
        if layers := [row.by_layer for row in rows if row.by_layer]:
            if len(counts := {len(x) for x in layers}) != 1:
                raise ValueError(f"samples of a run must be of one model's layers, got {sorted(counts)}")
            figures["by_layer"] = [float(x) for x in np.mean(np.asarray(layers, dtype=np.float64), axis=0)]
        if cells := _grid(rows, scores):
            figures["grid"] = cells
        if official := self.scorer.official(sorted([*rows, *unserved], key=lambda row: row.index)):
            figures["official"] = official

    def _spent(self, task: str, arm: str) -> float | None:
        """Bytes that the arm stores or computes anew over the KV bytes that patches of this task are applied to.

        This puts patches and token arms on one axis; where nothing is patched, it is over the arm's own chunks. None for
        re-prefill, which has no place on that axis.
        """
        if arm == "reprefill":
            return None
        mine = self.outcomes[task, arm]
        patched = next((o for (t, a), o in self.outcomes.items() if t == task and a.startswith("patched:")), mine)
        shared = [i for i in mine if i in patched]
        over = sum(patched[i].row.over for i in shared)
        return math.fsum(mine[i].spent for i in shared) / over if over else None

    def against(self, chosen: str | None, by_arm: Cells) -> dict[str, Pairs]:
        """Every arm paired with ``chosen``, by default with each task's `best_patched`; tasks without it are left out."""
        by_task: dict[str, Pairs] = {}
        for task in self.rows:
            cells = {arm: tasks[task] for arm, tasks in by_arm.items() if task in tasks}
            other = chosen or best_patched(cells)
            if other is not None and other in cells:
                theirs = self.outcomes[task, other]
                pairs = {arm: paired(self.outcomes[task, arm], theirs) for arm in cells if arm != other}
                by_task[task] = {"against": other, "arms": {arm: pair for arm, pair in pairs.items() if pair}}
        return by_task

    def matched(self, by_arm: Cells) -> dict[str, list[Matched]]:
        """Every patch against every token arm at its bytes, by task; see `metrics.matched`.

        Token arms are those that say what share of the chunks they compute anew (``recomputed`` on their samples).
        """
        by_task: dict[str, list[Matched]] = {}
        for task in self.rows:
            families: dict[str, list[Setting]] = defaultdict(list)
            cells = {arm: tasks[task] for arm, tasks in by_arm.items() if task in tasks}
            for arm, figures in cells.items():
                if figures.get("own", {}).get("recomputed") and arm != "reprefill":
                    setting = Setting(arm, figures["spent_share"] or 0.0, self.outcomes[task, arm])
                    families[arm.partition(":")[0]].append(setting)
            for arm, figures in cells.items():
                share = figures["bytes_share"]
                if not arm.startswith("patched:") or not share:
                    continue
                for family, settings in families.items():
                    if pair := matched(self.outcomes[task, arm], share, settings):
                        by_task.setdefault(task, []).append({"patch": arm, "share": share, "family": family, **pair})
        return by_task


def select(samples: Samples, names: Sequence[str] | None = None, n: int | None = None) -> list[Sample]:
    """Samples of some arms (all by default) and the first ``n`` items of every task (all by default).

    Raises ValueError for an arm without samples, or no samples at all.
    """
    rows = samples.first(n)
    present = {row.arm for row in rows}
    missing = [name for name in names or () if name not in present]
    if missing:
        raise ValueError(f"the run must hold samples of {', '.join(missing)}, got none")
    if not rows:
        raise ValueError(f"the run must hold samples, got none in {str(samples.folder)!r}; run it first")
    return [row for row in rows if names is None or row.arm in names]


def scores(
    samples: Samples,
    names: Sequence[str] | None = None,
    n: int | None = None,
    *,
    against: str | None = None,
    task_of: TaskOf | None = None,
) -> Result:
    """The result of a run: of these arms in order, and the first ``n`` items of each task (both all by default).

    ``against`` is the arm that others are paired with, by default each task's best patch; ``task_of`` as in `Scorer`. Raises
    ValueError for an arm without samples, or where nothing is scored at all.
    """
    rows = select(samples, names, n)
    present = {row.arm for row in rows}
    if against is not None and against not in present:
        raise ValueError(f"{samples.folder} must hold samples of {against} to compare with, got {sorted(present)}")
    table = Table(rows, Scorer(task_of))
    by_arm = table.arms()
    order = names if names is not None else list(dict.fromkeys(row.arm for row in rows))
    ordered = {name: by_arm.get(name, {}) for name in order}  # empty: nothing of it could be scored
    config = {k: v for k, v in samples.config.items() if k != "format"}
    tasks = {name: table.scorer.task(name) for name in table.rows}
    return {
        "suite": ", ".join(dict.fromkeys(name.partition("/")[0] for name in tasks)),
        "config": config,
        "created": samples.created,
        "basis_bytes": sum(path.stat().st_size for path in samples.folder.glob("basis*.safetensors")),
        "tasks": {
            name: {"about": task.about, "setting": task.setting, "control": task.control, "version": task.version}
            for name, task in tasks.items()
        },
        "arms": ordered,
        "paired": table.against(against, ordered),
        "matched": table.matched(ordered),
    }


def _accuracy(scores: Sequence[float | None]) -> dict[str, Any]:
    """Of a group of items; None where no answer could be scored."""
    scored = [s for s in scores if s is not None]
    return {"n": len(scores), "accuracy": fmean(scored) if scored else None}


def _grid(rows: Sequence[Sample], scores: Sequence[float | None]) -> list[dict[str, Any]]:
    """Accuracy by context length (lower edge) and depth of the needle (number of the bin), MM-NIAH's grid.

    Cells without items are left out. Needles in several places count at their mean depth, as in the official figure.
    """
    by_cell: dict[tuple[int, int], list[float | None]] = defaultdict(list)
    for row, score in zip(rows, scores, strict=True):
        length, depth = row.meta.get("context_length"), row.meta.get("placed_depth")
        if length is not None and depth is not None and depth != []:
            bin_of_length, at = mm_niah.cell_of(length, depth)
            by_cell[LENGTHS[bin_of_length], at].append(score)
    return [{"length": length, "depth": depth, **_accuracy(some)} for (length, depth), some in sorted(by_cell.items())]
