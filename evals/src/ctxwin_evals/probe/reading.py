"""Does the model read its context at all? Without that no verdict is possible, whatever blind reuse changes.

A random model's answers also move when its input does, so a moving distribution proves nothing. What sets a reading model
apart is *which* change moves it: the chunk that a question is about, more than any other. Places differ (the last one moves
most models most), so each place's mean over all questions is subtracted first; the remainder has mean zero for a model to
which question and chunks are unrelated. Where the generator knows the answers, the model must also be right, and no longer
be when a needed chunk is swapped. A user's own questions do not say what they need: they count where swapping a chunk
changes enough of their answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as scipy_stats

from ctxwin_evals.items import Task, grouped
from ctxwin_evals.probe.contexts import Kind
from ctxwin_evals.samples import Sample
from ctxwin_evals.stats import bootstrap_mean, share_interval, standard_error

LEVEL = 0.995
"""One-sided; a model that does not read passes for a reader once in 200 probes."""
GAIN = 0.1
"""Least share of right answers that must depend on a needed chunk; of a user's answers, on any chunk."""

_TRUTHS = (("accuracy", "right"), ("swapped", "swapped"))


@dataclass(frozen=True)
class Reading:
    """One question, and how far swapping each chunk moves its answer.

    Attributes:
        needs: places that it is about.
        moved: KL(re-prefill || re-prefill with the chunk at a place swapped) along re-prefill's answer, by place.
        right, swapped: whether the answer is true, and whether it still is with a needed chunk swapped; None unknown.
        changed: whether swapping any chunk changes the answer.
    """

    cluster: str
    kind: Kind
    needs: tuple[int, ...]
    moved: tuple[float, ...]
    right: bool | None
    swapped: bool | None
    changed: bool = False


@dataclass(frozen=True)
class Competence:
    """Evidence that answers of one kind of question depend on the chunks they are about.

    Attributes:
        n: questions.
        reads: the verdict of the tests that could be made.
        addressed, addressed_low: how much further a needed chunk moves an answer than others do (root of nats), and the
            lower end of its interval at `LEVEL`; None where no question says what it needs.
        accuracy, swapped: share of right answers, and of those with a needed chunk swapped.
        gain_low: lower end of the 95 % interval of their difference.
        moved: mean KL of swapping a needed chunk, nats: what an answer owes to its context. Of any chunk, where no question
            says what it needs.
        changed, changed_low: share of answers that swapping some chunk changes, with the lower end of its 95 % interval.
    """

    kind: Kind
    n: int
    reads: bool
    addressed: float | None = None
    addressed_low: float | None = None
    accuracy: float | None = None
    swapped: float | None = None
    gain_low: float | None = None
    moved: float | None = None
    changed: float | None = None
    changed_low: float | None = None


def readings(samples: Sequence[Sample], task: Task) -> list[Reading]:
    """Return one reading a question from samples of the arms `Swapped` (one per place, in order)."""
    rows = []
    for some in grouped(samples, lambda sample: sample.index).values():
        first = some[0]
        needs = tuple(first.meta["needs"])
        right = swapped = None
        if first.target is not None:
            right = bool(task.score(first.reference, first.target, first.meta).score)
            # The earliest needed chunk is what the others absorb.
            swapped = bool(task.score(some[needs[0]].answer, first.target, first.meta).score) if needs else None
        changed = any(one.answer != one.reference for one in some)
        moved = tuple(one.answer_kl for one in some)
        rows.append(Reading(first.cluster, first.meta["kind"], needs, moved, right, swapped, changed))
    return rows


def competence(rows: Sequence[Reading], kind: Kind) -> Competence | None:
    """Summarise the readings of one kind; None if there are none."""
    some = [r for r in rows if r.kind == kind]
    if not some:
        return None
    if kind == "yours":
        clusters = [r.cluster for r in some]
        changed = [float(r.changed) for r in some]
        low = share_interval(changed, clusters)[0]
        moved = float(np.mean([r.moved for r in some]))
        return Competence(kind, len(some), low > GAIN, moved=moved, changed=float(np.mean(changed)), changed_low=low)
    measures: dict[str, float] = {}
    aimed = [r for r in some if r.needs and len(r.needs) < len(r.moved)]
    if len(aimed) > 1:
        separations, clusters = addressing(aimed), [r.cluster for r in aimed]
        measures["addressed"] = float(np.mean(separations))
        if (error := standard_error(separations, clusters)) is not None:
            t = float(scipy_stats.t.ppf(LEVEL, len(set(clusters)) - 1))
            measures["addressed_low"] = measures["addressed"] - t * error
        measures["moved"] = float(np.mean([min(r.moved[i] for i in r.needs) for r in aimed]))
    reads = measures.get("addressed_low", 0.0) > 0
    if graded := [r for r in some if r.right is not None and r.swapped is not None]:
        measures |= {name: float(np.mean([bool(getattr(r, of)) for r in graded])) for name, of in _TRUTHS}
        gains = [float(bool(r.right)) - float(bool(r.swapped)) for r in graded]
        if interval := bootstrap_mean(gains, [r.cluster for r in graded]):
            measures["gain_low"] = interval[0]
        reads = reads and measures.get("gain_low", 0.0) > GAIN
    return Competence(kind, len(some), reads, **measures)


def addressing(rows: Sequence[Reading]) -> np.ndarray:
    """How much further needed chunks move each answer than the others do, ``[n]``, in roots of nats.

    Of several needed chunks the one that moves it least counts, unless the truth is known: then being right hangs on one
    of them in `Competence.gain_low`, and their mean counts. Means over the questions are taken out place by place.
    """
    moved = np.sqrt(np.array([r.moved for r in rows], dtype=np.float64))
    moved = moved - moved.mean(0)
    needed = [(min if r.right is None else np.mean)(row[list(r.needs)]) for r, row in zip(rows, moved, strict=True)]
    others = [np.delete(row, list(r.needs)).mean() for r, row in zip(rows, moved, strict=True)]
    gaps: np.ndarray = np.array(needed) - np.array(others)
    return gaps
