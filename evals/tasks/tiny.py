"""Generated tasks: contexts of frames in a setting (a window, a slide, a recall), one question each.

Items are drawn from `ctxwin.tiny.world` with held-out seeds: an item's generator is seeded by
``(SPACE, seed, task, variant, index)``, the trainer's by ``(seed, stage, step)``, and `SPACE` is a constant that no
training run uses as its seed, so no item can be a training batch. An item depends on its own index only, never on how
many are drawn.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.evals.items import Item, Scored, Setting, Task
from ctxwin.identity import digest
from ctxwin.tiny.world import (
    Frame,
    Question,
    Role,
    answer,
    antecedents,
    make_item,
    questions_for,
    render,
    sample_frames,
)
from ctxwin.tiny.world import Task as WorldTask

SPACE = 0x63747877
"""First word of every evaluation seed ("ctxw"); the fit split of a shared basis has `FIT_SPACE`."""
FIT_SPACE = 0x66697473

_DRAWS = 400


@dataclass(frozen=True)
class Case:
    """One item in its setting.

    Attributes:
        task, index: which item this is.
        frames: every frame concerned; the tuples below index them.
        before: what was placed when survivors were conditioned (slide), or when the patch was formed (recall); else
            empty.
        placed: what is placed when the question is asked.
        asked: position in ``placed`` of the frame that holds the answer.
        question, truth: the text, and the generator's answer over the placed frames.
    """

    task: str
    index: int
    frames: tuple[Frame, ...]
    before: tuple[int, ...]
    placed: tuple[int, ...]
    asked: int
    question: str
    truth: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Cases of one shape can share a forward."""
        return len(self.frames), len(self.before), len(self.placed)

    @property
    def digest(self) -> str:
        """Content of the item, so that samples of another generator are noticed."""
        drawn = [[f.role, *(a.tobytes() for a in (f.shape, f.appearance, f.mark, f.jitter))] for f in self.frames]
        return digest("case", drawn, list(self.before), list(self.placed), self.question, self.truth)


Draw = Callable[[np.random.Generator, int, float], "tuple[Sequence[Frame], Sequence[int], Sequence[int], Question]"]


@dataclass(frozen=True)
class Generated:
    """A kind of item.

    Attributes:
        setting: what happens before the question; decides which arms apply and what their base is.
        least: fewest frames; smaller numbers are left out for it.
        draw: makes (frames, before, placed, question) from a generator, a number of frames and the turnover.
    """

    name: str
    about: str
    setting: Setting
    least: int
    draw: Draw

    def case(self, seed: int, index: int, frames: Sequence[int], turnover: float = 0.0, space: int = SPACE) -> Case:
        """The item at ``index``; its number of frames cycles through ``frames``.

        Raises ValueError where no number of frames is enough for this task.
        """
        counts = [f for f in frames if f >= self.least]
        if not counts:
            raise ValueError(f"frames must include {self.least} or more for task {self.name!r}, got {list(frames)}")
        variant = round(turnover * 10_000)
        rng = np.random.default_rng((space, seed, zlib.crc32(self.name.encode()), variant, index))
        drawn, before, placed, question = self.draw(rng, counts[index % len(counts)], turnover)
        sequence = [drawn[i] for i in placed]
        truth = answer(sequence, question.text)
        if truth is None:
            raise ValueError(f"item {index} of {self.name!r} has no answer over the placed frames")
        asked = next(i for i, frame in enumerate(sequence) if question.mark in frame.marks)
        return Case(self.name, index, tuple(drawn), tuple(before), tuple(placed), asked, question.text, truth)


def _world(task: WorldTask) -> Draw:
    def draw(
        rng: np.random.Generator, frames: int, turnover: float
    ) -> tuple[Sequence[Frame], Sequence[int], Sequence[int], Question]:
        item = make_item(rng, task, frames)
        return item.frames, (), range(frames), item.questions[0]

    return draw


def _slide(needed: bool) -> Draw:
    """The leading frame leaves a window; it was the legend that decides what is asked, or has no part in it."""

    def draw(
        rng: np.random.Generator, frames: int, turnover: float
    ) -> tuple[Sequence[Frame], Sequence[int], Sequence[int], Question]:
        for _ in range(_DRAWS):
            first: Role = "legend" if needed or rng.random() < 0.5 else "scene"
            roles: list[Role] = [first, *_roles(rng, frames - 1)]
            drawn = sample_frames(rng, roles)
            pool = [
                q
                for q in questions_for(drawn, 1000, rng, ("multi_hop",))
                if q.frame > 0 and (q.antecedents == (0,) if needed else 0 not in q.antecedents)
            ]
            # Where older legends agree with the deciding one, the answer would not need the one that leaves.
            pool = [q for q in pool if (answer(drawn[1:], q.text) != q.answer) == needed]
            if pool:
                return drawn, range(frames), range(1, frames), pool[int(rng.integers(len(pool)))]
        raise ValueError(f"no sliding window of {frames} frames in {_DRAWS} draws")

    return draw


