"""Writes small MileBench sets: annotations and frames, in the official layout."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark_data import drawing
from benchmark_data.drawing import Pixels, Thing, name_of
from benchmark_data.video_mme import MOVES
from ctxwin.files import atomic_write
from ctxwin.tiny.sprites import N_COLORS, SHAPES
from ctxwin_evals.benchmarks.milebench import MileBench, quantity

_SPACE = 0x6D696C65
_INSTRUCTIONS = (
    "These images are frames of a video, in order. Answer the question about it with one of the choices.",
    "Look at the frames of a video below, which are in order, and choose the right answer to the question behind them.",
)
_BOXES = ("left", "middle", "right")
Made = tuple[list[Pixels], str, list[str], str]
"""(frames, question, choices, right choice)."""


def write_milebench(out: Path, n: int, seed: int = 0, steps: int = 4, image_size: int = 224) -> dict[str, Any]:
    """Writes ``n`` samples of each of the four sets; the same seed gives the same files.

    Args:
        out: the data folder.
        n: samples a set.
        seed: of everything drawn.
        steps: events shown in a sample; most frames come two a step.
        image_size: side of the frames in pixels.

    Returns what was written, by task. Raises ValueError for numbers out of range.
    """
    if n < 1 or steps < 2 or image_size < 56:
        raise ValueError(f"n must be >= 1, steps >= 2 and image_size >= 56; got {n}, {steps}, {image_size}")
    made = {}
    for task in MileBench.names:
        name = task.partition("/")[2]
        data = [_sample(name, i, seed, steps, image_size, out / name / "images") for i in range(n)]
        made[task] = {
            "meta_data": {
                "dataset": name,
                "split": "test",
                "num_sample": str(n),
                "task_instruction": list(_INSTRUCTIONS),
                "question_type": "multi-choice",
            },
            "data": data,
        }
        text = json.dumps(made[task], ensure_ascii=False, indent=1) + "\n"
        atomic_write(out / name / f"{name}.json", text.encode())
    return made


def _sample(name: str, index: int, seed: int, steps: int, size: int, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng((_SPACE, seed, zlib.crc32(name.encode()), index))
    frames, question, choices, truth = _MAKERS[name](rng, steps, size)
    paths = [f"{index:04d}-{j}.png" for j in range(len(frames))]
    for path, frame in zip(paths, frames, strict=True):
        drawing.save_png(folder / path, frame)
    shown = "".join(f"{{image#{j + 1}}}" for j in range(len(frames)))
    return {
        "sample_id": index,
        "task_instruction_id": index % len(_INSTRUCTIONS),
        "task_instance": {
            "context": f"{shown}\nQuestion: {question}",
            "images_path": paths,
            "choice_list": [choices[i] for i in rng.permutation(len(choices))],
        },
        "response": truth,
        "image_quantity_level": quantity(len(frames)).capitalize(),
    }


def _moved(move: str) -> str:
    return f"It moved {move}."


def _walk(thing: Thing, moves: Sequence[str], size: int) -> list[Pixels]:
    """Two frames a move: the thing in the middle, then at the edge it moved to."""
    side = size // 3
    centre = (size - side) // 2
    frames = []
    for move in moves:
        for share in (0, 1):
            dy, dx = MOVES[move]
            picture = drawing.plain(size)
            drawing.paste(
                picture, drawing.sprite(thing, side), centre + dy * share * centre, centre + dx * share * centre
            )
            frames.append(picture)
    return frames


def _sequence(rng: np.random.Generator, steps: int, size: int) -> Made:
    """Moves that each come once, so that one right after another is unambiguous; at most four."""
    moves = [list(MOVES)[i] for i in rng.permutation(len(MOVES))[: min(steps, len(MOVES))]]
    i = int(rng.integers(len(moves) - 1))
    thing = drawing.draw_things(rng, 1)[0]
    question = f"What did the {name_of(thing)} do right after it moved {moves[i]}?"
    return _walk(thing, moves, size), question, [_moved(m) for m in MOVES], _moved(moves[i + 1])


def _prediction(rng: np.random.Generator, steps: int, size: int) -> Made:
    """Moves that repeat with a period of two; at least two periods are shown."""
    first, second = (list(MOVES)[i] for i in rng.permutation(len(MOVES))[:2])
    moves = [first if i % 2 == 0 else second for i in range(max(steps, 4))]
    truth = first if len(moves) % 2 == 0 else second
    thing = drawing.draw_things(rng, 1)[0]
    question = f"The {name_of(thing)} keeps to its pattern. What will it do next?"
    choices = [f"It will move {m}." for m in MOVES]
    return _walk(thing, moves, size), question, choices, f"It will move {truth}."


def _shuffle(rng: np.random.Generator, steps: int, size: int) -> Made:
    """A thing goes under one of three boxes; boxes change places two by two, seen in the middle and at the end of a swap."""
    thing = drawing.draw_things(rng, 1)[0]
    tints = [int(t) for t in rng.permutation(N_COLORS)[:3]]
    side = size // 4
    left = [size * (2 * i + 1) // 6 - side // 2 for i in range(3)]
    boxes = [0, 1, 2]
    hidden = int(rng.integers(3))

    def show(places: Sequence[float], lifted: bool) -> Pixels:
        picture = drawing.plain(size)
        for box, at in enumerate(places):
            box_left = round(left[0] + at * (left[1] - left[0]))
            up = size // 8 if at % 1 and box % 2 else 0
            box_picture = np.broadcast_to(drawing.sprite((1, tints[box]), side)[side // 2, side // 2], (side, side, 3))
            drawing.paste(picture, np.ascontiguousarray(box_picture), size // 2 - up, box_left)
        if lifted:
            drawing.paste(picture, drawing.sprite(thing, side), size // 8, left[hidden])
        return picture

    frames = [show(boxes, True)]
    place = {box: float(box) for box in boxes}
    for _ in range(steps):
        a, b = (int(i) for i in rng.permutation(3)[:2])
        middle = (place[a] + place[b]) / 2
        frames.append(show([middle + (0.25 if x == a else -0.25) if x in (a, b) else place[x] for x in boxes], False))
        place[a], place[b] = place[b], place[a]
        frames.append(show([place[x] for x in boxes], False))
    choices = [f"Under the {name} box." for name in _BOXES]
    question = f"Where is the {name_of(thing)} at the end?"
    return frames, question, choices, choices[int(place[hidden])]


def _change(rng: np.random.Generator, steps: int, size: int) -> Made:
    """Four things stay where they are; one of them changes its colour between two frames."""
    things = drawing.draw_things(rng, 4)
    changed, at = int(rng.integers(4)), int(rng.integers(1, max(2, steps)))
    others = [c for c in range(N_COLORS) if c not in {t[1] for t in things}]
    after = (things[changed][0], others[int(rng.integers(len(others)))])
    half, side = size // 2, size // 3
    frames = []
    for i in range(max(2, steps)):
        picture = drawing.plain(size)
        for j, thing in enumerate(things):
            shown = after if j == changed and i >= at else thing
            corner = (j // 2 * half + (half - side) // 2, j % 2 * half + (half - side) // 2)
            drawing.paste(picture, drawing.sprite(shown, side), *corner)
        frames.append(picture)
    choices = [f"The {SHAPES[t[0]]}." for t in things]
    return frames, "Which thing changed its color?", choices, choices[changed]


_MAKERS = {
    "ActionSequence": _sequence,
    "ActionPrediction": _prediction,
    "ObjectShuffle": _shuffle,
    "StateChange": _change,
}
