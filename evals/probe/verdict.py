"""From measurements to a verdict: by intervals, and `keep exact` wherever they leave a doubt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ctxwin.evals.metrics import eta, eta_interval
from ctxwin.evals.probe.contexts import Kind
from ctxwin.evals.probe.listen import Heard
from ctxwin.evals.probe.reading import Competence
from ctxwin.evals.stats import bootstrap_mean, share_interval

Finding = Literal["binds", "chains", "unclear", "unread"]
MARGIN = 2
"""What is served has up to this many times the smallest rank that was shown safe: windows hold more, and other things, than
a probe's contexts do."""
_NAMES: dict[Kind, str] = {"cross": "questions about several chunks", "one": "questions about one chunk",
                           "yours": "your questions"}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What counts as safe.

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


@dataclass(frozen=True)
class Judgement:
    """What blind reuse does to this model.

    Attributes:
        finding: ``binds``: its answers change; ``chains``: they do not; ``unclear``: neither could be shown;
            ``unread``: the model does not read its context, so nothing was tested.
        partly: whether it reads as much of it as questions about one chunk need.
        evidence: the kind of question that it rests on.
        reasons: sentences with figures.
    """

    finding: Finding
    evidence: Kind | None
    reasons: tuple[str, ...] = ()
    partly: bool = False


@dataclass(frozen=True)
class Setting:
    """A patch that was tried on held-out contexts.

    Attributes:
        rank, layers: of the patch. ``share``: bytes beyond the canonicals over the chunks' KV in bf16.
        safe: whether it restores enough and changes few enough answers, by the ends of the intervals.
    """

    rank: int
    layers: Literal["all", "deep"]
    share: float
    safe: bool
    figures: Mapping[str, Any] = field(default_factory=dict)


def summary(heard: Sequence[Heard], base: Sequence[Heard] = ()) -> dict[str, Any] | None:
    """Figures of one arm over some questions; ``base`` are the same questions under blind reuse. None for no questions."""
    if not heard:
        return None
    clusters = [h.cluster for h in heard]
    flips = [float(h.flip) for h in heard]
    kls = [h.kl for h in heard]
    over = sum(h.over for h in heard)
    known = [h.right for h in heard if h.right is not None]
    controls = [h.control for h in heard if h.control is not None]
    made: dict[str, Any] = {
        "n": len(heard),
        "clusters": len(set(clusters)),
        "flips": float(np.mean(flips)),
        "flips_ci95": list(share_interval(flips, clusters)),
        "kl": math.fsum(kls) / len(kls),
        "kl_ci95": _listed(bootstrap_mean(kls, clusters)),
        "next_kl": float(np.mean([h.next_kl for h in heard])),
        "right": float(np.mean(known)) if known else None,
        "to_oracle": float(np.mean(controls)) if controls else None,
        "share": sum(h.stored for h in heard) / over if over else 0.0,
    }
    if base:
        bases = [h.kl for h in base]
        made |= {"eta": eta(kls, bases), "eta_ci95": eta_interval(kls, bases, clusters)}
    return made


def reading_kinds(found: Sequence[Competence]) -> list[Kind]:
    """Kinds of question whose answers depend on the chunks they are about."""
    return [c.kind for c in found if c.reads]


def judge(
    found: Sequence[Competence], blind: Sequence[Heard], noise: Sequence[Heard], limits: Limits, *, last: bool
) -> Judgement:
    """What the answers so far say.

    Args:
        found: what was learned about reading, by kind.
        blind, noise: the same questions under blind reuse and under a re-prefill that differs in arithmetic only.
        limits: what counts as safe.
        last: whether these are all answers there will be; that nothing is lost is never concluded before.
    """
    kinds = evidence_of(found, blind)
    if not kinds:
        return Judgement("unread", None, tuple(_unread(found)), partly=bool(reading_kinds(found)))
    made = [_judged(found, kind, blind, noise, limits, last=last) for kind in kinds]
    # Windows do not know which questions will come: one kind that is lost, or may be, decides.
    return min(made, key=lambda judgement: _WORST.index(judgement.finding))


_WORST: tuple[Finding, ...] = ("binds", "unclear", "chains")


def _judged(
    found: Sequence[Competence], kind: Kind, blind: Sequence[Heard], noise: Sequence[Heard], limits: Limits, *, last: bool
) -> Judgement:  # fmt: skip
    made = summary([h for h in blind if h.kind == kind])
    assert made is not None
    floor = float(np.mean([h.flip for h in noise if h.kind == kind]))
    limit = limits.flips + floor
    low, high = made["flips_ci95"]
    owed = _owed(found, kind)
    lost = None if not owed or made["kl_ci95"] is None else made["kl_ci95"][1] / owed
    reasons = (
        f"of {made['n']} {_NAMES[kind]}, blind reuse answers {made['flips']:.1%} otherwise than a re-prefill "
        f"(95 % interval {low:.1%} to {high:.1%}; arithmetic noise: {floor:.1%}; the limit is {limit:.1%})",
        f"it moves the answer by {made['kl']:.3g} nats a token"
        + (f"; swapping a needed chunk moves it by {owed:.3g}" if owed else ""),
    )
    if low > limit:
        return Judgement("binds", kind, reasons)
    if last and high <= limit and lost is not None and lost <= limits.lost:
        return Judgement("chains", kind, reasons)
    return Judgement("unclear", kind, reasons)


def _owed(found: Sequence[Competence], evidence: Kind) -> float | None:
    """What an answer of this kind owes to its context, nats; for a user's questions, which do not say what they need,
    the least that is known of any other kind."""
    known = {c.kind: c.moved for c in found if c.reads and c.moved}
    return known.get(evidence, min(known.values(), default=None))


