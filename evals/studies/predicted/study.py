"""A chunk behind neighbours it was never seen with: can its patch be predicted instead of formed?

Predictors are fitted on contexts of their own and judged on held-out items by the answers, against a re-prefill. Beside them:
nothing (blind), the true patch over the same basis, patches formed in another order or behind other neighbours, and partial
recomputation (MPIC, CacheBlend, first layers reused), each with the share of a re-prefill's work that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from ctxwin.evals.arms import Arm, parse_arms
from ctxwin.evals.console import new_table
from ctxwin.evals.decoder import Decoder
from ctxwin.evals.group import Group
from ctxwin.evals.items import Item
from ctxwin.evals.measure import Measurer, by_shape
from ctxwin.evals.patching import Patcher
from ctxwin.evals.samples import Sample
from ctxwin.evals.stats import bootstrap_mean, difference_interval, share_interval
from ctxwin.evals.tasks.tiny import WORLD_TASKS, Case, TinyOptions, TinyTask, as_item, fit_cases
from ctxwin.kv.lowrank import Weight
from ctxwin.profiles import require_basis

from ..command import SYSTEM_PROMPT
from .arms import Elsewhere, Predicted
from .contexts import Contexts, contexts_of
from .predictor import Predictor, Recipe

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.hf.engine import HFEngine

FIT_SEED = 12
"""Of the contexts that predictors are fitted on; the shared basis has others."""
HELD = 5
"""Every fifth context is not fitted on: it says how far off a predictor is."""
COVERAGES = (0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Variant:
    """A predictor, and what it is fitted on.

    Attributes:
        recipe: how it predicts.
        share: of the run's contexts that it is fitted on.
        least: contexts that it is fitted on at least.
        kind: only contexts of this task.
        most: only contexts of so many frames at most.
        system_prompt: of the contexts; None: the run's.
    """

    recipe: Recipe = field(default_factory=Recipe)
    share: float = 1.0
    least: int = 10
    kind: str | None = None
    most: int = 6
    system_prompt: str | None = None

    def takes(self, case: Case) -> bool:
        """Whether a context may be fitted on."""
        return len(case.frames) <= self.most and self.kind in (None, case.task)


VARIANTS: dict[str, Variant] = {
    "own": Variant(Recipe("none", ())),
    "pooled": Variant(Recipe("pooled", ())),
    "keys": Variant(Recipe("keys")),
    "from-keys": Variant(Recipe("from_keys")),
    "layer-1": Variant(Recipe(layers=(1,))),
    "layers-01": Variant(),
    "layers-012": Variant(Recipe(layers=(0, 1, 2))),
    "quarter": Variant(share=0.25),
    "sixteenth": Variant(share=1 / 16),
    "three-frames": Variant(most=3),
    "multi-hop": Variant(kind="multi_hop"),
    "other-prompt": Variant(system_prompt="Answer questions about the pictures below in one word."),
}
"""By name: what is read (`own` to `layers-012`), then the same recipe fitted on less than, or on other than, what it serves."""


@dataclass(frozen=True)
class PredictedSettings:
    """What a run does: ``n`` items of each task, predictors fitted on ``contexts``, patches of ``rank`` shared directions."""

    n: int = 300
    contexts: int = 240
    frames: tuple[int, ...] = (2, 3, 4, 5, 6)
    tasks: tuple[str, ...] = WORLD_TASKS
    rank: int = 54
    variants: tuple[str, ...] = tuple(VARIANTS)
    arms: str = "mpic:16"
    seed: int = 21
    system_prompt: str = SYSTEM_PROMPT

    def __post_init__(self) -> None:
        if unknown := [v for v in self.variants if v not in VARIANTS]:
            raise ValueError(f"variants must be of {', '.join(VARIANTS)}, got {', '.join(unknown)}")
        if unknown := [t for t in self.tasks if t not in WORLD_TASKS]:
            raise ValueError(f"tasks must be of {', '.join(WORLD_TASKS)}, got {', '.join(unknown)}")

    @property
    def steps(self) -> int:
        """Of progress: predictors, and items."""
        return len(self.variants) * self.contexts + len(self.tasks) * self.n


def measure(
    engine: HFEngine, settings: PredictedSettings, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Fits the predictors and asks every item behind every arm.

    Returns ``{"config", "explained": {variant: share of held-out deficits}, "rows": [{task, arm, n, accuracy, ci95, harm,
    harm_ci95, to_reprefill, to_reprefill_ci95, kl, kl_ci95, kl_p99, work, bytes}], "gate": {variant: [...]}}``.

    Raises ValueError for a model without a shared basis of that rank, and where no context is left to fit a variant on.
    """
    decoder, held = Decoder(engine), require_basis(engine.spec.model)
    if settings.rank > held.rank:
        raise ValueError(f"rank must be at most {held.rank}, the directions of the shared basis, got {settings.rank}")
    basis = replace(held.basis, identity=engine.spec.kv.identity)
    patcher = Patcher(engine.spec.kv, "shared", weight=held.weight, basis=basis)
    arms: list[Arm] = [*parse_arms(f"reprefill,blind,patched:{settings.rank}"), Elsewhere("elsewhere", settings.rank)]
    arms += parse_arms(f"orbit:{settings.rank},transfer:{settings.rank}," + settings.arms)
    explained = {}
    school = _School(decoder, patcher, settings)
    for name in settings.variants:
        variant = VARIANTS[name]
        predictor = Predictor(variant.recipe, held.weight or Weight())
        predictor.fit(*school.contexts(variant))
        explained[name] = predictor.explained
        arms.append(Predicted(f"predicted {name}", settings.rank, name, predictor))
        on_progress(settings.contexts)
    del school  # gigabytes, for hundreds of contexts
    samples: list[Sample] = []
    measurer = Measurer(decoder, patcher, settings.system_prompt)
    for task in settings.tasks:
        items = TinyTask(f"tiny/{task}", TinyOptions(settings.seed, settings.frames)).items(settings.n)
        for same in by_shape(items):
            samples += measurer.samples(same, arms)
            on_progress(len(same))
    return {
        "config": asdict(settings),
        "explained": explained,
        "rows": [row for task in settings.tasks for row in _rows(samples, f"tiny/{task}", arms)],
        "gate": {name: _gate([s for s in samples if s.arm == f"predicted {name}"]) for name in settings.variants},
    }


