"""MuSiQue (arXiv 2108.00573): questions of two to four hops over twenty paragraphs; Kamera's appendix C.5 is measured on it.

Layout, scores and predictions follow the official repository (commit 24cc5b2: ``evaluate_v1.0.py``, ``metrics/``): the JSON
lines of MuSiQue-Ans, each paragraph a chunk. Its models are trained, so there is no official prompt: ours asks for the answer and
for the numbers of the paragraphs that support it, each on a line of its own.

``musique/supporting`` places the supporting paragraphs alone, as Kamera does with two hops.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from ctxwin.hashing import digest
from ctxwin_evals.benchmarks.base import PromptTask, checked, json_lines, read_lines
from ctxwin_evals.benchmarks.prompt import Prompt
from ctxwin_evals.items import Item, Scored

INSTRUCTION = (
    "Answer the question from the paragraphs above, in as few words as you can. On a second line write the numbers of the "
    "paragraphs that the answer follows from, as: Paragraphs: 3, 8.\nQuestion: {}\nAnswer:"
)


class _Paragraph(BaseModel, strict=True):
    idx: int
    title: str
    paragraph_text: str
    is_supporting: bool


class _Hop(BaseModel, strict=True):
    paragraph_support_idx: int | None = None


class Row(BaseModel, strict=True):
    """One line of a file of MuSiQue-Ans."""

    id: str
    question: str
    answer: str
    answer_aliases: list[str]
    paragraphs: Annotated[list[_Paragraph], Field(min_length=1)]
    question_decomposition: Annotated[list[_Hop], Field(min_length=1)]


class MuSiQue(PromptTask):
    """``musique`` or ``musique/supporting``."""

    names: ClassVar[Mapping[str, str]] = {
        "musique": "questions of several hops over twenty paragraphs",
        "musique/supporting": "questions of several hops over the paragraphs that answer them",
    }
    splits = ("dev", "train")
    answer_tokens = 48

    def patterns(self) -> list[str]:
        return [f"*musique_ans_v1.0_{self.split}.jsonl"]

    def rows(self, root: Path) -> Iterator[tuple[str, Any]]:
        path = root / f"musique_ans_v1.0_{self.split}.jsonl"
        path = self.annotations(path if path.is_file() else root / "data" / path.name)
        return ((where, line) for where, _, line in read_lines(path))

    def parse(self, row: Any, where: str) -> Item:
        row = checked(Row, row, where)
        support = [p.idx for p in row.paragraphs if p.is_supporting]
        if not support or len({p.idx for p in row.paragraphs}) < len(row.paragraphs):
            raise ValueError(f"{where}: paragraphs must have an idx each and some must be supporting, got {support}")
        paragraphs = [p for p in row.paragraphs if p.is_supporting or self.name == "musique"]
        pieces = tuple(f"[{p.idx}] {p.title}\n{p.paragraph_text}\n\n" for p in paragraphs)
        prompt, places = Prompt(pieces, INSTRUCTION.format(row.question)), [p.idx for p in paragraphs]
        last = row.question_decomposition[-1].paragraph_support_idx
        return self.item_of(
            prompt,
            load=prompt.chunks,
            target={"answers": [row.answer, *row.answer_aliases], "support": support},
            doc_id=row.id,
            cluster=f"musique/{row.id.rpartition('_')[2]}",  # questions with one last hop have one answer
            digest=digest(self.name, list(pieces), prompt.query, row.answer, row.answer_aliases, support),
            asked=places.index(last) if last in places else None,
            meta={"hops": len(row.question_decomposition), "support_chunks": [places.index(i) for i in support]},
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """F1 of the answer; ``metrics`` are its exact match and the F1 of the paragraphs named."""
        text, named = read_answer(answer)
        f1 = max(word_f1(truth, text) for truth in target["answers"])
        exact = float(normalise(text) in map(normalise, target["answers"]))
        return Scored(f1, normalise(text), {"exact_match": exact, "support_f1": support_f1(named, target["support"])})

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The figures of the official script, to its three decimals."""
        names = {"answer_f1": "score", "answer_em": "exact_match", "support_f1": "support_f1"}
        means = {name: round(sum(row[key] for row in rows) / len(rows), 3) for name, key in names.items()}
        return {**means, "n": float(len(rows))}

    def export(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The official predictions, in the order of the rows, which must be the file's."""
        lines = []
        for row in rows:
            text, named = read_answer(row["answer"])
            prediction = {"predicted_answer": text, "predicted_support_idxs": named, "predicted_answerable": True}
            lines.append({"id": row["doc_id"], **prediction})
        return json_lines(lines)


def read_answer(text: str) -> tuple[str, list[int]]:
    """The answer, the first line of a text without "Answer:", and the numbers behind "Paragraphs:" wherever it stands."""
    match = re.search(r"paragraphs?\s*:", text, re.I)
    head, tail = (text[: match.start()], text[match.end() :]) if match else (text, "")
    first = next((line.strip() for line in head.splitlines() if line.strip()), "")
    return re.sub(r"^answer\s*:\s*", "", first, flags=re.I), [int(number) for number in re.findall(r"\d+", tail)]


def normalise(text: str) -> str:
    """SQuAD's rule: lower case, without punctuation, articles and extra spaces."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def word_f1(truth: str, text: str) -> float:
    """F1 of two answers' words once they are normalised; where one has none, 1 if neither has."""
    return _f1(Counter(normalise(text).split()), Counter(normalise(truth).split()))


def support_f1(named: Sequence[int], support: Sequence[int]) -> float:
    """F1 of the paragraphs named, each counted once; 1 where there are none on either side."""
    return _f1(Counter({*named}), Counter({*support}))


def _f1(ours: Counter[Any], theirs: Counter[Any]) -> float:
    both = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / both if both else 1.0
