"""Training batches: drawn frames, the prompts around them, and the targets of the losses."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctxwin.tiny.clip import write_clip
from ctxwin.tiny.sprites import COLORS, GRID, N_MARKS, SHAPES
from ctxwin.tiny.world import NO_MARK, UNDETERMINED, Frame, bound_colors, render
from ctxwin.video import decode_video
from train_tiny.draws import BatchSpec, IntArray, color_distribution, draw_frames, draw_questions
from train_tiny.tokenizer import HEADER_WORDS, HEADERS, LABELS, exchange_text, header_text, query_text

PICTURE = None
"""Stands for a picture (vision_start, 64 image tokens, vision_end) among the pieces of a prompt."""
NUMBER_AT = 2
"""Index of the number token in a question."""


class Vocabulary:
    """Token ids of the pieces a prompt is made of."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        self.colors = [self._single(word) for word in COLORS]
        self.shapes = [self._single(word) for word in SHAPES]
        self.numbers = [self._single(f" {mark:02d}") for mark in range(N_MARKS)]
        self.end = self._single("<|im_end|>")
        self.image = self._single("<|image_pad|>")
        self.picture = [self._single("<|vision_start|>"), *[self.image] * GRID**2, self._single("<|vision_end|>")]

    def encode(self, text: str) -> list[int]:
        """Ids of one separately tokenised piece."""
        if text not in self._cache:
            self._cache[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._cache[text]

    def _single(self, text: str) -> int:
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} must be one token, got {ids}")
        return ids[0]


def place(vocabulary: Vocabulary, pieces: Sequence[str | None], start: int = 0) -> tuple[IntArray, IntArray, int]:
    """Lay pieces out one after another.

    Args:
        vocabulary: Token ids.
        pieces: Texts and pictures (`PICTURE`).
        start: Position of the first token.

    Returns:
        Token ids [T], M-RoPE positions [3, T], and the position of the next token.
    """
    ids: list[int] = []
    columns: list[IntArray] = []
    row, column = np.divmod(np.arange(GRID**2), GRID)
    for piece in pieces:
        if piece is None:
            ids += vocabulary.picture
            inside = np.stack([np.zeros_like(row), row, column]) + start + 1
            edges = np.full((3, 1), start)
            columns += [edges, inside, edges + GRID + 1]
            start += GRID + 2
        else:
            tokens = vocabulary.encode(piece)
            ids += tokens
            columns.append(np.broadcast_to(np.arange(start, start + len(tokens)), (3, len(tokens))))
            start += len(tokens)
    return np.array(ids), np.concatenate(columns, 1), start


