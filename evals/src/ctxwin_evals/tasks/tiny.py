"""Generated tasks: contexts of frames in a setting (a window, a slide, a recall), one question each.

Items are drawn from `ctxwin.tiny.world` with held-out seeds: an item's generator is seeded by
``(SPACE, seed, task, variant, index)``, the trainer's by ``(seed, stage, step)``, and `SPACE` is a constant that no
training run uses as its seed, so no item can be a training batch. An item depends on its own index only, never on how
many are drawn.
"""

import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.hashing import digest
from ctxwin.tiny.world import Frame, answer, render
from ctxwin_evals.items import GeneratedTask, Item, Scored, Setting
from ctxwin_evals.tasks import drawn, edits
from ctxwin_evals.tasks.drawn import TRAINED_FRAMES, Draw
from ctxwin_evals.tasks.edits import Amount, amount_in

SPACE = 0x63747877
"""First word of every evaluation seed ("ctxw"); the fit split of a shared basis has `FIT_SPACE`."""
FIT_SPACE = 0x66697473


@dataclass(frozen=True)
class Generated:
    """A kind of item.

    Attributes:
        setting: what happens before the question; decides which arms apply and what their base is.
        least: fewest frames; smaller numbers are left out for it.
        draw: makes a context from a generator, a number of frames, the amount and the turn.
        amount: what its name takes after ``@``; None for nothing.
        turns: how many items in a row are of one context, for an amount; None: one.
    """

    name: str
    about: str
    setting: Setting
    least: int
    draw: Draw
    amount: Amount | None = None
    turns: Callable[[float], int] | None = None

    def counts(self, frames: Sequence[int]) -> list[int]:
        """Those of ``frames`` that are enough; raises ValueError where none is."""
        if counts := [f for f in frames if f >= self.least]:
            return counts
        raise ValueError(f"frames must include {self.least} or more for task {self.name!r}, got {list(frames)}")

    def case(
        self,
        seed: int,
        index: int,
        frames: Sequence[int],
        amount: float = 0.0,
        *,
        space: int = SPACE,
        task: str = "",
        decoded: bool = False,
    ) -> Item:
        """The item at ``index`` of ``task`` (``tiny/NAME`` by default); its number of frames cycles through ``frames``.

        Raises ValueError where no number of frames is enough for this task.
        """
        counts = self.counts(frames)
        context, turn = divmod(index, self.turns(amount) if self.turns else 1)
        rng = np.random.default_rng((space, seed, zlib.crc32(self.name.encode()), round(amount * 10_000), context))
        drawn, first_order, order, question, meta = self.draw(rng, counts[context % len(counts)], amount, turn)
        sequence = [drawn[i] for i in order]
        truth = answer(sequence, question.text)
        if truth is None:
            raise ValueError(f"item {index} of {self.name!r} has no answer over the placed frames")
        if first_order:
            # The same answer before and after: the change has no part in it, the item is a control.
            meta = meta | {"control": answer([drawn[i] for i in first_order], question.text) == truth}
        content = [[f.role, *(a.tobytes() for a in (f.shape, f.appearance, f.mark, f.jitter))] for f in drawn]
        return Item(
            task=task or f"tiny/{self.name}",
            index=index,
            load=partial(_decode if decoded else render_frames, drawn),
            count=len(drawn),
            placed=tuple(order),
            query=question.text,
            target=truth,
            doc_id=str(index),
            cluster=str(context),
            digest=digest("case", content, list(first_order), list(order), question.text, truth),
            before=tuple(first_order),
            asked=next(i for i, frame in enumerate(sequence) if question.mark in frame.marks),
            shape=(len(drawn), len(first_order), len(order)),
            meta={"frames": len(order), **meta},
        )


TURNOVERS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_TURNOVER = Amount("a turnover (tiny/recall@0.5)", TURNOVERS, share=True)
_SLIDES = Amount("a number of slides (tiny/history@8)", (1, 4, 16))
_MORE = Amount("a number of frames (tiny/excess@2)", (0, 1, 2, 3))
_PREDECESSORS = Amount("a number of predecessors (tiny/reorder@3)", (3, 4, 6))

