"""Dialogues over several pictures: MMDU (arXiv 2406.11833) and SparklesEval (arXiv 2308.16463), which MPIC is measured on.

Every answer of a dialogue is an item: the turns before it, with the reference answers, stand in the context, so that
arms are compared on the same one. References are free text. The papers have a model judge them; here an answer is scored by
ROUGE-L against its reference, agreement with a re-prefill is counted as for every task, and `export` writes what a judge
of one's own reads.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from ctxwin.chunk import Chunk
from ctxwin.hashing import digest
from ctxwin_evals.benchmarks.base import DataTask, Missing, checked, inside, json_lines, read_json
from ctxwin_evals.benchmarks.prompt import Piece, Prompt, interleave
from ctxwin_evals.items import Item, Scored
from ctxwin_evals.metrics import rouge_l

PLACEHOLDER = "<ImageHere>"
_NAMED = re.compile(r"IMAGE#(\w+)")
_TAG = f"<Img>{PLACEHOLDER}</Img>"
"""What SparklesEval's own prompts have behind a picture's name, in place of the picture."""
_WHOLE = "evaluation/SparklesEval/"
_FILE = "annotations/sparkles_evaluation_sparkleseval_annotations.json"


@dataclass(frozen=True)
class Turn:
    """A user's text and pictures, and the answer."""

    asked: tuple[Piece, ...]
    query: str
    answer: str


class _Said(BaseModel, strict=True):
    speaker: Annotated[Literal["user", "assistant"], Field(alias="from")]
    value: str


class _MMDU(BaseModel, strict=True):
    id: int | str
    image: list[str]
    conversations: Annotated[list[_Said], Field(min_length=2)]


class _Shown(BaseModel, strict=True):
    image_id: int | str


class _Spoken(BaseModel, strict=True):
    content: str
    images: list[_Shown] = []


class _Sparkles(BaseModel, strict=True):
    evaluation_id: int | str
    dialogue: Annotated[list[_Spoken], Field(min_length=2)]


