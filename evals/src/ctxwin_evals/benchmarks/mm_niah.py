"""MM-NIAH, Needle In A Multimodal Haystack (arXiv 2406.07230): documents of texts and pictures with needles in either.

Layout, prompt and result lines follow the official repository (commit 2fd03dd: README "Data Format", ``utils/tools.py``,
``eval_internvl.py``). The central paper evaluates on retrieval-image and reasoning-image (arXiv 2606.23581, section 6
and table 3).

Scores: ``calculate_scores.py`` and ``eval_internvl.py`` of MM-NIAH (arXiv 2406.07230; commit 2fd03dd).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, JsonValue

from ctxwin.chunk import Chunk
from ctxwin.hashing import digest
from ctxwin_evals.benchmarks import base
from ctxwin_evals.benchmarks.base import DataOptions, Missing, PromptTask, checked, inside
from ctxwin_evals.benchmarks.prompt import Piece, Prompt, interleave
from ctxwin_evals.benchmarks.vqa import normalise
from ctxwin_evals.items import Item, Scored

PLACEHOLDER = "<image>"
_LETTERS = "\nAnswer with the option's letter from the given choices directly."
_SHORT = "\nAnswer the question using a single word or phrase."
_Depth = Annotated[float, Field(ge=0, le=1)]


class Row(BaseModel, strict=True, allow_inf_nan=False):  # samples hold both fields of JsonValue
    """One line of an annotation file.

    Attributes:
        context: the document, with a placeholder for each picture.
        question: as it is asked, with choices and instruction once `parse_row` has added them.
        images: relative paths of the pictures of document, question and choices.
        answer: what is scored against.
    """

    id: int
    context: str
    question: str
    images: Annotated[list[str], Field(alias="images_list")]
    answer: int | str | list[JsonValue]
    meta: dict[str, JsonValue]


class _Meta(BaseModel, strict=True):
    context_length: int
    placed_depth: _Depth | Annotated[list[_Depth], Field(min_length=1)]
    choices: list[Any] | None = None
    choices_image_path: list[str] | None = None


def parse_row(line: Any, where: str, counting: bool = False) -> Row:
    """Read one line; raise ValueError naming the place and the field."""
    row = checked(Row, line, where)
    meta = checked(_Meta, row.meta, f"{where} meta")
    placeholders = (row.context + row.question).count(PLACEHOLDER)
    if placeholders != len(row.images):
        raise ValueError(
            f"{where}: {PLACEHOLDER} must occur once a picture in context and question, got {placeholders} of them and "
            f"{len(row.images)} pictures"
        )
    if counting and isinstance(row.answer, str):
        with suppress(json.JSONDecodeError):
            row = checked(Row, {**line, "answer": json.loads(row.answer)}, where)
    if (counting and not isinstance(row.answer, list)) or row.answer == []:
        expected = "a list of counts" if counting else "given"
        raise ValueError(f"{where}: the answer must be {expected}, got {row.answer!r}")
    if meta.choices and meta.choices_image_path:
        raise ValueError(f"{where}: only one of choices and choices_image_path must be set, got both")
    if choices := meta.choices or meta.choices_image_path:
        if not isinstance(row.answer, int) or not 0 <= row.answer < len(choices):
            raise ValueError(f"{where}: the answer must be the index of a choice, got {row.answer!r}")
        for i, choice in enumerate(choices):
            row.question += f"\n{chr(ord('A') + i)}. {choice if meta.choices else PLACEHOLDER}"
        row.images += meta.choices_image_path or []
    row.question += _LETTERS if choices else _SHORT
    return row


def compose(row: Row, folder: Path, where: str, words: int) -> Prompt:
    """The official prompt ``context + "\\n" + question``; what follows the last picture of the question is the query."""
    paths = [inside(folder, name, where) for name in row.images]
    document, question = (row.context + "\n").split(PLACEHOLDER), row.question.split(PLACEHOLDER)
    cut = len(document) - 1
    pieces = interleave(document, paths[:cut], words) + interleave(question[:-1], paths[cut:], words)
    return Prompt(pieces, question[-1])


class MMNiah(PromptTask):
    """One file of MM-NIAH, e.g. ``mm-niah/retrieval-image``."""

    names: ClassVar[Mapping[str, str]] = {
        "mm-niah/retrieval-text": "one sentence of a long document is asked for (control)",
        "mm-niah/retrieval-image": "which picture is pasted into one of a document's pictures",
        "mm-niah/counting-text": "numbers from several sentences, in order",
        "mm-niah/counting-image": "how often a thing is pasted into each picture, in order",
        "mm-niah/reasoning-text": "several sentences of a document together",
        "mm-niah/reasoning-image": "several pictures of a document together",
    }
    splits = ("val", "test")

    def __init__(self, name: str, options: DataOptions) -> None:
        super().__init__(name, options)
        self.kind, self.control = name.partition("/")[2], name.endswith("retrieval-text")
        self.answer_tokens = 32 if self.kind.startswith("counting") else 16

    def patterns(self) -> list[str]:
        folder = f"mm_niah_{self.split}"
        return [f"{folder}/annotations/{self.kind}.jsonl", f"{folder}/images.tar.gz", f"{folder}/images/**"]

    def rows(self, root: Path) -> Iterator[tuple[str, Any]]:
        folder = root if root.name == f"mm_niah_{self.split}" else root / f"mm_niah_{self.split}"
        path = self.annotations(folder / "annotations" / f"{self.kind}.jsonl")
        return ((where, (path, offset, line)) for where, offset, line in base.read_lines(path))

    def parse(self, row: Any, where: str) -> Item:
        path, offset, line = row
        counting, options, folder = self.kind.startswith("counting"), self.options, path.parents[1] / "images"
        row = parse_row(line, where, counting)
        prompt = compose(row, folder, where, options.text_words)
        Missing.check(prompt.pictures, where, str(row.id))
        name, row_digest = row.id, _digest(row)  # not the row, which holds the document

        def load() -> list[Chunk]:
            # Read again: the documents of a whole data set are not kept in memory.
            current = parse_row(base.read_line_at(path, offset), str(path), counting)
            if _digest(current) != row_digest:
                raise ValueError(f"{path} must stay as it is while its items are used, got another row {name}")
            return compose(current, folder, str(path), options.text_words).chunks(options.max_pixels)

        needles, sizes = needle_pieces(row, prompt.pieces, folder), [p.stat().st_size for p in prompt.pictures]
        kept = {k: row.meta[k] for k in _KEPT if k in row.meta}
        return self.item_of(
            prompt,
            load=load,
            target=row.answer,
            doc_id=str(row.id),
            cluster=document_of(row),
            digest=digest("mm-niah", row_digest, sizes, options.max_pixels, options.text_words),
            asked=needles[0] if len(needles) == 1 else None,
            meta=kept | {"question": row.question, "needle_chunks": needles, "split": self.split},
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        if self.kind.startswith("counting") and isinstance(target, str):
            target = json.loads(target)
        return score_answer(answer, target)

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The official figures of one task, and what they leave out.

        ``binned``: mean over 11 length bins of the mean over 5 depth bins, ``binned/1k`` ...: each length's. Two traps are
        part of the rule: contexts under 1,000 tokens are thrown away (``under_1000`` says how many), and a cell without items
        counts as 0 (``empty_cells`` of 55 says how many). ``mean``: plain mean over all ``n`` answers.
        """
        scored = [row for row in rows if row["score"] is not None]
        cells: dict[tuple[int, int], list[float]] = {(i, j): [] for i in range(len(LENGTHS) + 1) for j in range(DEPTHS)}
        for row in scored:
            cells[cell_of(row["meta"]["context_length"], row["meta"]["placed_depth"])].append(row["score"])
        means = {cell: sum(some) / len(some) if some else 0.0 for cell, some in cells.items()}
        by_length = [sum(means[i, j] for j in range(DEPTHS)) / DEPTHS for i in range(1, len(LENGTHS) + 1)]
        return {
            "mean": sum(float(row["score"]) for row in scored) / len(scored),
            "n": float(len(scored)),
            "binned": sum(by_length) / len(by_length),
            "empty_cells": float(sum(not some for (i, _), some in cells.items() if i)),
            "under_1000": float(sum(len(cells[0, j]) for j in range(DEPTHS))),
            **{f"binned/{b // 1000}k": round(v, 6) for b, v in zip(LENGTHS, by_length, strict=True)},
        }

    def export(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The official result lines."""
        return base.json_lines(
            {"question_id": int(row["doc_id"]), "question": row["meta"]["question"], "answer": row["target"]}
            | {"response": row["answer"].strip()}
            | {key: row["meta"][key] for key in ("context_length", "placed_depth")}
            for row in rows
        )

    def export_path(self, title: str, split: str) -> Path:
        """Task and split end the name; the official script takes every file of its folder for one of these."""
        return Path("mm-niah", f"{title}_{self.kind}-{split}.jsonl")


_KEPT = ("context_length", "context_length_text", "context_length_image", "num_images", "placed_depth")


def _digest(row: Row) -> str:
    return digest(row.context, row.question, list(row.images))


def _needles(row: Row) -> list[str]:
    needles = row.meta.get("needles")
    return [n for n in needles if isinstance(n, str) and n] if isinstance(needles, list) else []


def needle_pieces(row: Row, pieces: Sequence[Piece], folder: Path) -> list[int]:
    """Return the indices of pieces that hold a needle: its text, or the picture of that path in the document."""
    needles = _needles(row)
    pictures = {folder / n for n in needles}
    document = row.context.count(PLACEHOLDER)
    indices, pictures_so_far = [], 0
    for i, piece in enumerate(pieces):
        if isinstance(piece, Path):
            pictures_so_far += 1
            hit = pictures_so_far <= document and piece in pictures
        else:
            hit = any(n in piece for n in needles)
        if hit:
            indices.append(i)
    return indices


def document_of(row: Row) -> str:
    """Digest that questions about one document share: of its pictures without needles, or of its text without them."""
    needles = _needles(row)
    if pictures := [name for name in row.images[: row.context.count(PLACEHOLDER)] if name not in needles]:
        return digest("document", pictures)
    text = row.context
    for needle in needles:
        text = text.replace(needle, "")
    return digest("document", " ".join(text.split()))


LENGTHS = (1000, 2000, 4000, 8000, 12000, 16000, 24000, 32000, 40000, 48000, 64000)
"""Lower bounds of the length bins; a context shorter than the first is in none of them."""
DEPTHS = 5
_CAMERA = {"the camera is moving left": "a", "the camera is moving right": "b"}


def score_answer(answer: str, target: Any) -> Scored:
    """One answer under the official rule; the target's type decides which one.

    int (a choice, 0-based): an answer of digits is an index. Else lower case, "the answer is" and ``*`` dropped, cut at the
    first full stop, and what is left must be one character, so that "(B)" and "B," score 0. list: JSON, fenced or not,
    compared place by place, over the length of the truth; the lists of a JSON object are put together. str: the normalised
    truth as a whole word inside the normalised answer.

    Raises ValueError for a target of another type.
    """
    response = answer.strip().strip(".")
    if isinstance(target, bool) or not isinstance(target, int | list | str) or target == []:
        raise ValueError(f"a target must be an int, a str or a list that is not empty, got {target!r}")
    if isinstance(target, int):
        return _choice(response, target)
    if isinstance(target, list):
        return _counts(response, target)
    read = normalise(response)
    return Scored(float(re.search(rf"\b{re.escape(normalise(target))}\b", read) is not None), read)


def _choice(response: str, target: int) -> Scored:
    if response.isdecimal():
        index = int(response)
        return Scored(float(index == target), chr(ord("A") + index) if index < 26 else str(index))
    text = response.lower().replace("the answer is", "").replace("*", "")
    if "." in text:
        text = text.split(".")[0].replace(",", "")
    text = text.strip()
    text = next((letter for phrase, letter in _CAMERA.items() if phrase in text), text)
    if len(text) != 1:
        return Scored(0.0, "")
    return Scored(float(ord(text) - ord("a") == target), text.upper())


def _counts(response: str, target: Sequence[Any]) -> Scored:
    try:
        parsed = json.loads(response.replace("json", "").replace("```", "").strip())
    except (ValueError, RecursionError):
        return Scored(0.0, "")
    if isinstance(parsed, dict) and all(isinstance(v, list) for v in parsed.values()):
        parsed = [count for counts in parsed.values() for count in counts]
    if not isinstance(parsed, list):
        return Scored(0.0, "")
    return Scored(sum(a == b for a, b in zip(parsed, target, strict=False)) / len(target), json.dumps(parsed))


def cell_of(length: int, depths: float | Sequence[float]) -> tuple[int, int]:
    """(length bin, depth bin) of a context; length bin 0 is under 1,000 tokens.

    The depth bin is ``int(depth / 0.2)`` in floating point, as in the source, so that 0.6 falls into the third bin.
    """
    depth = float(depths) if isinstance(depths, int | float) else sum(depths) / len(depths)
    return sum(length >= bound for bound in LENGTHS), int((0.99 if depth == 1.0 else depth) / 0.2)
