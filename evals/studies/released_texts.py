"""Contexts of the study on released weights, of what every machine with Python has: natural text, facts in it, pictures.

A set of natural text is named ``text-PLACEDxTOKENS``: the documentation of the standard library, cut into passages that do
not overlap, each a history, the placed chunks, and what the text says next. ``facts-FORM`` puts one fact into each chunk of
such text and asks for one of them in the words of the text, so that a model that was never taught to follow instructions can
answer by reading. ``pictures-FEWEST-MOST`` places as many frames of the bundled world and asks about one of them.
"""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.engines.encoding.encoder import EncodingEngine
from ctxwin.hashing import digest
from ctxwin_evals.items import Item
from ctxwin_evals.tasks.drawn import history
from ctxwin_evals.tasks.tiny import render_frames

SYSTEM_PROMPT = "You read a manual."
NEXT = 32
"""Tokens of the true text that are read behind a context."""
HISTORY = 12
"""Most chunks that stand in front of the placed ones; fewer where they are long, but as many as a recall replaces."""
FACT_CHUNKS, FACT_TOKENS = 6, 80
PAST = 6
"""Frames that stand in front of the placed ones."""
_PIECE = 8000
_LEAST, _SHORTEST = 300, 40

OBJECTS = [
    "violin", "lantern", "kettle", "ladder", "compass", "anchor", "blanket", "barrel", "mirror", "hammer",
    "candle", "basket", "saddle", "wagon", "pillow", "trumpet", "bucket", "shovel", "curtain", "carpet",
    "statue", "fountain", "bicycle", "umbrella",
]  # fmt: skip
WOMEN = ["Maria", "Helen", "Julia", "Sarah", "Emma", "Alice", "Laura", "Nancy", "Diana", "Clara"]
MEN = ["Peter", "David", "Thomas", "Martin", "Simon", "Oliver", "Henry", "Victor", "Arthur", "Felix"]


@dataclass(frozen=True)
class Context:
    """Chunks of a stream, of which the last ``placed`` ones stand in the window, and what is read behind them.

    Attributes:
        task, index: its set, and its number there.
        chunks: token ids by chunk, those of the history first; none where they are ``pictures``.
        placed: number of placed chunks.
        query: tokens that are read first.
        target: tokens that then follow in truth.
        asked: place of the chunk on which the target depends most, at least 1.
        pictures: chunks of a picture each.
        system_prompt: what the model is told first.
    """

    task: str
    index: int
    chunks: tuple[tuple[int, ...], ...]
    placed: int
    query: tuple[int, ...]
    target: tuple[int, ...]
    asked: int
    pictures: tuple[Chunk, ...] = ()
    system_prompt: str = SYSTEM_PROMPT

    @property
    def digest(self) -> str:
        """Identity of its content."""
        chunks: list[object] = [chunk.id for chunk in self.pictures] or [list(chunk) for chunk in self.chunks]
        return digest("released", chunks, list(self.query), list(self.target))

    def load(self) -> list[Chunk]:
        """Return the chunks."""
        return list(self.pictures) or [Chunk.tokens(list(chunk)) for chunk in self.chunks]

    def item(self, history: str = "") -> Item:
        """Return it as an item in which nothing happened, or ``slideN`` or ``recall`` did.

        After N slides the placed chunks are the end of a stream that ran through the window. In a recall the asked chunk's
        patch was formed behind other chunks than those that precede it now, as many.
        """
        count = len(self.pictures or self.chunks)
        first = count - self.placed
        placed = tuple(range(first, count))
        before: tuple[int, ...] = ()
        meta: dict[str, int] = {}
        if history.startswith("slide"):
            slides = int(history.removeprefix("slide"))
            if not 1 <= slides <= first:
                raise ValueError(f"{self.task} has {first} earlier chunks: it slides 1 to {first} times, got {slides}")
            before, meta = tuple(range(first - slides, count)), {"stream_window": self.placed}
        elif history == "recall":
            before = (*range(first - self.asked, first), placed[self.asked])
        return Item(
            task=self.task, index=self.index, load=self.load, count=count,
            placed=placed, before=before, asked=self.asked, query="", target=list(self.target), doc_id=str(self.index),
            cluster=str(self.index), digest=self.digest, meta=meta,
        )  # fmt: skip


