"""MuirBench (arXiv 2406.09411): multiple-choice questions over several pictures; Kamera's figure 7 is measured on it.

Layout: the parquet files of the official data set (``data/test*.parquet``), which hold the pictures. Prompt and reading of
answers follow the official repository (commit 840b85f: ``eval/utils/preprocess.py``, ``postprocess.py``) but for one thing: an
answer that names no choice is wrong here, where the official script draws a choice at random.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from ctxwin.chunk import Chunk
from ctxwin.errors import BadMedia
from ctxwin.hashing import digest
from ctxwin_evals.benchmarks.base import PromptTask, checked, json_lines, read_parquet
from ctxwin_evals.benchmarks.frames import load_picture
from ctxwin_evals.benchmarks.prompt import cut_text
from ctxwin_evals.items import Item, Scored

PLACEHOLDER = "<image>"
_AROUND = (",", ".", "!", "?", ";", ":", "'")
_SPOKEN = 5  # an answer of more words may spell its choice out


class Row(BaseModel, strict=True):
    """One question, as in the official files, but for its pictures."""

    idx: str
    task: str
    image_relation: str
    image_type: str
    question: str
    options: Annotated[list[str], Field(min_length=2, max_length=26)]
    answer: str
    counterpart_idx: str | None = None


class MuirBench(PromptTask):
    """All twelve kinds of tasks; ``meta["task"]`` says which."""

    names: ClassVar[Mapping[str, str]] = {"muirbench": "multiple-choice questions about several pictures"}
    splits = ("test",)
    answer_tokens = 32

    def patterns(self) -> list[str]:
        return ["data/test*.parquet"]

    def rows(self, root: Path) -> Iterator[tuple[str, Any]]:
        for path in sorted(root.glob("data/test*.parquet")) or [self.annotations(root / "data" / "test.parquet")]:
            for where, *at, values in read_parquet(path, "MuirBench", list(Row.model_fields), ("image_list",)):
                yield where, (path, *at, values)

    def parse(self, row: Any, where: str) -> Item:
        path, group, number, values = row
        row = checked(Row, {name: value for name, value in values.items() if value is not None}, where)
        if row.answer not in letters(row.options):
            raise ValueError(f"{where}: answer must be a letter of {len(row.options)} options, got {row.answer!r}")
        options = self.options
        *texts, query = compose(row).split(PLACEHOLDER)
        parts = [cut_text(text, options.text_words) for text in texts]
        count = sum(map(len, parts)) + len(texts)
        labels = {key: getattr(row, key) for key in ("task", "image_relation", "image_type", "counterpart_idx")}
        return self.item(
            count,
            load=partial(_chunks, path, group, number, where, parts, options.max_pixels),
            query=query,
            target={"answer": row.answer, "options": row.options},
            doc_id=row.idx,
            cluster=f"{self.name}/{row.idx}",
            digest=digest(self.name, row.model_dump(), path.name, path.stat().st_size, options.max_pixels),
            meta={**labels, "num_images": len(texts)},
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        read = read_answer(answer, target["options"])
        return Scored(float(read == target["answer"]), read)

    def export(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """JSON lines of the questions' ids, the answers as given, and the letters they are read as."""
        records = []
        for row in rows:
            read = read_answer(row["answer"], row["target"]["options"])
            reference = {"task": row["meta"]["task"], "answer": row["target"]["answer"]}
            records.append({"idx": row["doc_id"], **reference, "response": row["answer"], "pred": read})
        return json_lines(records)


def compose(row: Row) -> str:
    """The official prompt."""
    choices = [f"({letter}) {choice}" for letter, choice in letters(row.options).items()]
    hint = "Hint: Please provide the correct option letter, such as A, B, C, D, directly."
    return "\n".join([f"Question: {row.question}", "Choices:", *choices, hint, "Answer:"]).strip()


def letters(options: Sequence[str]) -> dict[str, str]:
    """Choices by letter."""
    return {chr(ord("A") + i): choice for i, choice in enumerate(options)}


def read_answer(answer: str, options: Sequence[str]) -> str:
    """The letter that an answer is read as, by the official rule; "" for none.

    A letter in brackets, else one that stands alone, else, of an answer of more than five words, a choice spelled out; of
    several the one that comes last.
    """
    for sign in _AROUND:
        answer = answer.strip(sign)
    text, named = f" {answer} ", letters(options)
    spellings = [(text, {letter: form.format(letter) for letter in named}) for form in ("({})", " {} ")]
    if len(text.split()) > _SPOKEN:
        spellings.append((text.lower(), {letter: choice.lower() for letter, choice in named.items()}))
    for within, forms in spellings:
        positions = {letter: within.rfind(spelled) for letter, spelled in forms.items() if spelled in within}
        if positions:
            return max(positions, key=lambda letter: positions[letter])
    return ""


def _chunks(
    path: Path, group: int, number: int, where: str, parts: Sequence[Sequence[str]], max_pixels: int | None
) -> list[Chunk]:
    """The texts and the pictures of one question, read when they are asked for."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with pq.ParquetFile(path) as file:
        pictures = file.read_row_group(group, columns=["image_list"])["image_list"][number].as_py()
    if len(pictures) != len(parts):
        raise BadMedia(f"{where}: every {PLACEHOLDER} must have a picture, got {len(pictures)} for {len(parts)}")
    chunks: list[Chunk] = []
    for texts, picture in zip(parts, pictures, strict=True):
        chunks += [Chunk.text(text) for text in texts]
        chunks.append(Chunk.image(load_picture(picture["bytes"], max_pixels)))
    return chunks
