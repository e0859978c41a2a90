"""The generated world behind the bundled model: frames, questions and the rule that gives their answers.

A frame is a grid of 8 x 8 cells of 28 pixels; every cell holds one thing: a shape, an appearance and, for some things,
a two-digit number mark. A *legend* frame shows coloured shapes. A *scene* frame shows grey shapes, and a grey thing
has the colour its shape had in the most recent legend before that scene; later legends do not repaint it, and without
an earlier legend it is "grey". A *faded* scene thing is drawn in one of four pale tints; a tint stands for a pair of
colours, and the thing's colour is the legend's, which lies in that pair. Without a legend a faded thing's colour is
undetermined.

So the colour of a scene thing has to be absorbed from an earlier frame while the scene itself is prefilled, which is
what reusing key-value caches out of context breaks. Only numpy is needed here; every function is reproducible from its
seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from ctxwin.tiny.sprites import CELL, COLORS, GREY, GRID, N_COLORS, N_MARKS, N_SHAPES, N_TINTS, SHAPES
from ctxwin.tiny.truth import (
    NO_MARK,
    TINT_OF,
    UNDETERMINED,
    Frame,
    Item,
    Kind,
    Question,
    Role,
    all_questions,
    answer,
    antecedents,
    bound_colors,
    classify,
    legend_palette,
    locate,
    parse_question,
    render,
)

Task = Literal["single_hop", "multi_hop", "graded", "order"]
Seed = int | np.random.Generator

TASKS: tuple[Task, ...] = ("single_hop", "multi_hop", "graded", "order")


def questions_for(
    frames: Sequence[Frame], k: int, rng: Seed, kinds: Iterable[Kind] = ("single_hop", "multi_hop")
) -> list[Question]:
    """Up to `k` distinct questions of the given kinds about these frames, in random order.

    For `single_hop`, shapes and colours of legend things are drawn with equal weight where both exist.
    """
    rng, wanted = np.random.default_rng(rng), set(kinds)
    pool = [q for q in all_questions(frames) if q.kind in wanted]
    groups: dict[tuple[str, str], list[Question]] = {}
    for index in rng.permutation(len(pool)):
        groups.setdefault((pool[index].kind, pool[index].text[:5]), []).append(pool[index])
    ordered = [group for _, group in sorted(groups.items())]
    chosen: list[Question] = []
    while ordered and len(chosen) < k:
        group = ordered[int(rng.integers(len(ordered)))]
        chosen.append(group.pop())
        ordered = [g for g in ordered if g]
    return chosen


def sample_frames(
    rng: np.random.Generator,
    roles: Sequence[Role],
    *,
    marks: Sequence[Sequence[int]] | None = None,
    marks_per_frame: int | None = None,
    conflict: float = 0.8,
    faded: float = 0.3,
) -> tuple[Frame, ...]:
    """Draw a sequence of frames with the given roles.

    Args:
        rng: Source of randomness.
        roles: One role a frame.
        marks: The marks of each frame; by default, `marks_per_frame` distinct ones that are unique in the sequence.
        marks_per_frame: 0-64 and at most 100 in all; by default as many as fit.
        conflict: Share of sequences in which legends disagree (each redraws half or all of its palette).
        faded: Share of scene things that are drawn in a tint.

    Raises:
        ValueError: If the marks do not fit.
    """
    given = _unique_marks(rng, len(roles), marks_per_frame) if marks is None else marks
    base = rng.integers(N_COLORS, size=N_SHAPES)
    redraw = float(rng.choice([0.5, 1.0])) if rng.random() < conflict else 0.0
    current = np.full(N_SHAPES, UNDETERMINED)
    frames = []
    for role, frame_marks in zip(roles, given, strict=True):
        if role == "legend":
            palette = np.where(rng.random(N_SHAPES) < redraw, rng.integers(N_COLORS, size=N_SHAPES), base)
            shown = rng.permutation(N_SHAPES)[: int(rng.integers(3, N_SHAPES + 1))]
            shape = shown[rng.integers(len(shown), size=(GRID, GRID))]
            appearance = palette[shape]
            current[shape.ravel()] = appearance.ravel()
        else:
            shape = rng.integers(N_SHAPES, size=(GRID, GRID))
            known = current[shape]
            tint = np.where(known == UNDETERMINED, rng.integers(N_TINTS, size=(GRID, GRID)), TINT_OF[known])
            appearance = np.where(rng.random((GRID, GRID)) < faded, GREY + 1 + tint, GREY)
        mark = np.full(GRID * GRID, NO_MARK)
        mark[rng.permutation(GRID * GRID)[: len(frame_marks)]] = frame_marks
        jitter = rng.integers(9, size=(GRID, GRID))
        frames.append(Frame(role, shape, appearance, mark.reshape(GRID, GRID), jitter))
    return tuple(frames)


def _unique_marks(rng: np.random.Generator, n_frames: int, per_frame: int | None) -> list[list[int]]:
    room = min(GRID * GRID, N_MARKS // n_frames)
    per_frame = room if per_frame is None else per_frame
    if not 0 <= per_frame <= room:
        raise ValueError(f"marks_per_frame must be 0..{room} for {n_frames} frames, got {per_frame}")
    chosen: list[list[int]] = rng.permutation(N_MARKS)[: n_frames * per_frame].reshape(n_frames, per_frame).tolist()
    return chosen


def make_item(
    seed: Seed,
    task: Task,
    n_frames: int | None = None,
    *,
    n_questions: int = 1,
    marks_per_frame: int | None = None,
    conflict: float = 0.8,
    faded: float = 0.3,
) -> Item:
    """A context with questions of one task, all of that kind.

    Args:
        seed: An int (same seed, same item) or a generator to draw from.
        task: One of `TASKS`.
        n_frames: 2-6 (1 is allowed for `single_hop`, `order` needs 3); by default drawn.
        n_questions: How many distinct questions; contexts without enough of them are redrawn.
        marks_per_frame: See `sample_frames`.
        conflict: See `sample_frames`.
        faded: See `sample_frames`.

    Raises:
        ValueError: For an unknown task, too few frames for it, or if no context has that many questions.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}")
    rng = np.random.default_rng(seed)
    least = {"single_hop": 1, "order": 3}.get(task, 2)
    count = int(rng.integers(max(least, 2), 7)) if n_frames is None else n_frames
    if count < least:
        raise ValueError(f"task {task!r} needs at least {least} frames, got {count}")
    for _ in range(200):
        roles: list[Role] = ["legend" if rng.random() < 0.5 else "scene" for _ in range(count)]
        frames = sample_frames(rng, roles, marks_per_frame=marks_per_frame, conflict=conflict, faded=faded)
        questions = questions_for(frames, n_questions, rng, (task,))
        if len(questions) == n_questions:
            return Item(frames, tuple(questions))
    raise ValueError(f"no context of {count} frames with {n_questions} {task!r} questions in 200 draws")


