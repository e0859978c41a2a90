"""Prompts of texts and pictures in order: cut into pieces that become chunks, and a query after them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxwin.chunk import Chunk
from ctxwin_evals.benchmarks.frames import load_picture

Piece = str | Path
"""A text, or a picture by its file."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that ends in text.

    Attributes:
        pieces: what becomes chunks, in order; no text is empty.
        query: the text after the last piece.
    """

    pieces: tuple[Piece, ...]
    query: str

    @property
    def pictures(self) -> list[Path]:
        """The pictures' files, in order."""
        return [p for p in self.pieces if isinstance(p, Path)]

    def chunks(self, max_pixels: int | None = None) -> list[Chunk]:
        """Decode the pictures. Raises BadMedia, naming the file."""
        return [Chunk.text(p) if isinstance(p, str) else Chunk.image(load_picture(p, max_pixels)) for p in self.pieces]


def interleave(texts: Sequence[str], pictures: Sequence[Path], words: int) -> tuple[Piece, ...]:
    """``texts[0], pictures[0], texts[1], ...`` as pieces; texts may be one more than pictures, or as many.

    Empty texts vanish, long ones are cut (see `cut_text`); the texts of the pieces joined are the texts given.
    """
    pieces: list[Piece] = []
    for i, text in enumerate(texts):
        pieces += cut_text(text, words)
        if i < len(pictures):
            pieces.append(pictures[i])
    return tuple(pieces)


_UNITS = (
    re.compile(r".+?(?:\n+|\Z)", re.S),  # paragraphs
    re.compile(r".+?(?:[.!?][\"')\]]*\s+|\Z)", re.S),  # sentences
    re.compile(r"\s*\S+\s*?(?=\s|\Z)|\s+", re.S),  # words
)


def cut_text(text: str, words: int) -> list[str]:
    """A text in parts of at most ``words`` words, which joined are the text again; none for an empty one.

    Cuts fall at paragraph ends; inside a longer paragraph at sentence ends, inside a longer sentence between words.
    """
    return _cut(text, words, 0) if text else []


def _cut(text: str, words: int, level: int) -> list[str]:
    if len(text.split()) <= words or level == len(_UNITS):
        return [text]
    parts: list[str] = []
    current = ""
    count = 0
    for unit in _UNITS[level].findall(text):
        size = len(unit.split())
        if current and count + size > words:
            parts.append(current)
            current, count = "", 0
        if size > words:
            inner = _cut(unit, words, level + 1)
            parts += inner[:-1]
            unit, size = inner[-1], len(inner[-1].split())
        current += unit
        count += size
    return [*parts, current] if current else parts