TASKS: dict[str, Generated] = {
    t.name: t
    for t in (
        Generated("single_hop", "answered by one frame alone", "window", 2, partial(drawn.world, task="single_hop")),
        Generated("multi_hop", "needs the one earlier legend that decides it", "window", 2,
                  partial(drawn.world, task="multi_hop")),
        Generated("graded", "as multi_hop, with a tint that leaves two colours open", "window", 2,
                  partial(drawn.world, task="graded")),
        Generated("order", "earlier legends disagree: their order decides", "window", 3, partial(drawn.world, task="order")),
        Generated("slide_distractor", "the leading frame leaves; it has no part in it", "slide", 3,
                  partial(drawn.slide, needed=False)),
        Generated("slide_needed", "the leading frame leaves; it was the deciding legend", "slide", 2,
                  partial(drawn.slide, needed=True)),
        Generated("slide_repeated", "the deciding legend leaves; a later frame repeats it", "slide", 3, drawn.slide_repeated),
        Generated("history", "a window after slides of a stream; survivors met what was placed then", "slide", 3, drawn.history,
                  _SLIDES),
        Generated("recall", "a scene comes back behind frames of which a share was replaced", "recall", 3, drawn.recall,
                  _TURNOVER),
        Generated("reorder", "so many predecessors in another order than the patch was formed in", "window", 2, drawn.reorder,
                  _PREDECESSORS, drawn.orders_of),
        Generated("divergent-reorder", "antecedents in another order than at forming", "recall", 3,
                  partial(drawn.changed, edit=edits.reordered)),
        Generated("divergent-duplicate", "an antecedent dropped, its neighbour there twice", "recall", 3,
                  partial(drawn.changed, edit=edits.duplicated)),
        Generated("divergent-replace-one", "an antecedent replaced by a frame of another clip", "recall", 3,
                  partial(drawn.changed, edit=edits.replaced, count=1)),
        Generated("divergent-replace-all", "all antecedents replaced by frames of another clip", "recall", 3,
                  partial(drawn.changed, edit=edits.replaced, count=TRAINED_FRAMES)),
        Generated("changed", "so many antecedents replaced by frames of another clip", "recall", 4,
                  partial(drawn.changed, edit=edits.replaced), _MORE),
        Generated("excess", "two antecedents, so many irrelevant frames in front of them", "recall", 2,
                  partial(drawn.excess, edit=edits.preceded), _MORE),
        Generated("superset", "two antecedents, so many irrelevant frames behind and between", "recall", 2,
                  partial(drawn.excess, edit=edits.scattered), _MORE),
    )
}  # fmt: skip
CONTROLS = ("single_hop", "slide_distractor", "slide_repeated")
"""One frame alone answers these, or what leaves does not matter: reuse should not change the answer."""
WORLD_TASKS = ("single_hop", "multi_hop", "graded", "order")


def fit_cases(count: int, frames: Sequence[int]) -> list[Item]:
    """Contexts to fit a shared basis on, from a seed space of their own."""
    fitting = [TASKS[name] for name in ("multi_hop", "order", "graded") if TASKS[name].least <= max(frames)]
    return [fitting[i % len(fitting)].case(0, i, frames, space=FIT_SPACE) for i in range(count)]


@dataclass(frozen=True)
class TinyOptions:
    """Options of generated items besides their task and index.

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


class TinyTask(GeneratedTask):
    """A kind of generated item, ``tiny/NAME`` or ``tiny/NAME@AMOUNT`` (`TASKS`).

    Raises ValueError for an unknown name, one without an amount that needs one, or too few frames.
    """

    def __init__(self, name: str, options: TinyOptions | None = None) -> None:
        kind, at, _ = name.removeprefix("tiny/").partition("@")
        if kind not in TASKS:
            raise ValueError(f"a generated task must be one of {', '.join(f'tiny/{t}' for t in TASKS)}; got {name!r}")
        self.kind = TASKS[kind]
        self.amount = amount_in(name, self.kind.amount)
        self.options = TinyOptions() if options is None else options
        self.kind.counts(self.options.frames)  # before a model is opened and other tasks are run
        self.name = f"tiny/{kind}@{self.amount:g}" if at else f"tiny/{kind}"
        self.about, self.setting, self.control = self.kind.about, self.kind.setting, kind in CONTROLS

    def item(self, index: int) -> Item:
        options = self.options
        return self.kind.case(options.seed, index, options.frames, self.amount, task=self.name, decoded=options.decoded)

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """The next word must be the generator's."""
        return Scored(float(answer == target), answer)

    def config(self) -> dict[str, Any]:
        options = self.options
        return super().config() | {"seed": options.seed, "frames": list(options.frames), "decoded": options.decoded}


def render_frames(frames: Sequence[Frame]) -> list[Chunk]:
    """Frames as chunks of one picture each."""
    return [Chunk.image(render(frame), keep_source=False) for frame in frames]


def _decode(frames: Sequence[Frame]) -> list[Chunk]:
    """The frames as they come back from an mp4 file."""
    from ctxwin.tiny.clip import write_clip
    from ctxwin.video import decode_video

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_clip(path, frames, fps=4, seconds_per_frame=1.0)
        return [Chunk.image(picture, keep_source=False) for picture in decode_video(path, fps=1.0)[0]]
