"""EgoSchema (arXiv 2308.09126): five-way questions about videos of three minutes; Kamera's section 6 is measured on it.

Layouts: the official repository (commit c7a639f: ``questions.json``, ``subset_answers.json``, ``videos/UID.mp4``), and the
hub's ``lmms-lab/egoschema`` (``Subset`` and ``MC``, parquet). Prompt and reading of answers follow lmms-eval (commit 147ad5c:
``tasks/egoschema/utils.py``) but for one thing: full stops, brackets and letters' case do not matter here.

The answers of 500 questions are public, the split ``subset``. The others of ``full`` are known to the official server alone,
which takes the file that ``export`` writes; here they are unscored.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from ctxwin_evals.benchmarks.base import PlainName, checked, read_json, read_parquet
from ctxwin_evals.benchmarks.videos import VideoTask
from ctxwin_evals.items import Item, Scored

LETTERS = "ABCDE"
OPTIONS = tuple(f"option {i}" for i in range(len(LETTERS)))
INSTRUCTION = "\nAnswer with the option's letter from the given choices directly."
_LETTER = re.compile(r"[(\[\uff08]?([a-e])(?:$|[.)\]\uff09]+\s*)(.*)", re.S)
"""A letter with or without brackets, and what follows: without a mark between them it is a choice about C, who films."""
COLUMNS = ("video_idx", "question", "option", "answer")


class Row(BaseModel, strict=True):
    """One question; ``answer`` is the index of its choice, None where it is not public."""

    q_uid: PlainName
    question: str
    options: Annotated[list[str], Field(min_length=len(LETTERS), max_length=len(LETTERS))]
    answer: Annotated[int | None, Field(ge=0, lt=len(LETTERS), strict=False)] = None


class EgoSchema(VideoTask):
    """All questions of a split."""

    names: ClassVar[Mapping[str, str]] = {"egoschema": "five-way questions about videos of three minutes"}
    splits = ("subset", "full")
    # The official place, then as the hub's archives unpack.
    places = ("videos/{}.mp4", "video/{}.mp4", "videos/{}.MP4", "video/{}.MP4")

    def patterns(self) -> list[str]:
        return [f"{self._folder}/test*.parquet", "videos_chunked_*.zip"]

    @property
    def _folder(self) -> str:
        return "Subset" if self.split == "subset" else "MC"

    def rows(self, root: Path) -> Iterator[tuple[str, Any]]:
        """Questions in the hub's layout or the official one, by the names of `Row`."""
        if tables := sorted(root.glob(f"{self._folder}/test*.parquet")):
            for path in tables:
                for where, _, _, row in read_parquet(path, "EgoSchema", COLUMNS):
                    lettered = enumerate(row["option"] or ())
                    options = [str(text).removeprefix(f"{LETTERS[i % 5]}. ") for i, text in lettered]
                    yield where, {**row, "q_uid": row["video_idx"], "options": options}
            return
        path, public = (self.annotations(root / name) for name in ("questions.json", "subset_answers.json"))
        rows, answers = read_json(path), read_json(public)
        if not isinstance(rows, list) or not isinstance(answers, dict):
            raise ValueError(f"{path} must be a list of questions, and {public} answers by uid")
        for number, row in enumerate(rows):
            where = f"{path} question {number}"
            uid = row.get("q_uid") if isinstance(row, dict) else None
            if not isinstance(uid, str):
                yield where, row
            elif self.split == "full" or uid in answers:
                options = [row[name] for name in OPTIONS if name in row]
                yield where, {**row, "options": options, "answer": answers.get(uid)}

    def parse(self, row: Any, where: str) -> Item:
        row = checked(Row, row, where)
        if self.split == "subset" and row.answer is None:
            raise ValueError(f"{where} must have its answer in the split subset, got none")
        choices = "".join(f"\n{letter}. {text}" for letter, text in zip(LETTERS, row.options, strict=True))
        return self.item_of(
            self.find_video(row.q_uid, where, row.q_uid),
            [*row.model_dump().values()],
            {"options": row.options},
            query=row.question + choices + INSTRUCTION,
            target=row.answer,
            doc_id=row.q_uid,
            cluster=row.q_uid,
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        read = read_answer(answer, meta["options"])
        return Scored(None if target is None else float(read == target), LETTERS[read] if read >= 0 else "")

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Accuracy over the questions whose answer is known; an answer that names no choice is wrong."""
        scores = [row["score"] for row in rows if row["score"] is not None]
        unread = float(sum(not row["prediction"] for row in rows))
        return {"accuracy": sum(scores) / len(scores), "n": float(len(scores)), "unread": unread} if scores else {}

    def export(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The file that the official server takes: index of the choice by uid, -1 for none."""
        indices = {row["doc_id"]: read_answer(row["answer"], row["meta"]["options"]) for row in rows}
        return json.dumps(indices, indent=1) + "\n"


def read_answer(answer: str, options: Sequence[str]) -> int:
    """The choice that an answer is: a choice, a letter, or both, "B. C cleans" or "(B) C cleans"; -1 for all else, prose too."""
    text, *choices = (part.strip().rstrip(".").lower() for part in (answer, *options))
    if text in choices:
        return choices.index(text)
    match = _LETTER.fullmatch(text)
    index = LETTERS.lower().index(match[1]) if match else -1
    return index if match and match[2] in ("", choices[index]) else -1
