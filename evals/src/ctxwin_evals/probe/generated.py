"""Contexts without a user's data: the bundled world's frames, and plain coloured shapes."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.tiny.world import Kind, Role, all_questions, make_stream, sample_frames
from ctxwin.tiny.world import Question as WorldQuestion
from ctxwin_evals.probe.contexts import LETTERS, PLACED, Context, Question, Source, Split, seed_of
from ctxwin_evals.probe.contexts import Kind as AskedKind
from ctxwin_evals.tasks.tiny import SPACE, render_frames

_BOUND: tuple[Kind, ...] = ("multi_hop", "order", "graded", "graded_order")
_DRAWS = 200
Thing = tuple[str, str]
"""(colour, shape)."""


class World(Source):
    """Frames of the bundled world, in which the colour of a marked thing depends on an earlier frame.

    Legends agree in half of the contexts and conflict in the other half: a model may bind a colour when it reads the scene
    or look it up when asked, and where legends agree both give the right answer.
    """

    kind: ClassVar[str] = "world"
    name, system_prompt, max_tokens = "probe/world", "You watch a camera.", 4
    about = "frames of the bundled world, with questions whose answers the generator knows"

    def context(self, split: Split, index: int) -> Context:
        rng = np.random.default_rng((SPACE, 0x70726F62, seed_of(split), index))
        for _ in range(_DRAWS):
            middle: list[Role] = ["legend" if rng.random() < 0.5 else "scene" for _ in range(PLACED - 2)]
            roles: list[Role] = ["legend", *middle, "scene"]
            frames = sample_frames(rng, roles, conflict=float(index % 2))
            questions = all_questions(frames)
            one = [q for q in questions if q.kind == "single_hop"]
            cross = [q for q in questions if q.kind in _BOUND]
            if one and cross:
                break
        else:
            raise ValueError(f"no context {index} of split {split!r} in {_DRAWS} draws")
        strangers = sample_frames(rng, roles, marks=[f.marks for f in frames], conflict=1.0)
        load = partial(render_frames, (*frames, *strangers))
        drawn = (_drawn_from(rng, cross), _drawn_from(rng, one))
        return Context(load, ("frame",) * PLACED, f"{split}-{index}", drawn)

    def stream(self, index: int, slides: int) -> Context:
        rng = np.random.default_rng((SPACE, 0x70726F62, seed_of("moving"), 0x736C6964, index))
        frames = make_stream(rng, PLACED + slides, window=2 * PLACED)
        questions = []
        for slide in range(1, slides + 1):
            window = frames[slide : slide + PLACED]
            pool = [q for q in all_questions(window) if q.kind in (*_BOUND, "unbound")] or all_questions(window)
            questions.append(_drawn_from(rng, pool))
        return Context(partial(render_frames, frames), ("frame",) * len(frames), f"stream-{index}", tuple(questions))


class Scenes(Source):
    """Plain pictures of one coloured shape each, for models that read English."""

    kind: ClassVar[str] = "scenes"
    side = 224
    name, system_prompt, max_tokens = "probe/scenes", "You answer questions about pictures.", 4
    about = "generated pictures of one coloured shape each, with questions in English"

    def context(self, split: Split, index: int) -> Context:
        rng = np.random.default_rng((SPACE, 0x7363656E, seed_of(split), index))
        things = _things(rng, PLACED)
        load = partial(self._drawn, (*things, *_others(rng, things)))
        first, second = sorted(int(i) for i in rng.permutation(PLACED)[:2])
        by = index % 2
        same, what = things[first][by] == things[second][by], ("color", "shape")[by]
        text = f"Do pictures {LETTERS[first]} and {LETTERS[second]} show the same {what}? Answer yes or no."
        cross = Question(text, "cross", (first, second), "yes" if same else "no")
        at = int(rng.integers(PLACED))
        text = f"What color is the shape in picture {LETTERS[at]}? Answer with one word."
        questions = (cross, Question(text, "one", (at,), things[at][0]))
        return Context(load, ("picture",) * PLACED, f"{split}-{index}", questions)

    def stream(self, index: int, slides: int) -> Context:
        rng = np.random.default_rng((SPACE, 0x7363656E, seed_of("moving"), index))
        things = [t for _ in range(-(-(PLACED + slides) // PLACED)) for t in _things(rng, PLACED)][: PLACED + slides]
        questions = []
        for last in range(PLACED, PLACED + slides):
            text = f"Do pictures {LETTERS[last - 1]} and {LETTERS[last]} show the same color? Answer yes or no."
            same = things[last][0] == things[last - 1][0]
            questions.append(Question(text, "cross", (PLACED - 2, PLACED - 1), "yes" if same else "no"))
        return Context(partial(self._drawn, things), ("picture",) * len(things), f"stream-{index}", tuple(questions))

    def _drawn(self, things: Sequence[Thing]) -> list[Chunk]:
        count = PLACED if len(things) == 2 * PLACED else len(things)  # strangers take the letters of those they replace
        return [
            Chunk.image(_picture(thing, self.side), text=f"Picture {LETTERS[i % count]}:", keep_source=False)
            for i, thing in enumerate(things)
        ]


COLORS = {
    "red": (214, 40, 40),
    "green": (42, 157, 60),
    "blue": (38, 84, 214),
    "yellow": (240, 200, 20),
    "black": (20, 20, 20),
    "orange": (244, 140, 6),
}
SHAPES = ("circle", "square", "triangle", "cross")


def _things(rng: np.random.Generator, count: int) -> list[Thing]:
    """So few kinds that two of them are often alike."""
    colors = [str(c) for c in rng.permutation(list(COLORS))[:2]]
    shapes = [str(s) for s in rng.permutation(SHAPES)[:2]]
    return [(colors[int(rng.integers(2))], shapes[int(rng.integers(2))]) for _ in range(count)]


def _others(rng: np.random.Generator, things: Sequence[Thing]) -> list[Thing]:
    return [
        (str(rng.choice([c for c in COLORS if c != color])), str(rng.choice([s for s in SHAPES if s != shape])))
        for color, shape in things
    ]


def _picture(thing: Thing, side: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    color, shape = COLORS[thing[0]], thing[1]
    image = Image.new("RGB", (side, side), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    low, high, third = side // 5, side - side // 5, side // 3
    if shape == "circle":
        draw.ellipse((low, low, high, high), fill=color)
    elif shape == "square":
        draw.rectangle((low, low, high, high), fill=color)
    elif shape == "triangle":
        draw.polygon([(side // 2, low), (low, high), (high, high)], fill=color)
    else:
        draw.rectangle((third, low, side - third, high), fill=color)
        draw.rectangle((low, third, high, side - third), fill=color)
    return np.asarray(image)


def _drawn_from(rng: np.random.Generator, pool: Sequence[WorldQuestion]) -> Question:
    question = pool[int(rng.integers(len(pool)))]
    kind: AskedKind = "one" if question.kind == "single_hop" else "cross"
    return Question(question.text, kind, tuple(sorted({question.frame, *question.antecedents})), question.answer)
