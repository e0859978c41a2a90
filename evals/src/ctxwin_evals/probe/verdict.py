"""From measurements to a verdict: by intervals, and `keep exact` wherever they leave a doubt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, TypedDict

from ctxwin.kv.patch import Layers, Layout
from ctxwin_evals.items import Task
from ctxwin_evals.metrics import cell
from ctxwin_evals.patching import parse_variant
from ctxwin_evals.probe.contexts import Kind
from ctxwin_evals.probe.reading import Competence
from ctxwin_evals.samples import Sample
from ctxwin_evals.score import Scorer
from ctxwin_evals.stats import Interval, bootstrap_mean, share_interval

Finding = Literal["binds", "chains", "unclear", "unread"]
MARGIN = 2
"""The served rank is up to this many times the smallest one shown safe: windows hold more than a probe's contexts do."""
TRIES = 2
"""Ways to compress that are tried on fresh contexts. The end of an interval errs in 2.5 % of cases, so one of two in 5 %."""
_NAMES: dict[Kind, str] = {
    "cross": "questions about several chunks",
    "one": "questions about one chunk",
    "yours": "your questions",
}


@dataclass(frozen=True)
class Limits:
    """Bounds of what counts as safe.

    Attributes:
        flips: largest share of answers that reuse may change beyond those that arithmetic noise changes.
        eta: least share of what blind reuse loses that a patch must restore.
        lost: largest share of what an answer owes to its context that blind reuse may lose.
    """

    flips: float = 0.05
    eta: float = 0.95
    lost: float = 0.05

    def __post_init__(self) -> None:
        for name in ("flips", "eta", "lost"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")


class Summary(TypedDict):
    """Figures of one arm over some questions, by `ctxwin_evals.metrics.cell`.

    Attributes:
        flips: share of answers other than re-prefill's.
        kl, next_kl: KL(re-prefill || arm) along re-prefill's answer, and of the next token; nats.
        right: share of right answers, where truths are known.
        to_oracle: KL(oracle || arm) along the same answer, where both were measured.
        share: bytes kept beyond the canonicals over the chunks' KV in bf16.
        eta: share of what blind reuse loses that the arm restores; None where it loses nothing, or was not measured.
    """

    n: int
    clusters: int
    flips: float
    flips_ci95: Interval
    kl: float
    kl_ci95: Interval | None
    next_kl: float
    right: float | None
    to_oracle: float | None
    share: float
    eta: float | None
    eta_ci95: Interval | None


Summaries = Mapping[Kind, Summary]


@dataclass(frozen=True)
class Judgement:
    """Effect of blind reuse on this model.

    Attributes:
        finding: ``binds``: its answers change; ``chains``: they do not; ``unclear``: neither could be shown;
            ``unread``: the model does not read its context, so nothing was tested.
        evidence: the kind of question that it rests on.
        reasons: sentences with figures.
        partly: whether it reads as much of its context as questions about one chunk need.
    """

    finding: Finding
    evidence: Kind | None
    reasons: tuple[str, ...] = ()
    partly: bool = False


@dataclass(frozen=True)
class Setting:
    """A patch (rank, or its bytes where it is quantized; layers; share of the chunks' bytes) tried on held-out contexts.

    ``safe`` tells whether it restores enough and changes few enough answers, by the ends of the intervals; ``figures`` are
    those of the questions that the verdict rests on, with ``flips_all`` over all questions.
    """

    rank: int
    layers: Layers
    share: float
    safe: bool
    figures: Mapping[str, Any]
    layout: Layout = "joint"


def summary(samples: Sequence[Sample], task: Task, effective: float | None = None) -> Summary | None:
    """Figures of one arm; None for no samples. ``effective`` as in `share_interval`, for answers that all agree."""
    if not samples:
        return None
    scorer = Scorer(lambda name: task)
    f = cell([scorer.outcome(sample) for sample in samples])
    assert f["agreement"] is not None and f["agreement_ci95"] is not None
    low, high = f["agreement_ci95"]
    if f["agreement"] == 1 and effective is not None:
        low, high = share_interval([1.0] * len(samples), [s.cluster for s in samples], effective)
    controls = [kl for sample in samples if (kl := sample.extra.get("to_control")) is not None]
    return {
        "n": f["n"],
        "clusters": f["clusters"],
        "flips": 1 - f["agreement"],
        "flips_ci95": (1 - high, 1 - low),
        "kl": f.get("forced_kl", f["kl"]),
        "kl_ci95": f.get("forced_kl_ci95", f["kl_ci95"]),
        "next_kl": f["kl"],
        "right": f["accuracy"],
        "to_oracle": sum(controls) / len(controls) if controls else None,
        "share": f["bytes_share"] or 0.0,
        "eta": f.get("forced_eta", f["eta"]),
        "eta_ci95": f.get("forced_eta_ci95", f["eta_ci95"]),
    }


def judge(
    competences: Sequence[Competence], blind: Summaries, noise: Summaries, limits: Limits, *, last: bool
) -> Judgement:
    """Judge the answers so far.

    Args:
        competences: results of the reading test, by kind.
        blind, noise: the same questions under blind reuse, and under a re-prefill that differs only in arithmetic.
        limits: what counts as safe.
        last: True if no more answers will come; only then may it be concluded that nothing is lost.
    """
    reads = {c.kind for c in competences if c.reads}
    # The user's own questions count where they are read, or where others are; of the others, those about several chunks.
    natural: tuple[Kind, ...] = ("yours", "cross")
    kinds = [kind for kind in natural if kind in blind and (kind in reads or (kind == "yours" and reads))]
    if not kinds:
        return Judgement("unread", None, tuple(_read(c) for c in competences), partly=bool(reads))
    judgements = [_judged(competences, kind, blind[kind], noise[kind]["flips"], limits, last=last) for kind in kinds]
    # Windows do not know which questions will come: one kind that is lost, or may be, decides.
    return min(judgements, key=lambda judgement: ("binds", "unclear", "chains").index(judgement.finding))


def _judged(
    competences: Sequence[Competence], kind: Kind, blind: Summary, floor: float, limits: Limits, *, last: bool
) -> Judgement:
    limit = limits.flips + floor
    low, high = blind["flips_ci95"]
    # What an answer owes to its context; the least that is known of any kind, where nothing is known of this one.
    moved = {c.kind: c.moved for c in competences if c.reads and c.moved}
    owed = moved.get(kind, min(moved.values(), default=None))
    reasons = (
        f"of {blind['n']} {_NAMES[kind]}, blind reuse answers {blind['flips']:.1%} otherwise than a re-prefill "
        f"(95 % interval {low:.1%} to {high:.1%}; arithmetic noise: {floor:.1%}; the limit is {limit:.1%})",
        f"it moves the answer by {blind['kl']:.3g} nats a token"
        + (f"; swapping a needed chunk moves it by {owed:.3g}" if owed else ""),
    )
    little = owed is not None and blind["kl_ci95"] is not None and blind["kl_ci95"][1] / owed <= limits.lost
    safe = last and high <= limit and little
    return Judgement("binds" if low > limit else "chains" if safe else "unclear", kind, reasons)


def proven(
    rank: int, layers: Layers, layout: Layout, evidence: Summary, every: Summary, noise: float, limits: Limits
) -> Setting:
    """A setting judged by the limits on held-out questions: those of the verdict, and all of them together.

    ``noise`` is the share of answers that arithmetic alone changes.
    """
    limit = limits.flips + noise
    restored = evidence["eta"] is None or (evidence["eta_ci95"] is not None and evidence["eta_ci95"][0] >= limits.eta)
    safe = restored and evidence["flips_ci95"][1] <= limit and every["flips_ci95"][1] <= limit
    return Setting(rank, layers, evidence["share"], safe, {**evidence, "flips_all": every["flips"]}, layout)


def smallest_safe(settings: Sequence[Setting]) -> Setting | None:
    """From the largest downwards as long as each is safe: testing in this order needs no correction for many tests."""
    downwards = sorted(settings, key=lambda s: s.share, reverse=True)
    return next(reversed(list(takewhile(lambda s: s.safe, downwards))), None)


def with_margin(smallest: Setting | None, settings: Sequence[Setting]) -> Setting | None:
    """The largest setting within `MARGIN` times the smallest safe rank; all ranks above that one were shown safe, too."""
    if smallest is None:
        return None
    return max((s for s in settings if smallest.rank <= s.rank <= MARGIN * smallest.rank), key=lambda s: s.rank)


def survival(pairs: Mapping[int, Sequence[tuple[Sample, Sample]]]) -> list[dict[str, Any]]:
    """By number of slides: how far survivors are from two references, and which of these is the stricter one.

    ``pairs`` holds, by number of slides, samples of survivors compared with a re-prefill of what is placed (``window``) and
    with one of what was seen lately (``stream``): survivors remember what left, which is right or wrong depending on the
    question.
    """
    rows = []
    for slides, some in sorted(pairs.items()):
        row: dict[str, Any] = {"slides": slides, "n": len(some)}
        for name, samples in zip(("window", "stream"), zip(*some, strict=True), strict=True):
            clusters, kls = [sample.cluster for sample in samples], [sample.answer_kl for sample in samples]
            flips = [float(sample.answer != sample.reference) for sample in samples]
            row |= {f"kl_{name}": sum(kls) / len(kls), f"kl_{name}_ci95": bootstrap_mean(kls, clusters)}
            row |= {f"other_than_{name}": sum(flips) / len(flips)}
            row |= {f"other_than_{name}_ci95": share_interval(flips, clusters)}
        row["kl_nearer"] = sum(min(a.answer_kl, b.answer_kl) for a, b in some) / len(some)
        row["other_than_both"] = sum(a.answer not in (a.reference, b.reference) for a, b in some) / len(some)
        row["stricter"] = max(("window", "stream"), key=lambda name: row[f"other_than_{name}"])
        rows.append(row)
    return rows


def survivor_mode(survivors: Sequence[Mapping[str, Any]], limits: Limits) -> Literal["keep", "removal", "refresh"]:
    """Return what to do with survivors (rows of `survival`): ``keep`` them where they are safe as they are, else ``removal``.

    The former by the stricter reference, the latter, where patches gain, by what is placed. Safe is what was shown so after one
    slide, and unsafe after no number: fewer windows slide further, too few to show that they are safe, but enough to notice
    that a window loses more the further it slides.
    """

    def safe(ends: Mapping[int, Interval]) -> bool:
        return 1 in ends and ends[1][1] <= limits.flips and all(low <= limits.flips for low, _ in ends.values())

    if safe({row["slides"]: row[f"other_than_{row['stricter']}_ci95"] for row in survivors}):
        return "keep"
    patched = {row["slides"]: row["removal"] for row in survivors if row["removal"]}
    gains = patched.get(1, {}).get("eta_ci95")
    return "removal" if gains and gains[0] > 0 and safe({n: f["flips_ci95"] for n, f in patched.items()}) else "refresh"


def survivors_sentence(survivors: Sequence[Mapping[str, Any]], mode: str) -> str:
    """Describe the effect of keeping survivors by either reference, and name the one that decided."""
    first = min(survivors, key=lambda row: row["slides"])
    done = {"keep": "are kept as they are", "removal": "get removal patches, formed while the engine idles"}
    patched = f"; with removal patches {first['removal']['flips']:.1%}, by the former" if first["removal"] else ""
    which = "the former" if first["stricter"] == "window" else "the latter"
    return (
        f"survivors of a slide {done.get(mode, 'are computed again')}: kept, they answer {first['other_than_window']:.1%} of "
        f"{first['n']} questions otherwise than a re-prefill of what is placed and {first['other_than_stream']:.1%} otherwise "
        f"than one of what was seen lately; {which} is the stricter reference, by which it is decided "
        f"({first['other_than_both']:.1%} agree with neither){patched}"
    )


def cheapest(curve: Sequence[Mapping[str, Any]], limits: Limits) -> dict[str, Mapping[str, Any] | None]:
    """By way to compress: the smallest share of bytes that restores enough and changes few enough answers."""
    by_way: dict[str, Mapping[str, Any] | None] = dict.fromkeys(row["way"] for row in curve)
    for row in sorted(curve, key=lambda row: row["share"]):
        if enough(row, limits) and by_way[row["way"]] is None:
            by_way[row["way"]] = row
    return by_way


def enough(row: Mapping[str, Any], limits: Limits) -> bool:
    """Return True if an arm restores enough and changes few enough answers, by its means."""
    return bool((row["eta"] is None or row["eta"] >= limits.eta) and row["flips"] <= limits.flips)


def candidates(curve: Sequence[Mapping[str, Any]], limits: Limits, last: tuple[str, int]) -> list[tuple[str, int]]:
    """The ways to be proved, `TRIES` of them at most, each with the rank that was enough on the contexts that choose.

    All have the layout of ``last``: joint factors may harm few contexts much, which a proof by answers hardly sees. The first is
    the cheapest in bytes, whatever its layers; as those left out may be needed elsewhere, the second leaves out none.
    """
    kinds = {way: parse_variant(way) or ("", "all", "none") for way in (*(row["way"] for row in curve), last[0])}
    served = [row for row in curve if kinds[row["way"]][::2] == kinds[last[0]][::2]]
    some = sorted(filter(None, cheapest(served, limits).values()), key=lambda row: row["share"])
    first, *others = dict.fromkeys([*((str(row["way"]), int(row["rank"])) for row in some), last])
    whole = [way for way in others if kinds[way[0]][1] == "all"]
    return [first, *(way for way in whole if way[0] != first[0])][:TRIES]


def sentence(judgement: Judgement, setting: Setting | None, blind: Summary | None) -> str:
    """The verdict in one line."""
    if judgement.finding == "unread" or blind is None or judgement.evidence is None:
        if judgement.partly:
            return "no verdict: answers depend on one chunk at most, so that nothing could be lost; keep exact"
        return "no verdict: answers do not depend on the context; keep exact"
    share, (low, high) = blind["flips"], blind["flips_ci95"]
    if judgement.finding == "chains":
        return (
            f"chains at query time: blind reuse is safe within the measured noise (it changes {share:.1%} of the "
            f"answers, at most {high:.1%})"
        )
    if judgement.finding == "unclear":
        return (
            f"undecided: blind reuse changes {share:.1%} of the answers (between {low:.1%} and {high:.1%}), too few to "
            "call it a loss and too many or too uncertain to call it safe; keep exact"
        )
    start = f"binds at prefill: blind reuse changes {share:.0%} of the answers to {_NAMES[judgement.evidence]}"
    if setting is None:
        return f"{start}, and no patch was shown to be safe; keep exact"
    where = f"{'the deep' if setting.layers == 'deep' else 'all'} layers"
    if not isinstance(setting.layers, str):
        where = "the layers from {:.0%} to {:.0%} of the depth".format(*setting.layers)
    return f"{start}; {setting.layout} patches of {where} are safe at {setting.share:.1%} of the bytes"


def _read(c: Competence) -> str:
    line = f"{_NAMES[c.kind]} (n = {c.n}): "
    if c.changed is not None:
        line += f"swapping a chunk changes {c.changed:.0%} of the answers (at least {c.changed_low:.0%})"
    elif c.addressed is None:
        line += "none of them says which chunk it needs"
    else:
        low = "unknown" if c.addressed_low is None else f"{c.addressed_low:.3g}"
        line += f"a needed chunk moves the answer {c.addressed:.3g} further than another one (at least {low})"
    if c.accuracy is not None:
        line += f"; {c.accuracy:.0%} right, {c.swapped:.0%} with a needed chunk swapped"
    return line + (": reads" if c.reads else ": does not read")
