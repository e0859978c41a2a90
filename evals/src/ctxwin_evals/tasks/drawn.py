"""Draws of generated items that a window's history makes hard: slides, recalls, changed antecedents, orders.

Everything is a pure function of a generator, the number of frames, the task's amount and a turn (see `Draw`).
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from ctxwin.tiny import world as tiny
from ctxwin_evals.tasks.edits import Edit, other_orders

SAMPLED_ORDERS = 24
"""Orders sampled for six predecessors; for three and four all other orders are taken (Kamera, section 5, "Reorder")."""
TRAINED_FRAMES = 6
"""The bundled model was trained on contexts of up to this many frames."""
COLOURED: tuple[tiny.Kind, ...] = ("multi_hop", "order", "unbound")
_DRAWS = 400


class Drawn(NamedTuple):
    """A context as drawn.

    Attributes:
        frames: every frame concerned; ``before`` and ``placed`` index them.
        before: what was placed earlier; empty where nothing was.
        placed: what is placed when the question is asked.
        question: of the world.
        meta: further figures of the item, JSON-able.
    """

    frames: Sequence[tiny.Frame]
    before: Sequence[int]
    placed: Sequence[int]
    question: tiny.Question
    meta: dict[str, Any]


Draw = Callable[[np.random.Generator, int, float, int], Drawn]
"""(generator, number of frames, the task's amount, turn) -> a context. Items that differ in ``turn`` alone get generators
in the same state."""


def world(rng: np.random.Generator, frames: int, amount: float, turn: int, *, task: tiny.Task) -> Drawn:
    """A context without a history."""
    item = tiny.make_item(rng, task, frames)
    return Drawn(item.frames, (), range(frames), item.questions[0], {})


def _retry(attempt: Callable[..., Drawn | None]) -> Callable[..., Drawn]:
    """Draw until an attempt gives a context that has what its question needs; ValueError after `_DRAWS` of them."""

    @wraps(attempt)
    def draw(rng: np.random.Generator, frames: int, amount: float, turn: int, **options: Any) -> Drawn:
        for _ in range(_DRAWS):
            if (drawn := attempt(rng, frames, amount, turn, **options)) is not None:
                return drawn
        raise ValueError(f"no {attempt.__name__} of {frames} frames at amount {amount:g} in {_DRAWS} draws")

    return draw


@_retry
def slide(rng: np.random.Generator, frames: int, amount: float, turn: int, *, needed: bool) -> Drawn | None:
    """The leading frame leaves a window; it was the legend that decides what is asked, or has no part in it."""
    first: tiny.Role = "legend" if needed or rng.random() < 0.5 else "scene"
    drawn = tiny.sample_frames(rng, [first, *_roles(rng, frames - 1)])
    pool = [
        q
        for q in _questions(drawn, rng, "multi_hop")
        if q.frame > 0 and (q.antecedents == (0,) if needed else 0 not in q.antecedents)
    ]
    # Where older legends agree with the deciding one, the answer would not need the one that leaves.
    pool = [q for q in pool if (tiny.answer(drawn[1:], q.text) != q.answer) == needed]
    return Drawn(drawn, range(frames), range(1, frames), _pick(pool, rng), {}) if pool else None


@_retry
def slide_repeated(rng: np.random.Generator, frames: int, amount: float, turn: int) -> Drawn | None:
    """The leading legend leaves, and a frame between it and what is asked shows the same again: the answer stays."""
    drawn = list(tiny.sample_frames(rng, ["legend", *_roles(rng, frames - 1)]))
    pool = [q for q in _questions(drawn, rng, "multi_hop") if q.frame > 1 and q.antecedents == (0,)]
    pool = [q for q in pool if tiny.answer(drawn[1:], q.text) != q.answer]
    if not pool:
        return None
    question = _pick(pool, rng)
    drawn[int(rng.integers(1, question.frame))] = drawn[0]
    if tiny.answer(drawn[1:], question.text) != question.answer:
        return None
    return Drawn(drawn, range(frames), range(1, frames), question, {})


@_retry
def history(
    rng: np.random.Generator, frames: int, amount: float, turn: int, *, kinds: Sequence[tiny.Kind] = COLOURED
) -> Drawn | None:
    """A window of ``frames`` frames after ``amount`` slides of a longer stream; every frame met the window of its time.

    Asked about are things, by default coloured or grey ones, whose mark is unique in the whole stream.
    """
    length = frames + int(amount)
    drawn = tiny.make_stream(rng, length, window=TRAINED_FRAMES)
    marks = [mark for frame in drawn for mark in frame.marks]
    pool = _questions(drawn[-frames:], rng, *kinds)
    pool = [q for q in pool if q.frame and marks.count(q.mark) == 1]
    if not pool:
        return None
    return Drawn(drawn, range(length), range(length - frames, length), _pick(pool, rng), {"stream_window": frames})


@_retry
def recall(rng: np.random.Generator, frames: int, amount: float, turn: int) -> Drawn | None:
    """A scene after ``frames - 1`` others is evicted, a share ``amount`` of those is replaced, and it is recalled after them.

    The asked thing is grey and decided by a legend before it both times, by a new one where the old one is gone. A
    replacement carries the marks of the frame it replaces, so that marks stay unique.
    """
    front = frames - 1
    swapped = int(np.floor(amount * front + 0.5))
    drawn = tiny.sample_frames(rng, [*_roles(rng, front), "scene"], conflict=1.0)
    out = sorted(int(i) for i in rng.permutation(front)[:swapped])
    fresh = tiny.sample_frames(rng, _roles(rng, swapped), marks=[drawn[i].marks for i in out], conflict=1.0)
    order = [*range(front), front]
    for position, new in zip(out, range(front + 1, front + 1 + swapped), strict=True):
        order[position] = new
    pool = [*drawn, *fresh]
    now = [pool[i] for i in order]
    of_front = (q for q in _questions(drawn, rng, "multi_hop") if q.frame == front)
    questions = [q for q in of_front if len(tiny.antecedents(now, q.mark)) == 1]
    return Drawn(pool, range(frames), order, _pick(questions, rng), {}) if questions else None


@_retry
def changed(
    rng: np.random.Generator, frames: int, amount: float, turn: int, *, edit: Edit, count: int | None = None
) -> Drawn | None:
    """A scene's patch was formed after ``frames - 1`` others; it is served after them as ``edit`` leaves them.

    The edit's amount is ``count``, or the task's. The asked thing is grey and was decided by one legend or by the last of
    several. Its answer may change.
    """
    front = frames - 1
    drawn, others = _with_others(rng, front, front)
    edited = edit(range(front), range(frames, frames + len(others)), rng, int(amount) if count is None else count)
    pool = [q for q in _questions(drawn, rng, "multi_hop", "order") if q.frame == front]
    if not pool:
        return None
    # Of the others only those that came in, so that nothing is drawn or encoded in vain.
    names = {old: new for new, old in enumerate(sorted({*range(frames), *edited}))}
    used = [[*drawn, *others][old] for old in names]
    return Drawn(used, range(frames), [*(names[i] for i in edited), front], _pick(pool, rng), {})


@_retry
def excess(rng: np.random.Generator, frames: int, amount: float, turn: int, *, edit: Edit) -> Drawn | None:
    """A scene's patch was formed after two frames; it is served with ``amount`` more that have no part in the answer."""
    count = int(amount)
    drawn, others = _with_others(rng, 2, count)
    order = [*edit(range(2), range(3, 3 + count), rng, count), 2]
    pool = [*drawn, *others]
    now = [pool[i] for i in order]
    questions = [q for q in _questions(drawn, rng, "multi_hop") if q.frame == 2]
    questions = [q for q in questions if tuple(order[i] for i in tiny.antecedents(now, q.mark)) == q.antecedents]
    return Drawn(pool, range(3), order, _pick(questions, rng), {}) if questions else None


def reorder(rng: np.random.Generator, frames: int, amount: float, turn: int) -> Drawn:
    """``amount`` predecessors in the order of this turn; the stored patch is of their first order."""
    orders = other_orders(range(int(amount)), orders_of(amount), 0x7065726D, int(amount), int(rng.integers(2**31)))
    return _reordered(rng, frames, amount, turn, order=orders[turn])


@_retry
def _reordered(
    rng: np.random.Generator, frames: int, amount: float, turn: int, *, order: tuple[int, ...]
) -> Drawn | None:
    count = len(order)
    drawn = tiny.sample_frames(rng, [*_roles(rng, count), "scene"])
    pool = [q for q in _questions(drawn, rng, "multi_hop", "order") if q.frame == count]
    if not pool:
        return None
    question = _pick(pool, rng)
    meta = {"order": list(order), "legends": len(tiny.antecedents(drawn, question.mark))}
    return Drawn(drawn, range(count + 1), (*order, count), question, meta)


def orders_of(amount: float) -> int:
    """How many orders of that many predecessors are asked about: every other one of three and four, 24 of six."""
    return {3: 5, 4: 23}.get(int(amount), SAMPLED_ORDERS)


def _with_others(rng: np.random.Generator, front: int, others: int) -> tuple[list[tiny.Frame], list[tiny.Frame]]:
    """``front`` frames and a scene, and frames of another clip; every mark is unique in all of them."""
    total = front + 1 + others
    marks = rng.permutation(100)[: total * (100 // total)].reshape(total, -1)[:, :64].tolist()
    drawn = tiny.sample_frames(rng, [*_roles(rng, front), "scene"], marks=marks[: front + 1])
    return list(drawn), list(tiny.sample_frames(rng, _roles(rng, others), marks=marks[front + 1 :]))


def _questions(frames: Sequence[tiny.Frame], rng: np.random.Generator, *kinds: tiny.Kind) -> list[tiny.Question]:
    return tiny.questions_for(frames, 1000, rng, kinds)


def _pick(pool: Sequence[tiny.Question], rng: np.random.Generator) -> tiny.Question:
    return pool[int(rng.integers(len(pool)))]


def _roles(rng: np.random.Generator, count: int) -> list[tiny.Role]:
    return ["legend" if rng.random() < 0.5 else "scene" for _ in range(count)]
