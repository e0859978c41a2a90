"""Generating: items through arms into samples. Resumable; what is there already is not computed again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ctxwin.evals.arms import BASES, REFERENCE, Arm, Served
from ctxwin.evals.decoder import Decoder
from ctxwin.evals.generation import continue_, forced_logits
from ctxwin.evals.group import Group
from ctxwin.evals.items import Item, Task
from ctxwin.evals.kv_error import by_layer
from ctxwin.evals.metrics import kl_divergence
from ctxwin.evals.patching import Patcher, Weighting, load_basis, make_weight, parse_variant
from ctxwin.evals.samples import FORMAT, Row, Samples, open_samples
from ctxwin.evals.tasks import SUITES
from ctxwin.evals.tasks.tiny import TinyOptions, as_item, fit_cases
from ctxwin.kv.deficit import Deficit
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import Layers, Layout
from ctxwin.tiny import checkpoint_dir

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

BATCH = 16
BLOCK = 5 * BATCH
"""Items share forwards within blocks of this many indices, so that a batch depends on no other item and no earlier run."""
PATCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Everything a sample depends on beside its task, its arm and its index.

    Attributes:
        system_prompt: system prompt of items that have none of their own.
        layout, layers, weight, dtype: of the patches (see `form_patch`).
        basis_items: contexts a shared basis is fitted on (layout ``shared`` only).
        timed: the first so many items of a task are timed, each on its own; a time is no part of what a run compares.
    """

    system_prompt: str = "You watch a camera."
    layout: Layout = "joint"
    layers: Layers = "all"
    weight: Weighting = "none"
    dtype: str = "bfloat16"
    basis_items: int = 64
    timed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("layout", self.layout, ("joint", "per_layer", "shared")),
            ("layers", self.layers, ("all", "deep")),
            ("weight", self.weight, ("none", "balanced", "output")),
            ("dtype", self.dtype, tuple(PATCH_DTYPES)),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if self.timed < 0:
            raise ValueError(f"timed must be >= 0, got {self.timed}")

    def config(self, engine: HFEngine) -> dict[str, Any]:
        """What goes into ``config.json``: a run can be continued only under the same."""
        plain = json.loads(json.dumps(asdict(self)))
        del plain["timed"]
        if self.layout != "shared":
            del plain["basis_items"]
        name = "tiny" if Path(engine.spec.model) == checkpoint_dir() else Path(engine.spec.model).name
        return {"format": FORMAT, "name": name, "model": engine.spec.identity, "kv": engine.spec.kv.dtype, **plain}


@dataclass(frozen=True)
class Job:
    """One task, and the arms that run on it."""

    task: Task
    arms: tuple[Arm, ...]


def fits(arm: Arm, task: Task) -> bool:
    """Whether an arm runs on a task: it is of its setting, and of its turnover where it names one."""
    if arm.turnover is not None:
        return task.name == f"tiny/recall@{arm.turnover:g}"
    return arm.name == BASES[task.setting].name or task.setting in arm.settings


def companions(arms: Sequence[Arm], tasks: Sequence[Task]) -> list[str]:
    """Generated tasks for arms that fit none of the given ones, where those are all generated: slides, or recalls."""
    if not all(task.name.startswith("tiny/") for task in tasks):
        return []
    found: dict[str, None] = {}
    for arm in arms:
        if not any(fits(arm, task) for task in tasks):
            if arm.turnover is not None:
                found[f"tiny/recall@{arm.turnover:g}"] = None
            elif "slide" in arm.settings:
                found |= dict.fromkeys(("tiny/slide_distractor", "tiny/slide_needed"))
            elif "recall" in arm.settings:
                found |= dict.fromkeys(SUITES["tiny-recall"])
    return list(found)


