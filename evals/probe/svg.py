"""Small charts as inline SVG: lines over a number, with a legend. No library, so that a report is one file of a few KB."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
COLORS = ("#2e86ab", "#d1495b", "#3a7d44", "#ee964b", "#6457a6", "#8d99ae", "#b56576", "#a0862f")
_WIDTH, _HEIGHT = 520, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40


def lines(
    title: str, x_name: str, y_name: str, series: Mapping[str, Points], *, log_x: bool = False, log_y: bool = False
) -> str:
    """A chart; series without points are left out, and a chart without series is an empty string.

    On a logarithmic axis values are drawn at a millionth at least.
    """
    drawn = {name: sorted(points) for name, points in series.items() if points}
    if not drawn:
        return ""
    xs = [_scaled(x, log_x) for points in drawn.values() for x, _ in points]
    ys = [_scaled(y, log_y) for points in drawn.values() for _, y in points]
    across, up = _axis(min(xs), max(xs)), _axis(min([*ys, *([] if log_y else [0.0])]), max(ys))
    parts = [
        f"<figure><figcaption>{escape(title)}</figcaption>",
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(title)}'>",
    ]
    for value in _ticks(*up, log=log_y):
        y = _place(value, up, _HEIGHT - _BOTTOM, _TOP)
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' class='grid'/>")
        parts.append(f"<text x='{_LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{_shown(value, log_y)}</text>")
    for value in _ticks(*across, log=log_x, whole=all(x == int(x) for x in xs)):
        x = _place(value, across, _LEFT, _WIDTH - _RIGHT)
        parts.append(
            f"<text x='{x:.1f}' y='{_HEIGHT - _BOTTOM + 16}' text-anchor='middle'>{_shown(value, log_x)}</text>"
        )
    for i, points in enumerate(drawn.values()):
        color = COLORS[i % len(COLORS)]
        places = [
            (
                _place(_scaled(x, log_x), across, _LEFT, _WIDTH - _RIGHT),
                _place(_scaled(y, log_y), up, _HEIGHT - _BOTTOM, _TOP),
            )
            for x, y in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2'/>")
        parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{color}'/>" for x, y in places]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f"<text x='{middle}' y='{_HEIGHT - 6}' text-anchor='middle'>{escape(x_name)}</text>")
    parts.append(f"<text x='14' y='{_HEIGHT / 2}' transform='rotate(-90 14 {_HEIGHT / 2})' text-anchor='middle'>"
                 f"{escape(y_name)}</text></svg><p class='keys'>")  # fmt: skip
    for i, name in enumerate(drawn):
        parts.append(f"<span><i style='background:{COLORS[i % len(COLORS)]}'></i>{escape(name)}</span>")
    return "".join([*parts, "</p></figure>"])


def _scaled(value: float, log: bool) -> float:
    return math.log10(max(value, 1e-6)) if log else value


def _axis(low: float, high: float) -> tuple[float, float]:
    """Room for a line even where all values are alike."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, *, log: bool, whole: bool = False) -> list[float]:
    """Round values; powers of ten on a logarithmic axis that spans two, whole ones where only such have a meaning."""
    if log:
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        if len(powers) > 1:
            return [float(power) for power in powers]
        return [low + (high - low) * i / 4 for i in range(5)]
    rough = (high - low) / 5
    tens = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * tens for nice in (1, 2, 5, 10) if nice * tens >= rough * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _place(value: float, axis: tuple[float, float], begin: float, end: float) -> float:
    return begin + (value - axis[0]) / (axis[1] - axis[0]) * (end - begin)


def _shown(value: float, log: bool) -> str:
    return f"{10**value if log else value:.3g}"
