"""Runs arms over items and keeps the samples. Resumable: samples that exist already are not computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

from ctxwin.errors import BadMedia
from ctxwin.kv.patch import Layers, Layout
from ctxwin.tiny import checkpoint_dir
from ctxwin_evals.arms import BASES, Arm
from ctxwin_evals.decoder import Decoder, Reader
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item, Task, grouped
from ctxwin_evals.measure import BATCH, Measurer, by_shape
from ctxwin_evals.patching import Patcher, fitted
from ctxwin_evals.samples import FORMAT, Sample, Samples, open_samples
from ctxwin_evals.serving import ServedMeasurer
from ctxwin_evals.tasks import SUITES
from ctxwin_evals.tasks.tiny import TinyOptions, fit_cases

if TYPE_CHECKING:
    from ctxwin.engines.encoding.encoder import EncodingEngine
    from ctxwin.engines.hf.engine import HFEngine

BLOCK = 5 * BATCH
"""Items share forwards within blocks of this many indices, so that a batch depends on no other item and no earlier run."""
BASIS_ITEMS = 64
"""Contexts that a shared basis is fitted on."""
PATCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Everything a sample depends on beside its task, its arm and its index.

    Attributes:
        system_prompt: system prompt of items that have none of their own.
        layout, layers, dtype: of the patches (see `form_patch`).
    """

    system_prompt: str = "You watch a camera."
    layout: Layout = "joint"
    layers: Layers = "all"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("layout", self.layout, get_args(Layout)),
            ("layers", self.layers, ("all", "deep")),
            ("dtype", self.dtype, tuple(PATCH_DTYPES)),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    def config(self, engine: EncodingEngine) -> dict[str, Any]:
        """Return the content of ``config.json``; a run continues only under an equal one."""
        name, spec = model_name(engine.spec.model), engine.spec
        return {"format": FORMAT, "name": name, "model": spec.identity, "kv": spec.kv.dtype, **asdict(self)}


def model_name(model: str) -> str:
    """Return a model's name: ``tiny`` for the bundled one, else the last part of its folder or Hub name."""
    return "tiny" if Path(model) == checkpoint_dir() else Path(model).name


@dataclass(frozen=True)
class Job:
    """One task, and the arms that run on it."""

    task: Task
    arms: tuple[Arm, ...]


def fits(arm: Arm, task: Task) -> bool:
    """True if an arm is made for a task's setting, and for its turnover if it names one."""
    if arm.turnover is not None:
        return task.name == f"tiny/recall@{arm.turnover:g}"
    return arm.name == BASES[task.setting].name or task.setting in arm.settings


def companions(arms: Sequence[Arm], tasks: Sequence[Task]) -> list[str]:
    """Generated tasks (slides, recalls) for arms that fit none of the given tasks, where those are all generated."""
    if not all(task.name.startswith("tiny/") for task in tasks):
        return []
    names: dict[str, None] = {}
    for arm in arms:
        if any(fits(arm, task) for task in tasks):
            continue
        if arm.turnover is not None:
            names[f"tiny/recall@{arm.turnover:g}"] = None
        elif "slide" in arm.settings:
            names |= dict.fromkeys(("tiny/slide_distractor", "tiny/slide_needed"))
        elif "recall" in arm.settings:
            names |= dict.fromkeys(SUITES["tiny-recall"])
    return list(names)


def plan_jobs(arms: Sequence[Arm], tasks: Sequence[Task]) -> list[Job]:
    """Return the arms of each task, see `fits`. Raises ValueError for an arm that fits none of them."""
    jobs = []
    for task in tasks:
        base = BASES[task.setting]
        # Doing nothing means something else in every setting.
        fitting = [base if arm.name == base.name else arm.on(task.setting) for arm in arms if fits(arm, task)]
        if fitting:
            jobs.append(Job(task, tuple(fitting)))
    used = {arm.name for job in jobs for arm in job.arms}
    if idle := [arm for arm in arms if arm.name not in used]:
        what = "; ".join(f"{arm.name} needs a task of setting {' or '.join(arm.settings)}" for arm in idle)
        raise ValueError(f"every arm must fit one of the tasks, got {what} (`ctxwin eval ls` lists the tasks)")
    return jobs


def check_served(arms: Sequence[Arm]) -> None:
    """Raise ValueError for arms that read inside the model, which a serving engine does not allow."""
    if reading := dict.fromkeys(arm.name for arm in arms if arm.inside):
        raise ValueError(
            f"arms must be ones that vLLM can be asked for, got {', '.join(reading)}, which read inside the model; leave them "
            "out, or take --engine hf"
        )


