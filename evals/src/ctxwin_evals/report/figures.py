"""Figures, drawn with matplotlib: arms with intervals, curves over bytes, heat maps, lines.

They are narrow, so that they can be read on a phone, and without a background of their own: as SVG their ink follows the
reader's colour scheme, as PNG they are on white.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin_evals.metrics import Figures
from ctxwin_evals.report.tables import Run
from ctxwin_evals.score import DEPTH, LENGTHS
from ctxwin_evals.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drawn = tuple[str, "Figure"]
"""A caption and what it describes."""
Measured = tuple[float | None, Interval | None]
"""A figure with its interval."""
RUN_COLOURS = ("#5b76e0", "#d0652f", "#2f9468", "#a066b8", "#a5831f", "#3b95b0")
PATCH, BASE, REFERENCE, OTHER = "#7d6ce0", "#d9534f", "#3f9a4a", "#7b8794"
_ARM_COLOURS = {"patched": PATCH, "reprefill": REFERENCE, "blind": BASE}
TOKEN_COLOURS = ("#d9822b", "#1f98ac", "#a88c30", "#c25590", "#759a2a", "#9b6b42")
INK, _DARK_INK = "#16202b", "#e8edf2"
_SERIES = (RUN_COLOURS[0], BASE, REFERENCE, TOKEN_COLOURS[0], PATCH, OTHER, TOKEN_COLOURS[3], TOKEN_COLOURS[2])
_WIDTH = 5.4
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_STYLE = {"grid.alpha": 0.25, "legend.frameon": False, "svg.hashsalt": "ctxwin", "svg.fonttype": "path"} | {
    name: value
    for names, value in (
        ("text.color axes.labelcolor axes.edgecolor xtick.color ytick.color grid.color", INK),
        ("axes.facecolor figure.facecolor", "none"),
        ("font.size axes.titlesize axes.labelsize legend.fontsize", 9),
        ("xtick.labelsize ytick.labelsize", 8.5),
    )
    for name in names.split()
}


@dataclass(frozen=True)
class Picture:
    """A figure, not yet rendered, with its file name (without an ending; unique within a task) and its caption."""

    name: str
    caption: str
    figure: Figure


def styled() -> AbstractContextManager[None]:
    """The common style; raises ModuleNotFoundError without matplotlib (``pip install 'ctxwin[evals]'``)."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def render(figure: Figure, kind: str) -> bytes:
    """A figure as ``png`` or ``svg``; equal figures give equal bytes."""
    if figure.get_layout_engine() is not None:
        # The layout is solved once, not for every format.
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
    out, svg = io.BytesIO(), kind == "svg"
    unstamped = {"Date" if svg else "Software": None}
    with styled():
        looks: dict[str, Any] = {"dpi": "figure", "facecolor": "none"} if svg else {"dpi": 144, "facecolor": "white"}
        figure.savefig(out, format=kind, metadata=unstamped, **looks)
    if not svg:
        return out.getvalue()
    scheme = f"svg{{--ink:{INK}}}@media(prefers-color-scheme:dark){{svg{{--ink:{_DARK_INK}}}}}"
    text = out.getvalue().decode().replace(INK, "var(--ink)")
    return text.replace('<style type="text/css">', f'<style type="text/css">{scheme}', 1).encode()


def pictures(runs: Sequence[Run], task: str) -> list[Picture]:
    """The figures of a task for which the runs have something to show."""
    having = [run for run in runs if task in run.tasks]
    with styled():
        drawings = [_arms(having, task)]
        for i, run in enumerate(having):
            suffix, whose = (f"-{i + 1}", f" ({run.label})") if len(having) > 1 else ("", "")
            for name, draw in (("bytes", _curves), ("layers", _layers), ("grid", _grid)):
                if drawn := draw(run, task):
                    drawings.append(Picture(name + suffix, drawn[0] + whose, drawn[1]))
        return drawings