def make_stream(
    seed: Seed,
    n_frames: int = 24,
    *,
    window: int = 6,
    anchors: int | None = None,
    conflict: float = 1.0,
    faded: float = 0.3,
) -> list[Frame]:
    """A long clip: legends interleaved with scenes, the first frame a legend, never more than three scenes in a row.

    Every frame carries `anchors` marks that are unique in the whole stream, so a look-back to any frame can be asked
    about, and further marks that are unique within any `window` consecutive frames (all that fit).

    Args:
        seed: An int or a generator.
        n_frames: Length of the stream.
        window: Frames within which all marks are unique.
        anchors: Stream-unique marks a frame; by default 2, fewer where 100 marks do not go round.
        conflict: See `sample_frames`; 1.0 makes legends disagree.
        faded: See `sample_frames`.

    Raises:
        ValueError: If the anchors do not fit into 100 marks.
    """
    rng = np.random.default_rng(seed)
    anchors = min(2, N_MARKS // n_frames) if anchors is None else anchors
    if anchors * n_frames > N_MARKS:
        raise ValueError(f"{anchors} anchors in {n_frames} frames need more than {N_MARKS} marks")
    numbers = rng.permutation(N_MARKS)
    unique, rest = numbers[: anchors * n_frames].reshape(n_frames, anchors), numbers[anchors * n_frames :]
    turn = min(len(rest) // window, GRID * GRID - anchors)
    marks = [[*unique[i], *rest[i % window * turn : (i % window + 1) * turn]] for i in range(n_frames)]
    roles: list[Role] = []
    for _ in range(n_frames):
        due = not roles or roles[-3:] == ["scene"] * 3
        roles.append("legend" if due or rng.random() < 0.35 else "scene")
    return list(sample_frames(rng, roles, marks=marks, conflict=conflict, faded=faded))


__all__ = [
    "CELL",
    "COLORS",
    "GRID",
    "NO_MARK",
    "SHAPES",
    "TASKS",
    "UNDETERMINED",
    "Frame",
    "Item",
    "Kind",
    "Question",
    "Role",
    "Task",
    "all_questions",
    "answer",
    "antecedents",
    "bound_colors",
    "classify",
    "legend_palette",
    "locate",
    "make_item",
    "make_stream",
    "parse_question",
    "questions_for",
    "render",
    "sample_frames",
]
