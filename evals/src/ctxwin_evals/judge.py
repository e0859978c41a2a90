"""A judge for answers that no rule can score: a model behind an OpenAI-compatible address, named by the user.

It judges by one of three rules, and never sees which arm gave an answer:

- ``rating``: one number from 1 to 10 for how far an answer says what its reference says.
- ``dimensions``: MMDU's six and an overall one, 1 to 10 each, beside the reference (MPIC, section 5.1 and appendix D).
- ``wins``: the answer against that of the exact re-prefill (Elastic Cache, section 4.2 and table 1), in both orders: what the
  judge prefers in both has won, all else is a tie.

The wording is ours. Equal texts are asked about once; replies are kept beside the samples, for a run that goes on later.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ctxwin.hashing import digest
from ctxwin_evals.samples import Sample, Samples
from ctxwin_evals.stats import Interval, bootstrap_mean, share_interval

if TYPE_CHECKING:
    from openai import OpenAI

FILE = "judged.jsonl"
LOW, HIGH = 1, 10
DIMENSIONS = {
    "creativity": "it finds something of its own to say",
    "richness": "it goes into depth and gives details and examples",
    "visual perception": "what it says is to be seen agrees with what the reference says is there, and covers as much",
    "logical coherence": "its statements follow from each other and none contradicts another",
    "answer accuracy": "it answers what was asked, without mistakes",
    "image relationship understanding": "it keeps the pictures apart and relates them as the reference does",
    "overall": "all of this together, and whether it serves who asked",
}
_TEXTS = "[Question]\n{question}\n\n[Reference answer]\n{target}\n\n[Answer]\n{answer}\n\n"
_RATE = (
    "You compare an assistant's answer with a reference answer to the same question about pictures that you do not see.\n"
    "Judge whether the answer says what the reference says: correct, complete, and without anything that contradicts it. Length "
    f"and style do not matter.\n\n{_TEXTS}"
    "Reply with one line, nothing else: Rating: N, where N is a whole number from 1 (says something else) to 10 (says the same)."
)
_MARK = (
    "You mark an assistant's answer to a question about pictures that you do not see; a reference answer stands beside it.\n"
    "Be strict. In each dimension 1 or 2 is a failure, 5 or 6 does what is needed and no more, 7 or 8 is good, and 9 or 10 is "
    "better than the reference. The dimensions:\n"
    + "".join(f"- {name}: {about}\n" for name, about in DIMENSIONS.items())
    + "\n"
    f"{_TEXTS}First say in a sentence each what is strong or weak. Then end with a line for each dimension, as: creativity: N"
)
_COMPARE = (
    "Two assistants answer the same question about pictures that you do not see. Judge which answer serves who asked better: "
    "more helpful, more precise, better said. The order in which they stand means nothing, and neither does their length.\n\n"
    "[Question]\n{question}\n\n[Answer 1]\n{first}\n\n[Answer 2]\n{second}\n\n"
    "Reply with one line, nothing else: Better: 1, Better: 2 or Better: tie"
)
_RATING = re.compile(r"rating[\s*_]*(?:\([^()\n]*\))?[\s*_:=\[]*(\d+)", re.I)
_BETTER = re.compile(r"better[\s*_:=\[]*(?:answer[\s*_]*)?(1|2|tie)(?!\d)", re.I)
"""As asked for, with the marks of Markdown, brackets, an equals sign, or the scale or "Answer" in between."""


class Judge:
    """Replies of one model, by the name that its client calls it, kept in a run's folder."""

    def __init__(self, client: OpenAI, model: str, folder: Path) -> None:
        self._client, self.model, self._path = client, model, folder / FILE
        self._replies: dict[str, str] = {}
        content = self._path.read_bytes() if self._path.is_file() else b""
        if content and not content.endswith(b"\n"):  # the last line of a run that was killed
            self._write("\n")
        for line in content.split(b"\n"):  # replies may hold other ends of lines
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["judge"] == model:
                self._replies[row["id"]] = row["said"]

    def reply(self, prompt: str) -> str:
        """The reply to a prompt. Raises what the client does."""
        name = digest("judged", self.model, prompt)
        if name not in self._replies:
            reply = self._client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=1024
            )
            self._replies[name] = reply.choices[0].message.content or ""
            row = {"judge": self.model, "id": name, "said": self._replies[name]}
            self._write(json.dumps(row, ensure_ascii=False) + "\n")
        return self._replies[name]

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def _rate(judge: Judge, sample: Sample) -> dict[str, float] | None:
    rating = _last(_RATING, judge.reply(_RATE.format(**_fields(sample))))
    return None if rating is None else {"rating": rating}