def lines(
    name: str, caption: str, x: str, y: str, series: Mapping[str, Sequence[tuple[float, float]]], *, log: bool = False
) -> Picture:
    """Lines over a number; on logarithmic axes (``log``) values are drawn at no less than a millionth."""
    with styled():
        from matplotlib.ticker import MaxNLocator

        figure = _figure(3.3 + 0.17 * -(-len(series) // 2))
        axis = figure.subplots()
        for i, (label, points) in enumerate(series.items()):
            xs, ys = zip(*sorted(points), strict=True)
            heights = [max(v, 1e-6) for v in ys] if log else ys
            axis.plot(xs, heights, "o-", markersize=3, linewidth=1.5, label=label, color=_SERIES[i % len(_SERIES)])
        if log:
            axis.set(xscale="log", yscale="log")
        else:
            axis.set_ylim(bottom=0)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(xlabel=x, ylabel=y)
        axis.grid()
        if len(series) > 1:
            figure.legend(loc="outside lower center", ncols=2)
        return Picture(name, caption, figure)


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _arms(runs: Sequence[Run], task: str) -> Picture:
    """Dots with intervals: one line an arm, one panel a figure, runs side by side."""
    names = list(dict.fromkeys(arm for run in runs for arm in run.arms(task)))
    panels: list[tuple[str, Callable[[Figures], Measured]]] = [
        ("accuracy", lambda f: (f["accuracy"], f["ci95"])),
        ("KL to re-prefill, nats", lambda f: (f["kl"], f["kl_ci95"])),
        ("flips restored", lambda f: (f["flip_recover"], f["flip_ci95"])),
        ("harm", lambda f: (f["harm_rate"], f["harm_ci95"])),
    ]
    figure = _figure(1.6 + 0.4 * len(names) * max(1.0, 0.6 * len(runs)))
    axes = list(figure.subplots(2, 2, sharey=True).flat)
    step = 0.7 / len(runs)
    for axis, (title, read) in zip(axes, panels, strict=True):
        for r, run in enumerate(runs):
            arms = run.arms(task)
            for y, name in enumerate(names):
                value, span = read(arms[name]) if name in arms else (None, None)
                if value is None:
                    continue
                at = y + (r - (len(runs) - 1) / 2) * step
                colour = RUN_COLOURS[r % len(RUN_COLOURS)]
                if len(runs) == 1:
                    colour = _ARM_COLOURS.get(name.partition(":")[0], OTHER)
                if span:
                    axis.plot(span, [at, at], color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="butt")
                axis.plot([value], [at], "o", color=colour, markersize=4.5)
        if all(read(f)[0] is None for run in runs for f in run.arms(task).values()):
            axis.text(0.5, 0.5, "no item\nhas one", transform=axis.transAxes, ha="center", color=OTHER)
        axis.set_title(title)
        axis.grid(axis="x")
        if not title.startswith("KL"):
            axis.set_xlim(-0.03, 1.03)
        else:
            axis.set_xlim(left=-0.03 * axis.get_xlim()[1])
            axis.locator_params(axis="x", nbins=4)
            axis.ticklabel_format(axis="x", scilimits=(-2, 4))
    axes[0].set_yticks(range(len(names)), [_plain(n) for n in names])
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    if len(runs) > 1:
        handles = [
            axes[0].plot([], [], "o", color=RUN_COLOURS[r % len(RUN_COLOURS)], label=_plain(run.label))[0]
            for r, run in enumerate(runs)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(2, len(runs)))
    return Picture("arms", "Accuracy, KL, flips restored and harm by arm, with 95 % intervals.", figure)


def _curves(run: Run, task: str) -> Drawn | None:
    """Accuracy and eta over bytes, patches and token arms on one axis; None where there are fewer than two settings."""
    arms = run.arms(task)
    families: dict[str, list[tuple[float, str]]] = {}
    for name, f in arms.items():
        token = f.get("own", {}).get("recomputed", 0.0) > 0
        if (share := f["spent_share"]) and (name.startswith("patched:") or token):
            families.setdefault(name.partition(":")[0], []).append((share, name))
    spans = [share for points in families.values() for share, _ in points]
    if len(spans) < 2:
        return None
    figure = _figure(6.4)
    upper, lower = figure.subplots(2, 1)
    others = iter(TOKEN_COLOURS * len(families))
    for head, points in families.items():
        if patch := head == "patched":
            style = {"color": PATCH, "marker": "o", "linewidth": 1.8, "label": "patch, by rank"}
        else:
            style = {"color": next(others), "marker": "s", "linewidth": 1.3, "label": _plain(head)}
        ordered = [(share, arms[name]) for share, name in sorted(points)]
        _line(upper, [(x, (f["accuracy"], f["ci95"])) for x, f in ordered], style)
        _line(lower, [(x, (f["eta"], f["eta_ci95"])) for x, f in ordered], style)
        for share, name in sorted(points) if patch else ():
            if (value := arms[name]["accuracy"]) is not None:
                place = {"xy": (100 * share, value), "textcoords": "offset points", "xytext": (4, -10)}
                upper.annotate(name.partition(":")[2], **place, fontsize=8, color=PATCH)
    widest = max(arms.values(), key=lambda f: f["n"])  # arms that leave items out have another re-prefill beside them
    for value, label, colour in (
        (widest["reference_accuracy"], "re-prefill", REFERENCE),
        (widest["base_accuracy"], "nothing done (base)", BASE),
    ):
        if value is not None:
            upper.axhline(value, color=colour, linestyle="--", linewidth=1, label=label)
    if not lower.lines:
        why = "no eta: the base's mean KL is under 0.01"
        lower.text(0.5, 0.5, why, transform=lower.transAxes, ha="center", color=OTHER)
    lower.axhline(1.0, color=REFERENCE, linestyle="--", linewidth=1)
    lower.axhline(0.0, color=BASE, linestyle="--", linewidth=1)
    upper.set_ylabel("accuracy")
    lower.set_ylabel("eta (share of the base's KL removed)")
    lower.sharex(upper)
    for axis in (upper, lower):
        axis.set_xlabel("bytes stored or computed anew, % of the chunks' KV")
        if max(spans) > 8 * min(spans):
            ticks = [t for t in _TICKS if 70 * min(spans) <= t <= 140 * max(spans)]
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
            axis.set_xticks([], minor=True)
        axis.grid()
    upper.set_ylim(-0.04, 1.04)
    lower.set_ylim(bottom=max(-1.1, min(lower.get_ylim()[0], -0.04)), top=1.06)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return "Accuracy and eta over bytes: ranks of the patch (numbers), token arms, with 95 % intervals.", figure


def _line(axis: Axes, points: Sequence[tuple[float, Measured]], style: dict[str, Any]) -> None:
    measured = [(100 * share, value, span) for share, (value, span) in points if value is not None]
    if not measured:
        return
    axis.plot([x for x, _, _ in measured], [value for _, value, _ in measured], markersize=4.5, **style)
    if spans := [(x, *span) for x, _, span in measured if span is not None]:
        at, low, high = zip(*spans, strict=True)
        axis.fill_between(at, low, high, alpha=0.13, color=style["color"], linewidth=0)
        if len(spans) == 1:  # a band has no width there
            axis.vlines(at, low, high, color=style["color"], linewidth=1.2, alpha=0.6)


def _layers(run: Run, task: str) -> Drawn | None:
    by_arm = {name: f["by_layer"] for name, f in run.arms(task).items() if f.get("by_layer")}
    if not by_arm:
        return None
    values = np.array(list(by_arm.values()))
    figure = _figure(1.3 + 0.3 * len(by_arm))
    axis = figure.subplots()
    image = axis.imshow(values, aspect="auto", cmap="viridis", vmin=min(0.0, float(values.min())))
    axis.set_yticks(range(len(by_arm)), [_plain(n) for n in by_arm])
    axis.set_xlabel("layer, first to last")
    axis.set_xticks(range(0, values.shape[1], 1 if values.shape[1] <= 8 else 4))
    if values.shape[1] <= 8:
        _numbers(axis, values, np.char.mod("%.2g", values), (values - values.min()) / (np.ptp(values) or 1.0))
    figure.colorbar(image, ax=axis)
    return "By layer: mean over items of what each arm measured there.", figure


def _grid(run: Run, task: str) -> Drawn | None:
    """Accuracy over context length and depth of the needle, a map an arm; None where items have neither."""
    by_arm = {name: f["grid"] for name, f in run.arms(task).items() if f.get("grid")}
    if not by_arm:
        return None
    lengths = sorted({c["length"] for cells in by_arm.values() for c in cells})
    depths = round(1 / DEPTH)
    columns = min(len(by_arm), 2 if len(lengths) <= 4 else 1)
    rows = -(-len(by_arm) // columns)
    figure = _figure(0.7 + 1.75 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(by_arm) :]:
        axis.set_visible(False)
    for axis, (name, cells) in zip(axes.flat, by_arm.items(), strict=False):
        values = np.full((depths, len(lengths)), np.nan)
        counts = np.zeros_like(values)
        for c in cells:
            at = c["depth"], lengths.index(c["length"])
            counts[at] = c["n"]
            if c["accuracy"] is not None:
                values[at] = c["accuracy"]
        image = axis.imshow(values, aspect="auto", cmap="viridis", vmin=0, vmax=1)
        axis.set_facecolor("#9aa3ad66")  # cells without items: no figure, rather than a zero
        texts = np.char.add(np.char.mod("%.2f", values), np.char.mod("\nn=%.0f", counts))
        _numbers(axis, values, texts, values)
        axis.set_title(_plain(name))
        edges = [f"{edge // 1000}k" if edge else f"< {LENGTHS[1] // 1000}k" for edge in lengths]
        axis.set_xticks(range(len(lengths)), edges)
        axis.set_yticks(range(depths), [f"{i * DEPTH:.1f} to {(i + 1) * DEPTH:.1f}" for i in range(depths)])
    figure.supxlabel("context length in tokens, from")
    figure.supylabel("depth of the needle")
    figure.colorbar(image, ax=list(axes.flat))
    return "Accuracy by context length and depth of the needle; grey: no items.", figure


def _numbers(axis: Axes, values: np.ndarray, texts: np.ndarray, brightness: np.ndarray) -> None:
    """Write a text into every cell that has a value."""
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            ink = "black" if brightness[y, x] > 0.6 else "white"
            axis.text(x, y, str(texts[y, x]), ha="center", va="center", fontsize=8, color=ink)


def _plain(text: str) -> str:
    """Text without what matplotlib reads as mathematics."""
    return text.replace("$", r"\$")