def documentation(*, short: bool = False) -> Iterator[str]:
    """Yield the reference's topics and, file by file, the long strings of the sources, which are nearly all docstrings.

    With ``short``, yield those that are shorter instead.
    """
    from pydoc_data.topics import topics

    least, most = (_SHORTEST, _LEAST) if short else (_LEAST, math.inf)
    yield from () if short else (topics[name] for name in sorted(topics))
    library = Path(os.__file__).parent
    for path in sorted(library.rglob("*.py")):
        if not {"test", "tests", "idlelib", "pydoc_data", "site-packages", "dist-packages"} & {*path.parts}:
            strings = re.findall(r'"""(.+?)"""', path.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
            yield "\n\n".join(inspect.cleandoc(text) for text in strings if least <= len(text) < most)


@dataclass(frozen=True)
class Fact:
    """Pieces of text for each chunk (at its begin, its middle, its end), a question in the same words, and its answer."""

    pieces: Sequence[tuple[str, str, str]]
    question: str
    answer: str


def one_document(rng: np.random.Generator, chunks: int, place: int) -> Fact:
    """Every chunk tells one code."""
    objects, codes = rng.permutation(OBJECTS)[:chunks], rng.choice(np.arange(1000, 10000), chunks, replace=False)
    pieces = [("", f" The code of the {thing} is {code}.", "") for thing, code in zip(objects, codes, strict=True)]
    return Fact(pieces, f"\nThe code of the {objects[place]} is", f" {codes[place]}")


def cut_sentence(rng: np.random.Generator, chunks: int, place: int) -> Fact:
    """Every chunk ends with a sentence that the next one completes."""
    objects, codes = rng.permutation(OBJECTS)[:chunks], rng.choice(np.arange(1000, 10000), chunks, replace=False)
    pieces = [(f" {codes[i - 1]}." if i else "", "", f" The code of the {objects[i]} is") for i in range(chunks)]
    return Fact(pieces, f"\nThe code of the {objects[place - 1]} is", f" {codes[place - 1]}")


def pronoun(rng: np.random.Generator, chunks: int, place: int) -> Fact:
    """Every chunk ends with a person of whom the next one says what they own."""
    people = [str(name) for name in rng.permutation(WOMEN + MEN)[:chunks]]
    objects = rng.permutation(OBJECTS)[:chunks]
    owners, pieces = ["She" if name in WOMEN else "He" for name in people], []
    for i, name in enumerate(people):
        pieces.append((f" {owners[i - 1]} owns the {objects[i - 1]}." if i else "", "", f" This is {name}."))
    question = f"\nThis is {people[place - 1]}. {owners[place - 1]} owns the"
    return Fact(pieces, question, f" {objects[place - 1]}")


def comparison(rng: np.random.Generator, chunks: int, place: int) -> Fact:
    """Every chunk tells a weight; the heavier of two things is asked for."""
    objects, weights = rng.permutation(OBJECTS)[:chunks], rng.permutation(np.arange(2, 99))[:chunks]
    other = int(rng.integers(chunks - FACT_CHUNKS, place))
    pieces = [("", f" The {thing} weighs {weight} kg.", "") for thing, weight in zip(objects, weights, strict=True)]
    heavier = place if weights[place] > weights[other] else other
    first, second = rng.permutation([place, other])
    question = f"\nOf the {objects[first]} and the {objects[second]}, the heavier one is the"
    return Fact(pieces, question, f" {objects[heavier]}")


FORMS: dict[str, Callable[[np.random.Generator, int, int], Fact]] = {
    "one": one_document,
    "cut": cut_sentence,
    "pronoun": pronoun,
    "comparison": comparison,
}
"""(generator, number of chunks, number of the asked one) -> a fact in each."""


class Texts:
    """Contexts in the tokens of one engine, by set; the same for the same seed and version of Python."""

    def __init__(self, engine: EncodingEngine, seed: int) -> None:
        self._engine, self._seed = engine, seed

    @cached_property
    def _prose(self) -> list[int]:
        return self._ids(documentation())

    def _ids(self, texts: Iterable[str]) -> list[int]:
        parts = (text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE))
        return [token for part in parts for token in self._engine.text_ids(part)]

    def contexts(self, task: str, n: int) -> list[Context]:
        """Return the first ``n`` contexts of a set, in an order that the seed draws.

        Raises ValueError for a set that is not known, and for more contexts than the documentation has.
        """
        if match := re.fullmatch(r"text-(\d+)x(\d+)", task):
            return self._natural(task, int(match[1]), int(match[2]), n)
        if (form := FORMS.get(task.removeprefix("facts-"))) is not None:
            return [self._fact(task, form, index) for index in range(n)]
        if (match := re.fullmatch(r"pictures-([2-6])-([2-6])", task)) and match[1] <= match[2]:
            counts = range(int(match[1]), int(match[2]) + 1)
            return [self._scenes(task, counts[index % len(counts)], index) for index in range(n)]
        raise ValueError(
            "a set must be text-PLACEDxTOKENS, pictures-FEWEST-MOST (2 to 6) or one of "
            f"facts-{', facts-'.join(FORMS)}; got {task!r}"
        )

    def _natural(self, task: str, placed: int, tokens: int, n: int) -> list[Context]:
        if placed < 2 or tokens < 1:
            raise ValueError(f"a set of natural text must place at least 2 chunks of at least 1 token, got {task!r}")
        count = placed + max(placed - 1, min(HISTORY, HISTORY * 64 // tokens))
        size = count * tokens + 1 + NEXT
        rng, rows = np.random.default_rng((self._seed, placed, tokens)), list[list[int]]()
        for short in (False, True):  # the second where the first are too few, so that these stay the first ones
            if len(rows) < n:
                ids = self._ids(documentation(short=True)) if short else self._prose
                rows += [ids[i * size : (i + 1) * size] for i in rng.permutation(len(ids) // size).tolist()]
        if n > len(rows):
            raise ValueError(f"n must be at most {len(rows)} for {task}, the passages of the documentation; got {n}")
        return [
            Context(
                task,
                index,
                tuple(tuple(row[i * tokens : (i + 1) * tokens]) for i in range(count)),
                placed,
                (row[count * tokens],),
                tuple(row[count * tokens + 1 :]),
                placed - 1,
            )
            for index, row in enumerate(rows[:n])
        ]

    def _fact(self, task: str, form: Callable[[np.random.Generator, int, int], Fact], index: int) -> Context:
        rng = np.random.default_rng((self._seed, list(FORMS.values()).index(form), index))
        count, ids = HISTORY + FACT_CHUNKS, self._engine.text_ids
        place = int(rng.integers(1, FACT_CHUNKS))
        fact = form(rng, count, HISTORY + place)
        start = int(rng.integers(len(self._prose) - count * FACT_TOKENS))
        chunks = []
        for i, pieces in enumerate(fact.pieces):
            begin, middle, end = (ids(text) for text in pieces)
            filler = self._prose[start + i * FACT_TOKENS : start + (i + 1) * FACT_TOKENS]
            room = FACT_TOKENS - len(begin) - len(middle) - len(end)
            at = int(rng.integers(room + 1))
            chunks.append((*begin, *filler[:at], *middle, *filler[at:room], *end))
        return Context(task, index, tuple(chunks), FACT_CHUNKS, ids(fact.question), ids(fact.answer), place)

    def _scenes(self, task: str, placed: int, index: int) -> Context:
        rng = np.random.default_rng((self._seed, 0x70696374, placed, index))
        drawn = history(rng, placed, PAST, 0, kinds=("single_hop",))
        question, pictures = drawn.question, tuple(render_frames(drawn.frames))
        query, target = self._engine.encode_query(question.text), self._engine.text_ids(f" {question.answer}")
        system, ids = "You watch a camera.", query.token_ids
        return Context(task, index, (), placed, ids, target[:1], question.frame, pictures, system)
