"""MM-NIAH, Needle In A Multimodal Haystack (arXiv 2406.07230): documents of texts and pictures with needles in either.

Layout, prompt and result lines follow the official repository (commit 2fd03dd: README "Data Format", ``utils/tools.py``,
``eval_internvl.py``). The central paper evaluates on retrieval-image and reasoning-image (arXiv 2606.23581, section 6
and table 3).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxwin.chunk import Chunk
from ctxwin.evals.benchmarks.base import DataTask, Missing, inside, missing, read_line_at, read_lines, want
from ctxwin.evals.benchmarks.mm_niah_score import aggregate, score_answer
from ctxwin.evals.benchmarks.options import DataOptions
from ctxwin.evals.benchmarks.prompt import Picture, Piece, Prompt, interleave
from ctxwin.evals.items import Item, Scored
from ctxwin.hashing import digest

TASKS = {
    "mm-niah/retrieval-text": "one sentence of a long document is asked for (control)",
    "mm-niah/retrieval-image": "which picture is pasted into one of a document's pictures",
    "mm-niah/counting-text": "numbers from several sentences, in order",
    "mm-niah/counting-image": "how often a thing is pasted into each picture, in order",
    "mm-niah/reasoning-text": "several sentences of a document together",
    "mm-niah/reasoning-image": "several pictures of a document together",
}
PLACEHOLDER = "<image>"
_LETTERS = "\nAnswer with the option's letter from the given choices directly."
_SHORT = "\nAnswer the question using a single word or phrase."


@dataclass(frozen=True)
class Row:
    """One line of an annotation file.

    Attributes:
        context: the document, with a placeholder a picture.
        question: with choices and instruction, as it is asked.
        images: of the document and the question, then the choices', as relative paths.
        answer: what is scored against.
        meta: as in the file.
    """

    id: int
    context: str
    question: str
    images: tuple[str, ...]
    answer: int | str | list[Any]
    meta: Mapping[str, Any]


def parse_row(row: Any, where: str, counting: bool = False) -> Row:
    """Reads one line; raises ValueError naming the place and the field."""
    context, question = want(row, "context", str, where), want(row, "question", str, where)
    images = list(want(row, "images_list", list, where))
    placeholders = (context + question).count(PLACEHOLDER)
    if placeholders != len(images):
        raise ValueError(
            f"{where}: {PLACEHOLDER} must occur once a picture in context and question, got {placeholders} of them and "
            f"{len(images)} pictures"
        )
    answer = want(row, "answer", (int, str, list), where)
    if counting and isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError:
            answer = None
    if (counting and not isinstance(answer, list)) or answer == []:
        raise ValueError(
            f"{where}: the answer must be {'a list of counts' if counting else 'given'}, got {row['answer']!r}"
        )
    meta = want(row, "meta", dict, where)
    choices, pictured = meta.get("choices"), meta.get("choices_image_path")
    if choices and pictured:
        raise ValueError(f"{where}: only one of choices and choices_image_path must be set, got both")
    if choices or pictured:
        if not isinstance(answer, int) or not 0 <= answer < len(choices or pictured):
            raise ValueError(f"{where}: the answer must be the index of a choice, got {answer!r}")
        for i, choice in enumerate(choices or pictured):
            question += f"\n{chr(ord('A') + i)}. {choice if choices else PLACEHOLDER}"
        images += pictured or []
    question += _LETTERS if choices or pictured else _SHORT
    want(meta, "context_length", int, f"{where} meta")
    placed = want(meta, "placed_depth", (int, float, list), f"{where} meta")
    depths = placed if isinstance(placed, list) else [placed]
    if not depths or not all(isinstance(d, int | float) and 0 <= d <= 1 for d in depths):
        raise ValueError(f"{where} meta: placed_depth must be in 0..1, got {placed!r}")
    return Row(want(row, "id", int, where), context, question, tuple(images), answer, meta)


def compose(row: Row, folder: Path, where: str, words: int) -> Prompt:
    """The official prompt ``context + "\\n" + question``; what follows the last picture of the question is the query."""
    paths = [inside(folder, name, where) for name in row.images]
    document, question = (row.context + "\n").split(PLACEHOLDER), row.question.split(PLACEHOLDER)
    cut = len(document) - 1
    return Prompt(
        interleave(document, paths[:cut], words) + interleave(question[:-1], paths[cut:], words), question[-1]
    )


class MMNiah(DataTask):
    """One file of MM-NIAH, e.g. ``mm-niah/retrieval-image``."""

    splits = ("val", "test")

    def __init__(self, name: str, options: DataOptions) -> None:
        if name not in TASKS:
            raise ValueError(f"a task must be one of {', '.join(TASKS)}; got {name!r}")
        super().__init__(name, TASKS[name], options, control=name.endswith("retrieval-text"))
        self.kind = name.partition("/")[2]
        self.answer_tokens = 32 if self.kind.startswith("counting") else 16

    def patterns(self) -> list[str]:
        folder = f"mm_niah_{self.split}"
        return [f"{folder}/annotations/{self.kind}.jsonl", f"{folder}/images.tar.gz", f"{folder}/images/**"]

    def config(self) -> dict[str, Any]:
        return {**super().config(), "text_words": self.options.text_words}

    def read(self, root: Path) -> Iterator[Item | tuple[str, Missing]]:
        base = root if root.name == f"mm_niah_{self.split}" else root / f"mm_niah_{self.split}"
        path, folder = base / "annotations" / f"{self.kind}.jsonl", base / "images"
        if not path.is_file():
            raise ValueError(f"{self.name} must find its annotations, got no file {str(path)!r}")
        seen: set[int] = set()
        for index, (where, offset, line) in enumerate(read_lines(path)):
            row = parse_row(line, where, self.kind.startswith("counting"))
            if row.id in seen:
                raise ValueError(f"{where}: ids must be unique in a file, got {row.id} twice")
            seen.add(row.id)
            prompt = compose(row, folder, where, self.options.text_words)
            paths = [p.path for p in prompt.pieces if isinstance(p, Picture)]
            if (error := missing(paths, where)) is not None:
                yield str(row.id), error
            else:
                yield self._item(index, row, prompt, path, offset, folder, [p.stat().st_size for p in paths])

    def _item(
        self, index: int, row: Row, prompt: Prompt, path: Path, offset: int, folder: Path, sizes: list[int]
    ) -> Item:
        counting, options, shown = self.kind.startswith("counting"), self.options, _digest(row)
        name = row.id  # not the row, which holds the document

        def load() -> list[Chunk]:
            # Read again: the documents of a whole data set are not kept in memory.
            again = parse_row(read_line_at(path, offset), str(path), counting)
            if _digest(again) != shown:
                raise ValueError(f"{path} must stay as it is while its items are used, got another row {name}")
            return compose(again, folder, str(path), options.text_words).chunks(options.max_pixels)

        needles = needle_pieces(row, prompt.pieces, folder)
        return Item(
            task=self.name,
            index=index,
            load=load,
            count=len(prompt.pieces),
            placed=tuple(range(len(prompt.pieces))),
            query=prompt.query,
            target=row.answer,
            doc_id=str(row.id),
            cluster=document_of(row),
            digest=digest("mm-niah", shown, sizes, options.max_pixels, options.text_words),
            asked=needles[0] if len(needles) == 1 else None,
            max_tokens=self.max_tokens,
            meta={
                **{k: row.meta[k] for k in _KEPT if k in row.meta},
                "question": row.question,
                "needle_chunks": needles,
                "split": self.split,
            },
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        if self.kind.startswith("counting") and isinstance(target, str):
            target = json.loads(target)
        return score_answer(answer, target)

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """See `ctxwin.evals.benchmarks.mm_niah_score.aggregate`."""
        return aggregate(rows)

    def exported(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The official result lines; `result_name` is the file's name."""
        lines = [
            {
                "question_id": int(row["doc_id"]),
                "question": row["meta"]["question"],
                "answer": row["target"],
                "response": row["answer"].strip(),
                "context_length": row["meta"]["context_length"],
                "placed_depth": row["meta"]["placed_depth"],
            }
            for row in rows
        ]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


