"""Random draws of a training step: frames, and questions with the distributions of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctxwin.tiny.sprites import COLORS, GREY, GRID, N_COLORS, SHAPES, TINT_PAIRS
from ctxwin.tiny.world import NO_MARK, UNDETERMINED, Frame, Role, legend_palette, sample_frames

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class BatchSpec:
    """Size and content of the draw of one step.

    Attributes:
        contexts: Number of contexts.
        frames: Frames in each.
        marks: Marks in each frame.
        questions: Questions to each context.
        decoded: Share of steps with decoded frames.
        agree: All legends of a context show one palette, most scenes follow them, half of the contexts have no tints, and
            no question depends on the order of the frames.
        apart: A frame sees the header and itself only, as if it were prefilled alone; questions see everything.
    """

    contexts: int
    frames: int
    marks: int
    questions: int
    decoded: float = 0.2
    agree: bool = False
    apart: bool = False


def color_distribution(color: IntArray, appearance: IntArray) -> NDArray[np.float32]:
    """One-hot colour, or half and half over the tint's pair where undetermined; [..., 9]."""
    table = np.eye(len(COLORS), dtype=np.float32)
    pairs = np.stack([table[list(pair)].mean(0) for pair in TINT_PAIRS])
    faded = pairs[np.maximum(appearance - GREY - 1, 0)]
    return np.where((color == UNDETERMINED)[..., None], faded, table[color])


def draw_frames(rng: np.random.Generator, spec: BatchSpec) -> tuple[Frame, ...]:
    """The frames of one context."""
    opening: Role = "legend" if rng.random() < (0.95 if spec.agree else 0.65) else "scene"
    roles: list[Role] = [opening, *("legend" if rng.random() < 0.45 else "scene" for _ in range(spec.frames - 1))]
    if not spec.agree:
        return sample_frames(rng, roles, marks_per_frame=spec.marks)
    if rng.random() < 0.8:
        roles.sort()  # legends in front
    faded = float(rng.choice([0.0, 0.3]))
    return sample_frames(rng, roles, marks_per_frame=spec.marks, conflict=0.0, faded=faded)


def _order_decides(frames: Sequence[Frame], colors: Sequence[IntArray], cell: tuple[int, int, int]) -> bool:
    """Return True if a scene thing has no colour of its own, or is grey only because its legend comes later."""
    index, row, column = cell
    color, shape = colors[index][row, column], frames[index].shape[row, column]
    later = any(legend_palette(frame)[shape] != UNDETERMINED for frame in frames[index + 1 :])
    return bool(color == UNDETERMINED or (color == GREY and later))


def draw_questions(
    rng: np.random.Generator, frames: Sequence[Frame], colors: Sequence[IntArray], count: int, agree: bool = False
) -> tuple[list[str], NDArray[np.float32], list[bool], list[int]]:
    """`count` questions, mostly colours of scene things; see `BatchSpec` for `agree`.

    Returns texts, target distributions [count, 17], whether a legend decides them, and the index of the thing among the
    image tokens of the context.
    """
    cells = [(f, int(r), int(c)) for f, frame in enumerate(frames) for r, c in np.argwhere(frame.mark != NO_MARK)]
    scenes = [cell for cell in cells if frames[cell[0]].role == "scene"]
    if agree:
        scenes = [cell for cell in scenes if not _order_decides(frames, colors, cell)]
    legends = [cell for cell in cells if frames[cell[0]].role == "legend"]
    targets = np.zeros((count, len(COLORS) + len(SHAPES)), np.float32)
    texts, bound, things = [], [], []
    for index in range(count):
        draw = rng.random()
        pool = cells if draw < 0.2 else (legends or scenes) if draw < 0.4 else (scenes or legends)
        if not pool:  # only where `agree` left no colour to ask about
            draw, pool = 0.0, cells
        f, r, c = pool[int(rng.integers(len(pool)))]
        frame, color = frames[f], colors[f][r, c]
        if draw < 0.2:
            texts.append(f"shape of {frame.mark[r, c]:02d}?")
            targets[index, len(COLORS) + frame.shape[r, c]] = 1
        else:
            texts.append(f"color of {frame.mark[r, c]:02d}?")
            targets[index, : len(COLORS)] = color_distribution(color, frame.appearance[r, c])
        bound.append(bool(draw >= 0.2 and frame.role == "scene" and 0 <= color < N_COLORS))
        things.append((f * GRID + r) * GRID + c)
    return texts, targets, bound, things