def plan_jobs(arms: Sequence[Arm], tasks: Sequence[Task]) -> list[Job]:
    """Which arms run on which tasks, see `fits`. Raises ValueError for an arm that fits none of them."""
    jobs = []
    for task in tasks:
        fitting = []
        for arm in arms:
            base = BASES[task.setting]
            if arm.name == base.name:
                fitting.append(base)  # doing nothing means something else in every setting
            elif fits(arm, task):
                fitting.append(arm.on(task.setting))
        if fitting:
            jobs.append(Job(task, tuple(fitting)))
    used = {arm.name for job in jobs for arm in job.arms}
    idle = [arm for arm in arms if arm.name not in used]
    if idle:
        what = "; ".join(f"{arm.name} needs a task of setting {' or '.join(arm.settings)}" for arm in idle)
        raise ValueError(f"every arm must fit one of the tasks, got {what} (`ctxwin eval ls` lists the tasks)")
    return jobs


@dataclass
class _Read:
    """What an arm says on one item: the next token's distribution, an answer, and re-prefill's answer under it."""

    logits: np.ndarray
    answer: str
    token_ids: list[int] = field(default_factory=list)
    forced: np.ndarray | None = None


class Runner:
    """Runs jobs of one configuration on one engine.

    Args:
        engine: the transformers engine.
        settings: of the run.
        folder: where ``config.json``, ``samples.jsonl`` and a shared basis go.
        tasks: of the run; their configuration is part of the run's.
    """

    def __init__(self, engine: HFEngine, settings: Settings, folder: Path, tasks: Sequence[Task]) -> None:
        self.settings = settings
        config = settings.config(engine) | {"tasks": {task.name: task.config() for task in tasks}}
        self.samples: Samples = open_samples(folder, config)
        self.decoder = Decoder(engine)
        self.patcher = self._patcher(settings.layout, settings.layers, settings.weight)
        self.patcher.build = self._variant

    def run(self, jobs: Sequence[Job], n: int | None, progress: Callable[[int], None] = lambda done: None) -> None:
        """Computes the samples that are missing among the first ``n`` items of every job (None: all of a data set).

        ``progress`` is called with the number of samples that each step finished. Interrupting loses at most the batch
        in work.
        """
        if n is not None and n < 1:
            raise ValueError(f"n must be >= 1, got {n}")
        for job in jobs:
            # A sweep is cut from its largest rank: of the job, not of the arms that happen to be missing.
            self.patcher.floor = max((arm.rank or 0 for arm in job.arms), default=0)
            empty = True
            for items in batches(job.task, n):
                empty = False
                wanted = {item.index for item in items if _asked(job.task, item, n)}
                self._check_items(job, items)
                missing = [
                    arm
                    for arm in job.arms
                    if any(not self.samples.has(job.task.name, arm.name, index) for index in wanted)
                ]
                if missing:
                    self.samples.add(row for row in self._rows(job.task, items, missing) if row["index"] in wanted)
                progress(len(wanted) * len(job.arms))
            if empty:
                raise ValueError(f"{job.task.name} must have items, got none among the first {n}; take a larger n")

    def _check_items(self, job: Job, items: Sequence[Item]) -> None:
        """Raises ValueError where a sample on disk is of another item than the task gives today."""
        for item in items:
            for arm in job.arms:
                row = self.samples.rows.get((item.task, arm.name, item.index))
                if row is not None and row["case"] != item.digest:
                    raise ValueError(
                        f"samples of {self.samples.folder} must be of today's items, got another item {item.index} of "
                        f"{item.task!r}; choose another --output"
                    )

    def _rows(self, task: Task, items: Sequence[Item], arms: Sequence[Arm]) -> Iterator[Row]:
        """Samples of one batch."""
        group = self._group(items)
        limit = self.decoder.engine.spec.max_tokens
        longest = max(self.decoder.query(item.query).tokens + item.max_tokens for item in items)
        total = group.system_prompt.tokens + group.context_tokens + longest
        if total > limit:
            reason = f"the prompt of {total} tokens is longer than the model's {limit}"
            for arm in arms:
                yield from (self._row(item, arm, group) | {"unscored": reason} for item in items)
            return
        base = BASES[task.setting]
        heard: dict[Arm, tuple[list[Served | None], list[_Read | None]]] = {}
        for arm in (REFERENCE, base, *arms):
            if arm not in heard:
                served = arm.serve(group)
                exact = heard[REFERENCE][1] if heard else None
                heard[arm] = served, self._ask(group, served, exact)
        for arm in arms:
            for b, item in enumerate(items):
                one, said = heard[arm][0][b], heard[arm][1][b]
                row = self._row(item, arm, group)
                if one is None or said is None:
                    yield row | {"unscored": "the arm has no meaning for this item"}
                    continue
                reference, before = heard[REFERENCE][1][b], heard[base][1][b]
                assert reference is not None and before is not None
                yield row | self._figures(one, group.exact[b], said, reference, before) | self._time(arm, item)

    def _row(self, item: Item, arm: Arm, group: Group) -> Row:
        return {
            "task": item.task, "arm": arm.name, "index": item.index, "doc_id": item.doc_id, "cluster": item.cluster,
            "case": item.digest, "frames": len(item.placed),
            "tokens": group.system_prompt.tokens + group.context_tokens + self.decoder.query(item.query).tokens,
            "placed": group.context_tokens, "media": int(sum(len(group.chunks[0][f].media) for f in group.items[0].placed)),
            "question": item.query, "target": item.target, "meta": dict(item.meta),
        }  # fmt: skip

    def _figures(self, one: Served, exact: Sequence[SpanKV], said: _Read, reference: _Read, before: _Read) -> Row:
        made: Row = {
            "answer": said.answer, "reference": reference.answer, "base": before.answer,
            "kl": kl_divergence(reference.logits, said.logits), "base_kl": kl_divergence(reference.logits, before.logits),
            "stored": one.stored, "over": one.over, "computed": one.computed, "forwards": one.forwards,
            "encodes": one.encodes, **one.extra,
        }  # fmt: skip
        if one.begin is None and (error := by_layer(one.spans, exact)) is not None:
            made["by_layer"] = error
        if reference.forced is not None and said.forced is not None and before.forced is not None:
            made["forced_kl"] = _mean_kl(reference.forced, said.forced)
            made["base_forced_kl"] = _mean_kl(reference.forced, before.forced)
        return made

    def _ask(
        self, group: Group, served: Sequence[Served | None], reference: Sequence[_Read | None] | None
    ) -> list[_Read | None]:
        """Asks each item's question behind what is served for it."""
        some = [b for b, one in enumerate(served) if one is not None]
        out: list[_Read | None] = [None] * len(served)
        if all(group.items[b].max_tokens == 1 for b in some):
            for b, logits in zip(some, self._next(group, served, some), strict=True):
                out[b] = _Read(logits, self._text([int(logits.argmax())]))
            return out
        for b in some:
            item, one = group.items[b], served[b]
            assert one is not None
            memory = group.memory([one.spans])
            query, begin = self.decoder.query(item.query), _begin(one, group)
            made = continue_(self.decoder, memory, query, begin, max_tokens=item.max_tokens, policy=one.policy)
            said = _Read(made.logits[0].numpy(), self._text(made.token_ids), made.token_ids)
            first = None if reference is None else reference[b]
            answer = said.token_ids if first is None else first.token_ids
            if len(answer) > 1:
                said.forced = forced_logits(self.decoder, memory, query, begin, answer, one.policy).numpy()
            out[b] = said
        return out

    def _next(self, group: Group, served: Sequence[Served | None], some: Sequence[int]) -> list[np.ndarray]:
        """Next-token logits; items whose rows have as many slots, and the question at one position, share a forward."""
        found: dict[int, np.ndarray] = {}
        ones = {b: one for b in some if (one := served[b]) is not None}
        kinds = {b: (sum(s.tokens for s in one.spans), _begin(one, group)) for b, one in ones.items()}
        for kind in sorted(set(kinds.values())):
            same = [b for b in ones if kinds[b] == kind]
            memory = group.memory([ones[b].spans for b in same])
            logits = self.decoder.read(memory, [group.items[b].query for b in same], kind[1])
            found |= {b: row.numpy() for b, row in zip(same, logits, strict=True)}
        return [found[b] for b in some]

    def _time(self, arm: Arm, item: Item) -> Row:
        """Seconds to the first token of one item alone: serving from what is stored, then the question.

        Canonicals, patches and vision embeddings are there already, as they are from the second use on, and so is what
        else the arm finds (`Arm.found`).
        """
        if item.index >= self.settings.timed:
            return {}
        group = self._group([item])
        group.context.embeds.sum()  # embeddings are held by everybody
        again = arm.prepared(group)
        begun = time.perf_counter()
        served = again()
        assert served is not None
        self.decoder.read(group.memory([served.spans]), [item.query], _begin(served, group))
        return {"time": {"ttft_s": time.perf_counter() - begun}}

    def _group(self, items: Sequence[Item], patcher: Patcher | None = None) -> Group:
        return Group(self.decoder, items, self.patcher if patcher is None else patcher, self.settings.system_prompt)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.decoder.engine.decode(token_ids).strip()

    def _patcher(self, layout: Layout, layers: Layers, weight: Weighting, name: str = "") -> Patcher:
        engine = self.decoder.engine
        if (weight != "none" or layout == "shared") and not engine.spec.vision:
            raise ValueError("weights and shared bases are fitted on pictures: the model must see, got a text model")
        made = Patcher(self.decoder.spec, layout, layers, PATCH_DTYPES[self.settings.dtype])
        if weight != "none":
            made.weight = make_weight(weight, engine.text_model, self.decoder.spec, self._sample())
        if layout == "shared":
            made.basis = load_basis(self.samples.folder, made, self._fit, name)
        return made

    def _variant(self, name: str) -> Patcher:
        parsed = parse_variant(name)
        assert parsed is not None  # arms check their spelling
        return self._patcher(*parsed, name)

    def _sample(self) -> SpanKV:
        """KV of some chunk, for weights that depend on the size of keys and values."""
        item = as_item(fit_cases(0, 1, (2,))[0], "tiny/fit")
        return self._group([item], Patcher(self.decoder.spec)).exact[0][0]

    def _fit(self) -> Iterator[Deficit]:
        """Deficits of contexts of their own seeds."""
        cases = fit_cases(0, self.settings.basis_items, TinyOptions().frames)
        for part in _by_shape([as_item(case, f"tiny/{case.task}") for case in cases]):
            group = self._group(part, Patcher(self.decoder.spec))
            for b in range(len(group)):
                yield from (group.deficit(b, place) for place in range(1, len(group.places)))