class Runner:
    """Runs jobs of one configuration on one engine: transformers, which is read in batches, or vLLM, asked as a server is.

    ``folder`` takes ``config.json`` (that of ``tasks`` in it), ``samples.jsonl`` and a shared basis. ``inside``: whether to read
    inside the model; None: where the engine allows it.
    """

    def __init__(
        self,
        engine: EncodingEngine,
        settings: Settings,
        folder: Path,
        tasks: Sequence[Task],
        inside: bool | None = None,
    ) -> None:
        self.settings = settings
        self._inside = hasattr(engine, "text_model") if inside is None else inside
        config = settings.config(engine) | {"tasks": {task.name: task.config() for task in tasks}}
        self.samples: Samples = open_samples(folder, config)
        self._decoder = cast("Decoder", Decoder(cast("HFEngine", engine)) if self._inside else Reader(engine))
        self._measurer_type: type[Measurer] = Measurer if self._inside else ServedMeasurer
        dtype = PATCH_DTYPES[settings.dtype]
        form = settings.layout, settings.layers
        patcher = fitted(self._decoder, (*form, "none"), self._groups, dtype=dtype, keep=folder)
        self.measurer = self._measurer_type(self._decoder, patcher, settings.system_prompt, along=not self._inside)

    def run(
        self, jobs: Sequence[Job], n: int | None, progress: Callable[[int], None] = lambda done: None
    ) -> set[tuple[str, int]]:
        """Compute the samples that are missing among the first ``n`` items of every job (None: all of a data set).

        ``progress`` is called with the number of samples that each arm finished. Interrupting loses at most the batch
        in work. Returns (task, index) of the items, of which every arm has a sample now.
        """
        if n is not None and n < 1:
            raise ValueError(f"n must be >= 1, got {n}")
        if not self._inside:
            check_served([arm for job in jobs for arm in job.arms])
        ran: set[tuple[str, int]] = set()
        stored = grouped(self.samples.rows.values(), lambda row: (row.task, row.index))
        for job in jobs:
            # A sweep is cut from its largest rank: of the job, not of the arms that happen to be missing.
            self.measurer.patcher.floor = max((arm.rank or 0 for arm in job.arms), default=0)
            items: list[Item] = []
            unread: BadMedia | None = None
            for items in batches(job.task, n):
                self._check_items(items, stored)
                targets = {(item.task, item.index) for item in items if _in_first(job.task, item, n)}
                ran |= targets
                has = self.samples.has
                missing = [arm for arm in job.arms if any(not has(task, arm.name, index) for task, index in targets)]
                remaining = len(job.arms)

                def on_arm(more: int = len(targets)) -> None:
                    nonlocal remaining
                    remaining -= 1
                    progress(more)

                if missing:
                    base = BASES[job.task.setting]
                    try:
                        samples = list(self.measurer.samples(items, missing, base=base, on_arm=on_arm))
                        self.samples.add(sample for sample in samples if (sample.task, sample.index) in targets)
                    except BadMedia as error:  # which only loading its media shows
                        unread = BadMedia(f"{items[0].doc_id}: {error}")  # no other item shares its forwards
                        ran -= targets
                        job.task.leave_out(unread)
                progress(len(targets) * remaining)
            if not items:
                raise ValueError(f"{job.task.name} must have items, got none among the first {n}; take a larger n")
            if unread and not any(task == job.task.name for task, _ in ran):
                raise unread
        return ran

    def _check_items(self, items: Sequence[Item], stored: Mapping[tuple[str, int], Sequence[Sample]]) -> None:
        for item in items:  # whatever the arm of a sample: arms over different items would be paired in one table
            if any(row.case != item.digest for row in stored.get((item.task, item.index), ())):
                raise ValueError(
                    f"samples of {self.samples.folder} must be of today's items, got another item {item.index} of "
                    f"{item.task!r}; choose another --output"
                )

    def _groups(self) -> Iterator[Group]:
        """Contexts of their own seeds, to fit bases and weights on."""
        if not self._decoder.engine.spec.vision:
            raise ValueError("weights and shared bases are fitted on pictures: the model must see, got a text model")
        for part in by_shape(fit_cases(BASIS_ITEMS, TinyOptions().frames)):
            patcher = Patcher(self._decoder.spec)
            yield self._measurer_type.groups(self._decoder, part, patcher, self.settings.system_prompt)


def batches(task: Task, n: int | None) -> Iterator[list[Item]]:
    """Items in batches that depend on their indices alone.

    Where items share shapes, whole blocks are made, the last one too, of which some items may lie behind ``n``.
    """
    items = task.items(-(-n // BLOCK) * BLOCK if n is not None and task.endless else n)
    for _, block in groupby(items, lambda item: item.index // BLOCK):  # by index: a task may leave items out
        for part in by_shape(list(block)):
            if any(_in_first(task, item, n) for item in part):
                yield part


def _in_first(task: Task, item: Item, n: int | None) -> bool:
    """True if an item of a batch is one of the first ``n``. A data set yields only these, whatever their indices."""
    return n is None or not task.endless or item.index < n
