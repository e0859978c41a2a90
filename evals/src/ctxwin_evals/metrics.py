"""Figures of one arm on one task, and of arms compared on the same items; no model.

The reference of a sample is the exact re-prefill of what is placed; its base is what doing nothing would serve: the
relocated canonical, or for a survivor its KV as it is. Empty input raises instead of giving a figure. Answers are
compared as the task's rule reads them (`ctxwin_evals.items.Scored`), and as they are where it reads nothing in them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_softmax

from ctxwin_evals import stats
from ctxwin_evals.items import Scored
from ctxwin_evals.samples import Sample
from ctxwin_evals.stats import Interval

ETA_FLOOR = 0.01
"""Mean KL of the base in nats below which eta would divide noise by noise, and is None."""


class Figures(TypedDict):
    """Figures of one arm on one task, as JSON holds them. Intervals are of 95 %; a figure that no item has is None.

    Those with a column of the report are explained there (`ctxwin_evals.report.tables.ABOUT`). Besides:

    Attributes:
        unparsed, unscored: answers that the rule could not score; items that the arm could not serve, and ``..._why``.
        delta: accuracy minus re-prefill's on the same items.
        base_kl: KL(re-prefill || base) of the next token; ``forced_...`` are taken along re-prefill's answer, where any answer
            has more than one token.
        flips, flip_recover: items whose prediction the base changes, and the share of them that the arm restores.
        by_frames, by_layer, grid: accuracy by number of chunks; relative error of the KV by layer; accuracy by length and depth.
        own, official: means of the arm's own figures; the data set's own aggregates, for which an item that
            was not served has an empty answer, as in the exports.
    """

    n: int
    clusters: int
    unparsed: int
    accuracy: float | None
    ci95: Interval | None
    delta: float | None
    delta_ci95: Interval | None
    kl: float
    kl_ci95: Interval | None
    kl_p99: float
    base_kl: float
    eta: float | None
    eta_ci95: Interval | None
    agreement: float | None
    agreement_ci95: Interval | None
    flips: int
    flip_recover: float | None
    flip_ci95: Interval | None
    harm_rate: float | None
    harm_ci95: Interval | None
    reference_accuracy: float | None
    base_accuracy: float | None
    bytes_share: float | None
    recomputed_share: float
    forced_kl: NotRequired[float]
    forced_kl_ci95: NotRequired[Interval | None]
    forced_eta: NotRequired[float | None]
    forced_eta_ci95: NotRequired[Interval | None]
    spent_share: NotRequired[float | None]
    unscored: NotRequired[int]
    unscored_why: NotRequired[dict[str, int]]
    by_frames: NotRequired[dict[str, dict[str, Any]]]
    by_layer: NotRequired[list[float]]
    grid: NotRequired[list[dict[str, Any]]]
    tokens: NotRequired[float]
    computed: NotRequired[float]
    forwards: NotRequired[float]
    encodes: NotRequired[float]
    own: NotRequired[dict[str, float]]
    official: NotRequired[dict[str, float]]


@dataclass(frozen=True)
class Outcome:
    """One scored sample: the answers under its arm, under re-prefill and under the base, as the task's rule reads them."""

    row: Sample
    answer: Scored
    reference: Scored
    base: Scored

    @property
    def recomputed(self) -> float:
        """Share of the placed tokens that were computed when it was asked."""
        if self.row.arm == "reprefill":
            return 1.0  # by definition; the prompt's other tokens are system prompt and question
        return self.row.extra.get("recomputed", min(1.0, self.row.computed / self.row.placed))

    @property
    def spent(self) -> float:
        """Bytes stored, or replaced when it was asked."""
        return self.row.stored + self.row.extra.get("renewed", self.recomputed) * self.row.over


