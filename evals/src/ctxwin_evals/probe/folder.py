"""A user's own material: pictures and videos of a folder as contexts; its files, and a file of questions."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.media import as_rgb
from ctxwin_evals.benchmarks.frames import Pixels, fit
from ctxwin_evals.benchmarks.frames import sample_frames as video_frames
from ctxwin_evals.probe.contexts import LETTERS, PLACED, Context, Question, Source, Split, seed_of

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".avif")
VIDEOS = (".mp4", ".avi", ".mkv", ".mov", ".webm")
TEXTS = (".txt", ".md")
FRAMES = 8
"""Frames taken of a video."""
FILES = 256
"""Files read from a folder: a probe takes minutes, however much the folder holds."""
Value = TypeVar("Value")
_log = logging.getLogger("ctxwin.evals")
_FIT_EVERY = 4
"""Every fourth picture is kept for fitting, where there are enough for that."""


@dataclass(frozen=True)
class Piece:
    """Source of a chunk: a picture or a frame of a video.

    ``name`` tells people and clusters which one it is; pieces of one ``size`` can stand in for one another.
    """

    name: str
    path: Path
    size: tuple[int, ...]
    frame: int


class Images(Source):
    """Pictures, and frames of videos, of a folder, in name order (even indices) and shuffled (odd ones)."""

    kind: ClassVar[str] = "images"
    system_prompt = "You answer questions about pictures."

    def __init__(self, folder: Path, questions: Sequence[str], max_tokens: int, max_pixels: int | None) -> None:
        self._max_pixels = max_pixels
        self._frames = lru_cache(1)(self._decode)
        pieces: list[Piece] = []
        paths, notes = spread(files_of(folder, (*PICTURES, *VIDEOS), "pictures or videos"))
        for path, (count, *size) in readable(paths, lambda path: self._frames(path).shape[:3], notes).items():
            name = path.relative_to(folder).as_posix()  # folders may hold files of the same names
            names = [f"{name}#{i}" for i in range(count)] if path.suffix.lower() in VIDEOS else [name]
            pieces += [Piece(one, path, tuple(size), i) for i, one in enumerate(names)]
        if len(pieces) < PLACED + 1:
            raise ValueError(
                f"a probe needs at least {PLACED + 1} pictures to make sequences and swap in others, got "
                f"{len(pieces)}; add some, or leave the option out to probe generated pictures"
            )
        self.name, self.about = f"probe/{self.kind}", f"pictures of folder {folder.name}"
        self.pieces, self.asked, self.max_tokens = tuple(pieces), tuple(questions), max_tokens
        self.fits = len(pieces) >= _FIT_EVERY * 2 * PLACED
        self._fitting = tuple(pieces[_FIT_EVERY - 1 :: _FIT_EVERY]) if self.fits else ()
        fitting = set(self._fitting)
        self._probing = tuple(p for p in pieces if p not in fitting)
        remarks = [f"{len(pieces)} pictures; sequences that end with the same one count as one observation", *notes]
        if not self.fits:
            remarks.append("too few pictures to fit a shared basis on some and test it on others")
        self.notes = tuple(remarks)

    def context(self, split: Split, index: int) -> Context:
        rng = np.random.default_rng((seed_of(self.kind), seed_of(split), index))
        pool = self._fitting if split == "fitting" and self._fitting else self._probing
        if index % 2 == 0:
            begin = int(rng.integers(len(pool)))
            chosen = [pool[(begin + i) % len(pool)] for i in range(PLACED)]
        else:
            chosen = [pool[int(i)] for i in rng.permutation(len(pool))[:PLACED]]
        others = [p for p in pool if p not in chosen] or list(pool)
        alike = [[p for p in others if p.size == piece.size] or others for piece in chosen]
        strangers = tuple(some[int(rng.integers(len(some)))] for some in alike)
        load = partial(self._load, tuple(chosen), strangers)
        return Context(load, tuple(p.size for p in chosen), chosen[-1].name, self._questions(rng))

    def stream(self, index: int, slides: int) -> Context:
        rng = np.random.default_rng((seed_of(self.kind), seed_of("moving"), index))
        pool, count = self._probing, min(PLACED + slides, len(self._probing))
        begin = int(rng.integers(len(pool)))
        chosen = tuple(pool[(begin + i) % len(pool)] for i in range(count))
        questions = []
        for slide in range(1, count - PLACED + 1):
            first, last = (LETTERS[(slide + i) % len(LETTERS)] for i in (PLACED - 2, PLACED - 1))
            text = self.asked[slide % len(self.asked)] if self.asked else self._differ(first, last)
            questions.append(Question(text, "cross"))
        load, sizes = partial(self._load, chosen, ()), tuple(p.size for p in chosen)
        return Context(load, sizes, chosen[-1].name, tuple(questions))

    def _questions(self, rng: np.random.Generator) -> tuple[Question, ...]:
        first, second = sorted(int(i) for i in rng.permutation(PLACED)[:2])
        at = int(rng.integers(PLACED))
        questions = [
            Question(self._differ(LETTERS[first], LETTERS[second]), "cross", (first, second)),
            Question(f"What does picture {LETTERS[at]} show? Answer in a few words.", "one", (at,)),
        ]
        if self.asked:
            questions.append(Question(self.asked[int(rng.integers(len(self.asked)))], "yours"))
        return tuple(questions)

    def _differ(self, first: str, second: str) -> str:
        return f"What differs between picture {first} and picture {second}? Answer in a few words."

    def _load(self, pieces: Sequence[Piece], strangers: Sequence[Piece]) -> list[Chunk]:
        chunks = [self.chunk(p, p.size, LETTERS[i % len(LETTERS)]) for i, p in enumerate(pieces)]
        return chunks + [self.chunk(s, p.size, name) for s, p, name in zip(strangers, pieces, LETTERS, strict=False)]

    def chunk(self, piece: Piece, size: tuple[int, ...], letter: str) -> Chunk:
        from PIL import Image

        pixels = self._frames(piece.path)[piece.frame]
        if pixels.shape[:2] != size:
            pixels = np.asarray(Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BICUBIC))
        return Chunk.image(pixels, text=f"Picture {letter}:", keep_source=False)

    def _decode(self, path: Path) -> Pixels:
        """A picture, or the sampled frames of a video, as ``[F, H, W, 3]``; raises BadMedia."""
        if path.suffix.lower() in VIDEOS:
            return video_frames(path, "linspace", FRAMES, self._max_pixels).pixels
        return fit(as_rgb(path), self._max_pixels)[None]


def files_of(folder: Path, endings: Sequence[str], what: str) -> list[Path]:
    """Files with these endings, below the folder too, in name order; ValueError where there are none."""
    if not folder.is_dir():
        raise ValueError(f"{what} must lie in a folder, got {str(folder)!r}, which is no folder")
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix.lower() in endings)
    if not paths:
        raise ValueError(f"a folder must hold {what} ({', '.join(endings)}), got none in {str(folder)!r}")
    return paths


def spread(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """At most `FILES` of them, evenly by name, and what a reader must know of that."""
    if len(paths) <= FILES:
        return list(paths), []
    return [paths[i * len(paths) // FILES] for i in range(FILES)], [f"{FILES} of {len(paths):,} files, evenly by name"]


def readable(paths: Sequence[Path], read: Callable[[Path], Value], notes: list[str]) -> dict[Path, Value]:
    """What ``read`` gives of the files; those that it raises ValueError for are left out, logged and noted, unless all are."""
    values: dict[Path, Value] = {}
    errors: list[ValueError] = []
    for path in paths:
        try:
            values[path] = read(path)
        except ValueError as error:
            errors.append(error)
            _log.warning("a file is left out: %s", error)
    if errors and not values:
        raise errors[0]
    if errors:
        notes.append(f"{len(errors)} of {len(paths)} files cannot be read and are left out, the first as {errors[0]}")
    return values


def read_questions(path: Path) -> list[str]:
    """The questions of a file, one per line; raises ValueError where it holds none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"questions must be a readable text file, got {str(path)!r}: {error}") from error
    questions = [line for line in lines if line and not line.startswith("#")]
    if not questions:
        raise ValueError(f"questions must hold one question a line, got none in {str(path)!r}")
    return questions
