"""Does the model read its context at all? Without that no verdict is possible, whatever blind reuse changes.

A random model also moves when its input does, so that a moving distribution proves nothing. What tells a model that
reads apart is *which* change moves it: the chunk that a question is about, more than any other chunk. Places differ (the
last one moves most models most), so each place's mean over all questions is taken out first; what is left has mean zero
for a model to which the question and the chunks are unrelated. Where the generator knows the answers, the model must
also be right, and lose that when a needed chunk is swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as scipy_stats

from ctxwin.evals.probe.asking import divergence
from ctxwin.evals.probe.contexts import Context, Kind, Question, normal
from ctxwin.evals.probe.listen import Clock, Listener
from ctxwin.evals.stats import bootstrap_mean, standard_error

LEVEL = 0.995
"""One-sided; a model that does not read passes for a reader once in 200 probes."""
GAIN = 0.1
"""Least share of right answers that must hang on a needed chunk."""


@dataclass(frozen=True)
class Reading:
    """One question, and how far swapping each chunk moves its answer.

    Attributes:
        needs: places that it is about.
        moved: KL(re-prefill || re-prefill with the chunk at a place swapped) along re-prefill's answer, by place.
        right, swapped: whether the answer is true, and whether it still is with a needed chunk swapped; None unknown.
    """

    cluster: str
    kind: Kind
    needs: tuple[int, ...]
    moved: tuple[float, ...]
    right: bool | None
    swapped: bool | None


@dataclass(frozen=True)
class Competence:
    """Whether answers of one kind of question depend on the chunks they are about.

    Attributes:
        n: questions.
        reads: the verdict of the tests that could be made.
        addressed, addressed_low: how much further a needed chunk moves an answer than others do (root of nats), and the
            lower end of its interval at `LEVEL`; None where no question says what it needs.
        accuracy, swapped: share of right answers, and of those with a needed chunk swapped.
        gain_low: lower end of the 95 % interval of their difference.
        moved: mean KL of swapping a needed chunk, nats: what an answer owes to its context.
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


def read(listener: Listener, contexts: Sequence[Context], clock: Clock, end: float) -> list[Reading]:
    """Readings of all questions of contexts with strangers; stops after a batch once the clock is past ``end``.

    Cost: a re-prefill a placed chunk and one more, and a pass a question for each.
    """
    found: list[Reading] = []
    done = 0
    for batch in listener.batches(contexts):
        found += _batch(listener, batch)
        done += len(batch)
        clock.progress("does it read its context", done, len(contexts))
        if clock.begun + clock.spent > end:
            break
    return found


def competence(readings: Sequence[Reading], kind: Kind) -> Competence | None:
    """What the readings of one kind say; None where there are none."""
    some = [r for r in readings if r.kind == kind]
    if not some:
        return None
    aimed = [r for r in some if r.needs and len(r.needs) < len(r.moved)]
    addressed = low = moved = None
    if len(aimed) > 1:
        apart = addressing(aimed)
        clusters = [r.cluster for r in aimed]
        error = standard_error(apart, clusters)
        addressed = float(np.mean(apart))
        if error is not None:
            low = addressed - float(scipy_stats.t.ppf(LEVEL, len(set(clusters)) - 1)) * error
        moved = float(np.mean([min(r.moved[i] for i in r.needs) for r in aimed]))
    known = [r for r in some if r.right is not None and r.swapped is not None]
    accuracy = swapped = gain_low = None
    if known:
        accuracy, swapped = (float(np.mean([bool(getattr(r, name)) for r in known])) for name in ("right", "swapped"))
        gains = [float(bool(r.right)) - float(bool(r.swapped)) for r in known]
        interval = bootstrap_mean(gains, [r.cluster for r in known])
        gain_low = None if interval is None else interval[0]
    reads = low is not None and low > 0 and (not known or (gain_low is not None and gain_low > GAIN))
    return Competence(kind, len(some), reads, addressed, low, accuracy, swapped, gain_low, moved)


def addressing(readings: Sequence[Reading]) -> np.ndarray:
    """How much further needed chunks move each answer than the others do, ``[n]``, in roots of nats.

    Of several needed chunks the one that moves it least counts, unless the truth is known: then being right hangs on one
    of them in `Competence.gain_low`, and their mean counts. Means over the questions are taken out place by place.
    """
    moved = np.sqrt(np.array([r.moved for r in readings], dtype=np.float64))
    moved = moved - moved.mean(0)
    return np.array(
        [
            (min if r.right is None else np.mean)([row[i] for i in r.needs])
            - np.mean([row[i] for i in range(len(row)) if i not in r.needs])
            for r, row in zip(readings, moved, strict=True)
        ]
    )


def _batch(listener: Listener, batch: Sequence[Context]) -> list[Reading]:
    group, asker = listener.group([c.item for c in batch]), listener.asker
    places = len(group.places)
    numbers = range(len(batch[0].questions))
    texts = [[c.questions[q].text for c in batch] for q in numbers]
    exact = group.memory(group.exact)
    answers = [asker.greedy(exact, texts[q], group.begin) for q in numbers]
    said = [asker.forced(exact, texts[q], group.begin, answers[q]) for q in numbers]
    moved = np.zeros((len(batch), len(texts), places))
    still: dict[tuple[int, int], bool] = {}
    for place in range(places):
        order = [places + i if i == place else i for i in range(places)]
        memory = group.memory(group.prefilled([order] * len(batch)))
        for q in numbers:
            for b, row in enumerate(asker.forced(memory, texts[q], group.begin, answers[q])):
                moved[b, q, place] = float(divergence(said[q][b], row).mean())
            if any(_tested(c.questions[q]) == place for c in batch):
                for b, answer in enumerate(asker.greedy(memory, texts[q], group.begin)):
                    if _tested(batch[b].questions[q]) == place:
                        still[b, q] = normal(asker.text(answer)) == batch[b].questions[q].truth
    return [
        Reading(
            c.item.cluster, c.questions[q].kind, c.questions[q].needs, tuple(moved[b, q].tolist()),
            listener.right(c.questions[q], answers[q][b], False), still.get((b, q)),
        )
        for b, c in enumerate(batch)
        for q in numbers
    ]  # fmt: skip


def _tested(question: Question) -> int | None:
    """The needed place whose swap must cost the right answer: the earliest one, what the others absorb."""
    return question.needs[0] if question.truth is not None and question.needs else None
