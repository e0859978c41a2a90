"""Pictures of generated data: shapes of the bundled model's world, alone, framed, or as whole scenes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxwin.tiny.sprites import COLORS, FRAME, N_COLORS, N_SHAPES, SHAPES, sprites
from ctxwin.tiny.world import render, sample_frames

Pixels = NDArray[np.uint8]
BACKGROUND = 238
_CENTRED = 4
_BORDER = 0.06

Thing = tuple[int, int]
"""(index into SHAPES, index into COLORS)."""


def name_of(thing: Thing) -> str:
    """For example ``red star``."""
    return f"{COLORS[thing[1]]} {SHAPES[thing[0]]}"


def draw_things(rng: np.random.Generator, count: int) -> list[Thing]:
    """Things that share neither shape nor colour; at most eight."""
    shapes, colors = rng.permutation(N_SHAPES)[:count], rng.permutation(N_COLORS)[:count]
    return [(int(s), int(c)) for s, c in zip(shapes, colors, strict=True)]


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def sprite(thing: Thing, size: int) -> Pixels:
    """One thing on the plain background, ``[size, size, 3]``."""
    cell = sprites()[thing[0], thing[1], _CENTRED]
    # The sprite is drawn above the place of a number; without one its cell is cut to the shape.
    return resized(cell[:21, 3:25], size, size)


def framed(thing: Thing, size: int) -> Pixels:
    """One thing in a black frame: nothing else in a picture looks like it."""
    made = sprite(thing, size).copy()
    edge = max(1, round(size * _BORDER))
    for side in (made[:edge], made[-edge:], made[:, :edge], made[:, -edge:]):
        side[...] = 0
    return made


def plain(size: int) -> Pixels:
    return np.full((size, size, 3), BACKGROUND, np.uint8)


def paste(picture: Pixels, patch: Pixels, top: int, left: int) -> None:
    """Draws ``patch`` into ``picture``, cut at its edges."""
    height, width = picture.shape[:2]
    y0, x0, y1, x1 = max(top, 0), max(left, 0), min(top + patch.shape[0], height), min(left + patch.shape[1], width)
    if y0 < y1 and x0 < x1:
        picture[y0:y1, x0:x1] = patch[y0 - top : y1 - top, x0 - left : x1 - left]


def scene(rng: np.random.Generator, size: int) -> Pixels:
    """A frame of grey things with marks, ``[size, size, 3]``."""
    return resized(render(sample_frames(rng, ["scene"])[0]), size, size)


def scene_with(rng: np.random.Generator, things: list[Thing], size: int) -> Pixels:
    """A scene with framed things in it, none over another; at most nine."""
    made = scene(rng, size).copy()
    side, third = size // 4, size // 3
    for thing, place in zip(things, rng.permutation(9), strict=False):
        top, left = (int(place) // 3) * third, (int(place) % 3) * third
        paste(made, framed(thing, side), top + (third - side) // 2, left + (third - side) // 2)
    return made


def panorama(rng: np.random.Generator, size: int, rightward: bool) -> tuple[Pixels, Pixels]:
    """Two views of one scene, the camera having moved by a quarter of the picture in between."""
    wide = np.concatenate([render(f) for f in sample_frames(rng, ["scene", "scene"], marks_per_frame=50)], axis=1)
    near, far = (np.ascontiguousarray(wide[:, x : x + FRAME]) for x in (FRAME // 4, FRAME // 2))
    views = resized(near, size, size), resized(far, size, size)
    return views if rightward else views[::-1]


def save_png(path: Path, pixels: Pixels) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG", compress_level=1)