_KEPT = ("context_length", "context_length_text", "context_length_image", "num_images", "placed_depth")


def _digest(row: Row) -> str:
    return digest(row.context, row.question, list(row.images))


def _needles(row: Row) -> list[str]:
    return [n for n in row.meta.get("needles") or [] if isinstance(n, str) and n]


def needle_pieces(row: Row, pieces: Sequence[Piece], folder: Path) -> list[int]:
    """Which pieces hold a needle: its text, or the picture of that path in the document."""
    needles = _needles(row)
    pictures = {folder / n for n in needles}
    document = row.context.count(PLACEHOLDER)
    found, seen = [], 0
    for i, piece in enumerate(pieces):
        if isinstance(piece, Picture):
            seen += 1
            hit = seen <= document and piece.path in pictures
        else:
            hit = any(n in piece for n in needles)
        if hit:
            found.append(i)
    return found


def document_of(row: Row) -> str:
    """Digest that questions about one document share: of its pictures without needles, or of its text without them."""
    needles = _needles(row)
    pictures = [name for name in row.images[: row.context.count(PLACEHOLDER)] if name not in needles]
    if pictures:
        return digest("document", pictures)
    text = row.context
    for needle in needles:
        text = text.replace(needle, "")
    return digest("document", " ".join(text.split()))


def result_name(model: str, task: str, split: str) -> str:
    """The file name under which the official script finds a task's results."""
    return f"{model}_{task.removeprefix('mm-niah/')}-{split}.jsonl"