@dataclass(frozen=True)
class Batch:
    """One training step. B contexts of F frames, padded to T tokens; S scene tokens, Q questions in all.

    Attributes:
        pixels: uint8 [B * F, 224, 224, 3].
        ids: [B, T].
        positions: [B, 3, T].
        mask: bool [B, 1, T, T].
        real: Which tokens of the contexts are no padding, bool [B, tokens of the longest one].
        length: Tokens of a question and its answer.
        scenes: Flat indices (into B * T) of the image tokens of scenes, [S].
        scene_colors: Distribution over the 9 colours at those tokens, [S, 9].
        numbers: Flat indices of the questions' number tokens, [Q].
        things: Flat indices of the image tokens of the things asked about, [Q].
        last: Flat indices of the questions' last tokens, [Q]; the answer follows each.
        targets: Distribution over the 9 colours, then the 8 shapes, [Q, 17].
        bound: Whether a question is the colour of a scene thing that a legend decides, [Q].
    """

    pixels: Tensor
    ids: Tensor
    positions: Tensor
    mask: Tensor
    real: Tensor
    length: int
    scenes: Tensor
    scene_colors: Tensor
    numbers: Tensor
    things: Tensor
    last: Tensor
    targets: Tensor
    bound: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        moved: dict[str, Any] = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def through_clip(pictures: Sequence[NDArray[np.uint8]], rng: np.random.Generator) -> list[NDArray[np.uint8]]:
    """Write pictures to a video file and decode it: mostly mp4v, one in five times MJPG; each shown 1-3 times."""
    suffix, fourcc = (".avi", "MJPG") if rng.random() < 0.2 else (".mp4", "mp4v")
    repeats = int(rng.integers(1, 4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"clip{suffix}"
        write_clip(path, pictures, fps=repeats, seconds_per_frame=1.0, fourcc=fourcc)
        decoded, _ = decode_video(path, fps=repeats)
    return list(decoded[int(rng.integers(repeats)) :: repeats])


def _context(
    rng: np.random.Generator,
    frames: Sequence[Frame],
    colors: Sequence[IntArray],
    labelled: float,
    exchanges: float = 0.13,
) -> list[str | None]:
    """Pieces of a random prompt around frames: header, labels, and now and then a remembered exchange."""
    if rng.random() < 0.8:
        header = HEADERS[int(rng.integers(len(HEADERS)))]
    else:
        header = " ".join(rng.choice(HEADER_WORDS, int(rng.integers(2, 25)))).capitalize() + "."
    pieces: list[str | None] = [header_text(header)]
    label, second, step = str(rng.choice(LABELS)), int(rng.integers(30)), int(rng.integers(1, 6))
    exchange_after = int(rng.integers(len(frames))) if rng.random() < exchanges else -1
    for index in range(len(frames)):
        if rng.random() < labelled:
            pieces.append(label.format(s=second))
        second += step
        pieces.append(PICTURE)
        if index == exchange_after:
            pieces.append(_exchange(rng, frames[: index + 1], colors))
    return pieces


def _exchange(rng: np.random.Generator, frames: Sequence[Frame], colors: Sequence[IntArray]) -> str | None:
    index = int(rng.integers(len(frames)))
    askable = np.argwhere((frames[index].mark != NO_MARK) & (colors[index] != UNDETERMINED))
    if not len(askable):
        return ""
    row, column = askable[int(rng.integers(len(askable)))]
    mark = frames[index].mark[row, column]
    if rng.random() < 0.3:
        return exchange_text(f"shape of {mark:02d}?", SHAPES[frames[index].shape[row, column]])
    return exchange_text(f"color of {mark:02d}?", COLORS[colors[index][row, column]])


def _chunks(vocabulary: Vocabulary, pieces: Sequence[str | None]) -> IntArray:
    """Return the frame that each token of a prompt belongs to, its label included; -1 for the header (first piece). [T]."""
    lengths = [len(vocabulary.picture if piece is PICTURE else vocabulary.encode(piece)) for piece in pieces]
    pictures = np.cumsum([piece is PICTURE for piece in pieces])
    owners = [int(n) - (piece is PICTURE) for n, piece in zip(pictures, pieces, strict=True)]
    return np.repeat([-1, *owners[1:]], lengths)


def make_batch(vocabulary: Vocabulary, rng: np.random.Generator, spec: BatchSpec) -> Batch:
    """Draw one training step."""
    labelled = float(rng.choice([0.0, 0.5, 1.0]))
    contexts, layouts, chunk_of, pictures = [], [], [], []
    for _ in range(spec.contexts):
        frames = draw_frames(rng, spec)
        colors = bound_colors(frames)
        contexts.append((frames, colors))
        # A remembered exchange attends to its frame, so frames do not stand apart then.
        pieces = _context(rng, frames, colors, labelled, 0.0 if spec.apart else 0.13)
        layouts.append(place(vocabulary, pieces))
        chunk_of.append(_chunks(vocabulary, pieces))
        pictures += [render(frame) for frame in frames]
    if rng.random() < spec.decoded:
        pictures = through_clip(pictures, rng)

    width = max(len(ids) for ids, _, _ in layouts)
    questions = [draw_questions(rng, frames, colors, spec.questions, spec.agree) for frames, colors in contexts]
    length = len(vocabulary.encode(query_text(questions[0][0][0]))) + 1
    total = width + spec.questions * length
    ids = np.zeros((spec.contexts, total), np.int64)
    positions = np.zeros((spec.contexts, 3, total), np.int64)
    owner = np.full((spec.contexts, total), -2)
    for b, (tokens, places, following) in enumerate(layouts):
        ids[b, : len(tokens)], positions[b, :, : len(tokens)], owner[b, : len(tokens)] = tokens, places, -1
        for q, text in enumerate(questions[b][0]):
            begin = width + q * length
            goal = int(questions[b][1][q].argmax())
            word = (vocabulary.colors + vocabulary.shapes)[goal]
            ids[b, begin : begin + length] = [*vocabulary.encode(query_text(text)), word]
            positions[b, :, begin : begin + length] = np.arange(following, following + length)
            owner[b, begin : begin + length] = q
    # A token sees its context (owner -1) and its own question, causally; padding (-2) sees and is seen by itself only.
    visible = (owner[:, None, :] == -1) | (owner[:, None, :] == owner[:, :, None])
    mask = visible & np.tri(total, dtype=bool)
    if spec.apart:
        for b, chunk in enumerate(chunk_of):
            inside = (chunk[:, None] == chunk) | (chunk == -1)
            mask[b, : len(chunk), : len(chunk)] &= inside

    image_at = np.flatnonzero(ids == vocabulary.image).reshape(spec.contexts, spec.frames, GRID**2)
    things = [tokens.ravel()[context[3]] for tokens, context in zip(image_at, questions, strict=True)]
    is_scene = np.array([[frame.role == "scene" for frame in frames] for frames, _ in contexts])
    drawn = np.array([[frame.appearance for frame in frames] for frames, _ in contexts])
    truth = np.array([colors for _, colors in contexts])
    first = (np.arange(spec.contexts)[:, None] * total + width + np.arange(spec.questions) * length).ravel()
    return Batch(
        pixels=torch.from_numpy(np.stack(pictures)),
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        mask=torch.from_numpy(mask)[:, None],
        real=torch.from_numpy(owner[:, :width] == -1),
        length=length,
        scenes=torch.from_numpy(image_at[is_scene].ravel()),
        scene_colors=torch.from_numpy(color_distribution(truth, drawn)[is_scene].reshape(-1, len(COLORS))),
        numbers=torch.from_numpy(first + NUMBER_AT),
        things=torch.from_numpy(np.concatenate(things)),
        last=torch.from_numpy(first + length - 2),
        targets=torch.from_numpy(np.concatenate([context[1] for context in questions])),
        bound=torch.tensor([flag for context in questions for flag in context[2]]),
    )
