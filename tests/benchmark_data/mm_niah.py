"""Writes a small MM-NIAH: six annotation files and their pictures, in the official layout."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmark_data import drawing
from benchmark_data.drawing import Pixels
from benchmark_data.prose import PICTURE, Needle, write_document
from ctxwin.files import atomic_write
from ctxwin_evals.benchmarks.mm_niah import MMNiah

_SPACE = 0x6E696168
LENGTHS = (200, 1200, 4000)
_WORDS = ("oak", "lantern", "copper", "violet", "anchor", "saffron", "marble", "willow", "thunder", "velvet")
_PLACES = ("harbour", "mill", "tower", "chapel", "library", "station", "brewery", "lighthouse")
_NAMES = ("Otto", "Mira", "Jonas", "Selma", "Ravi", "Ines", "Tomas", "Greta")
_KEYS = ("brass", "iron", "silver", "golden", "wooden", "glass")
_STREETS = ("Lime Street", "Rose Lane", "Castle Road", "Fisher Row", "Abbey Court", "Hill Street")
_FRUITS = ("pears", "plums", "cherries", "walnuts", "melons", "quinces")
_CAMERA = ("The camera is moving left", "The camera is moving right")


@dataclass
class _Made:
    """A question before its document is written.

    Attributes:
        drawn: pictures by path.
        asked: pictures in the question, by path.
        choices, pictured: the choices as texts, or as pictures by path.
    """

    needles: list[Needle]
    question: str
    answer: int | str | list[int]
    drawn: dict[str, Pixels]
    asked: tuple[str, ...] = ()
    choices: list[str] | None = None
    pictured: list[str] | None = None


def write_mm_niah(
    out: Path, n: int, seed: int = 0, split: str = "val", lengths: Sequence[int] = LENGTHS, image_size: int = 224
) -> dict[str, list[dict[str, Any]]]:
    """Writes ``n`` rows a task below ``out / mm_niah_<split>``; the same seed gives the same files.

    Args:
        out: the data folder.
        n: rows a task.
        seed: of everything drawn.
        split: ``val`` or ``test``.
        lengths: tokens of the documents, cycled through (a picture counts ``(image_size / 28) ** 2``, text a token per
            four characters); needles and their pictures may need more than a very small one.
        image_size: side of the pictures in pixels.

    Returns the rows by task. Raises ValueError for numbers out of range.
    """
    if n < 1 or split not in ("val", "test") or not lengths or min(lengths) < 100 or image_size < 56:
        raise ValueError(
            "n must be >= 1, split val or test, lengths >= 100 and image_size >= 56; got "
            f"{n}, {split!r}, {list(lengths)}, {image_size}"
        )
    base = out / f"mm_niah_{split}"
    made: dict[str, list[dict[str, Any]]] = {}
    for task in MMNiah.names:
        kind = task.partition("/")[2]
        rows = [
            _row(kind, i, seed, base / "images", lengths[i % len(lengths)], image_size, len(lengths)) for i in range(n)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        atomic_write(base / "annotations" / f"{kind}.jsonl", lines.encode())
        made[task] = rows
    return made


def _row(kind: str, index: int, seed: int, folder: Path, budget: int, size: int, turn: int) -> dict[str, Any]:
    rng = np.random.default_rng((_SPACE, seed, zlib.crc32(kind.encode()), index))
    # One deep bin after the other; the step when lengths come round again keeps lengths and depths apart.
    depth = ((index + index // turn) % 5 + 0.5) / 5
    made = _MAKERS[kind](rng, depth, f"{kind}/{index:04d}", size, index)
    document = write_document(rng, budget, made.needles, (size // 28) ** 2)
    pictures = []
    for j, path in enumerate(document.pictures):
        if not path:
            path = f"{kind}/{index:04d}-{j}.png"
            made.drawn[path] = drawing.scene(rng, size)
        pictures.append(path)
    for path, pixels in made.drawn.items():
        drawing.save_png(folder / path, pixels)
    question_tokens = len(made.asked) * (size // 28) ** 2
    depths = list(document.depths)
    return {
        "id": index,
        "images_list": [*pictures, *made.asked],
        "context": document.context,
        "question": made.question,
        "answer": made.answer,
        "meta": {
            "placed_depth": depths if kind != "retrieval-image" else depths[0],
            "context_length": document.text_tokens + document.picture_tokens + question_tokens,
            "context_length_text": document.text_tokens,
            "context_length_image": document.picture_tokens + question_tokens,
            "num_images": len(pictures) + len(made.asked),
            "needles": [n.text or n.picture for n in sorted(made.needles, key=lambda n: n.depth)],
            "choices": made.choices,
            "choices_image_path": made.pictured,
        },
    }


def _around(depth: float, count: int) -> list[float]:
    """Depths of several needles, ascending, around their mean."""
    spread = min(depth, 1 - depth, 0.3)
    return [float(d) for d in np.linspace(depth - spread, depth + spread, count)]


def _retrieval_text(rng: np.random.Generator, depth: float, stem: str, size: int, index: int) -> _Made:
    place, word = _one(rng, _PLACES), _one(rng, _WORDS)
    return _Made(
        [Needle(depth, f"The secret password of the {place} is {word}.")],
        f"What is the secret password of the {place} according to the document?",
        word,
        {},
    )


def _retrieval_image(rng: np.random.Generator, depth: float, stem: str, size: int, index: int) -> _Made:
    things = drawing.draw_things(rng, 4)
    answer = int(rng.integers(4))
    needle = f"{stem}-needle.png"
    choices = [f"{stem}-choice-{i}.png" for i in range(4)]
    drawn = {needle: drawing.scene_with(rng, [things[answer]], size)}
    drawn |= {path: drawing.framed(thing, size) for path, thing in zip(choices, things, strict=True)}
    question = "Which of the following images appears in a certain image of the above document?"
    return _Made([Needle(depth, picture=needle)], question, answer, drawn, pictured=choices)


def _counting_text(rng: np.random.Generator, depth: float, stem: str, size: int, index: int) -> _Made:
    fruit, counts = _one(rng, _FRUITS), [int(c) for c in rng.integers(1, 10, size=int(rng.integers(2, 5)))]
    needles = [
        Needle(d, f"The gardener counted {c} {fruit}.")
        for d, c in zip(_around(depth, len(counts)), counts, strict=True)
    ]
    question = (
        f"The gardener of the document above counted {fruit} {len(counts)} times. Which numbers did the gardener count, in "
        "the order of the document? Answer with a JSON list of numbers such as [2, 5]."
    )
    return _Made(needles, question, counts, {})


def _counting_image(rng: np.random.Generator, depth: float, stem: str, size: int, index: int) -> _Made:
    thing, other = drawing.draw_things(rng, 2)
    counts = [int(c) for c in rng.integers(1, 5, size=2)]
    asked = f"{stem}-asked.png"
    drawn = {asked: drawing.framed(thing, size)}
    needles = []
    for j, (d, c) in enumerate(zip(_around(depth, len(counts)), counts, strict=True)):
        path = f"{stem}-needle-{j}.png"
        drawn[path] = drawing.scene_with(rng, [thing] * c + [other] * int(rng.integers(0, 3)), size)
        needles.append(Needle(d, picture=path))
    question = (
        f"Framed copies of this image {PICTURE} are in {len(counts)} images of the above document. How many copies are in each "
        "of them, in the order of the document? Answer with a JSON list of numbers such as [2, 5]."
    )
    return _Made(needles, question, counts, drawn, asked=(asked,))


def _reasoning_text(rng: np.random.Generator, depth: float, stem: str, size: int, index: int) -> _Made:
    names = [_NAMES[i] for i in rng.permutation(len(_NAMES))[:2]]
    keys = [_KEYS[i] for i in rng.permutation(len(_KEYS))[:2]]
    streets = [_STREETS[i] for i in rng.permutation(len(_STREETS))[:2]]
    texts = [f"The {k} key belongs to {who}." for k, who in zip(keys, names, strict=True)]
    texts += [f"{who} lives in {street}." for who, street in zip(names, streets, strict=True)]
    order = rng.permutation(len(texts))
    needles = [Needle(d, texts[i]) for d, i in zip(_around(depth, len(texts)), order, strict=True)]
    question = f"In which street does the owner of the {keys[0]} key live according to the document?"
    return _Made(needles, question, streets[0], {})


def _reasoning_image(rng: np.random.Generator, depth: float, stem: str, size: int, index: int) -> _Made:
    """Camera motion between two pictures on even rows, two framed things put together on odd ones."""
    paths = [f"{stem}-needle-{j}.png" for j in range(2)]
    needles = [Needle(d, picture=p) for d, p in zip(_around(depth, 2), paths, strict=True)]
    if index % 2 == 0:
        answer = int(rng.integers(2))
        views = drawing.panorama(rng, size, rightward=answer == 1)
        question = (
            "Two images of the above document show one scene from two places. In which direction is the camera moving from "
            "the first to the second?"
        )
        return _Made(needles, question, answer, dict(zip(paths, views, strict=True)), choices=list(_CAMERA))
    things = drawing.draw_things(rng, 4)
    drawn = {path: drawing.scene_with(rng, [thing], size) for path, thing in zip(paths, things, strict=False)}
    pairs = [things[:2], [things[0], things[2]], [things[3], things[1]], things[2:]]
    order = [int(i) for i in rng.permutation(4)]
    choices = [f"{stem}-choice-{i}.png" for i in range(4)]
    for path, i in zip(choices, order, strict=True):
        drawn[path] = _side_by_side(pairs[i], size)
    question = (
        "One framed thing is in one image of the above document and another one in a second. Which of the following images "
        "shows both?"
    )
    return _Made(needles, question, order.index(0), drawn, pictured=choices)


def _side_by_side(things: Sequence[drawing.Thing], size: int) -> Pixels:
    made = drawing.plain(size)
    for i, thing in enumerate(things):
        drawing.paste(made, drawing.framed(thing, size * 2 // 5), size * 3 // 10, size // 20 + i * size // 2)
    return made


def _one(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


_MAKERS = {
    "retrieval-text": _retrieval_text,
    "retrieval-image": _retrieval_image,
    "counting-text": _counting_text,
    "counting-image": _counting_image,
    "reasoning-text": _reasoning_text,
    "reasoning-image": _reasoning_image,
}
