"""A judge for answers that no rule can score: a model behind an OpenAI-compatible address, named by the user.

MMDU, SparklesEval and with them MPIC (section 5.1) have a model compare an answer with its reference. Here it reads question,
reference and answer, never which arm gave it, and says a number from 1 to 10. Equal texts are asked about once; what was said is
kept beside the samples, so that a run that was stopped goes on.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.hashing import digest
from ctxwin_evals.samples import Sample, Samples
from ctxwin_evals.stats import bootstrap_mean, mean

if TYPE_CHECKING:
    from openai import OpenAI

FILE = "judged.jsonl"
LOW, HIGH = 1, 10
_ASKED = (
    "You compare an assistant's answer with a reference answer to the same question about pictures that you do not see.\n"
    "Judge whether the answer says what the reference says: correct, complete, and without anything that contradicts it. Length "
    "and style do not matter.\n\n[Question]\n{question}\n\n[Reference answer]\n{reference}\n\n[Answer]\n{answer}\n\n"
    "Reply with one line, nothing else: Rating: N, where N is a whole number from 1 (says something else) to 10 (says the same)."
)
_RATING = re.compile(r"rating\s*:?\s*\[*\s*(\d+)", re.I)


class Judge:
    """Ratings of one model, kept in a run's folder.

    Args:
        client: an official client.
        model: its name for the judge.
        folder: of the run.
    """

    def __init__(self, client: OpenAI, model: str, folder: Path) -> None:
        self._client, self.model, self._path = client, model, folder / FILE
        self._said: dict[str, int | None] = {}
        text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        if text and not text.endswith("\n"):  # the last line of a run that was killed
            self._write("\n")
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["judge"] == model:
                self._said[row["id"]] = row["rating"]

    def rate(self, sample: Sample) -> int | None:
        """The rating of a sample's answer, ``LOW`` to ``HIGH``; None where the judge said none. Raises what the client does."""
        prompt = _ASKED.format(question=sample.question, reference=str(sample.target), answer=sample.answer)
        name = digest("judged", self.model, prompt)
        if name not in self._said:
            reply = self._client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=512
            )
            text = reply.choices[0].message.content or ""
            ratings = [int(number) for number in _RATING.findall(text) if LOW <= int(number) <= HIGH]
            self._said[name] = ratings[-1] if ratings else None
            row = {"judge": self.model, "id": name, "rating": self._said[name], "said": text}
            self._write(json.dumps(row, ensure_ascii=False) + "\n")
        return self._said[name]

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def to_judge(samples: Samples) -> list[Sample]:
    """The samples whose reference is text. Raises ValueError where there are none."""
    free_text = [
        sample for sample in samples.rows.values() if sample.unscored is None and isinstance(sample.target, str)
    ]
    if not free_text:
        raise ValueError(f"{samples.folder} must hold answers with a text as reference (MMDU, SparklesEval), got none")
    return free_text


def judged(samples: Samples, judge: Judge, on_progress: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Has every answer judged.

    Returns ``{"judge", "rows": [{task, arm, n, rating, ci95, unrated, equal}]}``: the mean rating with a 95 % interval over
    clusters, how many answers got no rating, and the share that is the re-prefill's answer. Cost: a call for each different
    answer that was not judged before.
    """
    ratings: defaultdict[tuple[str, str], list[tuple[Sample, int | None]]] = defaultdict(list)
    for sample in to_judge(samples):
        ratings[sample.task, sample.arm].append((sample, judge.rate(sample)))
        on_progress(1)
    rows = []
    for (task, arm), pairs in sorted(ratings.items()):
        rated = [(sample, rating) for sample, rating in pairs if rating is not None]
        values = [float(rating) for _, rating in rated]
        rows.append(
            {
                "task": task,
                "arm": arm,
                "n": len(rated),
                "rating": mean(values) if values else None,
                "ci95": bootstrap_mean(values, [sample.cluster for sample, _ in rated]) if values else None,
                "unrated": len(pairs) - len(rated),
                "equal": mean([float(sample.answer == sample.reference) for sample, _ in pairs]),
            }
        )
    return {"judge": judge.model, "rows": rows}