def kl_divergence(reference: ArrayLike, other: ArrayLike) -> float:
    """KL(reference || other) in nats of two next-token distributions given as logits over the same vocabulary.

    Computed in float64; tokens that the reference rules out (-inf) add nothing. Raises ValueError for different shapes or an
    empty vocabulary, FloatingPointError where there is no figure: for NaN, or a token that only the other rules out.
    """
    x, y = (np.asarray(logits, dtype=np.float64) for logits in (reference, other))
    if x.shape != y.shape or x.ndim != 1 or not x.size:
        raise ValueError(f"both must be logits of the same vocabulary, not empty, got shapes {x.shape} and {y.shape}")
    with np.errstate(all="ignore"):
        p, q = log_softmax(x), log_softmax(y)
        heeded = p != -np.inf  # true of NaN, too
        figure = float(np.sum(np.exp(p[heeded]) * (p[heeded] - q[heeded])))
    if not math.isfinite(figure):
        raise FloatingPointError("the model's logits must be numbers with a finite KL, got NaN or infinite ones")
    return max(0.0, figure)


def eta(kls: Sequence[float], base_kls: Sequence[float]) -> float | None:
    """Share of the base's KL that an arm removes: ``1 - sum(kl) / sum(base_kl)``; None under `ETA_FLOOR`.

    Negative where the arm is worse than doing nothing (Kamera, section 5).
    """
    if not kls or len(kls) != len(base_kls):
        raise ValueError(f"kl and base kl must be as many and at least one, got {len(kls)} and {len(base_kls)}")
    total = math.fsum(base_kls)
    return None if total / len(base_kls) < ETA_FLOOR else 1.0 - math.fsum(kls) / total


def rouge_l(reference: str, text: str) -> float:
    """ROUGE-L F1 (Elastic Cache, equation 5); two empty texts agree.

    The scorer reads letters a-z and digits only, as the field's reference implementation does.
    """
    if not reference and not text:
        return 1.0
    from rouge_score.rouge_scorer import RougeScorer

    return float(RougeScorer(["rougeL"]).score(reference, text)["rougeL"].fmeasure)


def agreed(outcome: Outcome) -> bool:
    """True if the arm answers as re-prefill does, right or wrong."""
    return outcome.answer.prediction == outcome.reference.prediction


def flipped(outcome: Outcome) -> bool:
    """True if the base answers otherwise than re-prefill."""
    return outcome.base.prediction != outcome.reference.prediction


def _gain(outcome: Outcome) -> float | None:
    """The arm's score minus re-prefill's; None where either answer is unscored."""
    ours, theirs = outcome.answer.score, outcome.reference.score
    return None if ours is None or theirs is None else ours - theirs


def harmed(outcome: Outcome) -> bool | None:
    """True if the arm scores lower than re-prefill; for scores of 0 and 1: re-prefill right, arm wrong."""
    gain = _gain(outcome)
    return None if gain is None else gain < 0


def cell(outcomes: Sequence[Outcome]) -> Figures:
    """All figures of one arm on one task that follow from its outcomes; raises ValueError where there are none.

    Intervals of shares are as in `ctxwin_evals.stats.share_interval`, of KL and eta by the cluster bootstrap, of ``delta``
    by Student's t.
    """
    if not outcomes:
        raise ValueError("outcomes must hold at least one sample, got none")
    rows = [o.row for o in outcomes]
    clusters = [row.cluster for row in rows]
    over = sum(row.over for row in rows)
    shares = {
        ("accuracy", "ci95"): _share(outcomes, lambda o: o.answer.score),
        ("agreement", "agreement_ci95"): _share(outcomes, agreed),
        ("flip_recover", "flip_ci95"): _share([o for o in outcomes if flipped(o)], agreed),
        ("harm_rate", "harm_ci95"): _share(outcomes, harmed),
    }
    gains = measured(outcomes, _gain)
    figures: dict[str, Any] = {
        "n": len(outcomes),
        "clusters": len(set(clusters)),
        "unparsed": sum(o.answer.score is None for o in outcomes),
        **{name: value for names, pair in shares.items() for name, value in zip(names, pair, strict=True)},
        **_divergence("", [row.kl for row in rows], [row.base_kl for row in rows], clusters),
        "kl_p99": float(np.quantile([row.kl for row in rows], 0.99)),
        "base_kl": fmean([row.base_kl for row in rows]),
        "bytes_share": sum(row.stored for row in rows) / over if over else None,
        "recomputed_share": fmean([o.recomputed for o in outcomes]),
        "flips": sum(map(flipped, outcomes)),
        "reference_accuracy": _share(outcomes, lambda o: o.reference.score)[0],
        "base_accuracy": _share(outcomes, lambda o: o.base.score)[0],
        "delta": fmean(gains[0]) if gains[0] else None,
        "delta_ci95": stats.difference_interval(*gains) if gains[0] else None,
    }
    if any(row.forced_kl is not None for row in rows):
        kls, base_kls = [row.answer_kl for row in rows], [row.base_answer_kl for row in rows]
        figures |= _divergence("forced_", kls, base_kls, clusters)
    return cast(Figures, figures)