def batches(task: Task, n: int | None) -> Iterator[list[Item]]:
    """Items in batches that depend on their indices alone.

    Where items share shapes, whole blocks are made, the last one too, of which some items may lie behind ``n``.
    """
    if n is None:
        found: Sequence[Item] = task.items()
    elif task.endless:
        found = task.items(-(-n // BLOCK) * BLOCK)
    else:
        found = task.items(n)
    for _, block in groupby(found, lambda item: item.index // BLOCK):  # by index: a task may leave items out
        for part in _by_shape(list(block)):
            if any(_asked(task, item, n) for item in part):
                yield part


def _asked(task: Task, item: Item, n: int | None) -> bool:
    """Whether an item of a batch is one of the first ``n``. A data set gives just these, whatever their indices."""
    return n is None or not task.endless or item.index < n


def _by_shape(items: Sequence[Item]) -> Iterator[list[Item]]:
    shapes: dict[Any, list[Item]] = {}
    for item in items:
        key = ("alone", item.index) if item.shape is None else item.shape
        shapes.setdefault(key, []).append(item)
    for same in shapes.values():
        for at in range(0, len(same), BATCH):
            yield same[at : at + BATCH]


def _begin(served: Served, group: Group) -> int:
    """Position of the question behind what an arm serves."""
    return group.begin if served.begin is None else served.begin


def _mean_kl(reference: np.ndarray, other: np.ndarray) -> float:
    return float(np.mean([kl_divergence(p, q) for p, q in zip(reference, other, strict=True)]))
