"""Generating: cases through arms into samples. Resumable; what is there already is not computed again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ctxwin.evals.arms import BASES, REFERENCE, Arm
from ctxwin.evals.group import Group
from ctxwin.evals.metrics import kl_divergence
from ctxwin.evals.patching import Patcher, Weighting, make_weight
from ctxwin.evals.reader import Picture, Reader
from ctxwin.evals.samples import FORMAT, Row, Samples, open_samples
from ctxwin.evals.tasks import TASKS, Case, EvalTask, fit_cases
from ctxwin.operator import SharedBasis, fit_basis
from ctxwin.operator.patch import Layout

if TYPE_CHECKING:
    from ctxwin.engines.hf import HFEngine

BATCH = 16
BASIS_RANK = 96
PATCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Everything a sample depends on beside its task, its arm and its index.

    Attributes:
        seed: of the items.
        frames: numbers of frames, cycled through by index.
        decoded: frames pass through an mp4 file first.
        layout, layers, weight, dtype: of the patches (see `form_patch`).
        basis_items: contexts a shared basis is fitted on (layout ``shared`` only).
    """

    seed: int = 0
    frames: tuple[int, ...] = (2, 3, 4, 5, 6)
    decoded: bool = False
    header: str = "You watch a camera."
    layout: Layout = "joint"
    layers: str = "all"
    weight: Weighting = "none"
    dtype: str = "bfloat16"
    basis_items: int = 64

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if not self.frames or any(not 2 <= f <= 6 for f in self.frames):
            raise ValueError(f"frames must be numbers from 2 to 6, got {list(self.frames)}")
        for name, value, known in (
            ("layout", self.layout, ("joint", "per_layer", "shared")),
            ("layers", self.layers, ("all", "deep")),
            ("weight", self.weight, ("none", "balanced", "output")),
            ("dtype", self.dtype, tuple(PATCH_DTYPES)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")

    def config(self, engine: HFEngine) -> dict[str, Any]:
        """What goes into ``config.json``: a run can be continued only under the same."""
        plain = json.loads(json.dumps(asdict(self)))
        if self.layout != "shared":
            del plain["basis_items"]
        return {"format": FORMAT, "suite": "tiny", "model": engine.spec.identity, "kv": engine.spec.kv.dtype, **plain}


@dataclass(frozen=True)
class Job:
    """One task under one turnover, and the arms that run on it."""

    task: EvalTask
    turnover: float
    arms: tuple[Arm, ...]


def plan_jobs(arms: Sequence[Arm], tasks: Sequence[str]) -> list[Job]:
    """Which arms run on which tasks.

    ``tasks`` are chosen names. An arm that fits none of them (``survivor`` needs a slide, ``recall:M@T`` a recall)
    brings the tasks of its own setting along. Raises ValueError for an unknown task.
    """
    unknown = [t for t in tasks if t not in TASKS]
    if unknown:
        raise ValueError(f"tasks must be among {', '.join(TASKS)}; got {', '.join(unknown)}")
    jobs: dict[tuple[str, float], list[Arm]] = {}
    for arm in arms:
        fitting = [TASKS[t] for t in tasks if TASKS[t].setting in arm.settings]
        for task in fitting or [t for t in TASKS.values() if t.setting in arm.settings]:
            jobs.setdefault((task.name, arm.turnover), []).append(arm)
    order = list(TASKS)
    ranked = sorted(jobs.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    return [Job(TASKS[name], turnover, tuple(found)) for (name, turnover), found in ranked]


class Runner:
    """Runs jobs of one configuration on one engine.

    Args:
        engine: the transformers engine.
        settings: of the run.
        folder: where ``config.json``, ``samples.jsonl`` and a shared basis go.
    """

    def __init__(self, engine: HFEngine, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.samples: Samples = open_samples(folder, settings.config(engine))
        first = TASKS["single_hop"].case(settings.seed, 0, (2,))
        self.reader = Reader(engine, settings.header, _rendered(first)[0])
        self._pictures = _decoded if settings.decoded else _rendered
        sample = self.reader.run(self.reader.see(_rendered(first))[None])[0][0]
        spec = self.reader.spec
        self.patcher = Patcher(
            spec,
            settings.layout,
            "deep" if settings.layers == "deep" else "all",
            PATCH_DTYPES[settings.dtype],
            make_weight(settings.weight, engine._model, spec, sample),
        )
        if settings.layout == "shared":
            self.patcher.basis = self._basis()

    def run(self, jobs: Sequence[Job], n: int, progress: Callable[[int], None] = lambda done: None) -> None:
        """Computes the samples that are missing among the first ``n`` items of every job.

        ``progress`` is called with the number of samples that each step finished. Interrupting loses at most the batch
        in work.
        """
        if n < 1:
            raise ValueError(f"n must be >= 1, got {n}")
        for job in jobs:
            for cases in _batches(job, n, self.settings):
                task = job.task.name
                self._check_items(job, cases)
                wanted = [a for a in job.arms if not all(self.samples.has(task, a.name, c.index) for c in cases)]
                if wanted:
                    self.samples.add(self._rows(job, cases, wanted))
                progress(len(cases) * len(job.arms))

    def _check_items(self, job: Job, cases: Sequence[Case]) -> None:
        """Raises ValueError where a sample on disk is of another item than the generator gives today."""
        for case in cases:
            for arm in job.arms:
                row = self.samples.rows.get((case.task, arm.name, case.index))
                if row is not None and row["case"] != case.digest:
                    raise ValueError(
                        f"samples of {self.samples.folder} must be of today's items, got another item {case.index} of "
                        f"{case.task!r}; choose another --output"
                    )

    def _rows(self, job: Job, cases: Sequence[Case], arms: Sequence[Arm]) -> Iterator[Row]:
        group = Group(self.reader, cases, self.patcher, self._pictures)
        read: dict[Arm, list[np.ndarray | None]] = {}
        rows: list[Row] = []
        base = BASES[job.task.setting]
        # The largest ranks first: smaller ones are cut from their decomposition.
        for arm in (REFERENCE, base, *sorted(arms, key=_rank_last)):
            served = arm.serve(group)
            if arm not in read:
                read[arm] = self._logits(group, [s.spans if s else None for s in served])
            if arm is REFERENCE or arm is base:
                continue
            for b, (case, one) in enumerate(zip(cases, served, strict=True)):
                row: Row = {
                    "task": job.task.name, "arm": arm.name, "index": case.index, "turnover": job.turnover,
                    "frames": len(case.placed), "case": case.digest, "question": case.question, "truth": case.truth,
                }  # fmt: skip
                logits, reference, before = read[arm][b], read[REFERENCE][b], read[base][b]
                if one is None or logits is None or reference is None or before is None:
                    rows.append({**row, "unscored": "fewer than two chunks stand in front of the asked one"})
                    continue
                rows.append(
                    {
                        **row,
                        "answer": self._word(logits),
                        "reference": self._word(reference),
                        "base": self._word(before),
                        "kl": kl_divergence(reference, logits),
                        "base_kl": kl_divergence(reference, before),
                        "stored": one.stored,
                        "over": one.over,
                        **one.extra,
                    }
                )
        return iter(rows)

    def _logits(self, group: Group, rows: Sequence[Any]) -> list[np.ndarray | None]:
        some = [b for b, row in enumerate(rows) if row is not None]
        out: list[np.ndarray | None] = [None] * len(rows)
        if some:
            logits = self.reader.read([rows[b] for b in some], [group.cases[b].question for b in some])
            for b, row in zip(some, logits, strict=True):
                out[b] = row.numpy()
        return out

    def _word(self, logits: np.ndarray) -> str:
        return self.reader.engine.decode([int(logits.argmax())]).strip()

    def _basis(self) -> SharedBasis:
        """The shared basis of this run: fitted once on contexts of their own seeds, then kept in the folder."""
        from safetensors import safe_open
        from safetensors.torch import save_file

        path = self.samples.folder / "basis.safetensors"
        if path.exists():
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
                return SharedBasis.from_tensors(tensors, json.loads(file.metadata()["basis"]))
        cases = fit_cases(self.settings.seed, self.settings.basis_items, self.settings.frames)
        deficits = (
            group.deficit(b, place)
            for group in (Group(self.reader, part, self.patcher, self._pictures) for part in _by_shape(cases))
            for b in range(len(group))
            for place in range(1, len(group.cases[b].placed))
        )
        basis = fit_basis(
            deficits, self.reader.spec, BASIS_RANK, layers=self.patcher.layers, weight=self.patcher.weight,
            dtype=self.patcher.dtype,
        )  # fmt: skip
        temporary = path.with_suffix(".tmp")
        save_file(basis.tensors(), temporary, metadata={"basis": json.dumps(basis.describe())})
        temporary.replace(path)
        return basis


def _rank_last(arm: Arm) -> int:
    return -1_000_000 if arm.rank is None else -arm.rank


def _batches(job: Job, n: int, settings: Settings) -> Iterator[list[Case]]:
    cases = [job.task.case(settings.seed, i, settings.frames, job.turnover) for i in range(n)]
    yield from _by_shape(cases)


def _by_shape(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Batches of one shape, each in order of the index, so that a resumed run makes the same ones."""
    shapes: dict[tuple[int, int, int], list[Case]] = {}
    for case in cases:
        shapes.setdefault(case.shape, []).append(case)
    for same in shapes.values():
        for at in range(0, len(same), BATCH):
            yield same[at : at + BATCH]


def _rendered(case: Case) -> list[Picture]:
    from ctxwin.tiny.world import render

    return [render(frame) for frame in case.frames]


def _decoded(case: Case) -> list[Picture]:
    """The frames as they come back from an mp4 file."""
    from ctxwin.tiny.clip import read_frames, write_clip

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_clip(path, case.frames, fps=4, seconds_per_frame=1.0)
        return read_frames(path, every_s=1.0)