def _divergence(prefix: str, kls: list[float], base_kls: list[float], clusters: list[str]) -> dict[str, Any]:
    """KL and eta with their intervals."""
    figures = fmean(kls), stats.bootstrap_mean(kls, clusters), eta(kls, base_kls), eta_interval(kls, base_kls, clusters)
    return {prefix + name: value for name, value in zip(("kl", "kl_ci95", "eta", "eta_ci95"), figures, strict=True)}


def eta_interval(kls: Sequence[float], base_kls: Sequence[float], clusters: Sequence[str]) -> Interval | None:
    """Bootstrap interval of `eta`; None where eta is."""
    interval = None if eta(kls, base_kls) is None else stats.bootstrap_ratio(kls, base_kls, clusters)
    return None if interval is None else (1 - interval[1], 1 - interval[0])


Read = Callable[[Outcome], float | bool | None]
"""Returns a figure of an outcome; None where it has none."""


def measured(outcomes: Iterable[Outcome], read: Read) -> tuple[list[float], list[str]]:
    """A figure of the outcomes that have it, and their clusters."""
    rows = [(float(value), o.row.cluster) for o in outcomes if (value := read(o)) is not None]
    return [value for value, _ in rows], [cluster for _, cluster in rows]


def _share(outcomes: Sequence[Outcome], read: Read) -> tuple[float | None, Interval | None]:
    """Mean and interval of a figure over the outcomes that have it."""
    values, clusters = measured(outcomes, read)
    return (fmean(values), stats.share_interval(values, clusters)) if values else (None, None)


Outcomes = Mapping[int, Outcome]
"""Scored samples of one arm on one task, by the index of their item."""


class Difference(TypedDict):
    """One arm minus another on shared items, with bootstrap intervals over clusters; None where no item has the figure."""

    accuracy: float | None
    accuracy_ci95: Interval | None
    eta: float | None
    eta_ci95: Interval | None


class Pair(Difference):
    """`paired`: also ``gained`` and ``lost``, the items that only the first or only the second gets right.

    These and ``mcnemar_p`` are None where scores are not all 0 or 1; the latter also where clusters hold several items, since
    McNemar's test takes items as independent.
    """

    n: int
    clusters: int
    gained: int | None
    lost: int | None
    mcnemar_p: float | None
    kl: float
    kl_ci95: Interval | None


class Match(Difference):
    """`matched`: the settings and shares compared with (lower, upper), and the difference to the upper one as it is."""

    n: int
    clusters: int
    settings: list[str | None]
    shares: list[float | None]
    interpolated: bool
    above: Difference | None


def best_patched(cells: Mapping[str, Figures]) -> str | None:
    """The ``patched:M`` arm of the highest accuracy, at equal accuracy of the fewest bytes; None without one."""
    patched = [
        (-accuracy, f["bytes_share"] or 0.0, name)
        for name, f in cells.items()
        if name.startswith("patched:") and (accuracy := f["accuracy"]) is not None
    ]
    return min(patched)[2] if patched else None


def paired(first: Outcomes, second: Outcomes) -> Pair | None:
    """``first`` minus ``second`` on the items that both have; None where they share none."""
    pairs = [(first[i], second[i]) for i in sorted(first.keys() & second.keys())]
    if not pairs:
        return None
    clusters = [a.row.cluster for a, _ in pairs]
    kls = [a.row.kl - b.row.kl for a, b in pairs]
    all_scores = ((a.answer.score, b.answer.score, a.row.cluster) for a, b in pairs)
    scored = [(mine, theirs, of) for mine, theirs, of in all_scores if mine is not None and theirs is not None]
    graded = not scored or any(score not in (0, 1) for a, b, _ in scored for score in (a, b))
    exact = not graded and len({c for _, _, c in scored}) == len(scored)
    base_kls = [a.row.base_kl for a, _ in pairs]
    return {
        "n": len(pairs),
        "clusters": len(set(clusters)),
        **_difference([(a - b, c) for a, b, c in scored], [-kl for kl in kls], base_kls, clusters),
        "gained": None if graded else sum(a > b for a, b, _ in scored),
        "lost": None if graded else sum(b > a for a, b, _ in scored),
        "mcnemar_p": stats.mcnemar([a > 0 for a, _, _ in scored], [b > 0 for _, b, _ in scored]) if exact else None,
        "kl": fmean(kls),
        "kl_ci95": stats.bootstrap_mean(kls, clusters),
    }


