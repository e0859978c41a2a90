"""Appearance of the generated world: names, colours, sprites and digits, painted into 224 x 224 RGB frames."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

GRID = 8
CELL = 28
FRAME = GRID * CELL
N_MARKS = 100
COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "pink", "grey")
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star", "ring", "heart")
N_COLORS = 8
N_SHAPES = len(SHAPES)
GREY = 8
TINT_PAIRS = ((0, 2), (1, 4), (3, 7), (5, 6))
"""Colours of each tint: sage is red or blue, sky green or purple, tan yellow or pink, lilac orange or cyan."""
N_TINTS = len(TINT_PAIRS)
N_APPEARANCES = N_COLORS + 1 + N_TINTS

_BACKGROUND = 238
_RGB = (
    (214, 39, 40),
    (30, 150, 50),
    (40, 70, 220),
    (235, 205, 30),
    (130, 40, 160),
    (245, 130, 20),
    (30, 200, 210),
    (250, 130, 190),
    (150, 150, 150),
    (150, 205, 140),
    (145, 180, 230),
    (215, 180, 140),
    (195, 155, 220),
)
_FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


def _coverage(shape: str, dx: int, dy: int) -> NDArray[np.float64]:
    """Anti-aliased mask of a shape, [28, 28] in 0..1, centred above the digits and shifted by (dx, dy) pixels."""
    samples = 8
    grid = (np.arange(CELL * samples) + 0.5) / samples
    x, y = (grid - 14 - dx)[None, :], (grid - 10 - dy)[:, None]
    squared = x * x + y * y
    if shape == "circle":
        mask = squared <= 7.4**2
    elif shape == "square":
        mask = (abs(x) <= 6.4) & (abs(y) <= 6.4)
    elif shape == "triangle":
        mask = (y <= 7) & (y >= -8) & (abs(x) <= (y + 8) * 8 / 15)
    elif shape == "diamond":
        mask = abs(x) + abs(y) <= 8
    elif shape == "cross":
        mask = ((abs(x) <= 2.3) & (abs(y) <= 8)) | ((abs(y) <= 2.3) & (abs(x) <= 8))
    elif shape == "star":
        fifth = 2 * np.pi / 5
        angle = abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)
        mask = np.sqrt(squared) * (np.cos(angle) + 1.9 * np.sin(angle)) <= 8
    elif shape == "ring":
        mask = (squared <= 7.7**2) & (squared >= 4.2**2)
    else:
        u, v = x / 7.2, (0.5 - y) / 7.0
        mask = ((u * u + v * v - 0.62) ** 3 <= u * u * v**3) & (abs(x) <= 8) & (abs(y) <= 8)
    mask = mask & (abs(x) <= 9) & (abs(y) <= 8.9)
    share: NDArray[np.float64] = mask.reshape(CELL, samples, CELL, samples).mean(axis=(1, 3))
    return share


@cache
def sprites() -> NDArray[np.uint8]:
    """Every sprite on its background: uint8 [shape 8, appearance 13, jitter 9, 28, 28, 3]."""
    bank = np.zeros((N_SHAPES, N_APPEARANCES, 9, CELL, CELL, 3), np.uint8)
    for s, shape in enumerate(SHAPES):
        for jitter in range(9):
            mask = _coverage(shape, jitter % 3 - 1, jitter // 3 - 1)[None, ..., None]
            color = np.array(_RGB)[:, None, None, :]
            bank[s, :, jitter] = np.round(_BACKGROUND * (1 - mask) + color * mask)
    return bank


@cache
def digits() -> NDArray[np.bool_]:
    """Ink of every mark: bool [101, 28, 28]; the last row is empty, so that a mark of -1 draws nothing."""
    ink = np.zeros((N_MARKS + 1, CELL, CELL), np.bool_)
    for mark in range(N_MARKS):
        for place, digit in enumerate(f"{mark:02d}"):
            glyph = [[bit == "1" for bit in row] for row in _FONT[int(digit)].split()]
            ink[mark, 20:27, 8 + 6 * place : 13 + 6 * place] = glyph
    return ink


def paint(
    shape: NDArray[np.int64], appearance: NDArray[np.int64], mark: NDArray[np.int64], jitter: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Draw a grid of things; arguments as in `ctxwin.tiny.world.Frame`, returns RGB uint8 [224, 224, 3]."""
    cells = sprites()[shape, appearance, jitter]
    cells[digits()[mark]] = 0
    return cells.transpose(0, 2, 1, 3, 4).reshape(FRAME, FRAME, 3)