def _recall(
    rng: np.random.Generator, frames: int, turnover: float
) -> tuple[Sequence[Frame], Sequence[int], Sequence[int], Question]:
    """A scene behind ``frames - 1`` others is evicted; ``turnover`` of those are replaced; it is recalled behind them.

    The asked thing is grey and decided by a legend in front both times, by a new one where the old one is gone. A
    replacement carries the marks of the frame it replaces, so that marks stay unique.
    """
    front = frames - 1
    replaced = int(np.floor(turnover * front + 0.5))
    for _ in range(_DRAWS):
        roles: list[Role] = [*_roles(rng, front), "scene"]
        drawn = sample_frames(rng, roles, conflict=1.0)
        out = sorted(int(i) for i in rng.permutation(front)[:replaced])
        fresh = sample_frames(rng, _roles(rng, replaced), marks=[drawn[i].marks for i in out], conflict=1.0)
        placed = [*range(front), front]
        for position, new in zip(out, range(front + 1, front + 1 + replaced), strict=True):
            placed[position] = new
        pool = [*drawn, *fresh]
        now = [pool[i] for i in placed]
        candidates = [q for q in questions_for(drawn, 1000, rng, ("multi_hop",)) if q.frame == front]
        kept = [q for q in candidates if len(antecedents(now, q.mark)) == 1]
        if kept:
            return pool, range(frames), placed, kept[int(rng.integers(len(kept)))]
    raise ValueError(f"no recall behind {front} frames at turnover {turnover} in {_DRAWS} draws")


def _roles(rng: np.random.Generator, count: int) -> list[Role]:
    return ["legend" if rng.random() < 0.5 else "scene" for _ in range(count)]


TASKS: dict[str, Generated] = {
    t.name: t
    for t in (
        Generated("single_hop", "answered by one frame alone", "window", 2, _world("single_hop")),
        Generated("multi_hop", "needs the one earlier legend that decides it", "window", 2, _world("multi_hop")),
        Generated("graded", "as multi_hop, with a tint that leaves two colours open", "window", 2, _world("graded")),
        Generated("order", "earlier legends disagree: their order decides", "window", 3, _world("order")),
        Generated("slide_distractor", "the leading frame leaves; it has no part in it", "slide", 3, _slide(False)),
        Generated("slide_needed", "the leading frame leaves; it was the deciding legend", "slide", 2, _slide(True)),
        Generated("recall", "a scene comes back behind frames of which a share was replaced", "recall", 3, _recall),
    )
}
CONTROLS = ("single_hop", "slide_distractor")
"""One frame alone answers these, or what leaves has no part in it: reuse should not change the answer."""
WORLD_TASKS = ("single_hop", "multi_hop", "graded", "order")


def fit_cases(seed: int, count: int, frames: Sequence[int]) -> list[Case]:
    """Contexts that a shared basis is fitted on; from a seed space of their own."""
    fitting = [TASKS[name] for name in ("multi_hop", "order", "graded") if TASKS[name].least <= max(frames)]
    return [fitting[i % len(fitting)].case(seed, i, frames, space=FIT_SPACE) for i in range(count)]


@dataclass(frozen=True)
class TinyOptions:
    """What generated items depend on beside their task and index.

    Attributes:
        seed: of the items.
        frames: numbers of frames, cycled through by index.
        decoded: frames pass through an mp4 file first.
    """

    seed: int = 0
    frames: tuple[int, ...] = (2, 3, 4, 5, 6)
    decoded: bool = False

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if not self.frames or any(not 2 <= f <= 6 for f in self.frames):
            raise ValueError(f"frames must be numbers from 2 to 6, got {list(self.frames)}")


class TinyTask(Task):
    """A kind of generated item, ``tiny/NAME``; ``tiny/recall@T`` at turnover T.

    Raises ValueError for an unknown name, or one without a turnover that needs one.
    """

    endless = True

    def __init__(self, name: str, options: TinyOptions | None = None) -> None:
        kind, at, share = name.removeprefix("tiny/").partition("@")
        if kind not in TASKS:
            raise ValueError(f"a generated task must be one of {', '.join(f'tiny/{t}' for t in TASKS)}; got {name!r}")
        self.kind = TASKS[kind]
        self.turnover = _turnover(name, share) if at else 0.0
        if bool(at) != (self.kind.setting == "recall"):
            raise ValueError(f"a turnover (tiny/recall@0.5) belongs to recalls and to them alone, got {name!r}")
        self.options = TinyOptions() if options is None else options
        self.name = f"tiny/{kind}@{self.turnover:g}" if at else f"tiny/{kind}"
        self.about = self.kind.about
        self.setting = self.kind.setting
        self.control = kind in CONTROLS

    def items(self, n: int | None = None) -> list[Item]:
        if n is None:
            raise ValueError(f"n must be given for {self.name}: there is no end of generated items")
        return [self.item(i) for i in range(n)]

    def item(self, index: int) -> Item:
        """The item at ``index``."""
        case = self.kind.case(self.options.seed, index, self.options.frames, self.turnover)
        return as_item(case, self.name, self.options.decoded)

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """The next word must be the generator's."""
        return Scored(float(answer == target), answer)

    def config(self) -> dict[str, Any]:
        options = self.options
        return super().config() | {"seed": options.seed, "frames": list(options.frames), "decoded": options.decoded}


def as_item(case: Case, name: str, decoded: bool = False) -> Item:
    """A generated case as an item; its frames are drawn when they are asked for."""
    return Item(
        task=name,
        index=case.index,
        load=partial(_decoded if decoded else _rendered, case.frames),
        count=len(case.frames),
        placed=case.placed,
        query=case.question,
        target=case.truth,
        doc_id=str(case.index),
        cluster=str(case.index),
        digest=case.digest,
        before=case.before,
        asked=case.asked,
        shape=case.shape,
        meta={"frames": len(case.placed)},
    )


def _turnover(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"a turnover must be 0..1, got {name!r}")
    return share


def _rendered(frames: Sequence[Frame]) -> list[Chunk]:
    return [Chunk.image(render(frame), keep_source=False) for frame in frames]


def _decoded(frames: Sequence[Frame]) -> list[Chunk]:
    """The frames as they come back from an mp4 file."""
    from ctxwin.tiny.clip import read_frames, write_clip

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_clip(path, frames, fps=4, seconds_per_frame=1.0)
        return [Chunk.image(picture, keep_source=False) for picture in read_frames(path, every_s=1.0)]
