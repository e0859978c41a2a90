"""Writes a small Video-MME: questions as parquet, videos of moving shapes, subtitles, in the official layout."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmark_data import drawing
from benchmark_data.drawing import Pixels, Thing
from ctxwin.tiny.clip import write_clip
from ctxwin.tiny.sprites import COLORS, SHAPES
from ctxwin_evals.benchmarks.video_mme import COLUMNS, DURATIONS, LETTERS, PARQUET

_SPACE = 0x76696465
SECONDS = (4.0, 6.0, 8.0)
_FPS = 8
_QUESTIONS = 3
_DOMAINS = (
    ("Knowledge", "Astronomy"),
    ("Film & Television", "Animation"),
    ("Sports Competition", "Other Sports"),
    ("Artistic Performance", "Magic Show"),
    ("Life Record", "Daily Life"),
    ("Multilingual", "Multilingual"),
)
MOVES = {"to the left": (0, -1), "to the right": (0, 1), "upwards": (-1, 0), "downwards": (1, 0)}


@dataclass(frozen=True)
class Scene:
    """One thing crossing the picture."""

    thing: Thing
    move: str


def write_video_mme(
    out: Path, n: int, seed: int = 0, seconds: Sequence[float] = SECONDS, image_size: int = 224
) -> list[dict[str, Any]]:
    """Writes ``n`` questions, three a video; every fourth video has no subtitles. The same seed gives the same files.

    Args:
        out: the data folder.
        n: questions.
        seed: of everything drawn.
        seconds: length of short, medium and long videos; videos take turns.
        image_size: side of the frames in pixels.

    Returns the rows. Raises ValueError for numbers out of range.
    """
    if n < 1 or len(seconds) != len(DURATIONS) or min(seconds) < 2 or image_size < 56:
        raise ValueError(
            f"n must be >= 1, seconds three numbers >= 2 and image_size >= 56; got {n}, {list(seconds)}, {image_size}"
        )
    rows: list[dict[str, Any]] = []
    for video in range(-(-n // _QUESTIONS)):
        rows += _video(out, video, seed, seconds[video % 3], image_size)
    _write_parquet(out / PARQUET, rows[:n])
    return rows[:n]


def _video(out: Path, video: int, seed: int, seconds: float, size: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng((_SPACE, seed, video))
    name = "".join(rng.choice(list(string.ascii_letters + string.digits), 11))
    things = drawing.draw_things(rng, min(8, max(3, round(seconds / 2))))
    scenes = [Scene(t, list(MOVES)[int(rng.integers(len(MOVES)))]) for t in things]
    frames = frames_of(scenes, max(len(scenes), round(seconds * _FPS)), size)
    path = out / "video" / f"{name}.mp4"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_clip(path, frames, fps=_FPS, seconds_per_frame=1 / _FPS)
    (out / "subtitle").mkdir(exist_ok=True)
    if video % 4 != 3:
        _write_subtitles(out / "subtitle" / f"{name}.srt", scenes, len(frames) / _FPS)
    domain, sub_category = _DOMAINS[video % len(_DOMAINS)]
    shared = {
        "video_id": f"{video + 1:03d}",
        "duration": DURATIONS[video % 3],
        "domain": domain,
        "sub_category": sub_category,
        "url": f"https://example.invalid/watch?v={name}",
        "videoID": name,
    }
    asked = (_color(rng, scenes), _next(rng, scenes), _move(rng, scenes))
    return [
        {c: ({**shared, **question, "question_id": f"{shared['video_id']}-{q}"})[c] for c in COLUMNS}
        for q, question in enumerate(asked, start=1)
    ]


def frames_of(scenes: Sequence[Scene], count: int, size: int) -> list[Pixels]:
    made = []
    side = size // 3
    for i in range(count):
        at = i * len(scenes) / count
        scene, share = scenes[int(at)], at - int(at)
        dy, dx = MOVES[scene.move]
        reach = (size - side) / 2
        top = round(reach + dy * reach * (2 * share - 1))
        left = round(reach + dx * reach * (2 * share - 1))
        picture = drawing.plain(size)
        drawing.paste(picture, drawing.sprite(scene.thing, side), top, left)
        made.append(picture)
    return made


def _write_subtitles(path: Path, scenes: Sequence[Scene], seconds: float) -> None:
    import srt  # type: ignore[import-untyped]

    step = seconds / len(scenes)
    cues = [
        srt.Subtitle(
            i + 1,
            timedelta(seconds=round(i * step, 3)),
            timedelta(seconds=round((i + 1) * step, 3)),
            f'<font color="white" size=".72c">Now you see a {SHAPES[scene.thing[0]]}.</font>',
        )
        for i, scene in enumerate(scenes)
    ]
    path.write_text(srt.compose(cues), encoding="utf-8")


def _color(rng: np.random.Generator, scenes: Sequence[Scene]) -> dict[str, Any]:
    shape, color = scenes[int(rng.integers(len(scenes)))].thing
    return _question(
        rng, "Attribute Perception", f"What is the color of the {SHAPES[shape]}?", COLORS[color], COLORS[:8]
    )


def _next(rng: np.random.Generator, scenes: Sequence[Scene]) -> dict[str, Any]:
    i = int(rng.integers(len(scenes) - 1))
    first, second = (SHAPES[s.thing[0]] for s in scenes[i : i + 2])
    others = [s for s in SHAPES if s != first]
    return _question(rng, "Temporal Reasoning", f"Which shape appears right after the {first}?", second, others)


def _move(rng: np.random.Generator, scenes: Sequence[Scene]) -> dict[str, Any]:
    scene = scenes[int(rng.integers(len(scenes)))]
    text = f"In which direction does the {SHAPES[scene.thing[0]]} move?"
    return _question(rng, "Action Recognition", text, scene.move, list(MOVES))


def _question(rng: np.random.Generator, kind: str, text: str, truth: str, pool: Sequence[str]) -> dict[str, Any]:
    wrong = [w for w in pool if w != truth]
    options = [truth, *(wrong[i] for i in rng.permutation(len(wrong))[:3])]
    options = [options[i] for i in rng.permutation(4)]
    return {
        "task_type": kind,
        "question": text,
        "options": [f"{letter}. {o[0].upper()}{o[1:]}." for letter, o in zip(LETTERS, options, strict=True)],
        "answer": LETTERS[options.index(truth)],
    }


def _write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([(c, pa.list_(pa.string()) if c == "options" else pa.string()) for c in COLUMNS])
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path)