def _difference(
    scores: Sequence[tuple[float, str]], removed: Sequence[float], base_kls: Sequence[float], clusters: Sequence[str]
) -> Difference:
    """From scores (with their clusters) and the share of the base's KL that is removed."""
    difference: Difference = {"accuracy": None, "accuracy_ci95": None, "eta": None, "eta_ci95": None}
    if scores:
        values, of = zip(*scores, strict=True)
        difference["accuracy"] = fmean(values)
        difference["accuracy_ci95"] = stats.difference_interval(values, of, drawn=True)
    if fmean(base_kls) >= ETA_FLOOR:
        difference["eta"] = math.fsum(removed) / math.fsum(base_kls)
        difference["eta_ci95"] = stats.bootstrap_ratio(removed, base_kls, clusters)
    return difference


@dataclass(frozen=True)
class Setting:
    """One setting of a token arm: its name, the share of the chunks' tokens that it computes anew, and its samples.

    A computed token costs its KV's bytes, so the share is of their bytes, too (Kamera, Table 6, sets a rank-16 patch beside
    31 tokens that way).
    """

    name: str
    share: float
    outcomes: Outcomes


def matched(patch: Outcomes, share: float, settings: Sequence[Setting]) -> Match | None:
    """A patch minus a token arm at the patch's bytes (Kamera, section 6 and Table 6), paired by item.

    Between the two settings on either side of ``share`` (the lower one may be the base, which computes nothing) each item's score
    and KL are interpolated linearly. A bent curve is better than its chord, which would flatter the patch; ``above`` is
    therefore the difference to the upper setting as it is. If no setting has that many bytes, the largest one is used.

    Args:
        patch: samples of the patch.
        share: its bytes over the KV's.
        settings: of one token arm, any order, at least one.

    Returns None where no item is shared.
    """
    ranked = sorted(settings, key=lambda s: s.share)
    upper = next((s for s in ranked if s.share >= share), None)
    lower = next((s for s in reversed(ranked) if s.share <= share), None) if upper else ranked[-1]
    shared = sorted(set(patch).intersection(*(s.outcomes for s in (lower, upper) if s)))
    if not shared:
        return None
    low_share = lower.share if lower else 0.0
    weight = (share - low_share) / (upper.share - low_share) if upper and upper.share > low_share else 0.0
    removed, gaps = [], []
    for i in shared:
        mine, row = patch[i], patch[i].row
        low = (lower.outcomes[i].row.kl, lower.outcomes[i].answer.score) if lower else (row.base_kl, mine.base.score)
        high = (upper.outcomes[i].row.kl, upper.outcomes[i].answer.score) if upper else low
        removed.append(low[0] + weight * (high[0] - low[0]) - row.kl)
        if mine.answer.score is not None and low[1] is not None and high[1] is not None:
            # This form is exact where both are equal: no lead is made of rounding.
            gaps.append((mine.answer.score - (low[1] + weight * (high[1] - low[1])), row.cluster))
    clusters = [patch[i].row.cluster for i in shared]
    above = paired(patch, upper.outcomes) if upper else None
    return {
        "n": len(shared),
        "clusters": len(set(clusters)),
        "settings": [lower.name if lower else "base", upper.name if upper else None],
        "shares": [low_share, upper.share if upper else None],
        "interpolated": 0.0 < weight < 1.0,
        **_difference(gaps, removed, [patch[i].row.base_kl for i in shared], clusters),
        "above": above and cast(Difference, {k: v for k, v in above.items() if k in Difference.__annotations__}),
    }