def evidence_of(found: Sequence[Competence], heard: Sequence[Heard]) -> list[Kind]:
    """The kinds of question that a verdict may rest on: the user's, and those about several chunks, if it reads them."""
    reads, asked = reading_kinds(found), {h.kind for h in heard}
    kinds: tuple[Kind, ...] = ("yours", "cross")
    return [kind for kind in kinds if kind in asked and (kind in reads or (kind == "yours" and reads))]


def proven(
    rank: int, layers: Literal["all", "deep"], heard: Sequence[Heard], blind: Sequence[Heard], noise: Sequence[Heard],
    evidence: Kind, limits: Limits,
) -> Setting:  # fmt: skip
    """A setting held against the limits on held-out questions: those of the verdict, and all of them together."""
    some = [h for h in heard if h.kind == evidence]
    own = summary(some, [h for h in blind if h.kind == evidence])
    every = summary(heard)
    assert own is not None and every is not None
    limit = limits.flips + float(np.mean([h.flip for h in noise if h.kind == evidence]))
    restored = own["eta"] is None or (own["eta_ci95"] is not None and own["eta_ci95"][0] >= limits.eta)
    safe = restored and own["flips_ci95"][1] <= limit and every["flips_ci95"][1] <= limit
    return Setting(rank, layers, own["share"], safe, own | {"flips_all": every["flips"]})


def smallest_safe(settings: Sequence[Setting]) -> Setting | None:
    """From the largest downwards as long as each is safe: testing in this order needs no correction for many tests."""
    chosen = None
    for setting in sorted(settings, key=lambda s: s.share, reverse=True):
        if not setting.safe:
            break
        chosen = setting
    return chosen


def with_margin(smallest: Setting | None, settings: Sequence[Setting]) -> Setting | None:
    """The largest setting within `MARGIN` times the smallest safe rank; all that are larger than it were shown safe too."""
    if smallest is None:
        return None
    return max((s for s in settings if smallest.rank <= s.rank <= MARGIN * smallest.rank), key=lambda s: s.rank)


def may_keep(survivors: Sequence[Mapping[str, Any]], limits: Limits) -> bool:
    """Whether survivors may stay as they are: shown to be safe after one slide, and shown to be unsafe after none.

    Args:
        survivors: rows by number of slides, of `ctxwin.evals.probe.moving.survival`. Fewer windows slide further, too few
            to show that they are safe; that a window loses more the further it slides is still seen there.
    """
    first = next((row for row in survivors if row["slides"] == 1), None)
    if first is None or first["other_than_both_ci95"][1] > limits.flips:
        return False
    return all(row["other_than_both_ci95"][0] <= limits.flips for row in survivors)


def survivors_sentence(survivors: Sequence[Mapping[str, Any]], survivors_mode: str) -> str:
    """What keeping survivors means, which is not a re-prefill of what is placed: they know what left the window."""
    first = min(survivors, key=lambda row: row["slides"])
    done = "are kept as they are" if survivors_mode == "keep" else "are computed again"
    return (
        f"survivors of a slide {done}: kept, they answer {first['other_than_window']:.1%} of {first['n']} questions otherwise "
        f"than a re-prefill of what is placed, {first['other_than_stream']:.1%} otherwise than one of what was seen lately, "
        f"and {first['other_than_both']:.1%} otherwise than both, by which it is decided"
    )


def cheapest(curve: Sequence[Mapping[str, Any]], limits: Limits) -> dict[str, Mapping[str, Any] | None]:
    """By way to compress: the smallest share of bytes that restores enough and changes few enough answers."""
    found: dict[str, Mapping[str, Any] | None] = {}
    for way in dict.fromkeys(row["way"] for row in curve):
        enough = [row for row in curve if row["way"] == way and _enough(row, limits)]
        found[way] = min(enough, key=lambda row: row["share"]) if enough else None
    return found


def _enough(row: Mapping[str, Any], limits: Limits) -> bool:
    return bool((row["eta"] is None or row["eta"] >= limits.eta) and row["flips"] <= limits.flips)


def candidate(curve: Sequence[Mapping[str, Any]], limits: Limits, largest: int) -> tuple[Literal["all", "deep"], int]:
    """Layers and rank of the cheaper of the ways that windows serve; all layers at the ``largest`` where neither is enough."""
    found = cheapest([row for row in curve if row["way"] in ("joint", "deep")], limits)
    rows = [row for row in found.values() if row is not None]
    if not rows:
        return "all", largest
    best = min(rows, key=lambda row: row["share"])
    return ("deep" if best["way"] == "deep" else "all"), int(best["rank"])


def sentence(judgement: Judgement, setting: Setting | None, blind: Mapping[str, Any] | None) -> str:
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
    where = "the deep layers" if setting.layers == "deep" else "all layers"
    return f"{start}; patched at rank {setting.rank} in {where} ({setting.share:.1%} of the bytes) is safe"


def _unread(found: Sequence[Competence]) -> list[str]:
    lines = []
    for c in found:
        line = f"{_NAMES[c.kind]} (n = {c.n}): "
        if c.addressed is None:
            line += "none of them says which chunk it needs"
        else:
            low = "unknown" if c.addressed_low is None else f"{c.addressed_low:.3g}"
            line += f"a needed chunk moves the answer {c.addressed:.3g} further than another one (at least {low})"
        if c.accuracy is not None:
            line += f"; {c.accuracy:.0%} right, {c.swapped:.0%} with a needed chunk swapped"
        lines.append(line + (": reads" if c.reads else ": does not read"))
    return lines


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)