def _mark(judge: Judge, sample: Sample) -> dict[str, float] | None:
    text = judge.reply(_MARK.format(**_fields(sample)))
    marks = {name: _last(re.compile(rf"\b{name}(?: score)?\W*?:\W*?(\d+)", re.I), text) for name in DIMENSIONS}
    return None if None in marks.values() else {name: mark for name, mark in marks.items() if mark is not None}


def _compare(judge: Judge, sample: Sample) -> dict[str, float] | None:
    """Verdict in both orders; None where a reply names none of the two. Equal texts are a tie, without a call."""
    balance = 0
    orders = ((sample.answer, sample.reference, 1), (sample.reference, sample.answer, -1))
    for first, second, sign in orders if sample.answer != sample.reference else ():
        verdicts = _BETTER.findall(judge.reply(_COMPARE.format(question=sample.question, first=first, second=second)))
        if not verdicts:
            return None
        balance += sign * {"1": 1, "2": -1, "tie": 0}[verdicts[-1].lower()]
    return {"wins": float(balance == 2), "ties": float(abs(balance) < 2), "losses": float(balance == -2)}


def _fields(sample: Sample) -> dict[str, str]:
    return {"question": sample.question, "target": str(sample.target), "answer": sample.answer}


def _last(pattern: re.Pattern[str], text: str) -> float | None:
    """The last number from `LOW` to `HIGH` that a pattern finds."""
    numbers = [float(number) for number in pattern.findall(text) if LOW <= int(number) <= HIGH]
    return numbers[-1] if numbers else None


RULES: dict[str, tuple[Callable[[Judge, Sample], dict[str, float] | None], str]] = {
    "rating": (_rate, "rating"),
    "dimensions": (_mark, "overall"),
    "wins": (_compare, "wins"),
}
"""What an answer is judged by: the figures of one answer, and which of them gets an interval."""


def to_judge(samples: Samples, by: str = "rating") -> list[Sample]:
    """The samples that a rule can judge: except by ``wins`` those whose reference is text. Raises ValueError for none."""
    if by not in RULES:
        raise ValueError(f"a rule to judge by must be one of {', '.join(RULES)}; got {by!r}")
    served = [sample for sample in samples.rows.values() if sample.unscored is None]
    rows = [sample for sample in served if by == "wins" or isinstance(sample.target, str)]
    if not rows:
        raise ValueError(f"{samples.folder} must hold answers with a text as reference (MMDU, SparklesEval), got none")
    return rows


def judged(
    samples: Samples, judge: Judge, by: str = "rating", on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Has every answer judged by a rule of `RULES`.

    Returns ``{"judge", "by", "rows": [{task, arm, n, ..., ci95, unrated, equal}]}``: the means of the rule's figures, the
    interval (95 %, over clusters) of its main one, how many answers got no verdict, and the share that is the re-prefill's
    answer. Cost: a call (of ``wins`` two) for each different answer that was not judged before.
    """
    verdicts: defaultdict[tuple[str, str], list[tuple[Sample, dict[str, float] | None]]] = defaultdict(list)
    rows, (rule, main) = to_judge(samples, by), RULES[by]
    for sample in rows:
        verdicts[sample.task, sample.arm].append((sample, rule(judge, sample)))
        on_progress(1)
    interval: Callable[[list[float], list[str]], Interval | None] = share_interval if by == "wins" else bootstrap_mean
    table = []
    for (task, arm), pairs in sorted(verdicts.items()):
        figures = [figures for _, figures in pairs if figures is not None]
        clusters = [sample.cluster for sample, figures in pairs if figures is not None]
        means = {name: fmean([one[name] for one in figures]) for name in (figures[0] if figures else ())}
        ci95 = interval([one[main] for one in figures], clusters) if figures else None
        equal = fmean([float(sample.answer == sample.reference) for sample, _ in pairs])
        counts = {"n": len(figures), "unrated": len(pairs) - len(figures)}
        table.append({"task": task, "arm": arm, **counts, main: None, **means, "ci95": ci95, "equal": equal})
    return {"judge": judge.model, "by": by, "rows": table}