class Dialogues(DataTask):
    """One of the two data sets."""

    splits = ("test",)
    answer_tokens = 512
    layouts: tuple[tuple[str, str], ...]
    """Annotations and the folder of pictures, as they may lie."""

    @abstractmethod
    def dialogue(self, row: Any, folder: Path, where: str) -> tuple[str, list[Turn]]:
        """Name and turns of a row; ValueError naming ``where``."""

    def patterns(self) -> list[str]:
        return [name for file, pictures in self.layouts for name in (file, f"{pictures}/**", f"{pictures}.zip")]

    def rows(self, root: Path) -> Iterator[tuple[str, Any]]:
        file, pictures = next((one for one in self.layouts if (root / one[0]).is_file()), self.layouts[0])
        path = self.annotations(root / file)
        rows = read_json(path)
        if not isinstance(rows, list):
            raise ValueError(f"{path} must be a list of dialogues, got {type(rows).__name__}")
        for number, row in enumerate(rows):
            where = f"{path} dialogue {number}"
            try:
                name, turns = self.dialogue(row, root / pictures, where)
            except ValueError as error:
                yield where, error
                continue
            yield from ((where, (name, turns[: last + 1])) for last in range(len(turns)))

    def parse(self, row: Any, where: str) -> Item:
        if isinstance(row, ValueError):
            raise row
        name, turns = row
        options, turn = self.options, turns[-1]
        pictures = [p for t in turns for p in t.asked if isinstance(p, Path)]
        Missing.check(pictures, where, f"{name}/{len(turns) - 1}")
        count = sum(len(t.asked) + 2 for t in turns[:-1]) + len(turn.asked)
        texts = [[*(p if isinstance(p, str) else None for p in t.asked), t.query, t.answer] for t in turns]
        media = [[path.name, path.stat().st_size] for path in pictures]
        return self.item(
            count,
            load=partial(_chunks, tuple(turns), options.max_pixels),
            query=turn.query,
            target=turn.answer,
            doc_id=f"{name}/{len(turns) - 1}",
            cluster=f"{self.name}/{name}",
            digest=digest(self.name, texts, media, options.max_pixels),
            meta={"turn": len(turns), "num_images": len(pictures), "images": [path.name for path in pictures]},
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        return Scored(rouge_l(str(target), answer), answer.strip())

    def export(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """JSON lines for a judge: dialogue, turn, pictures, reference, answer, and ROUGE-L beside them."""
        lines = []
        for row in rows:
            named = {"id": row["doc_id"], "turn": row["meta"]["turn"], "images": row["meta"]["images"]}
            scored = {"answer": row["answer"], "rouge_l": self.score(row["answer"], row["target"], row["meta"]).score}
            lines.append({**named, "reference": row["target"], **scored})
        return json_lines(lines)


class MMDU(Dialogues):
    """``benchmark.json`` and its pictures; each ``<ImageHere>`` takes the next of ``image``."""

    names: ClassVar[Mapping[str, str]] = {"mmdu": "long dialogues over many pictures, with free answers"}
    layouts = (("benchmark.json", "mmdu_pics"),)

    def dialogue(self, row: Any, folder: Path, where: str) -> tuple[str, list[Turn]]:
        read = checked(_MMDU, row, where)
        paths = [inside(folder, Path(name).name, where) for name in read.image]
        messages, turns, at = read.conversations, list[Turn](), 0
        for user, assistant in _pairs(messages, [one.speaker for one in messages], where):
            texts = user.value.split(PLACEHOLDER)
            pictures = paths[at : at + len(texts) - 1]
            at += len(texts) - 1
            if len(pictures) < len(texts) - 1:
                raise ValueError(f"{where}: there must be a picture for every {PLACEHOLDER}, got {len(paths)} pictures")
            turns.append(_turn(texts, pictures, assistant.value, self.options.text_words))
        if at < len(paths):
            raise ValueError(f"{where}: every picture must have its {PLACEHOLDER}, got {len(paths)} for {at}")
        return str(read.id), turns


class Sparkles(Dialogues):
    """Its official folder, that of all of Sparkles, or a file; a picture stands after the first mention of its ``IMAGE#ID``."""

    names: ClassVar[Mapping[str, str]] = {
        "sparkles": "two-turn dialogues over pictures that they name in the text (SparklesEval)"
    }
    layouts = (("sparkleseval.json", "images"), (_FILE, "images"), (f"{_WHOLE}{_FILE}", f"{_WHOLE}images"))

    def dialogue(self, row: Any, folder: Path, where: str) -> tuple[str, list[Turn]]:
        read = checked(_Sparkles, row, where)
        messages = read.dialogue
        speakers = ["user" if i % 2 == 0 else "assistant" for i in range(len(messages))]
        turns = []
        for user, assistant in _pairs(messages, speakers, where):
            image_ids = [str(image.image_id) for image in user.images]
            texts, names, at, content = [], [], 0, user.content.replace(_TAG, "")
            for match in _NAMED.finditer(content):
                if match[1] in image_ids and match[1] not in names:
                    texts.append(content[at : match.end()])
                    names.append(match[1])
                    at = match.end()
            if missing := [name for name in image_ids if name not in names]:
                raise ValueError(f"{where}: the text must name every picture as IMAGE#ID, got none for {missing}")
            paths = [inside(folder, f"{name}.jpg", where) for name in names]
            turns.append(_turn([*texts, content[at:]], paths, assistant.content, self.options.text_words))
        return str(read.evaluation_id), turns


def _pairs(messages: Sequence[Any], speakers: Sequence[str], where: str) -> list[tuple[Any, Any]]:
    if len(messages) % 2 or list(speakers) != ["user", "assistant"] * (len(messages) // 2):
        raise ValueError(f"{where}: turns must be a user's and an assistant's by turns, got {', '.join(speakers)}")
    return list(zip(messages[::2], messages[1::2], strict=True))


def _turn(texts: Sequence[str], pictures: Sequence[Path], answer: str, words: int) -> Turn:
    """Split a turn: the question is the text after the last picture, or, if there is none, the text before it repeated."""
    query = texts[-1].strip() or next((text.strip() for text in reversed(texts) if text.strip()), "")
    return Turn(interleave([*texts[:-1], ""] if pictures else [], pictures, words), query or "Go on.", answer)


def _chunks(turns: Sequence[Turn], max_pixels: int | None) -> list[Chunk]:
    """Pictures and texts as they are, earlier answers as turns of the assistant."""
    chunks: list[Chunk] = []
    for i, turn in enumerate(turns):
        chunks += Prompt(turn.asked, turn.query).chunks(max_pixels)
        if i < len(turns) - 1:
            chunks += [Chunk.text(turn.query), Chunk.message("assistant", turn.answer)]
    return chunks
