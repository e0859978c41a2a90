"""The generated world of the bundled model: frames, questions and the rule that gives their answers.

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

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ctxwin.tiny.sprites import COLORS, GREY, GRID, N_COLORS, N_MARKS, N_SHAPES, N_TINTS, SHAPES, TINT_PAIRS, paint

Role = Literal["legend", "scene"]
Kind = Literal["single_hop", "multi_hop", "graded", "order", "graded_order", "unbound"]
IntArray = NDArray[np.int64]

NO_MARK = -1
UNDETERMINED = -1
_QUESTION = re.compile(r"(color|shape) of (\d\d)\?")
TINT_OF = np.array([next(t for t, pair in enumerate(TINT_PAIRS) if c in pair) for c in range(N_COLORS)])

Task = Literal["single_hop", "multi_hop", "graded", "order"]
Seed = int | np.random.Generator

TASKS: tuple[Task, ...] = ("single_hop", "multi_hop", "graded", "order")


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
        kind: what answering takes, given the frames in their order. ``single_hop``: a shape, or the colour of a legend thing.
            ``multi_hop``: a grey scene thing, decided by an earlier legend whatever the order of the legends. ``order``: one
            for whose shape earlier legends disagree. ``graded``, ``graded_order``: the same two for a faded thing.
            ``unbound``: a grey scene thing with no earlier legend for its shape.
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
        color = current[frame.shape]
        tint = frame.appearance - GREY - 1
        agrees = (color != UNDETERMINED) & (TINT_OF[color] == tint)
        plain = np.where(color == UNDETERMINED, GREY, color)
        result.append(np.where(tint < 0, plain, np.where(agrees, color, UNDETERMINED)))
    return result


def locate(frames: Sequence[Frame], mark: int) -> tuple[int, int, int] | None:
    """Return (frame, row, column) of the thing with this mark; None if no thing, or more than one, carries it."""
    places = [(i, int(r), int(c)) for i, f in enumerate(frames) for r, c in np.argwhere(f.mark == mark)]
    return places[0] if len(places) == 1 else None


def answer(frames: Sequence[Frame], question_text: str) -> str | None:
    """Return the true answer to a question about a sequence of frames, in the order given.

    None if the mark is absent or ambiguous, or the colour is undetermined.

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
    """Return the earlier frames whose content decides the colour of the marked thing (see `Question.antecedents`)."""
    place = locate(frames, mark)
    if place is None or frames[place[0]].role == "legend":
        return ()
    index, row, column = place
    return _deciding([legend_palette(f) for f in frames[:index]], int(frames[index].shape[row, column]))


def _deciding(palettes: Sequence[IntArray], shape: int) -> tuple[int, ...]:
    """Return the indices of all legends that define a shape if they disagree, of the last one if they agree."""
    defining = [i for i, palette in enumerate(palettes) if palette[shape] != UNDETERMINED]
    agree = len({int(palettes[i][shape]) for i in defining}) < 2
    return tuple(defining[-1:] if agree else defining)


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
    """Return every question with an answer: the shape and, if determined, the colour of every unambiguous mark."""
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


def question_about(frames: Sequence[Frame], index: int, attribute: Literal["color", "shape"] = "color") -> Question:
    """Return the first question about one frame, in reading order, that has exactly one answer by these frames.

    Its mark is in no other of the frames, so the answer holds for every window over them that has seen the frame.

    Raises:
        ValueError: there is none.
    """
    for question in all_questions(frames):
        if question.frame == index and question.text.startswith(attribute):
            return question
    raise ValueError(f"frame {index} must hold a mark of its own with a {attribute}, got none")


def questions_for(
    frames: Sequence[Frame], k: int, rng: Seed, kinds: Iterable[Kind] = ("single_hop", "multi_hop")
) -> list[Question]:
    """Return up to `k` distinct questions of the given kinds about these frames, in random order.

    For `single_hop`, shapes and colours of legend things are drawn with equal weight if both exist.
    """
    rng, kind_set = np.random.default_rng(rng), set(kinds)
    pool = [q for q in all_questions(frames) if q.kind in kind_set]
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
    frame_mark_lists = _unique_marks(rng, len(roles), marks_per_frame) if marks is None else marks
    base = rng.integers(N_COLORS, size=N_SHAPES)
    redraw = float(rng.choice([0.5, 1.0])) if rng.random() < conflict else 0.0
    current = np.full(N_SHAPES, UNDETERMINED)
    frames = []
    for role, frame_marks in zip(roles, frame_mark_lists, strict=True):
        if role == "legend":
            palette = np.where(rng.random(N_SHAPES) < redraw, rng.integers(N_COLORS, size=N_SHAPES), base)
            visible = rng.permutation(N_SHAPES)[: int(rng.integers(3, N_SHAPES + 1))]
            shape = visible[rng.integers(len(visible), size=(GRID, GRID))]
            appearance = palette[shape]
            current[shape.ravel()] = appearance.ravel()
        else:
            shape = rng.integers(N_SHAPES, size=(GRID, GRID))
            color = current[shape]
            tint = np.where(color == UNDETERMINED, rng.integers(N_TINTS, size=(GRID, GRID)), TINT_OF[color])
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


def make_stream(seed: Seed, n_frames: int = 24, *, window: int = 6, anchors: int | None = None) -> list[Frame]:
    """A long clip: legends that disagree, interleaved with scenes; the first frame a legend, never four scenes in a row.

    Every frame carries `anchors` marks that are unique in the whole stream, so a look-back to any frame can be asked
    about, and further marks that are unique within any `window` consecutive frames (all that fit).

    Args:
        seed: An int or a generator.
        n_frames: Length of the stream.
        window: Frames within which all marks are unique.
        anchors: Stream-unique marks a frame; by default 2, fewer where 100 marks do not go round.

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
    return list(sample_frames(rng, roles, marks=marks, conflict=1.0))
