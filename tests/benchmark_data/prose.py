"""Documents of generated prose and pictures, with needles put in at wanted depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_WHO = (
    "the baker", "an old sailor", "the librarian", "a travelling doctor", "the postman", "a young teacher", "the miller",
    "the ferryman", "a retired judge", "the watchmaker", "a street musician", "the beekeeper", "the mayor's sister",
    "a clerk from the harbour office", "the innkeeper", "two brothers from the hills",
)  # fmt: skip
_DID = (
    "repaired", "carried home", "sold", "painted", "looked for", "borrowed", "forgot", "described", "counted again",
    "hid", "cleaned", "admired", "lost", "gave away", "wrote about", "waited for",
)  # fmt: skip
_WHAT = (
    "a wooden ladder", "three letters", "the morning paper", "a basket of bread", "the broken lamp", "a heavy coat",
    "an unfinished map", "the church bell", "a box of nails", "the long table", "some dried fish", "a pair of boots",
    "the garden gate", "a small boat", "the winter stores", "a book of songs",
)  # fmt: skip
_WHERE = (
    "near the old bridge", "behind the market hall", "on the road to the mill", "at the edge of the forest",
    "beside the canal", "in the cellar of the inn", "above the quarry", "under the arches", "by the north gate",
    "outside the school",
)  # fmt: skip
_WHEN = (
    "On Monday", "Before noon", "That evening", "During the first snow", "A week later", "At sunrise", "Once again",
    "After the rain", "In early spring", "Towards midnight", "For a while", "To everybody's surprise",
)  # fmt: skip
_END = (
    "Nobody spoke of it afterwards.", "It took longer than expected.", "The neighbours talked about it for days.",
    "The weather stayed mild.", "Nothing was paid for it.", "The dogs barked all the time.", "It was soon forgotten.",
)  # fmt: skip

PICTURE = "<image>"
_PICTURE_EVERY = 180


def sentence(rng: np.random.Generator) -> str:
    """One sentence about the town; none of them says what a needle says."""
    if rng.random() < 0.2:
        return _pick(rng, _END)
    return f"{_pick(rng, _WHEN)}, {_pick(rng, _WHO)} {_pick(rng, _DID)} {_pick(rng, _WHAT)} {_pick(rng, _WHERE)}."


def tokens_of(text: str) -> int:
    """About as many tokens as a text has: a quarter of its characters."""
    return max(1, round(len(text) / 4))


@dataclass(frozen=True)
class Needle:
    """What is put into a document: a sentence, or a picture by its path.

    Attributes:
        depth: wanted place, 0 (front) to 1 (end).
    """

    depth: float
    text: str = ""
    picture: str = ""


@dataclass(frozen=True)
class Document:
    """A document with its needles.

    Attributes:
        context: text with ``<image>`` for each picture.
        pictures: paths in order; empty for a picture that has to be made up.
        depths: where each needle stands, in tokens over the document's tokens.
        text_tokens, picture_tokens: how long it is.
    """

    context: str
    pictures: tuple[str, ...]
    depths: tuple[float, ...]
    text_tokens: int
    picture_tokens: int


def write_document(rng: np.random.Generator, budget: int, needles: Sequence[Needle], picture_tokens: int) -> Document:
    """A document of about ``budget`` tokens; needles keep the order of their depths.

    There is a picture about every 180 tokens, and at least one picture and one paragraph.
    """
    given = sum(bool(n.picture) for n in needles)
    others = max(1 - given, round(budget / max(_PICTURE_EVERY, 2 * picture_tokens)) - given, 0)
    room = budget - (given + others) * picture_tokens - sum(tokens_of(n.text) for n in needles if n.text)
    blocks = _paragraphs(rng, max(room, 40))
    for _ in range(others):
        blocks.insert(int(rng.integers(1, len(blocks) + 1)), "")
    size = [tokens_of(b) if b else picture_tokens for b in blocks]
    ends = np.cumsum([0, *size])
    # (block in front of which it stands, needle)
    placed = [(int(np.abs(ends - n.depth * ends[-1]).argmin()), n) for n in sorted(needles, key=lambda n: n.depth)]
    parts: list[str] = []
    pictures: list[str] = []
    depths: list[float] = []
    before = 0
    for at in range(len(blocks) + 1):
        for _, needle in (p for p in placed if p[0] == at):
            depths.append(float(before))
            parts.append(needle.text or PICTURE)
            if needle.picture:
                pictures.append(needle.picture)
            before += tokens_of(needle.text) if needle.text else picture_tokens
        if at < len(blocks):
            parts.append(blocks[at] or PICTURE)
            if not blocks[at]:
                pictures.append("")
            before += size[at]
    text = sum(tokens_of(p) for p in parts if p != PICTURE)
    return Document(
        "\n\n".join(parts), tuple(pictures), tuple(d / before for d in depths), text, len(pictures) * picture_tokens
    )


def _paragraphs(rng: np.random.Generator, tokens: int) -> list[str]:
    made: list[str] = []
    left = tokens
    while left > 0:
        paragraph = " ".join(sentence(rng) for _ in range(min(int(rng.integers(2, 7)), max(1, left // 18))))
        made.append(paragraph)
        left -= tokens_of(paragraph)
    return made


def _pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]