class _School:
    """Contexts to fit on; variants that are fitted on the same ones share them."""

    def __init__(self, decoder: Decoder, patcher: Patcher, settings: PredictedSettings) -> None:
        self._decoder, self._patcher, self._settings = decoder, patcher, settings
        self._made: dict[Variant, tuple[list[Contexts], list[Contexts]]] = {}

    def contexts(self, variant: Variant) -> tuple[list[Contexts], list[Contexts]]:
        """Those that a variant is fitted on, and those that say how far off it is."""
        key = replace(variant, recipe=Recipe())
        if key not in self._made:
            settings = self._settings
            cases = fit_cases(FIT_SEED, settings.contexts, settings.frames)
            cases = cases[: max(variant.least, round(settings.contexts * variant.share))]
            cases = [case for case in cases if variant.takes(case)]
            prompt = variant.system_prompt or settings.system_prompt
            parts = [case for i, case in enumerate(cases) if i % HELD], cases[::HELD]
            if not all(parts):
                raise ValueError(f"contexts must be more for {variant}, got {settings.contexts}")
            fitted, held = ([self._batch(same, prompt) for same in _alike(part)] for part in parts)
            self._made[key] = fitted, held
        return self._made[key]

    def _batch(self, items: Sequence[Item], prompt: str) -> Contexts:
        return contexts_of(Group(self._decoder, items, self._patcher, prompt), taught=True)


def _alike(cases: Sequence[Case]) -> Iterator[list[Item]]:
    return by_shape([as_item(replace(case, index=i, context=i), "fit") for i, case in enumerate(cases)])


