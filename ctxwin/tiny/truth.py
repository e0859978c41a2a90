"""Frames and questions of the generated world, and the rule that gives the answers (see `ctxwin.tiny.world`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ctxwin.tiny.sprites import COLORS, GREY, GRID, N_COLORS, N_MARKS, N_SHAPES, SHAPES, TINT_PAIRS, paint

Role = Literal["legend", "scene"]
Kind = Literal["single_hop", "multi_hop", "graded", "order", "graded_order", "unbound"]
IntArray = NDArray[np.int64]

NO_MARK = -1
UNDETERMINED = -1
_QUESTION = re.compile(r"(color|shape) of (\d\d)\?")
TINT_OF = np.array([next(t for t, pair in enumerate(TINT_PAIRS) if c in pair) for c in range(N_COLORS)])


@dataclass(frozen=True, eq=False)
class Frame:
    """One picture of the world, before rendering. All arrays are read-only int64 of shape [8, 8].

    Attributes:
        role: "legend" (coloured things) or "scene" (grey and faded things).
        shape: index into `SHAPES`.
        appearance: how the thing is drawn: 0-7 a colour of `COLORS`, 8 grey, 9-12 a pale tint.
        mark: the number written below the thing, 0-99, or `NO_MARK`.
        jitter: offset of the sprite inside its cell, 0-8 (row-major over -1, 0, +1 pixels).
    """

    role: Role
    shape: IntArray
    appearance: IntArray
    mark: IntArray
    jitter: IntArray

    def __post_init__(self) -> None:
        for array in self._arrays():
            if array.shape != (GRID, GRID):
                raise ValueError(f"frame arrays must have shape ({GRID}, {GRID}), got {array.shape}")
            array.setflags(write=False)

    def _arrays(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        return self.shape, self.appearance, self.mark, self.jitter

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame):
            return NotImplemented
        same = all(np.array_equal(a, b) for a, b in zip(self._arrays(), other._arrays(), strict=True))
        return self.role == other.role and same

    def __hash__(self) -> int:
        return hash((self.role, *(a.tobytes() for a in self._arrays())))

    @property
    def marks(self) -> tuple[int, ...]:
        """The marks in this frame, in reading order."""
        return tuple(int(m) for m in self.mark.ravel() if m != NO_MARK)


@dataclass(frozen=True)
class Question:
    """A question with its truth.

    Attributes:
        text: what is asked: "shape of 17?" or "color of 17?".
        kind: what answering takes; see `classify`.
        frame: index of the frame that holds the marked thing.
        mark: the number asked about.
        answer: one word.
        antecedents: indices of the earlier frames that frame's tokens must have absorbed, ascending: none for a
            single hop, the deciding legend for `multi_hop` and `graded`, every earlier legend that defines the shape
            for `order`.
    """

    text: str
    kind: Kind
    frame: int
    mark: int
    answer: str
    antecedents: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """A context of frames, in order, and questions asked after all of them."""

    frames: tuple[Frame, ...]
    questions: tuple[Question, ...]


def render(frame: Frame) -> NDArray[np.uint8]:
    """Draw a frame; returns RGB uint8 [224, 224, 3]."""
    return paint(frame.shape, frame.appearance, frame.mark, frame.jitter)


def legend_palette(frame: Frame) -> IntArray:
    """Colour index of each shape in a legend, [8]; `UNDETERMINED` for shapes it does not show (and for every scene)."""
    palette = np.full(N_SHAPES, UNDETERMINED)
    if frame.role == "legend":
        palette[frame.shape.ravel()] = frame.appearance.ravel()
    return palette


def bound_colors(frames: Sequence[Frame]) -> list[IntArray]:
    """The true colour index (8 is grey) of every cell of every frame, each [8, 8].

    Faded things that no earlier legend decides, or whose legend contradicts their tint, are `UNDETERMINED`.
    """
    current = np.full(N_SHAPES, UNDETERMINED)
    result = []
    for frame in frames:
        if frame.role == "legend":
            palette = legend_palette(frame)
            current = np.where(palette == UNDETERMINED, current, palette)
            result.append(frame.appearance.copy())
            continue
        known = current[frame.shape]
        tint = frame.appearance - GREY - 1
        agrees = (known != UNDETERMINED) & (TINT_OF[known] == tint)
        plain = np.where(known == UNDETERMINED, GREY, known)
        result.append(np.where(tint < 0, plain, np.where(agrees, known, UNDETERMINED)))
    return result


def locate(frames: Sequence[Frame], mark: int) -> tuple[int, int, int] | None:
    """(frame, row, column) of the thing with this mark; None if no frame, or more than one thing, carries it."""
    found = [(i, int(r), int(c)) for i, f in enumerate(frames) for r, c in np.argwhere(f.mark == mark)]
    return found[0] if len(found) == 1 else None


def answer(frames: Sequence[Frame], question_text: str) -> str | None:
    """The truth for a question about any sequence of frames, in the order given.

    Returns None where the mark is absent or ambiguous, or the colour is undetermined.

    Raises:
        ValueError: If the text is not "shape of NN?" or "color of NN?".
    """
    attribute, mark = parse_question(question_text)
    place = locate(frames, mark)
    if place is None:
        return None
    index, row, column = place
    if attribute == "shape":
        return SHAPES[frames[index].shape[row, column]]
    color = int(bound_colors(frames[: index + 1])[index][row, column])
    return None if color == UNDETERMINED else COLORS[color]


def parse_question(text: str) -> tuple[str, int]:
    """Split a question into its attribute ("color" or "shape") and its mark.

    Raises:
        ValueError: If the text is not a question of this world.
    """
    match = _QUESTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'question must be "shape of NN?" or "color of NN?", got {text!r}')
    return match.group(1), int(match.group(2))


def antecedents(frames: Sequence[Frame], mark: int) -> tuple[int, ...]:
    """Earlier frames whose content decides the colour of the marked thing (see `Question.antecedents`)."""
    place = locate(frames, mark)
    if place is None or frames[place[0]].role == "legend":
        return ()
    index, row, column = place
    return _deciding([legend_palette(f) for f in frames[:index]], int(frames[index].shape[row, column]))


def _deciding(palettes: Sequence[IntArray], shape: int) -> tuple[int, ...]:
    """Indices of all legends that define a shape if they disagree, of the last one if they agree."""
    defining = [i for i, palette in enumerate(palettes) if palette[shape] != UNDETERMINED]
    agree = len({int(palettes[i][shape]) for i in defining}) < 2
    return tuple(defining[-1:] if agree else defining)


def classify(frames: Sequence[Frame], mark: int) -> Kind | None:
    """What asking for the colour of a mark takes, given the frames in this order.

    `single_hop`: a legend thing. `multi_hop`: a grey scene thing, decided by an earlier legend whatever the order of
    the legends. `order`: a grey scene thing for whose shape earlier legends disagree. `graded`, `graded_order`: the
    same two for a faded thing. `unbound`: a grey scene thing with no earlier legend for its shape. None: no answer.
    """
    place = locate(frames, mark)
    if place is None or answer(frames, f"color of {mark:02d}?") is None:
        return None
    index, row, column = place
    return _color_kind(frames[index], row, column, antecedents(frames, mark))


def _color_kind(frame: Frame, row: int, column: int, needed: tuple[int, ...]) -> Kind:
    if frame.role == "legend":
        return "single_hop"
    if not needed:
        return "unbound"
    faded = frame.appearance[row, column] > GREY
    if len(needed) > 1:
        return "graded_order" if faded else "order"
    return "graded" if faded else "multi_hop"


def all_questions(frames: Sequence[Frame]) -> list[Question]:
    """Every question that has an answer: the shape and, where determined, the colour of every unambiguous mark."""
    everything = np.concatenate([frame.mark.ravel() for frame in frames])
    counts = np.bincount(everything[everything != NO_MARK], minlength=N_MARKS)
    colors, palettes = bound_colors(frames), [legend_palette(frame) for frame in frames]
    questions = []
    for index, frame in enumerate(frames):
        for row, column in np.argwhere(frame.mark != NO_MARK):
            mark, color, shape = (int(a[row, column]) for a in (frame.mark, colors[index], frame.shape))
            if counts[mark] != 1:
                continue
            questions.append(Question(f"shape of {mark:02d}?", "single_hop", index, mark, SHAPES[shape], ()))
            if color != UNDETERMINED:
                needed = _deciding(palettes[:index], shape) if frame.role == "scene" else ()
                kind = _color_kind(frame, row, column, needed)
                questions.append(Question(f"color of {mark:02d}?", kind, index, mark, COLORS[color], needed))
    return questions