def _rows(samples: Sequence[Sample], task: str, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    rows = []
    for arm in arms:
        found = [s for s in samples if (s.task, s.arm) == (task, arm.name) and s.unscored is None]
        if not found:
            continue
        clusters = [s.cluster for s in found]
        right, exact = ([float(x == s.target) for s, x in zip(found, y, strict=True)] for y in _answers(found))
        harmed = [float(e > r) for r, e in zip(right, exact, strict=True)]
        kls = [s.kl for s in found]
        rows.append(
            {
                "task": task.removeprefix("tiny/"),
                "arm": arm.name,
                "n": len(found),
                "accuracy": float(np.mean(right)),
                "ci95": share_interval(right, clusters),
                "harm": float(np.mean(harmed)),
                "harm_ci95": share_interval(harmed, clusters),
                "to_reprefill": float(np.mean(right) - np.mean(exact)),
                "to_reprefill_ci95": difference_interval(np.subtract(right, exact), clusters),
                "kl": float(np.mean(kls)),
                "kl_ci95": bootstrap_mean(kls, clusters),
                "kl_p99": float(np.quantile(kls, 0.99)),
                "work": float(
                    np.mean([s.extra.get("work", s.extra.get("recomputed", s.computed / s.placed)) for s in found])
                ),
                "bytes": sum(s.stored for s in found) / max(1, sum(s.over for s in found)),
            }
        )
    return rows


def _answers(samples: Sequence[Sample]) -> tuple[list[str], list[str]]:
    return [s.answer for s in samples], [s.reference for s in samples]


def _gate(samples: Sequence[Sample]) -> dict[str, Any]:
    """What comes of serving only where the expected residual is low: changed answers, and mean KL, by coverage."""
    residual = np.array([s.extra["residual"] for s in samples])
    changed = np.array([s.answer != s.reference for s in samples])
    kls = np.array([s.kl for s in samples])
    at = []
    for share in COVERAGES:
        served = residual <= np.quantile(residual, share, method="higher")
        interval = share_interval(changed[served].astype(float), [str(i) for i in np.flatnonzero(served)])
        row = {"coverage": float(served.mean()), "changed": float(changed[served].mean()), "ci95": interval}
        at.append({**row, "kl": float(kls[served].mean())})
    both = 0 < changed.sum() < len(changed)
    auc = float(stats.mannwhitneyu(residual[changed], residual[~changed]).statistic) if both else None
    if auc is not None:
        auc /= float(changed.sum() * (~changed).sum())
    return {
        "n": len(samples),
        "auc": auc,
        "rank_correlation": float(stats.spearmanr(residual, kls).statistic),
        "at": at,
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for a terminal."""
    shown = []
    for task in result["config"]["tasks"]:
        columns = "arm|n|accuracy|95 %|minus re-prefill|harm|KL|p99|work|bytes"
        made = new_table(f"{task}: answers against a re-prefill", columns)
        for row in (r for r in result["rows"] if r["task"] == task):
            made.add_row(
                row["arm"],
                str(row["n"]),
                f"{row['accuracy']:.3f}",
                _interval(row["ci95"]),
                f"{row['to_reprefill']:+.3f} {_interval(row['to_reprefill_ci95'])}",
                f"{row['harm']:.1%}",
                f"{row['kl']:.4f}",
                f"{row['kl_p99']:.3f}",
                f"{row['work']:.1%}",
                f"{row['bytes']:.1%}",
            )
        shown.append(made)
    columns = "predictor|explained|AUC|residual and KL|changed answers at coverage " + "|at ".join(
        f"{c:.0%}" for c in COVERAGES
    )
    made = new_table("how well a predictor knows where it is off, all tasks together", columns)
    for name, gate in result["gate"].items():
        auc = "-" if gate["auc"] is None else f"{gate['auc']:.3f}"
        known = f"{result['explained'][name]:.4f}", auc, f"{gate['rank_correlation']:.2f}"
        made.add_row(name, *known, *(f"{a['changed']:.2%}" for a in gate["at"]))
    return [*shown, made]


def _interval(bounds: tuple[float, float] | None) -> str:
    return "" if bounds is None else f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
